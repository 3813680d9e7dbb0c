"""The arguments of a training run, as dataclasses that a recipe (YAML) and the command line fill in."""

import argparse
import contextlib
import json
import math
import os
import shlex
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from accelerate.utils import broadcast_object_list
from transformers import HfArgumentParser, TrainingArguments
from transformers.integrations import get_available_reporting_integrations

from lsgpt.configuration import LSGPTConfig, list_presets, load_config, load_preset, load_recipe
from lsgpt.utilities import suggest, with_unit

from .averaging import AVERAGES, read_averaging


@dataclass
class ModelArguments:
    """The model to train."""

    preset: str | None = field(
        default="demo", metadata={"help": f"Model preset to start from: {', '.join(list_presets())}."}
    )
    model_name_or_path: str | None = field(
        default=None,
        metadata={"help": "LSGPT checkpoint to fine-tune, with its tokenizer: a folder or a name on the Hub."},
    )
    config_overrides: dict | str | None = field(
        default=None,
        metadata={
            "help": "Fields of LSGPTConfig that replace the model's, as in '{hidden_size: 64, qk_norm: true}'; "
            "`num_global_heads: all` is plain multi-head attention."
        },
    )
    attn_implementation: str | None = field(
        default=None,
        metadata={"help": "Attention implementation; by default sdpa, or with soft-capping flex_attention or eager."},
    )
    teacher: str | None = field(
        default=None,
        metadata={
            "help": "Teacher to distil from: its next-token distributions replace the text as the target. A folder, a "
            "name on the Hub or a GGUF file of any causal language model with the same tokenizer."
        },
    )
    trainable: str = field(
        default="all",
        metadata={
            "help": "What to train: all (all weights), light (only sinks, biases and norms), or lora (those plus an "
            "adapter for each matrix of the blocks, merged into the weights at the end; needs the package peft)."
        },
    )
    lora_rank: int = field(default=16, metadata={"help": "Rank of the adapters of `trainable: lora`."})
    sink_learning_rate: float | None = field(
        default=None,
        metadata={
            "help": "Learning rate of the sinks and of the biases that carry their values; learning_rate by default."
        },
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
            ".parquet files; or a dataset on the Hub."
        },
    )
    dataset_config_name: str | None = field(
        default=None, metadata={"help": "Configuration of the dataset, if it has several."}
    )
    text_column: str = field(default="text", metadata={"help": "Column that holds the text."})
    streaming: bool = field(
        default=False, metadata={"help": "Read the data during training instead of before; needs max_steps."}
    )
    validation_split_percentage: int = field(
        default=5, metadata={"help": "Percentage of the documents held out if the dataset has no validation split."}
    )
    max_eval_blocks: int | None = field(
        default=None, metadata={"help": "Evaluate on at most this many blocks; all by default."}
    )
    tokenizer: str = field(
        default="bpe",
        metadata={
            "help": "bpe or unigram to train a tokenizer with the model's vocabulary size on the data; or a folder or "
            "a name on the Hub. Fine-tuning keeps the checkpoint's tokenizer."
        },
    )
    max_tokenizer_characters: int = field(
        default=100_000_000, metadata={"help": "Train a tokenizer on at most this many characters of text."}
    )
    block_size: int = field(default=512, metadata={"help": "Number of tokens in a training sequence."})
    respect_boundaries: bool = field(
        default=False, metadata={"help": "Keep attention and loss inside documents; otherwise, they cross documents."}
    )
    preprocessing_num_workers: int | None = field(
        default=None, metadata={"help": "Number of processes for tokenizing."}
    )
    prompt: str = field(
        default="def", metadata={"help": "Text that the trained model continues at the end of the run."}
    )


