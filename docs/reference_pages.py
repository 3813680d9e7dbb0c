"""
The reference pages of the site, made from the code when the site is built: nothing in them can go stale.

`pages()` returns them. `python docs/reference_pages.py` prints them.
"""

import contextlib
import dataclasses
import importlib
import inspect
import io
import os
import re
from unittest import mock

import yaml

import lsgpt_cli
from lsgpt import LSGPTConfig, training
from lsgpt.configuration import list_presets, list_recipes, load_arms, load_preset, load_recipe
from lsgpt.utilities import describe, table


MODULES = (
    "lsgpt",
    "lsgpt.configuration",
    "lsgpt.training",
    "lsgpt.conversion",
    "lsgpt.inspection",
    "lsgpt.model_cards",
)
"""Packages whose public names are described."""


def pages() -> dict[str, str]:
    """All pages by name, in Markdown."""
    return {
        "configuration": configuration(),
        "command-line": command_line(),
        "recipes": recipes(),
        "python": python(),
    }


def configuration() -> str:
    """Every field of a model's configuration, from the docstring and the defaults, and the methods."""
    summary, _, rest = inspect.cleandoc(LSGPTConfig.__doc__).partition("\nArgs:\n")
    # A field begins with four spaces, and goes on with eight.
    text = rest.partition("\nRaises:")[0].replace("\n        ", " ")
    rows = []
    for names, kind, meaning in re.findall(r"^    ([a-z_, ]+) \((.+?)\): (.*)$", text, re.MULTILINE):
        defaults = dict.fromkeys(as_yaml(getattr(LSGPTConfig, name)) for name in names.split(", "))
        cells = [", ".join(f"`{name}`" for name in names.split(", ")), kind, ", ".join(defaults), meaning]
        rows.append([escape(cell) for cell in cells])
    return "\n\n".join(
        [
            "# Configuration",
            "The fields of `LSGPTConfig` describe a model, and are saved in its `config.json`.",
            summary.strip(),
            "## Fields",
            table(rows, ["field", "type", "default", "meaning"]),
            "## Methods",
            "::: lsgpt.LSGPTConfig\n    options:\n      show_docstring_description: false\n"
            "      show_docstring_parameters: false\n      show_docstring_raises: false\n"
            "      show_docstring_examples: false\n",
        ]
    )


def command_line() -> str:
    """What each command prints with `--help`, and the fields of `lsgpt train` as tables."""
    parts = ["# Command line", f"```text\n{help_of()}```"]
    for command in lsgpt_cli.COMMANDS:
        parts.append(f"## lsgpt {command}")
        parts.append(fields_of_training() if command == "train" else f"```text\n{help_of(command)}```")
    return "\n\n".join(parts) + "\n"


def help_of(*command: str) -> str:
    """What `lsgpt COMMAND --help` prints."""
    output = io.StringIO()
    with (
        mock.patch.dict(os.environ, {"COLUMNS": "88", "NO_COLOR": "1"}),
        contextlib.redirect_stdout(output),
        contextlib.suppress(SystemExit),
    ):
        lsgpt_cli.main([*command, "--help"])
    return output.getvalue()


def fields_of_training() -> str:
    """The fields of a recipe, in one table for each of our classes of arguments, and the names of Transformers'."""
    parts = [
        "`lsgpt train [RECIPE] [--field value ...]` trains a model. RECIPE is a [shipped one](recipes.md) or a YAML "
        "file with the fields below; fields on the command line override the recipe's."
    ]
    described = set()
    for name in training.__all__:
        arguments = getattr(training, name)
        if not (isinstance(arguments, type) and dataclasses.is_dataclass(arguments) and name.endswith("Arguments")):
            continue
        rows = []
        for field in dataclasses.fields(arguments):
            described.add(field.name)
            cells = [f"`{field.name}`", as_yaml(field.default), field.metadata.get("help", "")]
            rows.append([escape(cell) for cell in cells])
        parts += [f"### {arguments.__doc__.strip().rstrip('.')}", table(rows, ["field", "default", "meaning"])]
    theirs = sorted({action.dest for action in training.make_parser()._actions} - described - {"help"})
    parts += [
        "### Fields of Transformers",
        "These are fields of [`TrainingArguments`](https://huggingface.co/docs/transformers/main_classes/trainer"
        "#transformers.TrainingArguments), which describes them:",
        ", ".join(f"`{name}`" for name in theirs) + ".",
    ]
    return "\n\n".join(parts)


def recipes() -> str:
    """The shapes of the presets, the fields of the recipes, and the arms of comparisons."""
    shapes = [(f"`{name}`", describe(load_preset(name))) for name in list_presets()]
    labels = list(dict.fromkeys(label for _, shape in shapes for label in shape))
    parts = [
        "# Recipes, presets and arms",
        "## Presets",
        "A preset is the shape of a model: `load_preset(name)` in Python, the field `preset` in a recipe. `lsgpt info "
        "NAME` shows its costs.",
        table([[name, *(shape.get(label, "") for label in labels)] for name, shape in shapes], ["preset", *labels]),
        "## Recipes",
        "`lsgpt train NAME` runs a recipe. The model is described by `preset` and `config_overrides`.",
    ]
    for name in list_recipes():
        fields = yaml.safe_dump(load_recipe(name), sort_keys=False, default_flow_style=None, width=96)
        parts += [f"### {name}", f"```yaml\n{fields}```"]
    parts += [
        "## Arms",
        "An arm is a named set of fields that replace a recipe's in `lsgpt compare RECIPE --arms NAME,...`.",
        table([[f"`{name}`", escape(as_yaml(fields))] for name, fields in load_arms().items()], ["arm", "fields"]),
    ]
    return "\n\n".join(parts) + "\n"


def python() -> str:
    """The public names of our packages, with their docstrings."""
    parts = ["# Python"]
    for module in MODULES:
        names = importlib.import_module(module).__all__
        parts.append(f"## {module}")
        parts += [
            f"::: {module}.{name}" for name in names if not (module == "lsgpt.configuration" and name == "LSGPTConfig")
        ]
    return "\n\n".join(parts) + "\n"


def as_yaml(value: object) -> str:
    """A value as it stands in a recipe, for a cell of a table."""
    if value is None or value is dataclasses.MISSING:
        return ""
    text = yaml.safe_dump(value, default_flow_style=True, width=1000).removesuffix("\n").removesuffix("\n...")
    return f"`{text}`"


def escape(text: str) -> str:
    """Text for a cell of a table."""
    return text.replace("|", "\\|").replace("\n", " ")


if __name__ == "__main__":
    for name, text in pages().items():
        print(f"<!-- {name} -->\n\n{text}")
