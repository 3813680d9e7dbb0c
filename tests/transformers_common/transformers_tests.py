"""
Transformers' own tests as the package `transformers_tests`: the version that is installed, fetched on first use.

No wheel contains them and nothing of them may stand in this repository, so they come from the source distribution:
`from transformers_tests.test_modeling_common import ModelTesterMixin`. That distribution leaves out a few modules that
the common tests import; the stand-ins below make those imports work and add no tests.
"""

import subprocess
import sys
import tarfile
import tempfile
from importlib.metadata import version
from os import environ
from pathlib import Path, PurePosixPath
from types import ModuleType

import pytest


CACHE_VARIABLE = "LSGPT_TRANSFORMERS_TESTS"
DEFAULT_CACHE = Path(__file__).resolve().parents[2] / ".cache" / "transformers-tests"

STAND_INS = {
    "exporters.test_export": {"ExportTesterMixin": type("ExportTesterMixin", (), {})},
    "generation.test_utils": {"GenerationTesterMixin": type("GenerationTesterMixin", (), {})},
    # None of these is a default of `PreTrainedConfig`, so a configuration that drops one is noticed.
    "utils.test_configuration_utils": {
        "config_common_kwargs": {
            "architectures": ["LSGPTForTokenClassification"],
            "chunk_size_feed_forward": 7,
            "dtype": "float16",
            "id2label": {0: "no", 1: "yes", 2: "maybe"},
            "label2id": {"no": 0, "yes": 1, "maybe": 2},
            "output_attentions": True,
            "output_hidden_states": True,
            "problem_type": "multi_label_classification",
            "return_dict": False,
        }
    },
}


def fetch(release: str) -> Path:
    """
    The folder with the test modules of Transformers `release`, downloaded on first use.

    It lies below `$LSGPT_TRANSFORMERS_TESTS`, by default `.cache/transformers-tests` in the repository. Where it is
    missing and cannot be downloaded, the tests that need it fail with a sentence that says what to do.
    """
    folder = Path(environ.get(CACHE_VARIABLE) or DEFAULT_CACHE).expanduser() / release
    if folder.is_dir():
        return folder

    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as work:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", "transformers"]
        result = subprocess.run([*pip, "--dest", work, f"transformers=={release}"], capture_output=True, text=True)
        archives = list(Path(work).glob("*.tar.gz"))
        if not archives:
            reason = (result.stderr.strip() or "pip said nothing").splitlines()[-1]
            pytest.fail(
                f"Transformers' tests are in the source distribution of transformers {release}, which could not be "
                f"downloaded ({reason}): connect to a package index, or copy {folder} from a machine that has it.",
                pytrace=False,
            )
        unpacked = Path(work) / "unpacked"
        unpack(archives[0], unpacked)
        try:
            unpacked.rename(folder)  # in one step, so that no other test process sees a part of it
        except OSError:
            if not folder.is_dir():
                raise
    return folder


def unpack(archive: Path, folder: Path):
    """Writes the modules that stand directly in `tests/` of the source distribution to the new folder."""
    folder.mkdir()
    (folder / "__init__.py").touch()  # `test_configuration_common` reads it
    with tarfile.open(archive) as tar:
        for member in tar:
            parts = PurePosixPath(member.name).parts
            if member.isfile() and len(parts) == 3 and parts[1] == "tests" and parts[2].endswith(".py"):
                (folder / parts[2]).write_bytes(tar.extractfile(member).read())


for name, attributes in STAND_INS.items():
    module = sys.modules[f"{__name__}.{name}"] = ModuleType(f"{__name__}.{name}")
    vars(module).update(attributes)

__path__ = [str(fetch(version("transformers")))]  # makes this module a package of the fetched modules