@dataclass
class RunArguments:
    """How the run is monitored and kept stable."""

    z_loss: float = field(
        default=0.0,
        metadata={"help": "Weight of the squared log-partition in the training loss (z-loss); published: 1e-4."},
    )
    fp32_attention: bool = field(default=False, metadata={"help": "Compute attention in float32 under autocast."})
    max_logit_every_n_steps: int = field(
        default=50, metadata={"help": "Measure the attention logits every this many steps; 0 turns it off."}
    )
    max_logit_threshold: float = field(default=100.0, metadata={"help": "A larger logit counts as an explosion."})
    on_explosion: str = field(
        default="warn",
        metadata={
            "help": "What to do if a logit exceeds max_logit_threshold: warn, stop or clip "
            "(QK-clip, which then measures every step)."
        },
    )
    averaging: dict | str | None = field(
        default=None,
        metadata={
            "help": f"Average of the weights, one of {', '.join(AVERAGES)}: a name for the default values, or "
            "'{kind: ema, decay: 0.9999}' for others. It is also evaluated, and saved in OUTPUT_DIR/averaged."
        },
    )
    stop_at_step: int | None = field(
        default=None,
        metadata={"help": "End the training after this step; the schedule still extends to max_steps."},
    )
    license: str | None = field(
        default=None,
        metadata={"help": "Licence of the weights for the model card, as the Hub names it: apache-2.0, mit, ..."},
    )

    def __post_init__(self):
        self.averaging = read_averaging(_read_yaml(self.averaging))


def _read_yaml(value):
    if isinstance(value, str):
        with contextlib.suppress(yaml.YAMLError):
            return yaml.safe_load(value)
    return value


_ARGUMENT_TYPES = (ModelArguments, DataArguments, RunArguments, TrainingArguments)
_FIELDS = [f.name for argument_type in _ARGUMENT_TYPES for f in fields(argument_type) if f.init]

ADAGC = "adagc"

_NO_STABILIZERS = (
    "the field `stabilizers`, which has been replaced: qk-norm by `config_overrides: {qk_norm: true}`, softcap by "
    "`config_overrides: {attn_logit_softcapping: 50.0}`, z-loss by `z_loss: 1.0e-4`, qk-clip by `on_explosion: clip`, "
    "adagc by `optim: adagc` with `max_grad_norm: 0`, and fp32-attention by `fp32_attention: true`"
)

_TRAINABLE = ("all", "light", "lora")
_ON_EXPLOSION = ("warn", "stop", "clip")

_RANGES = {
    "adam_beta1": (0, 1),
    "adam_beta2": (0, 1),
    "adam_epsilon": (0, math.inf),
    "dataloader_num_workers": (0, math.inf),
    "gradient_accumulation_steps": (1, math.inf),
    "label_smoothing_factor": (0, 1),
    "learning_rate": (0, math.inf),
    "lora_rank": (1, math.inf),
    "max_eval_blocks": (1, math.inf),
    "max_grad_norm": (0, math.inf),
    "max_logit_every_n_steps": (0, math.inf),
    "max_tokenizer_characters": (1, math.inf),
    "per_device_eval_batch_size": (1, math.inf),
    "per_device_train_batch_size": (1, math.inf),
    "preprocessing_num_workers": (1, math.inf),
    "sink_learning_rate": (0, math.inf),
    "stop_at_step": (1, math.inf),
    "weight_decay": (0, math.inf),
    "z_loss": (0, math.inf),
}
"""Fields that must be at least the first number and below the second. Other values would fail late, or silently."""

