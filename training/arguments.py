"""What a training run is made of, as dataclasses that a recipe (YAML) and the command line fill in."""

import argparse
import contextlib
import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import NamedTuple

import yaml
from accelerate.utils import broadcast_object_list
from transformers import HfArgumentParser, TrainingArguments

from lsgpt.configuration import LSGPTConfig, load_config, load_preset, load_recipe
from lsgpt.utilities import suggest

from .stabilizers import STABILIZERS, config_fields, read_stabilizers
from .telemetry import LogitTelemetryCallback


@dataclass
class ModelArguments:
    """The model to train."""

    preset: str | None = field(default="demo", metadata={"help": "Model preset to start from, see `lsgpt info`."})
    model_name_or_path: str | None = field(
        default=None,
        metadata={"help": "LSGPT checkpoint to fine-tune, with its tokenizer: a folder or a name on the Hub."},
    )
    config_overrides: dict | str | None = field(
        default=None,
        metadata={
            "help": "Fields of LSGPTConfig that replace the preset's, as in '{hidden_size: 64, qk_norm: true}'; "
            "`num_global_heads: all` is plain multi-head attention."
        },
    )
    attn_implementation: str | None = field(
        default=None,
        metadata={"help": "Attention engine. Default: sdpa; with soft-capping flex_attention on CUDA, else eager."},
    )

    def __post_init__(self):
        self.config_overrides = _read_yaml(self.config_overrides)
        if not isinstance(self.config_overrides, dict | None):
            raise ValueError(
                f"`config_overrides` must be a mapping, as in '{{hidden_size: 64}}'; got {self.config_overrides!r}"
            )


@dataclass
class DataArguments:
    """The text to train on, see `lsgpt.training.data`."""

    dataset_name: str = field(
        default="stdlib",
        metadata={
            "help": "stdlib (the source of Python's standard library); a file or a folder of .txt, .jsonl, .json or "
            ".parquet files; or a data set on the Hub."
        },
    )
    dataset_config_name: str | None = field(
        default=None, metadata={"help": "Configuration of the data set, where it has several."}
    )
    text_column: str = field(default="text", metadata={"help": "Column that holds the text."})
    streaming: bool = field(
        default=False, metadata={"help": "Read the data while training instead of before; needs max_steps."}
    )
    validation_split_percentage: int = field(
        default=5, metadata={"help": "Share of the documents held out where the data set has no validation split."}
    )
    max_eval_blocks: int | None = field(
        default=None, metadata={"help": "Evaluate on this many blocks at most; all by default."}
    )
    tokenizer: str = field(
        default="bpe",
        metadata={
            "help": "bpe or unigram to train one on the data, of the model's vocabulary size; a folder or a name on "
            "the Hub. Fine-tuning keeps the checkpoint's."
        },
    )
    max_tokenizer_characters: int = field(
        default=100_000_000, metadata={"help": "Characters of text that a tokenizer is trained on at most."}
    )
    block_size: int = field(default=512, metadata={"help": "Number of tokens in a training sequence."})
    respect_boundaries: bool = field(
        default=False, metadata={"help": "Keep attention and loss inside documents; otherwise blocks cross them."}
    )
    preprocessing_num_workers: int | None = field(
        default=None, metadata={"help": "Number of processes that tokenize."}
    )
    prompt: str = field(
        default="def", metadata={"help": "Text that the trained model continues at the end of the run."}
    )


@dataclass
class RunArguments:
    """What watches the run and keeps it stable."""

    stabilizers: dict | str | None = field(
        default=None,
        metadata={
            "help": f"Any of {', '.join(STABILIZERS)}: names for the published defaults, as in 'qk-norm,z-loss', or "
            "'{z-loss: 1e-3}' for other values."
        },
    )
    max_logit_every_n_steps: int = field(
        default=50, metadata={"help": "Measure the attention logits at multiples of this many steps; 0: never."}
    )
    max_logit_threshold: float = field(default=100.0, metadata={"help": "A larger logit counts as an explosion."})
    on_explosion: str = field(default="warn", metadata={"help": "Then: warn, stop or clip."})
    stop_at_step: int | None = field(
        default=None,
        metadata={"help": "End the training after this step; the schedule still reaches to max_steps."},
    )
    license: str | None = field(
        default=None,
        metadata={"help": "Licence of the weights for the model card, as the Hub names it: apache-2.0, mit, ..."},
    )

    def __post_init__(self):
        self.stabilizers = read_stabilizers(_read_yaml(self.stabilizers))


def _read_yaml(value):
    if isinstance(value, str):
        with contextlib.suppress(yaml.YAMLError):
            return yaml.safe_load(value)
    return value


_ARGUMENT_TYPES = (ModelArguments, DataArguments, RunArguments, TrainingArguments)


