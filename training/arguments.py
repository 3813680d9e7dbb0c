"""The arguments of a training run, as dataclasses that a recipe (YAML) and the command line fill in."""

import argparse
import contextlib
import math
import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml
from accelerate.utils import broadcast_object_list
from transformers import HfArgumentParser, TrainingArguments, get_scheduler
from transformers.hf_argparser import HfArg
from transformers.integrations import get_available_reporting_integrations
from transformers.utils import logging

from lsgpt.configuration import LSGPTConfig, list_presets, load_config, load_preset, load_recipe, read_yaml
from lsgpt.utilities import suggest

from .averaging import AVERAGES, check_updates, read_averaging
from .context_parallel import processes_per_row, replace_parallelism
from .folders import find_checkpoint, free_folder
from .stabilizers import IN_FLOAT32, is_sharded


logger = logging.get_logger(__name__)


@dataclass
class ModelArguments:
    """The model to train."""

    _argument_group_name = "the model"

    preset: str | None = HfArg(default="demo", help=f"Model preset to start from: {', '.join(list_presets())}.")
    model_name_or_path: str | None = HfArg(
        default=None, help="LSGPT checkpoint to fine-tune: folder or name on the Hub."
    )
    config_overrides: dict | str | None = HfArg(
        default=None,
        help="Fields of LSGPTConfig that replace the model's, as in '{hidden_size: 64, qk_norm: true}'; on the "
        "command line, in addition to the recipe's. `num_global_heads: all` is plain multi-head attention.",
    )
    attn_implementation: str | None = HfArg(
        default=None,
        help="Attention implementation; by default sdpa, or with soft-capping flex_attention or eager. "
        "With `_in_float32` at its end, attention is computed in float32 under autocast.",
    )
    teacher: str | None = HfArg(
        default=None,
        help="Teacher to distil from: its next-token distributions replace the text as the target. A folder, a "
        "name on the Hub or a GGUF file of any causal language model with the same tokenizer. Up to half of the "
        "blocks get hidden numbers, see docs/healing.md.",
    )
    trainable: str = HfArg(
        default="all",
        help="What to train: all (all weights), light (only sinks, biases and norms), or lora (those plus an "
        "adapter of rank 16 for each matrix of the blocks, merged into the weights at the end; needs peft).",
    )
    sink_learning_rate: float | None = HfArg(
        default=None, help="Learning rate of sinks and the biases that carry their values; learning_rate by default."
    )

    def __post_init__(self):
        self.config_overrides = value = _read_yaml(self.config_overrides)
        if not isinstance(value, dict | None) or not all(isinstance(name, str) for name in value or ()):
            raise ValueError(f"`config_overrides` must be a mapping, as in '{{hidden_size: 64}}'; got {value!r}")


@dataclass
class DataArguments:
    """The text to train on, see `lsgpt.training.data`."""

    _argument_group_name = "the text"

    dataset_name: str = HfArg(
        default="stdlib",
        help="stdlib (the source of Python's standard library); a file or a folder of .txt, .jsonl, .json or "
        ".parquet files; or a dataset on the Hub.",
    )
    dataset_config_name: str | None = HfArg(default=None, help="Configuration of the dataset, if it has several.")
    text_column: str = HfArg(default="text", help="Column that holds the text.")
    streaming: bool = HfArg(default=False, help="Read the data during training instead of before; needs max_steps.")
    max_eval_blocks: int | None = HfArg(default=None, help="Evaluate on at most this many blocks; all by default.")
    tokenizer: str = HfArg(
        default="bpe",
        help="bpe or unigram to train a tokenizer with the model's vocabulary size on the data; or a folder or "
        "a name on the Hub. Fine-tuning keeps the checkpoint's tokenizer.",
    )
    block_size: int = HfArg(default=512, help="Number of tokens in a training sequence.")
    respect_boundaries: bool = HfArg(default=False, help="Keep attention and loss inside documents.")


