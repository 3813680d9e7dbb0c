"""Utilities shared by several packages: wording of messages and tables, and the summary of a model."""

from .model_summary import compare_costs, describe, has_sinks
from .wording import format_duration, suggest, table, with_unit


__all__ = ["compare_costs", "describe", "format_duration", "has_sinks", "suggest", "table", "with_unit"]