class Arguments(NamedTuple):
    """All arguments of a run."""

    model: ModelArguments
    data: DataArguments
    run: RunArguments
    training: TrainingArguments
    recipe: dict
    """The fields to repeat the run: all about model, data and run, the seed, and what `TrainingArguments` changes."""

    def build_config(self) -> LSGPTConfig:
        """
        The preset, or the configuration of the checkpoint to fine-tune, with overrides and stabilizers. Raises
        `ValueError` as `load_preset` and `load_config` do.
        """
        model = self.model
        load, name = (
            (load_config, model.model_name_or_path) if model.model_name_or_path else (load_preset, model.preset)
        )
        return load(name, **(model.config_overrides or {}), **config_fields(self.run.stabilizers))


def make_parser(**kwargs) -> HfArgumentParser:
    """The parser of all fields; `kwargs` are those of `argparse.ArgumentParser`."""
    return HfArgumentParser(_ARGUMENT_TYPES, allow_abbrev=False, exit_on_error=False, **kwargs)


def parse_arguments(
    recipe: str | Path | dict | None = None, overrides: Sequence[str] = (), parser: HfArgumentParser | None = None
) -> Arguments:
    """
    The arguments of a run: a recipe, with some fields replaced.

    Without an `output_dir` the run goes to the first of `runs/NAME`, `runs/NAME-2`, ... that is free, where NAME is
    the recipe's `run_name` or else the recipe's own name. With `resume_from_checkpoint`, a run's folder or one of its
    checkpoints, it goes on where it was, and the recipe is that run's own unless another one is given.

    Args:
        recipe: A shipped recipe's name, a YAML file, or its content; `demo` by default.
        overrides: Command-line arguments, such as `["--max_steps", "100"]`.
        parser: What `make_parser` returns.

    Raises:
        ValueError: An unknown field, with the nearest known name, or a value that cannot be.
    """
    parser = parser or make_parser()
    defaults = vars(parser.parse_known_args([])[0])
    checkpoint = _find_option("resume_from_checkpoint", overrides)
    if checkpoint is not None and recipe is None:
        recipe_of_run = find_checkpoint(checkpoint).parent / "recipe.yaml"
        recipe = recipe_of_run if recipe_of_run.is_file() else None
    recipe = recipe or "demo"
    values = dict(recipe) if isinstance(recipe, dict) else load_recipe(recipe)
    checkpoint = checkpoint or values.get("resume_from_checkpoint")
    checkpoint = find_checkpoint(checkpoint) if checkpoint else None
    name = "run" if isinstance(recipe, dict) else Path(recipe).stem
    values["run_name"] = name = values.get("run_name") or name
    known = {f.name for argument_type in _ARGUMENT_TYPES for f in fields(argument_type) if f.init}
    for field_name in values:
        if field_name not in known:
            raise ValueError(f"recipe {name} has an unknown field {field_name!r}{suggest(str(field_name), known)}")
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

    namespace.resume_from_checkpoint = checkpoint and str(checkpoint)
    folder = namespace.output_dir or (checkpoint and checkpoint.parent)
    namespace.output_dir = str(folder or Path("runs") / namespace.run_name)
    model_args, data_args, run_args, training_args = parser.parse_dict(vars(namespace))
    # Left out are the output folder, a repetition needs another one, and the token, which would be published with the
    # recipe; the seed is always told.
    changed = {name: value for name, value in vars(namespace).items() if value != defaults[name]}
    ours = {**asdict(model_args), **asdict(data_args), **asdict(run_args), "seed": training_args.seed}
    left_out = ("output_dir", "resume_from_checkpoint", "hub_token", *ours)
    changed = {name: value for name, value in changed.items() if name not in left_out}
    arguments = Arguments(model_args, data_args, run_args, training_args, {**ours, **changed})
    check_arguments(arguments)
    if folder is None and training_args.process_index == 0:
        training_args.output_dir = str(free_folder(Path(training_args.output_dir)))
    training_args.output_dir = broadcast_object_list([training_args.output_dir])[0]
    return arguments


def _find_option(name: str, arguments: Sequence[str]) -> str | None:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument(f"--{name}", f"--{name.replace('_', '-')}", dest=name)
    try:
        return getattr(parser.parse_known_args(list(arguments))[0], name)
    except argparse.ArgumentError as error:
        raise ValueError(str(error)) from error