@dataclass
class RunArguments:
    """How the run is monitored and kept stable."""

    _argument_group_name = "the run"

    z_loss: float = HfArg(
        default=0.0, help="Weight of the z-loss, the squared log-partition of the logits; 1e-4 in the literature."
    )
    max_logit_every_n_steps: int = HfArg(default=50, help="Measure attention logits every so many steps; 0: never.")
    on_explosion: str = HfArg(
        default="warn",
        help="What to do if an attention logit exceeds 100: warn, stop or clip (QK-clip, which then measures "
        "every step).",
    )
    averaging: dict | str | None = HfArg(
        default=None,
        help=f"Average of the weights, one of {', '.join(AVERAGES)}: a name for the default values, or "
        "'{kind: ema, decay: 0.9999}' for others. It is also evaluated, and saved in OUTPUT_DIR/averaged.",
    )
    license: str | None = HfArg(default=None, help="License of the weights, as the Hub names it: apache-2.0, mit, ...")

    def __post_init__(self):
        self.averaging = read_averaging(_read_yaml(self.averaging))


def _read_yaml(value):
    if isinstance(value, str):
        with contextlib.suppress(yaml.YAMLError):
            return read_yaml(value)
    return value


OURS = (ModelArguments, DataArguments, RunArguments)
_KINDS = {f.name: f.type for argument_type in (*OURS, TrainingArguments) for f in fields(argument_type) if f.init}
"""All fields, with their annotations."""

ADAGC = "adagc"

_SMALLEST = {
    **dict.fromkeys(("learning_rate", "max_grad_norm", "max_logit_every_n_steps", "sink_learning_rate", "z_loss"), 0),
    **dict.fromkeys(("gradient_accumulation_steps", "max_eval_blocks", "per_device_train_batch_size"), 1),
    "per_device_eval_batch_size": 1,
    "weight_decay": 0,
}
"""Fields that must be finite and at least this. Other values would fail late, or silently."""

_NEEDED = {
    "num_train_epochs": ("max_steps", "-1"),
    **{f"{what}_steps": (f"{what}_strategy", "steps") for what in ("eval", "logging", "save")},
}
"""Fields that another field can make ineffective, and what that must be if they are given on the command line."""

_SMALLER_IS_BETTER = ("perplexity", "bits_per_byte")
"""Endings of metrics whose largest value Transformers would take as the best, because it knows losses only."""


class Arguments(NamedTuple):
    """All arguments of a run."""

    model: ModelArguments
    data: DataArguments
    run: RunArguments
    training: TrainingArguments
    recipe: dict
    """The fields that repeat the run: all of model, data and run, the seed, and changed `TrainingArguments`."""

    @property
    def uses_adagc(self) -> bool:
        """Whether the recipe asks for `optim: adagc`, which `TrainingArguments` does not know."""
        return self.recipe.get("optim") == ADAGC

    def build_config(self) -> LSGPTConfig:
        """
        Returns the configuration of the preset, or of the checkpoint to fine-tune, with the overrides. Raises
        `ValueError` as `load_preset` and `load_config` do.
        """
        overrides: Any = self.model.config_overrides or {}  # annotated as `dict | str` for the parser
        if self.model.model_name_or_path:
            return load_config(self.model.model_name_or_path, **overrides)
        return load_preset(self.model.preset, **overrides)


def make_parser(**kwargs) -> HfArgumentParser:
    """Returns the parser of all fields; `kwargs` are passed to `argparse.ArgumentParser`."""
    parser = HfArgumentParser((*OURS, TrainingArguments), allow_abbrev=False, exit_on_error=False, **kwargs)
    parser._optionals.title = "transformers.TrainingArguments"
    parser._action_groups.append(parser._action_groups.pop(1))  # the help begins with our fields
    optim = next(action for action in parser._actions if action.dest == "optim")
    optim.choices = [*(optim.choices or ()), ADAGC]  # no optimizer of Transformers, see `Arguments.uses_adagc`
    return parser


