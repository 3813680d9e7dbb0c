"""
The LSGPT model. Its files are copied into checkpoints, so they may import only torch, Transformers, the packages that
Transformers itself needs, and each other.
"""

from .attention_lsgpt import (
    ALL_ATTENTION_FUNCTIONS,
    ALL_MASK_ATTENTION_FUNCTIONS,
    AttentionMasks,
    create_masks,
    create_masks_for_generate,
)
from .cache_lsgpt import CACHE
from .configuration_lsgpt import FULL_WINDOW, GLOBAL, HEAD_KINDS, LOCAL, HeadKind, LSGPTConfig
from .modeling_lsgpt import (
    LSGPTAttention,
    LSGPTForCausalLM,
    LSGPTForSequenceClassification,
    LSGPTForTokenClassification,
    LSGPTModel,
    LSGPTPreTrainedModel,
    attention_layers,
    eager_attention_forward,
    is_lsgpt,
)
from .visibility_lsgpt import Visibility, describe_visibility


__all__ = [
    "ALL_ATTENTION_FUNCTIONS",
    "ALL_MASK_ATTENTION_FUNCTIONS",
    "CACHE",
    "FULL_WINDOW",
    "GLOBAL",
    "HEAD_KINDS",
    "LOCAL",
    "AttentionMasks",
    "HeadKind",
    "LSGPTAttention",
    "LSGPTConfig",
    "LSGPTForCausalLM",
    "LSGPTForSequenceClassification",
    "LSGPTForTokenClassification",
    "LSGPTModel",
    "LSGPTPreTrainedModel",
    "Visibility",
    "attention_layers",
    "create_masks",
    "create_masks_for_generate",
    "describe_visibility",
    "eager_attention_forward",
    "is_lsgpt",
]
