"""Converts other checkpoints to LSGPT: pretrained models (optionally with local heads), nanoGPT, the paper's code."""

from .calibration import Calibration, budget_heads, calibrate, perplexity, plot_scores, read_blocks, recall
from .convert import convert
from .heads import HeadChanges, Sinks, choose_global_heads, measure_changes, with_global_heads
from .nanogpt import convert_nanogpt, load_nanogpt
from .pretrained import convert_pretrained, load_pretrained
from .retrieval import Passage, Question, ask, cache_bytes, make_passages


__all__ = [
    "Calibration",
    "HeadChanges",
    "Passage",
    "Question",
    "Sinks",
    "ask",
    "budget_heads",
    "cache_bytes",
    "calibrate",
    "choose_global_heads",
    "convert",
    "convert_nanogpt",
    "convert_pretrained",
    "load_nanogpt",
    "load_pretrained",
    "make_passages",
    "measure_changes",
    "perplexity",
    "plot_scores",
    "read_blocks",
    "recall",
    "with_global_heads",
]