LICENSES = """
afl-3.0 agpl-3.0 apache-2.0 apple-amlr apple-ascl array artistic-2.0 bigcode-openrail-m bigscience-bloom-rail-1.0
bigscience-openrail-m bsd bsd-2-clause bsd-3-clause bsd-3-clause-clear bsl-1.0 c-uda cc cc-by-2.0 cc-by-2.5 cc-by-3.0
cc-by-4.0 cc-by-nc-2.0 cc-by-nc-3.0 cc-by-nc-4.0 cc-by-nc-nd-3.0 cc-by-nc-nd-4.0 cc-by-nc-sa-2.0 cc-by-nc-sa-3.0
cc-by-nc-sa-4.0 cc-by-nd-4.0 cc-by-sa-3.0 cc-by-sa-4.0 cc0-1.0 cdla-permissive-1.0 cdla-permissive-2.0
cdla-sharing-1.0 creativeml-openrail-m deepfloyd-if-license ecl-2.0 epl-1.0 epl-2.0 etalab-2.0 eupl-1.1 eupl-1.2
fair-noncommercial-research-license gemma gfdl gpl gpl-2.0 gpl-3.0 grok2-community h-research intel-research isc lgpl
lgpl-2.1 lgpl-3.0 lgpl-lr llama2 llama3 llama3.1 llama3.2 llama3.3 llama4 lppl-1.3c mit mpl-2.0 ms-pl ncsa odbl odc-by
ofl-1.1 openmdw-1.0 openrail openrail++ osl-3.0 other pddl postgresql unknown unlicense wtfpl zlib
""".split()  # noqa: SIM905 (one per line would fill two pages)
"""The licences for which the Hub has identifiers. Any other licence is `other`, with a name and a link."""


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
        Returns the configuration of the preset, or of the checkpoint to fine-tune, with the overrides.
        Raises `ValueError` as `load_preset` and `load_config` do.
        """
        model = self.model
        load, name = (
            (load_config, model.model_name_or_path) if model.model_name_or_path else (load_preset, model.preset)
        )
        overrides: Any = model.config_overrides or {}  # annotated as `dict | str` for the parser
        return load(name, **overrides)


def make_parser(**kwargs) -> HfArgumentParser:
    """Returns the parser of all fields; `kwargs` are passed to `argparse.ArgumentParser`."""
    parser = HfArgumentParser(_ARGUMENT_TYPES, allow_abbrev=False, exit_on_error=False, **kwargs)
    for action in parser._actions:  # AdaGC is no optimizer of Transformers, see `Arguments.uses_adagc`
        if action.dest == "optim":
            action.choices = [*(action.choices or ()), ADAGC]
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
        ImportError: If a package that the run needs is not installed.
    """
    parser = parser or make_parser()
    defaults = vars(parser.parse_known_args([])[0])
    if recipe is None:
        checkpoint = _parse_command_line(parser, overrides).resume_from_checkpoint
        recipe = _recipe_of_run(checkpoint) if checkpoint else "demo"
    parser.set_defaults(**_read_recipe(recipe))
    namespace = _parse_command_line(parser, overrides)
    has_folder = _choose_folder(namespace)
    optimizer = {"optim": "adamw_torch"} if namespace.optim == ADAGC else {}
    model_args, data_args, run_args, training_args = parser.parse_dict({**vars(namespace), **optimizer})
    resolved = _resolve_recipe(model_args, data_args, run_args, training_args, namespace, defaults)
    arguments = Arguments(model_args, data_args, run_args, training_args, resolved)
    check_arguments(arguments)
    if not has_folder and training_args.process_index == 0:
        training_args.output_dir = str(free_folder(Path(training_args.output_dir)))
    training_args.output_dir = broadcast_object_list([training_args.output_dir])[0]
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
    if values.pop("stabilizers", None):  # an old recipe without any has an empty one
        raise ValueError(f"recipe {name} has {_NO_STABILIZERS}")
    for field_name in values:
        if field_name not in _FIELDS:
            raise ValueError(f"recipe {name} has an unknown field {field_name!r}{suggest(str(field_name), _FIELDS)}")
    # The parser converts and checks only strings, so numbers become strings. YAML reads 3e-4 as one anyway.
    return {name: str(value) if isinstance(value, int | float) else value for name, value in values.items()}


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
        if option == "--stabilizers":
            raise ValueError(f"there is {_NO_STABILIZERS}")
        hint = suggest(option.replace("-", "_").replace("__", "--", 1), [f"--{name}" for name in _FIELDS])
        raise ValueError(f"unknown field {option!r}{hint}")
    return namespace


def _choose_folder(namespace: argparse.Namespace) -> bool:
    """Sets the checkpoint to resume from and the output folder. Returns whether that folder is not the default one."""
    checkpoint = namespace.resume_from_checkpoint and find_checkpoint(namespace.resume_from_checkpoint)
    namespace.resume_from_checkpoint = checkpoint and str(checkpoint)
    folder = namespace.output_dir or (checkpoint and checkpoint.parent)
    namespace.output_dir = str(folder or Path("runs") / namespace.run_name)
    return folder is not None


def _resolve_recipe(
    model_args: ModelArguments,
    data_args: DataArguments,
    run_args: RunArguments,
    training_args: TrainingArguments,
    namespace: argparse.Namespace,
    defaults: dict,
) -> dict:
    """Returns what `Arguments.recipe` describes; `defaults` are the parser's."""
    ours = {**asdict(model_args), **asdict(data_args), **asdict(run_args), "seed": training_args.seed}
    # A repeated run needs another output folder, and the token would be published with the recipe.
    left_out = ("output_dir", "resume_from_checkpoint", "hub_token", *ours)
    changed = {
        # A float in `TrainingArguments`, where values below 1 are a share of the training. Write 60 steps, not 60.0.
        name: int(value) if name == "warmup_steps" and value is not None and value.is_integer() else value
        for name, value in vars(namespace).items()
        if value != defaults[name] and name not in left_out
    }
    return {**ours, **changed}


