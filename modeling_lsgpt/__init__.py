"""
The model. Its files travel inside a checkpoint, but for `attach_lsgpt`, which is for other models: every file in this
folder may import torch, Transformers and siblings only, and where it is used Triton.
"""

from .attach_lsgpt import attach
from .attention_lsgpt import HeadGroup, LSGPTAttention
from .configuration_lsgpt import GLOBAL, LOCAL, LSGPTConfig
from .masking_lsgpt import create_attention_masks
from .modeling_lsgpt import (
    LSGPTForCausalLM,
    LSGPTForSequenceClassification,
    LSGPTForTokenClassification,
    LSGPTModel,
    LSGPTPreTrainedModel,
)
from .telemetry_lsgpt import MaxLogits, attention_layers, measure_max_logits


__all__ = [
    "GLOBAL",
    "LOCAL",
    "HeadGroup",
    "LSGPTAttention",
    "LSGPTConfig",
    "LSGPTForCausalLM",
    "LSGPTForSequenceClassification",
    "LSGPTForTokenClassification",
    "LSGPTModel",
    "LSGPTPreTrainedModel",
    "MaxLogits",
    "attach",
    "attention_layers",
    "create_attention_masks",
    "measure_max_logits",
]
