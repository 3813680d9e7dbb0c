import matplotlib
import yaml
from PIL import Image

from lsgpt.training import write_report


def test_report_has_everything_and_changes_no_backend(tmp_path):
    backend = matplotlib.rcParams._get_backend_or_none()
    recipe = {"run_name": "mine", "preset": "demo", "block_size": 8}
    history = [{"step": 1, "loss": 3.0}, {"step": 2, "loss": 2.0}, {"step": 2, "eval_loss": 2.5}]
    path = write_report(tmp_path, recipe, {"perplexity": "12.2"}, history, "def ```f```")
    report = path.read_text()
    for part in ("# mine", "| perplexity | 12.2 |", "loss.png", "def ```f```", "| torch |", "| hardware |"):
        assert part in report
    assert yaml.safe_load(report.split("````yaml\n")[1].split("````")[0]) == recipe
    with Image.open(tmp_path / "loss.png") as image:
        assert image.format == "PNG"
        assert min(image.size) > 300
    assert matplotlib.rcParams._get_backend_or_none() == backend
