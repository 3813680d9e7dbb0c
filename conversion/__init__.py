"""Checkpoints of other code as LSGPT checkpoints: pretrained models with calibrated heads, nanoGPT's, the paper's."""

from .calibration import Calibration, calibrate, perplexity, plot_locality, read_blocks
from .convert import convert
from .heads import choose_global_heads, measure_locality, with_global_heads
from .nanogpt import convert_nanogpt, load_nanogpt
from .pretrained import convert_pretrained, load_pretrained


__all__ = [
    "Calibration",
    "calibrate",
    "choose_global_heads",
    "convert",
    "convert_nanogpt",
    "convert_pretrained",
    "load_nanogpt",
    "load_pretrained",
    "measure_locality",
    "perplexity",
    "plot_locality",
    "read_blocks",
    "with_global_heads",
]