def parse_arguments(
    recipe: str | Path | dict | None = None, overrides: Sequence[str] = (), parser: HfArgumentParser | None = None
) -> Arguments:
    """
    Returns the arguments of a run: those of a recipe, with some fields replaced.

    Without an `output_dir`, the run uses the first of `runs/NAME`, `runs/NAME-2`, ... that is free, where NAME is the
    recipe's `run_name` or else the recipe's own name. With `resume_from_checkpoint`, which names a run's folder or one
    of its checkpoints, that run is resumed. Its own recipe is used unless another one is given.

    Args:
        recipe: A shipped recipe's name, a YAML file, or its content; `demo` by default.
        overrides: Command-line arguments, such as `["--max_steps", "100"]`.
        parser: What `make_parser` returns.

    Raises:
        ValueError: If a field is unknown (the message suggests the nearest known name), or a value is invalid.
    """
    parser = parser or make_parser()
    defaults = vars(parser.parse_known_args([])[0])
    if recipe is None:
        checkpoint = _parse_command_line(parser, overrides).resume_from_checkpoint
        recipe = _recipe_of_run(checkpoint) if checkpoint else "demo"
    values = _read_recipe(recipe)
    parser.set_defaults(**values)
    given = _parse_command_line(parser, overrides)
    named = {argument.split("=")[0][2:].replace("-", "_") for argument in overrides if argument.startswith("--")}
    for field, (other, needed) in _NEEDED.items():
        if field in named and str(value := getattr(given, other)) != needed:
            raise ValueError(
                f"`{field}` has no effect with the recipe's `{other}: {value}`; give --{other} {needed} with it"
            )
    if given.dataset_name != values.get("dataset_name") and "dataset_config_name" not in named:
        given.dataset_config_name = None  # that of the recipe's own dataset
    for field, reason in (("tokenizer", "whose tokenizer fine-tuning keeps"), ("preset", "whose shape the model has")):
        if given.model_name_or_path and field in named:
            raise ValueError(
                f"`{field}` must not be given with `model_name_or_path`, {reason}; got "
                f"{getattr(given, field)!r} and {given.model_name_or_path!r}"
            )
    if given.model_name_or_path:
        if values.get("preset"):
            logger.warning(
                f"`preset: {given.preset}` of the recipe is not used: `model_name_or_path` defines the model's shape"
            )
        given.preset = None
    before, now = (_read_yaml(overrides) for overrides in (values.get("config_overrides"), given.config_overrides))
    if isinstance(before, dict) and isinstance(now, dict):
        given.config_overrides = {**before, **now}
    checkpoint = given.resume_from_checkpoint and find_checkpoint(given.resume_from_checkpoint)
    given.resume_from_checkpoint = checkpoint and str(checkpoint)
    folder = given.output_dir or (checkpoint and checkpoint.parent)
    given.output_dir = str(folder or Path("runs") / given.run_name)
    if given.greater_is_better is None and (given.metric_for_best_model or "").endswith(_SMALLER_IS_BETTER):
        given.greater_is_better = False

    optimizer = {"optim": "adamw_torch"} if given.optim == ADAGC else {}
    model, data, run, training = parser.parse_dict({**vars(given), **optimizer})
    ours = {**asdict(model), **asdict(data), **asdict(run), "seed": training.seed}
    for field in ("dataset_name", "tokenizer", "model_name_or_path", "teacher"):
        # So that it is nowhere taken for a name on the Hub, which it looks like.
        if re.fullmatch(r"[^./~][^/]*/[^/]+", ours[field] or "") and Path(ours[field]).exists():
            ours[field] = f"./{ours[field]}"
    # A repeated run needs another output folder, and the token would be published with the recipe.
    left_out = ("output_dir", "resume_from_checkpoint", "hub_token", *ours)
    changed = {k: v for k, v in vars(given).items() if v != defaults[k] and k not in left_out}
    for field in ("warmup_steps", "logging_steps", "eval_steps", "save_steps"):
        if isinstance(value := changed.get(field), float) and value.is_integer():
            changed[field] = int(value)  # a float, because values below 1 are a share of the training
    arguments = Arguments(model, data, run, training, {**ours, **changed})
    check_arguments(arguments)
    if "sink_learning_rate" in named and not arguments.build_config().attention_sinks:
        raise ValueError(
            f"`sink_learning_rate` must be unset for a model without `attention_sinks`; got {model.sink_learning_rate}"
        )
    if not folder and training.process_index == 0:
        training.output_dir = str(free_folder(Path(training.output_dir)))
    training.output_dir = broadcast_object_list([training.output_dir])[0]
    return arguments


