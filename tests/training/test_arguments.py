import pytest
import yaml
from transformers import TrainingArguments

from lsgpt.training import parse_arguments
from lsgpt.training.arguments import free_folder, resolve_recipe


@pytest.fixture(autouse=True)
def in_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def write_recipe(tmp_path, text):
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    return path


def test_demo_recipe():
    model_args, data_args, training_args = parse_arguments()
    assert model_args.preset == "demo"
    assert data_args.dataset_name == "stdlib"
    assert type(training_args) is TrainingArguments
    assert training_args.report_to == []
    assert training_args.output_dir == "runs/demo"


def test_command_line_overrides_recipe(tmp_path):
    recipe = write_recipe(tmp_path, "learning_rate: 3e-4\nmax_steps: 7\nblock_size: 64\n")
    _, data_args, training_args = parse_arguments(
        recipe, ["--max_steps", "9", "--config_overrides", "{qk_norm: true}"]
    )
    assert training_args.learning_rate == 3e-4
    assert training_args.max_steps == 9
    assert data_args.block_size == 64
    assert training_args.output_dir == "runs/mine"


def test_config_overrides_change_the_model(tmp_path):
    recipe = write_recipe(tmp_path, "config_overrides: {num_hidden_layers: 5}\n")
    assert parse_arguments(recipe)[0].build_config().num_hidden_layers == 5
    model_args, *_ = parse_arguments(recipe, ["--config_overrides", '{"qk_norm": true}'])
    assert model_args.build_config().qk_norm
    assert model_args.build_config().num_hidden_layers != 5


@pytest.mark.parametrize(
    ("recipe", "overrides", "message"),
    [
        ("max_stps: 5", [], r"unknown field 'max_stps'; did you mean 'max_steps'\?"),
        ("{}", ["--max-stps", "5"], r"unknown field '--max-stps'; did you mean '--max_steps'\?"),
        ("{}", ["--zzzzzzzz=5"], r"unknown field '--zzzzzzzz'$"),
        ("{}", ["--learning", "1"], r"unknown field '--learning'"),
        ("{}", ["stray"], "unexpected argument 'stray'"),
        ("max_steps: 5.5", [], "max_steps.*invalid int value: '5.5'"),
        ("{}", ["--block_size", "long"], "block_size.*invalid int value: 'long'"),
        ("lr_scheduler_type: cosin", [], "cosin is not a valid SchedulerType"),
        ("block_size: 513", [], r"`block_size` must be between 2 and `max_position_embeddings` \(512\); got 513"),
        ("preset: dem", [], "did you mean 'demo'"),
        ("config_overrides: {hiden_size: 3}", [], "no field 'hiden_size'; did you mean 'hidden_size'"),
        ("config_overrides: hidden_size=3", [], "`config_overrides` must be a mapping"),
    ],
)
def test_mistakes_are_explained(tmp_path, recipe, overrides, message):
    with pytest.raises(ValueError, match=message):
        parse_arguments(write_recipe(tmp_path, recipe), overrides)


def test_resolved_recipe_round_trips(tmp_path):
    overrides = ["--config_overrides", "{sliding_window: 20}", "--learning_rate", "3e-5", "--seed", "7"]
    arguments = parse_arguments("demo", [*overrides, "--lr_scheduler_kwargs", '{"num_cycles": 0.4}'])
    resolved = resolve_recipe(*arguments)
    assert "output_dir" not in resolved
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(resolved))
    again = parse_arguments(path)
    assert again[:2] == arguments[:2]
    assert again[2].to_dict() == arguments[2].to_dict()
    assert resolve_recipe(*again) == resolved


def test_nothing_is_overwritten(tmp_path):
    assert free_folder(tmp_path / "run") == tmp_path / "run"
    for expected in ("run-2", "run-3"):
        taken = free_folder(tmp_path / "run")
        taken.mkdir(exist_ok=True)
        assert free_folder(tmp_path / "run") == taken  # an empty folder is free
        (taken / "report.md").touch()
        assert free_folder(tmp_path / "run") == tmp_path / expected
    with pytest.raises(ValueError, match="`output_dir` must be a new or an empty folder"):
        parse_arguments("demo", ["--output_dir", str(tmp_path / "run")])