def check_arguments(arguments: Arguments):
    """
    Checks, before anything is loaded or written, what would fail later.

    Raises:
        ValueError: If a name is unknown, a block is longer than the model's positions, or values are incompatible.
        ImportError: If a package that the run needs is not installed.
    """
    model_args, data_args, run_args, training_args, _ = arguments
    if not (model_args.preset or model_args.model_name_or_path):
        raise ValueError("`model_name_or_path` must be set if there is no `preset`: it is the checkpoint to fine-tune")
    name = model_args.model_name_or_path
    if name and looks_like_a_path(name) and not Path(name).is_dir():
        raise ValueError(f"`model_name_or_path` must be a checkpoint; there is no folder {name!r}")
    _check_processes(training_args)
    _check_healing(arguments)
    _check_numbers(arguments)
    config = arguments.build_config()
    positions = config.max_position_embeddings
    if not 2 <= data_args.block_size <= positions:
        raise ValueError(
            f"`block_size` must be between 2 and `max_position_embeddings` ({positions}); got {data_args.block_size}"
        )
    if data_args.streaming and training_args.max_steps <= 0:
        raise ValueError("`max_steps` must be set with `streaming`: a stream has no length")
    if run_args.on_explosion in ("stop", "clip") and not run_args.max_logit_every_n_steps:
        raise ValueError(
            f"`max_logit_every_n_steps` must be at least 1 with `on_explosion: {run_args.on_explosion}`, which needs "
            "measurements; got 0"
        )
    if run_args.on_explosion not in _ON_EXPLOSION:
        raise ValueError(f"`on_explosion` must be one of {', '.join(_ON_EXPLOSION)}; got {run_args.on_explosion!r}")
    if training_args.push_to_hub and run_args.license is None:
        raise ValueError("`license` must be set with `push_to_hub`, for the model card; for example apache-2.0")
    if run_args.license is not None:
        check_license(run_args.license)
    engine = model_args.attn_implementation
    if engine in ("flex_attention", "triton") and training_args.device.type == "cpu":
        reason = "it has no backward pass there" if engine == "flex_attention" else "it runs on CUDA devices only"
        raise ValueError(
            f"`attn_implementation` must not be {engine} for training on the CPU: {reason}; leave it out, or use sdpa"
        )
    _check_trackers(training_args)
    _check_stabilizers(arguments, config)
    _check_averaging(arguments)


def _check_processes(args: TrainingArguments):
    started = int(os.environ.get("WORLD_SIZE", 1))
    if args.world_size != started:
        raise ValueError(
            f"{started} processes were started, and each would train a model of its own: they found no GPUs, and "
            "`use_cpu` was not set. Start one process without `accelerate launch`, or several on the CPU with "
            "configuration/launch/cpu.yaml or --use_cpu true"
        )


def _check_numbers(arguments: Arguments):
    values = {name: value for part in arguments[:4] for name, value in vars(part).items()}
    for name, (low, high) in _RANGES.items():
        value = values[name]
        if value is not None and not low <= value < high:
            limit = f" and below {high}" if high != math.inf else " and finite" if value == math.inf else ""
            raise ValueError(f"`{name}` must be at least {low}{limit}; got {value}")
    if not 0 < (threshold := values["max_logit_threshold"]) < math.inf:
        raise ValueError(f"`max_logit_threshold` must be positive and finite; got {threshold}")
    max_steps, epochs = values["max_steps"], values["num_train_epochs"]
    if max_steps < 1 and max_steps != -1:
        raise ValueError(f"`max_steps` must be at least 1, or -1 to count epochs instead; got {max_steps}")
    if max_steps == -1 and not 0 < epochs < math.inf:
        raise ValueError(f"`num_train_epochs` must be positive and finite; got {epochs}")


