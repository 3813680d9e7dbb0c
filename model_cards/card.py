"""Makes model cards: of a run, from the files in its folder; of a preset, from its configuration."""

import json
import math
import re
import shlex
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import BinaryIO

import yaml
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging

from lsgpt.configuration import LSGPTConfig, list_recipes, load_config, load_preset, load_recipe
from lsgpt.training.arguments import OURS
from lsgpt.training.callbacks import read_metrics
from lsgpt.training.data import ALGORITHMS, STDLIB
from lsgpt.training.report import format_results, points_of
from lsgpt.training.results import RunResult
from lsgpt.training.telemetry import THRESHOLD
from lsgpt.utilities import (
    compare_costs,
    describe,
    has_sinks,
    load_tokenizer,
    looks_like_a_path,
    runs_on_vllm,
    table,
)
from lsgpt.utilities.plots import GLOBAL, LOCAL


logger = logging.get_logger(__name__)


HEADS_PICTURE = "heads.png"

PLOTS = {
    "training_plots": {"Training and evaluation loss": "loss.png"},
    "evaluation_plots": {"Evaluation loss by position in the block: does context help?": "loss_by_position.png"},
    "logit_plots": {
        "Largest attention logits over the training": "max_logits.png",
        "Largest attention logit of each head of the trained model": "max_logits_by_head.png",
    },
}
"""The plots of a run's report that a card shows: their titles and files, by section."""

# Presets without a recipe of their own: the recipe that fits best, and how it differs from the paper.
_OTHER_RECIPES = {
    "paper-36l": (
        "paper-12l",
        "The recipe is that of another preset; the paper trains 36 layers on OpenWebText with GPT-2's tokenizer.",
    )
}


def make_card(
    folder: str | Path,
    repo_id: str | None = None,
    license: str | None = None,
    language: str | list[str] | None = None,
    tags: Sequence[str] = (),
) -> ModelCard:
    """
    Makes the card of a checkpoint from the files of `lsgpt train` in the same folder. The card says what was not
    recorded or not measured because a file is missing.

    Args:
        folder: The checkpoint with its tokenizer. The card links to `heads.png` (see `draw_heads`) and plots in it.
        repo_id: The model's name on the Hub, for title and snippets; by default, the folder.
        license: The weights' license, an identifier of the Hub such as `apache-2.0`. By default, it is taken from the
            metadata of a README.md in the folder, or else from the run's recipe, or else likewise from the folder of
            the checkpoint that the run started from.
        language: Language codes for the metadata.
        tags: Additional tags for the metadata.

    Raises:
        ValueError: If there is no checkpoint, no tokenizer, or no license.
    """
    folder = Path(folder)
    config, tokenizer = load_config(folder), load_tokenizer(folder, local_files_only=True)
    recipe = load_recipe(folder / "recipe.yaml") if (folder / "recipe.yaml").is_file() else None
    known = _find_metadata(folder)
    metadata: dict = {**find_license(folder, known, license), "base_model": known.get("base_model")}
    results = RunResult.read(folder) if (folder / "results.json").is_file() else None
    metrics = read_metrics(folder / "metrics.jsonl") if (folder / "metrics.jsonl").is_file() else []
    name = repo_id.split("/")[-1] if repo_id else folder.resolve().name
    context = {
        **_describe_model(config),
        **_describe_snippets(config, repo_id or str(folder), recipe, results.prompt if results else "The", tokenizer),
        **_describe_logits(metrics),
        "name": name,
        "heads_picture": HEADS_PICTURE,
        "license_text": _license_text(metadata),
        "limits": _limits(config, recipe, results),
    }
    for section, plots in PLOTS.items():
        context[section] = {title: file for title, file in plots.items() if (folder / file).is_file()}
    if recipe is not None:
        metadata |= _recipe_metadata(recipe)
        shown = {field: value for field, value in recipe.items() if value not in (None, {})}
        context |= {
            **_describe_recipe(recipe, config),
            "recipe": yaml.safe_dump(shown, sort_keys=False, allow_unicode=True).strip(),
            "train_command": "lsgpt train recipe.yaml",
            "notes": [],
        }
    if results is not None:
        if recipe is not None:
            metadata["eval_results"] = _eval_results(results, recipe)
        rows = format_results(results)
        context["evaluation"] = {name: value for name, value in rows.items() if name.startswith("evaluation")}
        context["training"] = {name: value for name, value in rows.items() if name not in context["evaluation"]}
    return _render(metadata | {"model_name": name, "language": language}, tags, context)


