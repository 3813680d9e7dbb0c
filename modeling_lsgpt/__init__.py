"""
The LSGPT model. Its files are copied into checkpoints, so they may import only torch, Transformers, the
packages that Transformers itself needs, each other and, where it is needed, Triton.
"""

from .attention_lsgpt import HeadGroup, LSGPTAttention
from .configuration_lsgpt import GLOBAL, LOCAL, LSGPTConfig
from .engines_lsgpt import ENGINES, Engine, plan_attention, register_engine
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
    "register_engine",
]