def _check_healing(arguments: Arguments):
    model_args, _, run_args, training_args, _ = arguments
    trainable, teacher = model_args.trainable, model_args.teacher
    if trainable not in _TRAINABLE:
        raise ValueError(
            f"`trainable` must be one of {', '.join(_TRAINABLE)}; got {trainable!r}{suggest(trainable, _TRAINABLE)}"
        )
    if trainable != "all" and not model_args.model_name_or_path:
        raise ValueError(
            f"`trainable` must be all without `model_name_or_path`, because the other weights would stay random; got "
            f"{trainable!r}"
        )
    is_file = teacher and (looks_like_a_path(teacher) or teacher.endswith(".gguf"))
    if is_file and not Path(teacher).exists():
        raise ValueError(f"`teacher` must be a folder, a name on the Hub or a GGUF file; there is no {teacher!r}")
    if teacher and training_args.label_smoothing_factor:
        raise ValueError("`label_smoothing_factor` must be 0 with a `teacher`, which leaves no labels to smooth")
    if trainable != "all" and run_args.on_explosion == "clip":
        raise ValueError(f"QK-clip must not be combined with `trainable: {trainable}`: it scales frozen weights")
    is_sharded = training_args.deepspeed_plugin is not None or os.environ.get("ACCELERATE_USE_FSDP") == "true"
    for name, is_set in (("teacher", teacher), ("trainable: lora", trainable == "lora")):
        if is_set and is_sharded:
            raise ValueError(f"`{name}` must not be combined with FSDP or DeepSpeed; use DDP or one process")


def _check_trackers(args: TrainingArguments):
    installed = get_available_reporting_integrations()
    for name in args.report_to:
        if name not in installed:
            raise ValueError(
                f"`report_to` must name trackers that are installed ({', '.join(installed) or 'none is'}); got "
                f"{name!r}{suggest(name, installed) or f', which `pip install {name}` may provide'}"
            )


def _check_stabilizers(arguments: Arguments, config: LSGPTConfig):
    run_args, training_args, uses_adagc = arguments.run, arguments.training, arguments.uses_adagc
    clips = run_args.on_explosion == "clip"
    has_deepspeed = training_args.deepspeed_plugin is not None
    if clips and has_deepspeed:
        raise ValueError("QK-clip must not be combined with DeepSpeed, which overwrites changes to the weights")
    if uses_adagc and (has_deepspeed or os.environ.get("ACCELERATE_USE_FSDP") == "true"):
        raise ValueError("AdaGC must not be combined with FSDP or DeepSpeed: it needs the gradients of whole tensors")
    if uses_adagc and training_args.max_grad_norm != 0:
        raise ValueError(
            "`max_grad_norm` must be 0 with `optim: adagc`, which clips the gradient of each tensor instead; got "
            f"{training_args.max_grad_norm}"
        )
    if uses_adagc and find_spec("pytorch_optimizer") is None:
        raise ImportError("AdaGC needs the package pytorch_optimizer: pip install pytorch_optimizer")
    if clips and config.qk_norm:
        raise ValueError("QK-clip must not be combined with QK-norm: normalized queries ignore their weights' scale")


def _check_averaging(arguments: Arguments):
    if arguments.run.averaging is None:
        return
    if arguments.model.trainable == "lora":
        raise ValueError(
            "`averaging` must not be combined with `trainable: lora`, whose adapters are merged at the end of the "
            "run; in a script with PEFT, AveragedWeightsCallback averages adapters"
        )
    plugin = arguments.training.deepspeed_plugin
    if plugin is not None and plugin.zero_stage == 3:
        raise ValueError("`averaging` must not be combined with DeepSpeed's ZeRO-3; use DDP or FSDP2")


def check_license(license: str):
    """Raises `ValueError` if the Hub has no identifier for a licence; the message suggests the nearest one."""
    if license not in LICENSES:
        raise ValueError(
            "`license` must be an identifier from https://huggingface.co/docs/hub/repositories-licenses, such as "
            f"apache-2.0, or `other`; got {license!r}{suggest(str(license), LICENSES)}"
        )


