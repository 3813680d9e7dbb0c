"""The command `lsgpt inspect`: a report, plots and a web page that show where the heads of a model look."""

import json
import math
import shlex
from pathlib import Path

import torch
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from lsgpt.training.data import load_documents
from lsgpt.utilities import check_writable, table
from lsgpt.utilities.plots import heat_map
from lsgpt.utilities.strict_json import finite

from .statistics import FIGURES, SHARES, AttentionStatistics, LayerAttention, attention_statistics, visit_layers


FILES = ("report.md", "heads.png", "statistics.json", "attention.html")
"""The files that `inspect_heads` writes."""

LENGTH = 512
"""Default for the maximum number of tokens in a block."""

CHARACTERS = 64
"""Maximum number of characters read for each token that is needed; texts have far fewer in each token."""

PAGE_TOKENS = 128
"""Maximum number of tokens in the passage on the page."""

PAGE_WEIGHTS = 2_000_000
"""Maximum number of attention weights on the page, which is then about 5 MB in size."""

PAGE_SCALE = 10_000
"""Weights on the page are integers, in units of one ten-thousandth."""


def inspect_heads(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    folder: str | Path,
    name: str,
    length: int | None = None,
    num_blocks: int = 8,
    far: int | None = None,
) -> AttentionStatistics:
    """
    Measures where the heads of a model look in a text, and writes `report.md`, `heads.png`, `statistics.json` and
    `attention.html` to a folder.

    Args:
        model: See `attention_statistics`.
        tokenizer: The model's tokenizer.
        text: See `read_blocks`.
        folder: A new or empty folder, or that of an earlier inspection, whose files are replaced.
        name: The displayed name of the model.
        length: See `check_length`.
        num_blocks: See `read_blocks`.
        far: See `attention_statistics`.

    Returns:
        The statistics that the files show.

    Raises:
        ValueError: The folder has other files, or `check_length`, `read_blocks` or `attention_statistics` raises it.
    """
    folder = Path(folder)
    if folder.exists() and not (folder.is_dir() and {file.name for file in folder.iterdir()} <= set(FILES)):
        raise ValueError(
            f"the folder for the results must be new, empty, or that of an earlier inspection; got {folder}"
        )
    blocks = read_blocks(text, tokenizer, check_length(length, model.config), num_blocks)
    check_writable(folder)
    statistics = attention_statistics(model, blocks, far)
    num_blocks, length = blocks.shape
    source = f"{num_blocks:,} {'block' if num_blocks == 1 else 'blocks'} of {length:,} tokens of {text}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.md").write_text(format_report(statistics, name, source), encoding="utf-8")
    plot_heads(folder / "heads.png", statistics)
    _write_json(folder / "statistics.json", statistics, name, text, blocks)
    write_page(folder / "attention.html", model, tokenizer, blocks[0], statistics, name, text, source)
    return statistics


def check_length(length: int | None, config: PreTrainedConfig) -> int:
    """
    The number of tokens in a block: `length`, by default 512 or the model's number of positions if that is smaller.

    Raises:
        ValueError: `length` is below 2, or larger than the model's number of positions.
    """
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    if length is not None and length < 2:
        raise ValueError(f"`length` must be at least 2, so that a token has another one to look at; got {length}")
    if positions and length and length > positions:
        raise ValueError(f"`length` must be at most {positions}, the number of positions of the model; got {length}")
    return length or min(LENGTH, positions or LENGTH)


