"""What must be as before when a run goes on from a checkpoint, checked before anything is loaded or written."""

import shlex
from pathlib import Path

from transformers import TrainerState, TrainingArguments

from lsgpt.configuration import LSGPTConfig, load_config, load_recipe

from .arguments import Arguments, DataArguments
from .averaging import check_averages
from .context_parallel import processes_per_row
from .folders import check_checkpoint


TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
"""Fields of a model's configuration that a run takes from its tokenizer."""

OPTIMIZER_FIELDS = (
    *("optim", "optim_args", "trainable"),
    *("learning_rate", "sink_learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon"),
)
"""What an optimizer's state belongs to, or contains: when a run resumes, it replaces the settings of the arguments."""


_STREAM_NAMES = {
    DataArguments: (
        "streaming",
        "dataset_name",
        "dataset_config_name",
        "text_column",
        "block_size",
        "respect_boundaries",
    ),
    TrainingArguments: ("seed", "data_seed", "dataloader_num_workers"),
}
STREAM_FIELDS = {
    name: kind.__dataclass_fields__[name].default for kind, names in _STREAM_NAMES.items() for name in names
}
"""What determines the rows of a stream and their order, with the defaults."""


def check_resuming(checkpoint: str | Path, arguments: Arguments):
    """Raises `ValueError` if a run with these arguments cannot resume from a checkpoint, or would ignore them."""
    check_checkpoint(checkpoint)
    check_model(checkpoint, arguments)
    check_optimizer(checkpoint, arguments)
    recipes = recipe_before(checkpoint, arguments), arguments.recipe
    if any(recipe.get("streaming") for recipe in recipes) and not arguments.training.ignore_data_skip:
        check_stream(checkpoint, arguments)
    if arguments.run.averaging is not None:
        check_averages(checkpoint, arguments.run.averaging["kind"])


def recipe_before(checkpoint: str | Path, arguments: Arguments) -> dict:
    """The recipe of the run that saved a checkpoint, or else that of the arguments."""
    file = Path(checkpoint).parent / "recipe.yaml"
    return load_recipe(file) if file.is_file() else arguments.recipe


def _how_to_change(checkpoint: str | Path, recipe: dict) -> str:
    change, start = "begin a run with these weights", Path(checkpoint)
    if recipe.get("trainable") == "lora":  # the checkpoint holds the adapter alone
        change, start = "finish this run, then begin one with its merged weights", start.parent
    return f"To change it, {change}: --model_name_or_path {shlex.quote(str(start))}"


def check_optimizer(checkpoint: str | Path, arguments: Arguments):
    """Raises `ValueError` if a run would resume with another optimizer, or with settings that its state replaces."""
    before, now = recipe_before(checkpoint, arguments), arguments.recipe
    for name in OPTIMIZER_FIELDS:
        old, new = before.get(name, "the default"), now.get(name, "the default")
        if old != new:
            raise ValueError(
                f"`{name}` must be as before ({old}) when a run resumes, because the optimizer keeps its settings; "
                f"got {new}. {_how_to_change(checkpoint, before)}"
            )


def check_model(checkpoint: str | Path, arguments: Arguments):
    """Raises `ValueError` if the arguments of a run that resumes describe another model than its checkpoint has."""
    before, now = load_config(checkpoint), arguments.build_config()
    for name in LSGPTConfig.__annotations__:
        if name not in (*TOKENS, "use_cache") and getattr(before, name) != getattr(now, name):
            raise ValueError(
                f"`{name}` of the model must be as before ({getattr(before, name)}) when a run resumes; got "
                f"{getattr(now, name)}. {_how_to_change(checkpoint, recipe_before(checkpoint, arguments))}"
            )


def check_stream(checkpoint: str | Path, arguments: Arguments):
    """Raises `ValueError` if a run would not resume where its stream was when `checkpoint` was saved."""
    args, rest = arguments.training, "Otherwise, the stream would not continue where it was"
    recipes = recipe_before(checkpoint, arguments), arguments.recipe
    for name, default in STREAM_FIELDS.items():
        old, now = (recipe.get(name, default) for recipe in recipes)
        if old != now:
            raise ValueError(f"`{name}` must be {old}, as before; got {now}. {rest}")
    state = TrainerState.load_from_json(str(Path(checkpoint) / "trainer_state.json"))
    rows = state.train_batch_size if args.auto_find_batch_size else args.train_batch_size  # as it was found
    blocks = rows * args.gradient_accumulation_steps * (args.world_size // processes_per_row(args))
    tokens, seen = blocks * arguments.data.block_size, state.num_input_tokens_seen
    # Steps that were not taken, because their loss was bad, do not count in `seen`.
    num_bad = max(sum("bad_step" in log for log in state.log_history), 1)
    if seen and state.global_step * tokens - seen not in (0, num_bad * tokens):
        before = f"{seen:,} in {state.global_step:,} steps"
        raise ValueError(f"a step must have as many tokens as before ({before}); got {tokens:,}. {rest}")