def make_preset_card(preset: str) -> ModelCard:
    """
    Makes the card of a shipped preset: its shape, its costs and how to train it. The card links to the picture
    `PRESET.png`, and its snippets load the output folder of the training.

    Raises:
        ValueError: If there is no such preset.
    """
    config = load_preset(preset)
    metadata = {"license": "apache-2.0"}
    command, recipe_name, notes = f"lsgpt train {preset}", preset, []
    if preset not in list_recipes():
        recipe_name, note = _OTHER_RECIPES[preset]
        command = f"lsgpt train {recipe_name} --preset {preset} --output_dir runs/{preset}"
        notes.append(note)
    recipe = load_recipe(recipe_name)
    context = {
        **_describe_model(config),
        **_describe_recipe(recipe, config),
        **_describe_snippets(config, f"runs/{preset}", recipe),
        **_describe_logits([]),
        "preset": preset,
        "name": f"{preset} (preset)",
        "heads_picture": f"{preset}.png",
        "recipe": yaml.safe_dump({**recipe, "preset": preset}, sort_keys=False, allow_unicode=True).strip(),
        "train_command": command,
        "notes": notes,
        "license_text": _license_text(metadata),
        "limits": ["No weights are published, so nothing is measured.", *_limits(config, recipe, None)],
        **{section: {} for section in PLOTS},
    }
    return _render(metadata, (), context)


def save_card(folder: str | Path, repo_id: str | None = None, license: str | None = None, **kwargs) -> ModelCard:
    """Writes the card of `make_card` to `README.md` in the folder, and the picture of the heads beside it."""
    card = make_card(folder, repo_id, license, **kwargs)
    draw_heads(load_config(folder), Path(folder) / HEADS_PICTURE)
    card.save(Path(folder) / "README.md")
    return card


def draw_heads(config: LSGPTConfig, file: str | Path | BinaryIO):
    """
    Draws, as a PNG, which heads of each layer are global and, to scale, which keys a query of each kind sees.

    Args:
        config: The model's configuration.
        file: Where to write, a path or an open binary file.
    """
    colors = {"global": GLOBAL, "local": LOCAL}
    layers, heads, length = config.num_hidden_layers, config.num_attention_heads, config.max_position_embeddings
    window = min(config.sliding_window, length)
    regions = {"global": [(0, 0), (length, length), (0, length)]}
    regions["local"] = [(0, 0), (length, length), (length - window, length), (0, window)]
    num_global = sum(config.num_global_heads_per_layer)
    shown = {"global": num_global > 0, "local": num_global < layers * heads}
    kinds = [kind for kind in shown if shown[kind]]
    titles = {"global": "a global head: the whole past", "local": f"a local head: the last {window:,} tokens"}

    figure = Figure(figsize=(3.4 * (1 + len(kinds)), 3.6), layout="constrained")
    axes = figure.subplots(1, 1 + len(kinds))
    is_local = [[head >= count for head in range(heads)] for count in config.num_global_heads_per_layer]
    axes[0].imshow(is_local, cmap=ListedColormap(list(colors.values())), vmin=0, vmax=1, aspect="auto")
    axes[0].xaxis.set_major_locator(MaxNLocator(integer=True))
    axes[0].yaxis.set_major_locator(MaxNLocator(integer=True))
    axes[0].set_xticks([head - 0.5 for head in range(heads + 1)], minor=True)
    axes[0].set_yticks([layer - 0.5 for layer in range(layers + 1)], minor=True)
    axes[0].grid(which="minor", color="white", linewidth=1)
    axes[0].tick_params(which="both", length=0)
    title = "heads: " + ", ".join(f"{kind} ({'blue' if kind == 'global' else 'orange'})" for kind in kinds)
    axes[0].set(title=title, xlabel="head", ylabel="layer")
    for axis, kind in zip(axes[1:], kinds):
        axis.fill(*zip(*regions[kind]), color=colors[kind], linewidth=0.5)
        axis.set(title=titles[kind], xlabel="key position", ylabel="query position")
        axis.set(xlim=(0, length), ylim=(length, 0), xticks=[0, length], yticks=[0, length])
    for axis in axes:
        axis.title.set_fontsize(10)
    figure.savefig(file, format="png", dpi=110, metadata={"Software": None})


def find_license(folder: Path, known: dict, license: str | None) -> dict[str, str]:
    """
    The metadata about the license of the weights in `folder`, out of all that is `known` (see `_find_metadata`) unless
    it is given: `license`, and for `other` its name and link.

    Raises:
        ValueError: If there is no license, or it is `other` and has no name. Only the Hub knows its identifiers; an
            upload fails with an unknown one before anything is published.
    """
    license = license or known.get("license")
    if not license:
        raise ValueError(
            "`license` must be given, the license of the weights as the Hub names it, such as apache-2.0; "
            f"{str(folder)!r} has none in a recipe.yaml or in the metadata of a README.md"
        )
    if license != "other":
        return {"license": license}
    named = {field: known.get(field) for field in ("license_name", "license_link")}
    if not all(named.values()):
        raise ValueError(
            "`license` must be one that the Hub knows, or be named: `other` needs `license_name` and `license_link` "
            f"in the metadata of {folder / 'README.md'}"
        )
    return {"license": license, **named}


