"""LSGPT: Long Short-attention (arXiv:2505.15548) as a Hugging Face model.

Importing this package registers the models with Transformers' Auto classes. It also makes `save_pretrained` write the
model's code into every checkpoint, so that the checkpoint loads even where this package is not installed.
"""

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from lsgpt.modeling_lsgpt import (
    LSGPTConfig,
    LSGPTForCausalLM,
    LSGPTForSequenceClassification,
    LSGPTForTokenClassification,
    LSGPTModel,
    LSGPTPreTrainedModel,
)

from . import triton_attention  # noqa: F401 (it registers itself)
from .parallelism import prepare_for_training
from .telemetry import MaxLogits, measure_max_logits


__version__ = "0.1.0"

AutoConfig.register(LSGPTConfig.model_type, LSGPTConfig, exist_ok=True)
AutoModel.register(LSGPTConfig, LSGPTModel, exist_ok=True)
AutoModelForCausalLM.register(LSGPTConfig, LSGPTForCausalLM, exist_ok=True)
AutoModelForSequenceClassification.register(LSGPTConfig, LSGPTForSequenceClassification, exist_ok=True)
AutoModelForTokenClassification.register(LSGPTConfig, LSGPTForTokenClassification, exist_ok=True)

prepare_for_training(LSGPTPreTrainedModel)

LSGPTConfig.register_for_auto_class()
LSGPTModel.register_for_auto_class("AutoModel")
LSGPTForCausalLM.register_for_auto_class("AutoModelForCausalLM")
LSGPTForSequenceClassification.register_for_auto_class("AutoModelForSequenceClassification")
LSGPTForTokenClassification.register_for_auto_class("AutoModelForTokenClassification")

__all__ = [
    "LSGPTConfig",
    "LSGPTForCausalLM",
    "LSGPTForSequenceClassification",
    "LSGPTForTokenClassification",
    "LSGPTModel",
    "MaxLogits",
    "measure_max_logits",
]