def read_blocks(text: str, tokenizer: PreTrainedTokenizerBase, length: int, num_blocks: int) -> torch.Tensor:
    """
    Reads the first blocks of a text. Each begins with the beginning-of-text token, if the tokenizer adds one to texts.

    Args:
        text: A `.txt` file, which is read from its beginning; or a dataset as for `load_documents`, whose split
            `validation` is read.
        tokenizer: The model's tokenizer.
        length: Number of tokens in a block. A shorter text makes one block.
        num_blocks: Maximum number of blocks.

    Returns:
        Token ids `(blocks, tokens)`.

    Raises:
        ValueError: The text does not exist, is not in UTF-8, or has fewer than two tokens.
    """
    if Path(text).is_file() and Path(text).suffix == ".txt":
        try:
            documents = [Path(text).read_text(encoding="utf-8")]
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{text!r} must be encoded in UTF-8: {error}. To convert it: iconv -f latin1 -t utf-8 "
                f"{shlex.quote(text)} > NEW.txt, with its encoding instead of latin1"
            ) from error
    else:
        documents = load_documents(text)["validation"]["text"]
    prefix = [token for token in tokenizer("").input_ids if token == tokenizer.bos_token_id][:1]
    ids: list[int] = []
    room = max(length - len(prefix), 1)
    for number, document in enumerate(documents):
        if number and tokenizer.eos_token_id is not None:
            ids.append(tokenizer.eos_token_id)
        beginning = document[: CHARACTERS * room * num_blocks]
        ids += tokenizer(beginning, add_special_tokens=False, verbose=False).input_ids
        if len(ids) >= room * num_blocks:
            break
    room = min(room, len(ids))
    if len(prefix) + room < 2:
        raise ValueError(f"the text must have two tokens or more; {text!r} has {len(ids)}")
    blocks = torch.tensor(ids[: len(ids) // room * room]).view(-1, room)[:num_blocks]
    return torch.cat([torch.tensor(prefix, dtype=torch.long).expand(len(blocks), -1), blocks], dim=1)


def kinds_of_heads(statistics: AttentionStatistics) -> dict[str, torch.Tensor]:
    """The heads of each kind, bool `(L, H)`: `global` and `local`, or `all` if there are no local heads."""
    exists, is_local = ~statistics.distance.isnan(), statistics.is_local
    return {"global": exists & ~is_local, "local": is_local} if is_local.any() else {"all": exists}


def format_report(statistics: AttentionStatistics, name: str, source: str) -> str:
    """The report in Markdown. `name` is the model's name, `source` says which text was measured."""
    figures, kinds = statistics.figures(), kinds_of_heads(statistics)
    labels = [FIGURES[figure][0] for figure in figures]
    layers = [
        [str(number), kind, *_format_heads(statistics, is_kind & (torch.arange(len(is_kind)) == row)[:, None])]
        for row, number in enumerate(statistics.layers)
        for kind, is_kind in kinds.items()
        if is_kind[row].any()
    ]
    definitions = "\n".join(f"- **{FIGURES[figure][0]}**: {FIGURES[figure][1]}." for figure in figures)
    return f"""# {name}: where heads look

Measured on {source}. *Far* keys are {statistics.far:,} tokens away or more: those that a window of {statistics.far:,}
tokens does not hold. [The page of all heads](attention.html) shows their attention on a passage; open it in a browser.

## Kinds of heads

Means over heads, with the smallest and the largest in brackets.

{format_kinds(statistics)}

## Layers

Means over the heads of a layer and kind.

{table(layers, ["layer", "kind", "heads", *labels, "sink heads"])}

## Heads

![Every figure, layers by heads](heads.png)

The figures of each head are in `statistics.json`.

## Metrics

Weights are those of `eager`. Each metric is averaged over blocks and over the queries for
which it is defined: entropies need at least two keys, and figures of far keys need queries that have such keys.

{definitions}
"""


def format_kinds(statistics: AttentionStatistics) -> str:
    """Formats the figures of each kind of head as a Markdown table."""
    kinds = kinds_of_heads(statistics)
    rows = []
    for figure, values in statistics.figures().items():
        cells = []
        for is_kind in kinds.values():
            found = values[is_kind & ~values.isnan()]
            low, high = (_format(figure, x.item()) for x in found.aminmax()) if len(found) else ("", "")
            cells.append(f"{_format(figure, found.mean().item())} ({low} to {high})" if len(found) else "-")
        rows.append([FIGURES[figure][0], *cells])
    rows.append(["sink heads", *(str(int((statistics.is_sink & is_kind).sum())) for is_kind in kinds.values())])
    return table(rows, ["", *(f"{kind} ({int(is_kind.sum())} heads)" for kind, is_kind in kinds.items())])


def _format_heads(statistics: AttentionStatistics, chosen: torch.Tensor) -> list[str]:
    """Formats the number of the chosen heads, the means of their figures, and the number of sink heads."""
    means = [_format(figure, values[chosen].nanmean().item()) for figure, values in statistics.figures().items()]
    return [str(int(chosen.sum())), *means, str(int((statistics.is_sink & chosen).sum()))]


def _format(figure: str, value: float) -> str:
    if math.isnan(value):
        return "-"
    if figure in SHARES:
        return f"{value:.1%}"
    return f"{value:.2f}" if figure.endswith("entropy") else f"{value:,.1f}"


def _write_json(path: Path, statistics: AttentionStatistics, name: str, text: str, blocks: torch.Tensor):
    values = {figure: finite(x.tolist()) for figure, x in statistics.figures().items()}
    kinds = [["local" if x else "global" for x in row] for row in statistics.is_local.tolist()]
    for row, column in statistics.distance.isnan().nonzero().tolist():
        kinds[row][column] = None  # this layer has fewer heads
    content = {
        "model": name,
        "text": text,
        "blocks": len(blocks),
        "length": blocks.shape[1],
        "far": statistics.far,
        "layers": statistics.layers,
        "kinds": kinds,
        "figures": values,
    }
    path.write_text(json.dumps(content, indent=1, allow_nan=False), encoding="utf-8")


def plot_heads(path: str | Path, statistics: AttentionStatistics):
    """
    Draws every figure as a heat map, layers by heads. Heads for which a figure is not defined are grey.

    Args:
        path: The PNG file to write.
        statistics: What `attention_statistics` returns.
    """
    figures = statistics.figures()
    num_layers, num_heads = statistics.distance.shape
    columns, rows = 4, math.ceil(len(figures) / 4)
    # In inches. Sizes are fixed because computing a layout takes seconds.
    panel = min(max(1.6, 0.25 * num_heads), 5), min(max(1.2, 0.25 * num_layers), 5)
    cell = panel[0] + 1.3, panel[1] + 0.6
    size = columns * cell[0], rows * cell[1] + 0.5
    canvas = Figure(figsize=size)
    kinds = kinds_of_heads(statistics)
    num_global = (kinds["global"].sum(1) * kinds["local"].any(1)).tolist() if "local" in kinds else []
    for number, (figure, values) in enumerate(figures.items()):
        row, column = divmod(number, columns)
        left, bottom = (column * cell[0] + 0.5) / size[0], ((rows - 1 - row) * cell[1] + 0.5) / size[1]
        axes = canvas.add_axes((left, bottom, panel[0] / size[0], panel[1] / size[1]))
        bar = canvas.add_axes((left + (panel[0] + 0.08) / size[0], bottom, 0.1 / size[0], panel[1] / size[1]))
        image = heat_map(axes, values.numpy(), num_global, vmin=0)
        if figure in SHARES or figure.endswith("entropy"):
            image.set_clim(0, 1)
        canvas.colorbar(image, cax=bar, format="{x:.0%}" if figure in SHARES else "{x:g}")
        axes.set_title(FIGURES[figure][0], fontsize=10)
        axes.set_xlabel("head" if row == rows - 1 else "")
        axes.set_ylabel("layer" if column == 0 else "")
        axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
        axes.yaxis.set_major_locator(MaxNLocator(8, integer=True))
        axes.yaxis.set_major_formatter(lambda row, _: str(dict(enumerate(statistics.layers)).get(int(row), "")))
    if any(0 < count < num_heads for count in num_global):
        canvas.suptitle(
            "left of the red line: global heads; right of it: local heads", fontsize=10, y=1 - 0.1 / size[1]
        )
    canvas.savefig(path, dpi=110)


def write_page(
    path: str | Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    input_ids: torch.Tensor,
    statistics: AttentionStatistics,
    name: str,
    text: str,
    source: str,
):
    """
    Writes a web page that shows where each token of a passage looks. It is one file, which loads no others.

    The page holds the weights of `eager`, rounded to ten-thousandths, for the first 128 tokens of
    the text; for fewer tokens if the model has so many heads that the file would become larger than about 5 MB.

    Args:
        path: The HTML file to write.
        model: See `attention_statistics`.
        tokenizer: The model's tokenizer.
        input_ids (`(T,)`): The text.
        statistics: Figures of the heads, which may come from a longer text.
        name: The displayed name of the model.
        text: The displayed name of the text.
        source: A description of what `statistics` were measured on.
    """
    figures, layers = statistics.figures(), []
    has_local = bool(statistics.is_local.any())
    num_heads = int((~statistics.distance.isnan()).sum())
    ids = input_ids[: min(PAGE_TOKENS, math.isqrt(2 * PAGE_WEIGHTS // num_heads))]
    rows, columns = torch.tril_indices(len(ids), len(ids))

    def add(layer: LayerAttention):
        weights = _to_page(layer.weights[:, rows, columns])
        sinks = _to_page(1 - layer.weights.double().sum(-1))
        reach = layer.visible[:, -1].sum(-1).expand(len(weights)).tolist()
        row = len(layers)
        heads = [
            {
                "kind": ("local" if is_local else "global") if has_local else "",
                "reach": reach[head],
                "figures": [_format(figure, values[row, head].item()) for figure, values in figures.items()],
                "weights": weights[head],
                **({"sinks": sinks[head]} if layer.has_sink[head] else {}),
            }
            for head, is_local in enumerate(statistics.is_local[row, : len(weights)].tolist())
        ]
        layers.append({"number": layer.number, "heads": heads})

    visit_layers(model, ids, add)
    content = {
        "model": name,
        "text": text,
        "source": source,
        "tokens": [tokenizer.decode([token]) for token in ids.tolist()],
        "scale": PAGE_SCALE,
        "figures": [{"label": FIGURES[figure][0], "meaning": FIGURES[figure][1]} for figure in figures],
        "layers": layers,
    }
    data = json.dumps(content, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    template = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    # Without this, a `</script>` in the text would end the data.
    Path(path).write_text(template.replace("__DATA__", data.replace("<", "\\u003c")), encoding="utf-8")


def _to_page(shares: torch.Tensor) -> list:
    return (shares.double() * PAGE_SCALE).round().int().tolist()
