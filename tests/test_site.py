"""The site: links that leave docs/ are rewritten, and the reference pages name all that the code has."""

import dataclasses
import importlib.util
import re
import sys
from pathlib import Path

import pytest
import yaml

import lsgpt_cli
from lsgpt import LSGPTConfig, training
from lsgpt.configuration import list_presets, list_recipes, load_arms


ROOT = Path(__file__).parents[1]


def load(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # hooks.py imports reference_pages.py
    spec.loader.exec_module(module)
    return module


reference_pages = load("reference_pages")
hooks = load("hooks")
KNOWN = {"index.md", "training.md", "reference/configuration.md", "studies/results/x/report.md", "masks.png"}


@pytest.mark.parametrize(
    ("path", "link", "expected"),
    [
        ("README.md", "[a](docs/training.md#data)", "[a](training.md#data)"),
        ("README.md", "![a](docs/masks.png)", "![a](masks.png)"),
        ("README.md", '<source srcset="docs/masks.png">', '<source srcset="masks.png">'),
        ("docs/training.md", "[a](../README.md)", "[a](index.md)"),
        ("docs/training.md", "[a](#data)", "[a](#data)"),
        ("docs/training.md", "[a](https://example.org/b.md)", "[a](https://example.org/b.md)"),
        ("docs/training.md", "[a](../studies/results/x/report.md)", "[a](studies/results/x/report.md)"),
        ("studies/results/x/report.md", "[a](../../../docs/training.md)", "[a](../../../training.md)"),
        (
            "docs/training.md",
            "[`C`](../modeling_lsgpt/configuration_lsgpt.py)",
            "[`C`](reference/configuration.md)",
        ),
        ("docs/training.md", "[a](../setup.cfg)", "[a](URL/blob/main/setup.cfg)"),
        ("docs/training.md", "[a](../tests)", "[a](URL/tree/main/tests)"),
        ("docs/training.md", "[a](gone.md)", "[a](gone.md)"),  # MkDocs says so
        ("docs/training.md", "`[a](../setup.cfg)`", "`[a](../setup.cfg)`"),
        ("docs/training.md", "```\n[a](../setup.cfg)\n```", "```\n[a](../setup.cfg)\n```"),
    ],
)
def test_links_lead_to_the_site_or_to_the_repository(path, link, expected):
    assert hooks.rewrite(link, path, KNOWN, "https://x") == expected.replace("URL", "https://x")


@pytest.mark.parametrize(
    ("link", "expected"),
    [("[a](../setup.cfg)", "a"), ("[`a`](../setup.cfg)", "`a`"), ("[a](gone.md)", "[a](gone.md)")],
)
def test_without_a_repository_the_words_stay(link, expected):
    assert hooks.rewrite(link, "docs/training.md", KNOWN, "") == expected


def test_the_address_of_the_repository_can_be_given(monkeypatch):
    monkeypatch.setenv("REPOSITORY_URL", "https://example.org/lsgpt/")
    assert hooks.repository_url() == "https://example.org/lsgpt"


@pytest.fixture(scope="module")
def pages():
    return reference_pages.pages()


def test_the_reference_has_every_command_and_field(pages):
    text = pages["command-line"]
    for command in lsgpt_cli.COMMANDS:
        assert f"\n## lsgpt {command}\n" in text
        if command != "train":
            assert f"\nusage: lsgpt {command} " in text
    actions = {action.dest for action in training.make_parser()._actions} - {"help"}
    assert {name for name in actions if f"`{name}`" not in text} == set()


def test_the_reference_has_every_recipe_preset_and_arm(pages):
    text = pages["recipes"]
    for name in list_recipes():
        assert f"\n### {name}\n" in text
    for name in [*list_presets(), *load_arms()]:
        assert f"\n| `{name}` |" in text


def test_the_reference_has_every_field_of_the_configuration(pages):
    text = pages["configuration"]
    cells = [row.split(" | ") for row in re.findall(r"^\| (`.*) \|$", text, re.MULTILINE)]
    described = {name.strip(" `"): default for names, _, default, _ in cells for name in names.split(",")}
    own = {field.name for field in dataclasses.fields(LSGPTConfig)} & LSGPTConfig.__annotations__.keys()
    assert described.keys() == own
    assert described["sliding_window"] == "`100`" and described["num_key_value_heads"] == ""


def test_the_commands_are_those_of_the_parser():
    (action,) = (action for action in lsgpt_cli._make_parser()._actions if action.dest == "command")
    assert set(action.choices) == set(lsgpt_cli.COMMANDS)


def test_workflows_call_targets_that_exist():
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    files = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
    assert len(files) == 3
    for file in files:
        jobs = yaml.safe_load(file.read_text(encoding="utf-8"))["jobs"]
        for job in jobs.values():
            called = [step["run"] for step in job["steps"] if step.get("run", "").startswith("make ")]
            matrix = job.get("strategy", {}).get("matrix", {}).get("target", [])
            names = [name for run in called for name in (matrix if "matrix" in run else [run.split()[1]])]
            assert set(names) <= targets, file.name
    checks = yaml.safe_load((ROOT / ".github" / "workflows" / "checks.yml").read_text(encoding="utf-8"))
    in_ci = re.search(r"output-sync=target (.*) \"", (ROOT / ".ci" / "run").read_text(encoding="utf-8"))[1].split()
    assert set(in_ci) <= set(checks["jobs"]["make"]["strategy"]["matrix"]["target"])


def test_hooks_have_the_version_of_the_checks():
    (hooks,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))["repos"]
    assert f"\nruff=={hooks['rev'].removeprefix('v')}\n" in (ROOT / "constraints.txt").read_text(encoding="utf-8")


def test_every_picture_of_the_front_page_has_both_schemes():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    pictures = re.findall(r"<picture>(.*?)</picture>", readme, re.DOTALL)
    assert len(pictures) == 3
    for picture in pictures:
        light, dark = re.search(r'src="(\S+)"', picture)[1], re.search(r'srcset="(\S+)"', picture)[1]
        assert dark == light.replace("-light.svg", "-dark.svg") and (ROOT / dark).is_file()