def _recipe_of_run(checkpoint: str) -> Path:
    """Returns the recipe of the run to which `checkpoint` belongs."""
    recipe = find_checkpoint(checkpoint).parent / "recipe.yaml"
    if not recipe.is_file():
        raise ValueError(
            f"`resume_from_checkpoint` must belong to a run with its recipe, but there is no {recipe}. Name the "
            f"recipe: lsgpt train RECIPE --resume_from_checkpoint {shlex.quote(str(checkpoint))}"
        )
    return recipe


def _read_recipe(recipe: str | Path | dict) -> dict:
    """Returns the fields of a recipe, including `run_name`, in the form that the parser takes."""
    values = dict(recipe) if isinstance(recipe, dict) else load_recipe(recipe)
    name = "run" if isinstance(recipe, dict) else Path(recipe).stem
    values["run_name"] = name = values.get("run_name") or name
    if unknown := [field for field in values if field not in _KINDS]:
        raise ValueError(f"recipe {name} has an unknown field {unknown[0]!r}{suggest(str(unknown[0]), _KINDS)}")
    for field in ("eval_strategy", "logging_strategy", "save_strategy"):
        if values.get(field) is False:
            values[field] = "no"  # which YAML reads as false
    for field, value in values.items():
        kinds = str(_KINDS[field])
        if value is None and not re.search("None|Optional", kinds):
            raise ValueError(f"`{field}` of recipe {name} must have a value; got null, which is none")
        if isinstance(value, list | dict) and not re.search("list|dict", kinds):
            raise ValueError(f"`{field}` of recipe {name} must be one value; got {value}")
        if isinstance(value, bool) and "str" in kinds and "bool" not in kinds and field != "fsdp":
            raise ValueError(
                f"`{field}` of recipe {name} must be text; got {value}, as YAML reads words like no; put it in quotes"
            )
    # The parser converts and checks only strings, so numbers become strings; `fsdp` may be true or a string.
    return {
        field: str(value) if isinstance(value, int | float | date) and field != "fsdp" else value
        for field, value in values.items()
    }


def _parse_command_line(parser: HfArgumentParser, arguments: Sequence[str]) -> argparse.Namespace:
    """Returns the values of all fields. Raises `ValueError` for invalid values, unknown fields and stray arguments."""
    try:
        namespace, unknown = parser.parse_known_args(list(arguments))
    except argparse.ArgumentError as error:
        raise ValueError(str(error)) from error
    for argument in unknown:
        if not argument.startswith("--"):
            raise ValueError(f"unexpected argument {argument!r}; fields are given as --field value")
        option = argument.split("=")[0]
        name = "--" + option[2:].replace("-", "_")
        raise ValueError(f"unknown field {option!r}{suggest(name, [f'--{known}' for known in _KINDS])}")
    return namespace


