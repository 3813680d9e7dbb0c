"""Utilities shared by several packages: wording of messages and tables, the summary of a model, and loading."""

from .loading import (
    check_gguf,
    check_writable,
    encode_prompt,
    fits_vocabulary,
    has_learned_positions,
    load_complete,
    load_tokenizer,
    looks_like_a_path,
    read_gguf,
    refuse_not_finite,
    refuse_tensors,
)
from .model_summary import (
    SERVED_VALUES,
    VLLM_ROPE_TYPES,
    compare_costs,
    compare_split,
    describe,
    has_sinks,
    runs_on_vllm,
    split_bytes,
)
from .wording import format_duration, suggest, table, with_unit


__all__ = [
    "SERVED_VALUES",
    "VLLM_ROPE_TYPES",
    "check_gguf",
    "check_writable",
    "compare_costs",
    "compare_split",
    "describe",
    "encode_prompt",
    "fits_vocabulary",
    "format_duration",
    "has_learned_positions",
    "has_sinks",
    "load_complete",
    "load_tokenizer",
    "looks_like_a_path",
    "read_gguf",
    "refuse_not_finite",
    "refuse_tensors",
    "runs_on_vllm",
    "split_bytes",
    "suggest",
    "table",
    "with_unit",
]
