"""Where the heads of a decoder look: statistics of attention, and the report of `lsgpt inspect`."""

from .statistics import FIGURES, AttentionStatistics, attention_statistics, head_figures


__all__ = ["FIGURES", "AttentionStatistics", "attention_statistics", "head_figures"]
