"""Where do the heads of trained models look, and is the far past sparse?"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import lsgpt  # noqa: F401 (registers LSGPT with the Auto classes)
from lsgpt.configuration import load_arms
from lsgpt.modeling_lsgpt import Visibility
from lsgpt.training import parse_arguments
from lsgpt.training.data import pack, tokenize
from lsgpt.training.train import load_texts
from lsgpt.utilities import table

from .inspection import FIGURES, attention_statistics, head_figures
from .study import (
    Claim,
    Finding,
    Runs,
    Scale,
    TrainingStudy,
    below,
    format_values,
    mean,
    validation_blocks,
    verdict_below,
)


PRETRAINED = "smollm2-135m"
SOURCE = "HuggingFaceTB/SmolLM2-135M-Instruct"
SOURCE_FIELD = "--model_name_or_path"
NUM_BLOCKS = 8
LENGTH = 512
FAR = 128
"""The distance from which keys count as far in the pretrained model; in the trained ones it is the window of `ls`."""
WINDOW = 12
"""The window of `ls` at `micro`, in tokens."""


class WhereHeadsLook(TrainingStudy):
    """Attention statistics of trained models, the same as in `lsgpt inspect`."""

    name = "where-heads-look"
    title = "Where heads look"
    question = """\
LS-attention rests on two assumptions: near tokens need dense attention, whose matrices have a high rank, and far ones
need sparse attention only. Is that what trained models do?"""
    protocol = f"""\
