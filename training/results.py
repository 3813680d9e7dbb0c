"""The outcome of a run: one typed result, made at its end, which reports, comparisons and model cards read."""

import math
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

from lsgpt.utilities.strict_json import from_json, to_json


@dataclass
class RunResult:
    """
    The result of a run that ended. A run that SIGTERM interrupted has none until it is resumed and ends.

    Losses are in nats per token, and all evaluation figures are means over tokens. Figures may be NaN or infinite, in
    `results.json`, too. A figure is `None` if it was not measured.
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
    """The largest attention logit of all logged steps: with `on_explosion: clip`, not of every step."""
    parameters: int = 0
    peak_memory_bytes: int = 0
    train_seconds: float = math.nan
    """Wall time of the training since its last start."""
    loss_by_position: list[float] = field(default_factory=list)
    prompt: str = "The"
    """The first words of the evaluation text, which the model continues in the report."""
    environment: dict[str, str] = field(default_factory=dict)
    """The hardware, versions and commit with which the training began or resumed, see `describe_environment`."""

    @property
    def status(self) -> str:
        """The outcome in words."""
        by = f" by {self.stopped_by}" if self.stopped_by else ""
        return self.outcome if self.outcome == "finished" else f"{self.outcome} at step {self.step}{by}"

    @property
    def sentence(self) -> str:
        """The outcome as a sentence, without its full stop."""
        return f"The run {'was ' if self.stopped_by else ''}{self.status}"

    def write(self, folder: str | Path):
        """Writes `results.json`, see `to_json`."""
        values = {"status": self.status, **asdict(self)}
        (Path(folder) / "results.json").write_text(to_json(values, indent=2) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, folder: str | Path) -> "RunResult":
        """Reads the `results.json` of a run."""
        values = from_json((Path(folder) / "results.json").read_text(encoding="utf-8"))
        return cls(**{f.name: values[f.name] for f in fields(cls) if f.name in values})
