"""
The model. Its files travel inside a checkpoint: every file in this folder may import torch, Transformers and siblings
only, and where it is used Triton.
"""

from .attention_lsgpt import HeadGroup, LSGPTAttention
from .configuration_lsgpt import GLOBAL, LOCAL, LSGPTConfig
from .engines_lsgpt import ENGINES, Engine, plan_attention
from .modeling_lsgpt import (
    LSGPTForCausalLM,
    LSGPTForSequenceClassification,
    LSGPTForTokenClassification,
    LSGPTModel,
    LSGPTPreTrainedModel,
)
from .telemetry_lsgpt import attention_layers
from .visibility_lsgpt import Visibility, create_attention_masks, describe_visibility


__all__ = [
    "ENGINES",
    "GLOBAL",
    "LOCAL",
    "Engine",
    "HeadGroup",
    "LSGPTAttention",
    "LSGPTConfig",
    "LSGPTForCausalLM",
    "LSGPTForSequenceClassification",
    "LSGPTForTokenClassification",
    "LSGPTModel",
    "LSGPTPreTrainedModel",
    "Visibility",
    "attention_layers",
    "create_attention_masks",
    "describe_visibility",
    "plan_attention",
]
