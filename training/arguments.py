"""What a training run is made of, as dataclasses that a recipe (YAML) and the command line fill in."""

import argparse
import contextlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

import yaml
from transformers import HfArgumentParser, TrainingArguments

from lsgpt.configuration import LSGPTConfig, load_preset, load_recipe, suggest


@dataclass
class ModelArguments:
    """The model to train."""

    preset: str = field(default="demo", metadata={"help": "Model preset to start from, see `lsgpt info`."})
    config_overrides: dict | str | None = field(
        default=None,
        metadata={
            "help": "Fields of LSGPTConfig that replace the preset's, as in '{hidden_size: 64, qk_norm: true}'."
        },
    )

    def __post_init__(self):
        if isinstance(self.config_overrides, str):
            with contextlib.suppress(yaml.YAMLError):
                self.config_overrides = yaml.safe_load(self.config_overrides)
        if not isinstance(self.config_overrides, dict | None):
            raise ValueError(
                f"`config_overrides` must be a mapping, as in '{{hidden_size: 64}}'; got {self.config_overrides!r}"
            )

    def build_config(self) -> LSGPTConfig:
        """The preset with its overrides. Raises `ValueError` for unknown names and impossible values."""
        return load_preset(self.preset, **(self.config_overrides or {}))


@dataclass
class DataArguments:
    """The text to train on."""

    dataset_name: str = field(
        default="stdlib", metadata={"help": "Data set: stdlib, the source of Python's standard library."}
    )
    block_size: int = field(default=512, metadata={"help": "Number of tokens in a training sequence."})
    prompt: str = field(
        default="def", metadata={"help": "Text that the trained model continues at the end of the run."}
    )


_ARGUMENT_TYPES = (ModelArguments, DataArguments, TrainingArguments)


def make_parser(**kwargs) -> HfArgumentParser:
    """The parser of all fields; `kwargs` are those of `argparse.ArgumentParser`."""
    return HfArgumentParser(_ARGUMENT_TYPES, allow_abbrev=False, exit_on_error=False, **kwargs)


def parse_arguments(
    recipe: str | Path = "demo", overrides: Sequence[str] = (), parser: HfArgumentParser | None = None
) -> tuple[ModelArguments, DataArguments, TrainingArguments]:
    """
    The arguments of a run: a recipe, with some fields replaced.

    Without an `output_dir` the run goes to the first of `runs/NAME`, `runs/NAME-2`, ... that is free, where NAME is
    the recipe's `run_name` or else the recipe's own name.

    Args:
        recipe: A shipped recipe's name or a YAML file.
        overrides: Command-line arguments, such as `["--max_steps", "100"]`.
        parser: What `make_parser` returns.

    Raises:
        ValueError: An unknown field, with the nearest known name, or a value that cannot be.
    """
    parser = parser or make_parser()
    values = load_recipe(recipe)
    values["run_name"] = values.get("run_name") or Path(recipe).stem
    known = {f.name for argument_type in _ARGUMENT_TYPES for f in fields(argument_type) if f.init}
    for name in values:
        if name not in known:
            raise ValueError(f"recipe {recipe} has an unknown field {name!r}{suggest(str(name), known)}")
    # The parser converts and checks strings, also those from a recipe: YAML reads 3e-4 as one.
    parser.set_defaults(
        **{name: str(value) if isinstance(value, int | float) else value for name, value in values.items()}
    )
    try:
        namespace, unknown = parser.parse_known_args(list(overrides))
    except argparse.ArgumentError as error:
        raise ValueError(str(error)) from error
    for argument in unknown:
        if not argument.startswith("--"):
            raise ValueError(f"unexpected argument {argument!r}; fields are given as --field value")
        name = argument[2:].split("=")[0].replace("-", "_")
        hint = suggest(name, known).replace("mean '", "mean '--")
        raise ValueError(f"unknown field {argument.split('=')[0]!r}{hint}")

    if namespace.output_dir is None:
        namespace.output_dir = str(free_folder(Path("runs") / namespace.run_name))
    arguments = parser.parse_dict(vars(namespace))
    check_arguments(*arguments)
    return arguments


def check_arguments(model_args: ModelArguments, data_args: DataArguments, training_args: TrainingArguments):
    """
    What can be known to fail before anything is loaded or written.

    Raises:
        ValueError: Unknown names, a block longer than the model's positions, an output folder with something in it.
    """
    positions = model_args.build_config().max_position_embeddings
    if not 2 <= data_args.block_size <= positions:
        raise ValueError(
            f"`block_size` must be between 2 and `max_position_embeddings` ({positions}); got {data_args.block_size}"
        )
    folder = Path(training_args.output_dir)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"`output_dir` must be a new or an empty folder; got {str(folder)!r}, which has content")


def free_folder(folder: Path) -> Path:
    """`folder`, or the first of `folder-2`, `folder-3`, ... that does not exist or is empty."""
    candidate, number = folder, 1
    while candidate.exists() and (not candidate.is_dir() or any(candidate.iterdir())):
        number += 1
        candidate = folder.with_name(f"{folder.name}-{number}")
    return candidate


def resolve_recipe(
    model_args: ModelArguments, data_args: DataArguments, training_args: TrainingArguments
) -> dict[str, object]:
    """
    The recipe that these arguments amount to: every field about model and data, the seed, and the `TrainingArguments`
    that differ from their defaults. The output folder is left out, a repetition needs another one.

    Call it before a `Trainer` is built: making the default `TrainingArguments` resets Accelerate's state.
    """
    default = TrainingArguments(output_dir=training_args.output_dir).to_dict()
    changed = {name: value for name, value in training_args.to_dict().items() if value != default[name]}
    return {**asdict(model_args), **asdict(data_args), "seed": training_args.seed, **changed}
