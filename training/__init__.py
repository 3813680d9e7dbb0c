"""Training with the stock `Trainer`: recipes, data, callbacks, metrics and reports. Each also works on its own."""

from typing import TYPE_CHECKING

from lsgpt.utilities.plots import plot_max_logits

from .arguments import Arguments, DataArguments, ModelArguments, RunArguments, make_parser, parse_arguments
from .averaging import AVERAGES, AveragedWeightsCallback
from .callbacks import MetricsFileCallback, SaveOnSignalCallback, StepTimerCallback, StopOnBadLossCallback
from .context_parallel import ContextParallelismConfig
from .data import collate_blocks, load_documents, load_tokenizer, pack, tokenize, train_tokenizer
from .losses import exponentiated_loss, generalized_cross_entropy, symmetric_cross_entropy
from .metrics import LanguageModelingMetrics, count_bytes, token_losses
from .report import write_report
from .results import RunResult
from .soft_thinking import find_end_of_thinking, generate_soft_thinking
from .stabilizers import adagc_optimizer, attend_in_float32
from .telemetry import LogitTelemetryCallback, qk_clip
from .train import build_trainer, run
from .trainer import LSGPTTrainer


if TYPE_CHECKING:
    from .token_metrics import TokenMetrics


def __getattr__(name: str):
    # Only when it is asked for: importing `evaluate` would be a sixth of the time that training takes to start.
    if name == "TokenMetrics":
        from .token_metrics import TokenMetrics  # noqa: PLC0415

        return TokenMetrics
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "AVERAGES",
    "Arguments",
    "AveragedWeightsCallback",
    "ContextParallelismConfig",
    "DataArguments",
    "LSGPTTrainer",
    "LanguageModelingMetrics",
    "LogitTelemetryCallback",
    "MetricsFileCallback",
    "ModelArguments",
    "RunArguments",
    "RunResult",
    "SaveOnSignalCallback",
    "StepTimerCallback",
    "StopOnBadLossCallback",
    "TokenMetrics",
    "adagc_optimizer",
    "attend_in_float32",
    "build_trainer",
    "collate_blocks",
    "count_bytes",
    "exponentiated_loss",
    "find_end_of_thinking",
    "generalized_cross_entropy",
    "generate_soft_thinking",
    "load_documents",
    "load_tokenizer",
    "make_parser",
    "pack",
    "parse_arguments",
    "plot_max_logits",
    "qk_clip",
    "run",
    "symmetric_cross_entropy",
    "token_losses",
    "tokenize",
    "train_tokenizer",
    "write_report",
]