`mhsa` and `ls` are trained on the same text; `{PRETRAINED}` is SmolLM2-135M-Instruct, or the checkpoint that
`{SOURCE_FIELD}` names, and its seeds are different blocks of text. In the runs at `micro`, its weights were read
from a 4-bit GGUF file. The figures are means over layers, heads and {NUM_BLOCKS} blocks of {LENGTH} tokens of
validation text, defined in docs/inspect.md. Far are keys that the window of `ls` does not reach ({WINDOW} tokens at
`micro`), and {FAR} tokens away or more for `{PRETRAINED}`. For comparison, the table also has the figures of heads
that attend equally to all keys that they may see. Effective ranks of heads with and without a window differ for that
reason alone, so the verdict about them says little about what heads learn."""
    claims = {
        "near": Claim(
            "most attention is on near tokens",
            "paper",
            "in `mhsa` and in SmolLM2, more than half of the attention is on near tokens and the first one, in all "
            "seeds",
            "in both, less than half, in all seeds",
        ),
        "sparse": Claim(
            "attention to the far past is sparse",
            "paper",
            "in `mhsa` and in SmolLM2, the normalized entropy of the attention to far tokens without the first is "
            "below 0.5 in all seeds",
            "in both, it is above 0.8 in all seeds, which is nearly uniform",
        ),
        "rank": Claim(
            "local heads have attention matrices of a higher rank than heads of multi-head attention",
            "paper",
            below("the mean effective rank over heads of `mhsa`, and over local heads of `ls`:", "mhsa", "ls"),
            "it is above by more than two standard errors",
        ),
    }
    scales = {
        "micro": Scale("micro", {"max_steps": 1000}, 3, 0.4),
        "paper": Scale("paper-v1", {}, 3, 500.0),
    }

    def arms(self, scale: str) -> Mapping[str, Any]:
        """Two models to train, and a pretrained one."""
        shipped = load_arms()
        return {name: shipped[name] for name in ("mhsa", "ls")} | {PRETRAINED: {}}

    def run(self, arm: str, seed: int, scale: str, folder: Path, fields: Sequence[str]) -> dict:
        """Trains and measures, or measures the pretrained model."""
        place, rest = split_source(fields)
        if arm != PRETRAINED:
            return super().run(arm, seed, scale, folder, rest)
        model, tokenizer = AutoModelForCausalLM.from_pretrained(place), AutoTokenizer.from_pretrained(place)
        data = parse_arguments(self.scales[scale].recipe, rest).data
        blocks = pack(tokenize(load_texts(data)["validation"], tokenizer), LENGTH)
        start = (seed - 42) * NUM_BLOCKS
        rows = [row["input_ids"] for i, row in zip(range(start + NUM_BLOCKS), blocks) if i >= start]
        return statistics_of(model, torch.stack([torch.as_tensor(row).long() for row in rows]), FAR)

    def prepare(self, scale: str, folder: Path, fields: Sequence[str]):
        """Trains the tokenizer, as for every training study."""
        super().prepare(scale, folder, split_source(fields)[1])

    def measure(self, folder: Path) -> dict:
        """The statistics of the trained model."""
        model = AutoModelForCausalLM.from_pretrained(folder)
        return statistics_of(model, validation_blocks(folder, NUM_BLOCKS, LENGTH), model.config.sliding_window)

    def judge(self, runs: Runs) -> dict[str, Finding]:
        """Judges each of `claims`."""
        figures = {
            name: {arm: [_mean_over_heads(run, name) for run in runs.of(arm)] for arm in ("mhsa", PRETRAINED)}
            for name in ("far_mass_without_first", "far_entropy")
        }
        far, entropy = figures["far_mass_without_first"], figures["far_entropy"]
        both = [value for values in far.values() for value in values]
        near = "seen" if max(both) < 0.5 else "opposite" if min(both) > 0.5 else "not seen"
        spread = [value for values in entropy.values() for value in values]
        sparse = "seen" if max(spread) < 0.5 else "opposite" if min(spread) > 0.8 else "not seen"
        ranks = {
            "mhsa": [_mean_over_heads(run, "effective_rank") for run in runs.of("mhsa")],
            "ls": [_mean_over_heads(run, "effective_rank", local=True) for run in runs.of("ls")],
        }
        return {
            "near": Finding("share of attention on far tokens, without the first: " + _list(far), near),
            "sparse": Finding("normalized entropy of far attention: " + _list(entropy), sparse),
            "rank": Finding("effective rank: " + _list(ranks, 1), verdict_below(ranks["mhsa"], ranks["ls"])),
        }

    def report(self, runs: Runs, folder: Path) -> str:
        """All figures, for each kind of head."""
        rows = []
        for arm, of_arm in runs.items():
            for kind, local in (("global", False), ("local", True)):
                if not any(is_local == local for row in of_arm[0]["is_local"] for is_local in row):
                    continue
                values = [[_mean_over_heads(run, name, local) for run in of_arm] for name in FIGURES]
                # Local heads have no far keys, and so no entropy over them.
                cells = [format_values(x for x in of_figure if not math.isnan(x)) for of_figure in values]
                rows.append([f"`{arm}`, {kind} heads", *cells])
        for what, window in (("every earlier key", LENGTH), (f"the last {WINDOW} keys", WINDOW)):
            cells = [format_values([x]) if math.isfinite(x) else "-" for x in uniform_figures(window).tolist()]
            rows.append([f"equal weights on {what}", *cells])
        words = "\n".join(f"- {title}: {text}" for title, text in FIGURES.values())
        return f"{table(rows, ['heads', *(title for title, _ in FIGURES.values())])}\n\n{words}"


STUDY = WhereHeadsLook()


def split_source(fields: Sequence[str]) -> tuple[str, list[str]]:
    """Splits fields into the name or folder of the pretrained model and the fields for training."""
    if SOURCE_FIELD not in fields:
        return SOURCE, list(fields)
    at = list(fields).index(SOURCE_FIELD)
    return fields[at + 1], [*fields[:at], *fields[at + 2 :]]


def statistics_of(model, ids: torch.Tensor, far: int) -> dict:
    """The figures of every layer and head, and which heads are local."""
    statistics = attention_statistics(model, ids, far)
    figures = {name: getattr(statistics, name) for name in FIGURES}
    rounded = {name: [[round(x, 4) for x in row] for row in values.tolist()] for name, values in figures.items()}
    return {"is_local": statistics.is_local.tolist(), **rounded}


def uniform_figures(window: int) -> torch.Tensor:
    """The figures of a head that attends equally to the last `window` keys, in blocks of `LENGTH` tokens."""
    visible = Visibility(LENGTH, LENGTH, window=window).dense()[0, 0]
    return head_figures(visible / visible.sum(-1, keepdim=True), visible, WINDOW)


def _mean_over_heads(run: dict, name: str, local: bool | None = None) -> float:
    pairs = [
        (value, is_local)
        for values, kinds in zip(run[name], run["is_local"])
        for value, is_local in zip(values, kinds)
        if value is not None
    ]
    return mean(value for value, is_local in pairs if local is None or is_local == local)


def _list(figures: Mapping[str, list[float]], digits: int = 3) -> str:
    return ", ".join(f"{format_values(values, digits)} of `{arm}`" for arm, values in figures.items())
