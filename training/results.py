"""What a run came to: one typed result, made at its end, which reports, comparisons and model cards read."""

import json
import math
import re
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any


_OPTIONAL = ("eval_averaged_perplexity", "max_logit", "perplexity_before_training", "teacher_perplexity")


@dataclass
class RunResult:
    """
    The result of a run that ended. A run that SIGTERM interrupted has none until it is resumed and ends.

    Losses are in nats per token, and all evaluation figures are means over tokens. Figures may be NaN or infinite, and
    stay so in `results.json`; those that a run need not have are `None` without a measurement.
    """

    outcome: str = "finished"
    """`finished`, at the last step that the recipe asks for; `stopped` by a callback; or `diverged`."""
    stopped_by: str | None = None
    """What stopped the run: `on_explosion`, or `a callback` of the user."""
    step: int = 0
    """The last optimizer step, counted from 1; of a run that diverged, the one that was not taken."""
    max_steps: int = 0
    tokens: int = 0
    """Number of tokens that the run has trained on, on all processes and before interruptions as well."""
    tokens_per_second: float = math.nan
    """Median over the steps since the last start, without waiting for data."""
    eval_loss: float = math.nan
    eval_perplexity: float = math.nan
    eval_bits_per_byte: float = math.nan
    eval_averaged_perplexity: float | None = None
    perplexity_before_training: float | None = None
    teacher_perplexity: float | None = None
    max_logit: float | None = None
    """The largest attention logit of all measured steps."""
    parameters: int = 0
    peak_memory_bytes: int = 0
    train_seconds: float = math.nan
    """Wall time of the training since its last start."""
    loss_by_position: list[float] = field(default_factory=list)

    @property
    def status(self) -> str:
        """The outcome in words."""
        by = f" by {self.stopped_by}" if self.stopped_by else ""
        return self.outcome if self.outcome == "finished" else f"{self.outcome} at step {self.step}{by}"

    def write(self, folder: str | Path):
        """
        Writes `results.json`. JSON has no NaN and infinities: they are `null` in their places, and the field
        `not_finite` says what each is.
        """
        values = {"status": self.status, **{f.name: getattr(self, f.name) for f in fields(self)}}
        lost = {name: _names(value) for name, value in values.items()}
        values["not_finite"] = {name: found for name, found in lost.items() if found}
        text = json.dumps(finite(values), indent=2)
        (Path(folder) / "results.json").write_text(text + "\n", encoding="utf-8")

    @classmethod
    def read(cls, folder: str | Path) -> "RunResult":
        """Reads the `results.json` of a run. A `null` without an entry in `not_finite` is NaN, if it is a figure."""
        values = json.loads((Path(folder) / "results.json").read_text(encoding="utf-8"))
        status = re.match(r"(\w+)(?: at step (\d+))?(?: by (.*))?", values.get("status", "finished"))
        kept: dict[str, Any] = {"outcome": status[1], "stopped_by": status[3]}  # of runs before there was an outcome
        lost = values.get("not_finite", {})
        for name in (f.name for f in fields(cls) if f.name in values):
            value = values[name]
            if name in lost:
                value = _restore(value, lost[name])
            elif value is None and name not in (*_OPTIONAL, "stopped_by"):
                value = math.nan
            elif name == "loss_by_position":
                value = [math.nan if x is None else x for x in value]
            kept[name] = value
        return cls(**kept)


def _names(value: Any) -> Any:
    """`"NaN"`, `"Infinity"` or `"-Infinity"` for such a number; for a list, those in it, by index."""
    if isinstance(value, list):
        return {str(i): name for i, x in enumerate(value) if (name := _names(x))}
    if not isinstance(value, float) or math.isfinite(value):
        return None
    return "NaN" if math.isnan(value) else f"{'-' * (value < 0)}Infinity"


def _restore(value: Any, names: Any) -> Any:
    if isinstance(value, list):
        return [float(names.get(str(i), "nan")) if x is None else x for i, x in enumerate(value)]
    return float(names)


def finite(value: Any) -> Any:
    """Replaces numbers that JSON cannot represent (NaN and infinity) by `None`, also inside lists and dictionaries."""
    if isinstance(value, dict):
        return {name: finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