def _find_metadata(folder: str | Path) -> dict:
    """
    Reads the metadata of a README.md in the folder. Missing fields are taken from the checkpoint that the run started
    from, and in turn from that before it; for the license, the run's recipe comes first.
    """
    known = {}
    for place in reversed(lineage(folder)):
        recipe = _read_recipe(place)
        start = recipe.get("model_name_or_path") or ""
        if looks_like_a_path(start) and not Path(start).exists():
            logger.warning(f"{start!r}, which the training started from, is not here: the card may lack its origin")
        if license := recipe.get("license"):
            known["license"] = license
        known |= _read_metadata(place)
    return known


def lineage(folder: str | Path) -> list[Path]:
    """Returns the folder of a checkpoint, of that which its run started from, and so on; each of them once."""
    folders, place = {}, Path(folder)
    while place.resolve() not in folders:
        folders[place.resolve()] = place
        if start := _read_recipe(place).get("model_name_or_path"):
            place = Path(start)
    return list(folders.values())


def _read_recipe(folder: Path) -> dict:
    file = folder / "recipe.yaml"
    return load_recipe(file) if file.is_file() else {}


def _read_metadata(folder: str | Path) -> dict:
    readme = Path(folder) / "README.md"
    if not readme.is_file():
        return {}
    try:
        return ModelCard.load(readme, ignore_metadata_errors=True).data.to_dict()
    except (ValueError, yaml.YAMLError) as error:
        raise ValueError(f"the metadata of {readme} cannot be read: {error}") from error


def _render(metadata: dict, tags: Sequence[str], context: dict) -> ModelCard:
    data = ModelCardData(
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["lsgpt", "long-short-attention", *tags],
        **metadata,
    )
    return ModelCard.from_template(data, str(Path(__file__).parent / "template.md"), table=table, **context)


def _describe_model(config: LSGPTConfig) -> dict:
    positions = config.max_position_embeddings
    return {
        "shape": describe(config),
        "global_heads": sum(config.num_global_heads_per_layer),
        "local_heads": sum(config.num_attention_heads - count for count in config.num_global_heads_per_layer),
        "window": f"{config.sliding_window:,}",
        "has_sinks": has_sinks(config),
        "runs_on_vllm": runs_on_vllm(config),
        "positions": f"{positions:,}",
        "costs": [(name, *figures) for name, figures in compare_costs(config, positions).items()],
    }