def check_arguments(arguments: Arguments):
    """
    What can be known to fail before anything is loaded or written.

    Raises:
        ValueError: Unknown names, a block longer than the model's positions, values that cannot go together.
    """
    model_args, data_args, run_args, training_args, _ = arguments
    if not (model_args.preset or model_args.model_name_or_path):
        raise ValueError("`model_name_or_path` must be set without a `preset`: the checkpoint to go on with")
    started = int(os.environ.get("WORLD_SIZE", 1))
    if training_args.world_size != started:
        raise ValueError(
            f"{started} processes were started, and each would train a model of its own: they found no GPUs, and "
            "`use_cpu` was not set"
        )
    config = arguments.build_config()
    positions = config.max_position_embeddings
    if not 2 <= data_args.block_size <= positions:
        raise ValueError(
            f"`block_size` must be between 2 and `max_position_embeddings` ({positions}); got {data_args.block_size}"
        )
    if data_args.streaming and training_args.max_steps <= 0:
        raise ValueError("`max_steps` must be set with `streaming`: a stream has no length")
    for name in ("max_eval_blocks", "preprocessing_num_workers"):
        value = getattr(data_args, name)
        if value is not None and value < 1:
            raise ValueError(f"`{name}` must be at least 1; got {value}")
    if training_args.push_to_hub and run_args.license is None:
        raise ValueError("`license` must be set with `push_to_hub`, such as apache-2.0: the model card names it")
    if run_args.stop_at_step is not None and run_args.stop_at_step < 1:
        raise ValueError(f"`stop_at_step` must be at least 1; got {run_args.stop_at_step}")
    if run_args.max_logit_every_n_steps:
        LogitTelemetryCallback(run_args.max_logit_every_n_steps, run_args.max_logit_threshold, run_args.on_explosion)
    clips = run_args.on_explosion == "clip" or "qk-clip" in run_args.stabilizers
    has_deepspeed = training_args.deepspeed_plugin is not None
    if clips and has_deepspeed:
        raise ValueError("QK-clip must not be combined with DeepSpeed, which overwrites changes to the weights")
    if "adagc" in run_args.stabilizers and (has_deepspeed or os.environ.get("ACCELERATE_USE_FSDP") == "true"):
        raise ValueError("AdaGC must not be combined with FSDP or DeepSpeed: it needs the gradients of whole tensors")
    if clips and config.qk_norm:
        raise ValueError("QK-clip must not be combined with QK-norm: normalised queries ignore their scale")


def make_folder(arguments: Arguments):
    """
    Makes the output folder.

    Raises:
        ValueError: A folder with something in it (unless the run resumes), that cannot be written, or on a disk
            without room for the checkpoints.
    """
    training_args = arguments.training
    folder = Path(training_args.output_dir)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"`output_dir` must be a folder; got {str(folder)!r}, which is a file")
    if folder.exists() and any(folder.iterdir()) and not training_args.resume_from_checkpoint:
        raise ValueError(
            f"`output_dir` must be a new or an empty folder; got {str(folder)!r}, which has content. To go on with "
            f"the run in it: --resume_from_checkpoint {folder}"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        test_file = folder / ".can_write"
        test_file.touch()
        test_file.unlink()
    except OSError as error:
        raise ValueError(f"`output_dir` must be a folder that can be written; got {str(folder)!r}: {error}") from error
    # Weights and two moments of Adam in float32 for a checkpoint, one of which stays while the next one is written;
    # and the final weights.
    weights = 4 * arguments.build_config().num_parameters()
    checkpoints = 0 if training_args.save_strategy == "no" else (training_args.save_total_limit or 1) + 1
    needed, free = weights * (1 + 3 * checkpoints), shutil.disk_usage(folder).free
    if needed > free:
        raise ValueError(
            f"`output_dir` must be on a disk with room for the checkpoints, {needed / 1e9:,.1f} GB; "
            f"{str(folder)!r} has {free / 1e9:,.1f} GB"
        )


def free_folder(folder: Path) -> Path:
    """`folder`, or the first of `folder-2`, `folder-3`, ... that does not exist or is empty."""
    candidate, number = folder, 1
    while candidate.exists() and (not candidate.is_dir() or any(candidate.iterdir())):
        number += 1
        candidate = folder.with_name(f"{folder.name}-{number}")
    return candidate


def find_checkpoint(folder: str | Path) -> Path:
    """
    `folder` if it is a checkpoint of a `Trainer`, or the last complete one in it.

    Raises:
        ValueError: No such folder, or no complete checkpoint in it.
    """
    folder = Path(folder)
    candidates = [folder, *folder.glob("checkpoint-*")]
    complete = [path for path in candidates if _is_complete(path / "trainer_state.json")]
    if not complete:
        raise ValueError(f"`resume_from_checkpoint` must be or hold a complete checkpoint; got {str(folder)!r}")
    return max(complete, key=lambda path: int(path.name.partition("-")[2] or 0))


def _is_complete(state_file: Path) -> bool:
    """Whether a checkpoint's last file was written to its end; a run may be killed while it saves."""
    try:
        json.loads(state_file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return True
