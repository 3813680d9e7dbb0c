"""Is it better to split the heads of every layer, or the layers?"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .study import EXCHANGED, Claim, Finding, Runs, Scale, TrainingStudy, format_values, results_table, verdict_below


SIZES = {"micro": (4, 6), "paper": (6, 6)}
"""Number of layers, and of heads in each of them, at each scale."""

IN_LAYERS = {
    "one": ("one-first-layer", "one-middle-layer", "one-last-layer"),
    "half": ("half-odd-layers", "half-even-layers"),
}
"""For each number of global heads, the arms in which whole layers are global."""


class HeadsOrLayers(TrainingStudy):
    """The same number of global heads, spread over all layers or gathered in whole layers."""

    name = "heads-or-layers"
    title = "Split heads or split layers"
    question = """\
Gemma 2 and 3, gpt-oss and other models have a window in some layers and none in the others. LS-attention has both
kinds of heads in every layer. With equally many global heads, and so with a KV cache of the same size, which design
learns better?"""
    protocol = """\
All models have rotary positions, like models with windowed layers. In `one-...`, as many heads are global as one layer
has: spread over the layers as evenly as possible (`one-spread`), or all heads of the first, the middle or the last
layer. In `half-...`, half of the heads are global: half of those of each layer (`half-spread`), or all heads of the
first, the third and so on (`half-odd-layers`) or of the others (`half-even-layers`). `ls` has one global head in each
layer, and `mhsa` has global heads only. Claims compare `...-spread` with the arrangement in layers that has the lowest
mean loss; that this is the best of several favours the layers a little."""
    claims = {
        "loss": Claim(
            "global heads do better spread over all layers than gathered in whole layers",
            "ours: every layer then sees both what is near and what is far",
            "with both numbers of global heads, the mean loss of `...-spread` is below that of the best arrangement "
            "in layers by more than two standard errors",
            EXCHANGED,
        ),
        "logits": Claim(
            "their logits are then smaller, too",
            "follows from the paper's explanation: in a global layer, global heads must take care of what is near",
            "with both numbers of global heads, the mean of the largest logits of `...-spread` is below that of the "
            "best arrangement in layers by more than two standard errors",
            EXCHANGED,
        ),
    }
    scales = {
        "micro": Scale("micro", {"max_steps": 600}, 3, 0.4),
        "paper": Scale("paper-v1", {}, 3, 2300.0),
    }

    def arms(self, scale: str) -> Mapping[str, Any]:
        """The number of global heads in each layer."""
        num_layers, num_heads = SIZES[scale]
        layers = range(num_layers)
        heads: dict[str, Any] = {"mhsa": "all", "ls": 1}
        heads["one-spread"] = [(i + 1) * num_heads // num_layers - i * num_heads // num_layers for i in layers]
        for arm, layer in zip(IN_LAYERS["one"], (0, num_layers // 2, num_layers - 1)):
            heads[arm] = [num_heads if i == layer else 0 for i in layers]
        heads["half-spread"] = num_heads // 2
        for arm, remainder in zip(IN_LAYERS["half"], (0, 1)):
            heads[arm] = [num_heads if i % 2 == remainder else 0 for i in layers]
        positions = {"position_embedding_type": "rope"}
        return {arm: {"config_overrides": {**positions, "num_global_heads": count}} for arm, count in heads.items()}

    def judge(self, runs: Runs) -> dict[str, Finding]:
        """Judges each of `claims`."""
        losses = {arm: runs.column(arm, "eval_loss") for arm in self.arms(runs.scale)}
        pairs = {  # infinite losses are those of runs that diverged
            f"{number}-spread": min(arms, key=lambda arm: sum(losses[arm])) for number, arms in IN_LAYERS.items()
        }
        return {
            "loss": self._judge(runs, pairs, "eval_loss", "loss", 3),
            "logits": self._judge(runs, pairs, "max_logit", "largest logit", 1),
        }

    def _judge(self, runs: Runs, pairs: Mapping[str, str], key: str, what: str, digits: int) -> Finding:
        verdicts, figures = set(), []
        for arms in pairs.items():
            values = [runs.column(arm, key) for arm in arms]
            verdicts.add(verdict_below(*values))
            figures.append(", ".join(f"{format_values(x, digits)} for `{arm}`" for x, arm in zip(values, arms)))
        verdict = verdicts.pop() if len(verdicts) == 1 else "not seen"
        return Finding(f"{what} {'; '.join(figures)}", verdict)

    def report(self, runs: Runs, folder: Path) -> str:
        """A table of the final figures."""
        return results_table(runs)


STUDY = HeadsOrLayers()