def check_arguments(arguments: Arguments):
    """Raises `ValueError`, before anything is loaded or written, for values that would fail late or silently."""
    model, data, run, args, _ = arguments
    started = int(os.environ.get("WORLD_SIZE", 1))
    if args.world_size != started:
        raise ValueError(
            f"{started} processes were started, and each would train a model of its own: they found no GPUs. Start "
            "one without `accelerate launch`, or several with configuration/launch/cpu.yaml or --use_cpu true"
        )
    if not (model.preset or model.model_name_or_path):
        raise ValueError("`model_name_or_path` must be set if there is no `preset`: it is the checkpoint to fine-tune")
    values = {name: value for part in arguments[:4] for name, value in vars(part).items()}
    for name, low in _SMALLEST.items():
        if (value := values[name]) is not None and not low <= value < math.inf:
            raise ValueError(f"`{name}` must be at least {low} and finite; got {value}")
    if args.max_steps < 1 and (args.max_steps != -1 or not 0 < args.num_train_epochs < math.inf):
        raise ValueError(
            "`max_steps` must be at least 1, or -1 with a positive and finite `num_train_epochs`; got "
            f"{args.max_steps} and {args.num_train_epochs}"
        )
    if args.optim_args and args.optim in ("adamw_torch", "adamw_torch_fused") and not arguments.uses_adagc:
        raise ValueError(
            f"`optim_args` must be unset with `optim: {args.optim.value}`, which takes none; got {args.optim_args!r}"
        )
    # Built once, because the Trainer does it only after the text has been tokenized.
    options = {k: v for k, v in (args.lr_scheduler_kwargs or {}).items() if k != "num_training_steps"}
    try:
        get_scheduler(args.lr_scheduler_type, torch.optim.SGD([torch.zeros(1)]), 1, 1000, options)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"`lr_scheduler_kwargs` must fit `lr_scheduler_type` ({args.lr_scheduler_type.value}); got {options}: "
            f"{error}"
        ) from error
    # The Trainer says so only after the text has been tokenized. The last two are not always listed as available.
    trackers = get_available_reporting_integrations()
    if missing := [name for name in args.report_to if name not in (*trackers, "azure_ml", "flyte")]:
        raise ValueError(
            f"`report_to` must be trackers whose packages are installed ({', '.join(trackers) or 'here none'}); got "
            f"{missing[0]!r}. Install its package, or set `report_to: none`"
        )
    if data.streaming and args.max_steps == -1:
        raise ValueError("`max_steps` must be set with `streaming`: a stream has no length")
    for name in ("eval_strategy", "save_strategy", "logging_strategy"):
        if data.streaming and getattr(args, name) == "epoch":
            raise ValueError(f"`{name}` must be steps or no with `streaming`: a stream has no epochs; got epoch")
    replace_parallelism(args)
    if args.include_num_input_tokens_seen != "no" and processes_per_row(args) > 1:
        raise ValueError(
            "`include_num_input_tokens_seen` must be false with `cp_size`, because processes that share a sequence "
            "would count it several times; leave it out: tokens are counted anyway"
        )
    if args.n_gpu > 1:
        raise ValueError(
            f"each process must have one GPU; this one sees {args.n_gpu}, and `Trainer` would ignore `bf16` and "
            "`torch_compile`. Start one process for each of them, with `accelerate launch --multi_gpu -m lsgpt_cli "
            "train ...`, or set CUDA_VISIBLE_DEVICES=0"
        )
    if run.averaging is not None and args.optim.startswith("schedule_free"):
        raise ValueError(f"`averaging` must be unset with `optim: {args.optim.value}`, which averages by itself")
    positions = arguments.build_config().max_position_embeddings
    if not 2 <= data.block_size <= positions:
        raise ValueError(
            f"`block_size` must be between 2 and `max_position_embeddings` ({positions}); got {data.block_size}"
        )
    if run.on_explosion in ("stop", "clip") and not run.max_logit_every_n_steps:
        raise ValueError(
            f"`max_logit_every_n_steps` must be at least 1 with `on_explosion: {run.on_explosion}`; got 0"
        )
    if args.push_to_hub and run.license is None:
        raise ValueError("`license` must be set with `push_to_hub`, for the model card; for example apache-2.0")
    engine = (model.attn_implementation or "").removesuffix(IN_FLOAT32)
    if engine in ("flex_attention", "triton") and args.device.type == "cpu":
        raise ValueError(f"`attn_implementation` must not be {engine} for training on the CPU; leave it out")
    for name, is_set in (("teacher", model.teacher), ("trainable: lora", model.trainable == "lora")):
        if is_set and is_sharded(args):
            raise ValueError(f"`{name}` must not be combined with FSDP or DeepSpeed; use DDP or one process")
    for name, kind, choices in (
        ("trainable", model.trainable, ("all", "light", "lora")),
        ("on_explosion", run.on_explosion, ("warn", "stop", "clip")),
    ):
        if kind not in choices:
            raise ValueError(f"`{name}` must be one of {', '.join(choices)}; got {kind!r}{suggest(kind, choices)}")
    if model.trainable != "all" and not model.model_name_or_path:
        raise ValueError(
            f"`trainable` must be all without `model_name_or_path`, or weights stay random; got {model.trainable!r}"
        )
    if run.averaging is not None and args.max_steps > 0:
        check_updates(run.averaging, args.max_steps)
    if run.averaging is not None and model.trainable == "lora":
        raise ValueError(
            "`averaging` must not be combined with `trainable: lora`, whose adapters are merged at the end"
        )
