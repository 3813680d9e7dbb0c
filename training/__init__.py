"""Training with the stock `Trainer`: recipes, data, callbacks and reports, each of use alone in other scripts."""

from .arguments import DataArguments, ModelArguments, make_parser, parse_arguments
from .callbacks import MetricsFileCallback, StopOnBadLossCallback
from .data import load_documents, pack, tokenize, train_tokenizer
from .report import write_report
from .telemetry import LogitTelemetryCallback, qk_clip
from .train import build_trainer, run


__all__ = [
    "DataArguments",
    "LogitTelemetryCallback",
    "MetricsFileCallback",
    "ModelArguments",
    "StopOnBadLossCallback",
    "build_trainer",
    "load_documents",
    "make_parser",
    "pack",
    "parse_arguments",
    "qk_clip",
    "run",
    "tokenize",
    "train_tokenizer",
    "write_report",
]