def _describe_snippets(
    config: LSGPTConfig,
    model_id: str,
    recipe: dict | None,
    prompt: str = "The",
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> dict:
    positions = config.max_position_embeddings
    prompt_length = len(tokenizer(prompt)["input_ids"]) if tokenizer else 0
    return {
        "model_literal": json.dumps(model_id, ensure_ascii=False),
        "model_argument": shlex.quote(model_id),
        "prompt_literal": json.dumps(prompt, ensure_ascii=False),
        "max_new_tokens": max(1, min(50, positions - prompt_length)),
        "max_length": min(_with_defaults(recipe or {})["block_size"], positions),
    }


def _describe_recipe(recipe: dict, config: LSGPTConfig) -> dict:
    recipe = _with_defaults(recipe)
    blocks = recipe["max_eval_blocks"]
    base_model = recipe["model_name_or_path"]
    if base_model:
        tokenizer = "that of the model that it started from"
        base_model = _hub_link(base_model)
    elif recipe["tokenizer"] in ALGORITHMS:
        tokenizer = f"{recipe['tokenizer']}, {config.vocab_size:,} tokens, trained on the same data"
    else:
        tokenizer = _hub_link(recipe["tokenizer"])
    return {
        "data": f"{_name_data(recipe)}, in blocks of {recipe['block_size']:,} tokens",
        "tokenizer": tokenizer,
        "base_model": base_model,
        "evaluation_text": "from the same source and was held out from the training"
        + (f"; the first {blocks:,} blocks of it were used" if blocks else ""),
    }


def _name_data(recipe: dict) -> str:
    name = recipe["dataset_name"]
    if name == STDLIB:
        return "the source code of Python's standard library"
    config_name = recipe["dataset_config_name"]
    configuration = f", configuration {config_name}" if config_name else ""
    return _hub_link(name, "datasets/") + configuration


def _hub_link(name: str, kind: str = "") -> str:
    """
    A link to a name on the Hub; of a local path, only the last part, because the rest says nothing to others. A single
    word may be either, such as `gpt2`.
    """
    if _is_on_hub(name):
        return f"[{name}](https://huggingface.co/{kind}{name})"
    is_word = re.fullmatch(r"[\w-]+", name) is not None and not Path(name).exists()
    return f"`{name}`" if is_word else f"`{Path(name).name}` (local)"


def _is_on_hub(name: str) -> bool:
    """Whether a name refers to the Hub and not to a path, decided as in `load_dataset` and `from_pretrained`."""
    return re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", name) is not None and not Path(name).exists()


def _recipe_metadata(recipe: dict) -> dict:
    recipe = _with_defaults(recipe)
    metadata = {}
    if _is_on_hub(recipe["dataset_name"]):
        metadata["datasets"] = [recipe["dataset_name"]]
    if recipe["model_name_or_path"] and _is_on_hub(recipe["model_name_or_path"]):
        metadata["base_model"] = recipe["model_name_or_path"]
    return metadata


def _eval_results(results: RunResult, recipe: dict) -> list[EvalResult] | None:
    """Evaluation results for the Hub. NaN and infinity are left out, because YAML would store them as text."""
    recipe = _with_defaults(recipe)
    names = {
        "perplexity": ("eval_perplexity", "perplexity per token"),
        "loss": ("eval_loss", "cross-entropy (nats per token)"),
        "bits_per_byte": ("eval_bits_per_byte", "bits per byte"),
    }
    is_on_hub = _is_on_hub(recipe["dataset_name"])
    dataset_name = recipe["dataset_name"] if is_on_hub else Path(recipe["dataset_name"]).name
    return [
        EvalResult(
            task_type="text-generation",
            task_name="Language modelling",
            dataset_type=dataset_name,
            dataset_name=dataset_name + " (held-out text)",
            dataset_config=recipe["dataset_config_name"],
            dataset_split="validation",
            metric_type=metric_type,
            metric_name=name,
            metric_value=round(getattr(results, key), 4),
        )
        for metric_type, (key, name) in names.items()
        if math.isfinite(getattr(results, key))
    ] or None


def _describe_logits(metrics: list[dict]) -> dict:
    kinds = {"global": "max_logit_global", "local": "max_logit_local"}
    rows = []
    for kind, key in kinds.items():
        if points := points_of(metrics, key):
            largest = max(points, key=lambda point: math.inf if math.isnan(point[1]) else point[1])
            ends = (points[0], largest, points[-1])
            rows.append([kind, *(f"{value:.3g} ({step:,})" for step, value in ends)])
    points = points_of(metrics, "max_logit")
    over = [step for step, value in points if not value <= THRESHOLD]
    return {
        "max_logits": rows,
        "measured_steps": f"{len(points):,}",
        "explosions": f"{len(over):,} of them had one over {THRESHOLD:g}" if over else f"none was over {THRESHOLD:g}",
    }


def _limits(config: LSGPTConfig, recipe: dict | None, results: RunResult | None) -> list[str]:
    limits = ["It continues text, and nothing prevents it from writing false or harmful text."]
    from_scratch = recipe is not None and not _with_defaults(recipe)["model_name_or_path"]
    if from_scratch:
        limits.append("It was not tuned to follow instructions.")
    positions = config.max_position_embeddings
    if config.position_embedding_type == "learned":
        limits.append(f"Its {positions:,} learned positions are a hard limit for prompt and continuation together.")
    if recipe is not None:
        block_size = _with_defaults(recipe)["block_size"]
        limits.append(
            f"It is trained on blocks of {block_size:,} tokens; how well it does on longer text is not measured."
        )
    if results is None:
        return limits
    if results.outcome != "finished":
        limits.append(f"{results.sentence}; these are the last good weights.")
    ratio = results.tokens / results.parameters
    if from_scratch and ratio < 20:
        limits.append(
            f"It is undertrained: {ratio:.2g} tokens per parameter, where about 20 make the best use of a compute "
            "budget ([Hoffmann et al. 2022](https://arxiv.org/abs/2203.15556))."
        )
    limits.append("It was evaluated in one run, on text from the same source; downstream tasks are not measured.")
    return limits


def _license_text(metadata: dict) -> str:
    if metadata["license"] == "other":
        return f"[{metadata['license_name']}]({metadata['license_link']})"
    return metadata["license"]


def _with_defaults(recipe: dict) -> dict:
    """Adds the defaults of the fields that a recipe leaves out."""
    return {name: value for kind in OURS for name, value in asdict(kind()).items()} | recipe
