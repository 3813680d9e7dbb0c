"""Checkpoints of other code as LSGPT checkpoints: nanoGPT's, the paper's, and GPT-2 with calibrated heads."""

from .calibration import Calibration, calibrate, perplexity, plot_locality, read_blocks
from .checkpoints import convert_gpt2, convert_nanogpt, load_gpt2, load_nanogpt
from .convert import convert
from .heads import choose_global_heads, measure_locality, with_global_heads


__all__ = [
    "Calibration",
    "calibrate",
    "choose_global_heads",
    "convert",
    "convert_gpt2",
    "convert_nanogpt",
    "load_gpt2",
    "load_nanogpt",
    "measure_locality",
    "perplexity",
    "plot_locality",
    "read_blocks",
    "with_global_heads",
]