def make_folder(arguments: Arguments):
    """
    Creates the output folder.

    Raises:
        ValueError: If the folder is not empty (unless the run resumes), cannot be written to, or is on a disk without
            room for the checkpoints.
    """
    training_args = arguments.training
    folder = Path(training_args.output_dir)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"`output_dir` must be a folder; got {str(folder)!r}, which is a file")
    if folder.exists() and any(folder.iterdir()) and not training_args.resume_from_checkpoint:
        remedy = "It has no checkpoint to resume from: choose another folder, or delete this one"
        if _complete_checkpoints(folder):
            remedy = f"To resume the run in it: --resume_from_checkpoint {shlex.quote(str(folder))}"
        raise ValueError(
            f"`output_dir` must be a new or an empty folder; got {str(folder)!r}, which is not empty. {remedy}"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        test_file = folder / ".can_write"
        test_file.touch()
        test_file.unlink()
    except OSError as error:
        raise ValueError(f"`output_dir` must be a writable folder; got {str(folder)!r}: {error}") from error
    needed, free = _bytes_to_write(arguments), shutil.disk_usage(folder).free
    if needed > free:
        raise ValueError(
            f"`output_dir` must be on a disk with room for the checkpoints, {with_unit(needed, 'B')}; "
            f"{str(folder)!r} has {with_unit(free, 'B')}"
        )


def _bytes_to_write(arguments: Arguments) -> int:
    """Returns the bytes that the run may still write: final weights, and the checkpoints that it keeps."""
    args, folder = arguments.training, Path(arguments.training.output_dir)
    weights = 4 * arguments.build_config().num_parameters()
    trains_all = arguments.model.trainable == "all"  # else the optimizer has few parameters
    size = 3 * weights if trains_all and not args.save_only_model else weights  # 3 with Adam's two moments
    averaged = 0  # the averaged model at the end
    if averaging := arguments.run.averaging:
        averaged = weights
        size += AVERAGES[averaging["kind"]].copies * weights if trains_all else 0
    checkpoints = 0
    if args.save_strategy != "no":  # existing checkpoints already take up their space
        checkpoints = max(_max_checkpoints(arguments) - len(list(folder.glob("checkpoint-*"))), 1)
    return weights + averaged + checkpoints * size


def _max_checkpoints(arguments: Arguments) -> int:
    """Returns how many checkpoints the run has at the same time at most, or 2 if that depends on the data."""
    args = arguments.training
    if args.save_total_limit:
        return args.save_total_limit + 1  # a new checkpoint is written before an old one is deleted
    if args.save_strategy != "steps" or args.max_steps <= 0:
        return 2
    every = args.save_steps if args.save_steps >= 1 else math.ceil(args.save_steps * args.max_steps)
    return math.ceil(min(args.max_steps, arguments.run.stop_at_step or math.inf) / every)


def looks_like_a_path(name: str) -> bool:
    """
    Returns whether `name` can only mean a file or a folder, because a name on the Hub is `NAME` or `USER/NAME`. If it
    does not exist, there is no need to ask the Hub, which takes half a minute without a network.
    """
    path = Path(name)
    return (
        name.startswith((".", "~"))
        or path.is_absolute()
        or len(path.parts) > 2
        or (len(path.parts) == 2 and path.parent.is_dir())
    )


def free_folder(folder: Path) -> Path:
    """Returns the first of `folder`, `folder-2`, `folder-3`, ... that does not exist or is empty."""
    candidate, number = folder, 1
    while candidate.exists() and (not candidate.is_dir() or any(candidate.iterdir())):
        number += 1
        candidate = folder.with_name(f"{folder.name}-{number}")
    return candidate


def find_checkpoint(folder: str | Path) -> Path:
    """
    Returns `folder` if it is a checkpoint of a `Trainer`, or else the last complete checkpoint in it.

    Raises:
        ValueError: If there is no such folder, or it contains no complete checkpoint.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"`resume_from_checkpoint` must be the folder of a run; there is no {str(folder)!r}")
    complete = _complete_checkpoints(folder)
    if not complete:
        recipe = folder / "recipe.yaml"
        remedy = f". The run ended before its first checkpoint; start it again: lsgpt train {shlex.quote(str(recipe))}"
        raise ValueError(
            f"`resume_from_checkpoint` must be or contain a complete checkpoint; got {str(folder)!r}"
            + (remedy if recipe.is_file() else "")
        )
    return max(complete, key=complete.__getitem__)


def _complete_checkpoints(folder: Path) -> dict[Path, int]:
    """Maps the complete checkpoints to their steps. A run may be killed while it saves: the last file tells."""
    steps = {}
    for path in (folder, *folder.glob("checkpoint-*")):
        with contextlib.suppress(OSError, ValueError, KeyError):
            steps[path] = json.loads((path / "trainer_state.json").read_text(encoding="utf-8"))["global_step"]
    return steps
