"""Transformers' common model tests, run on every LSGPT class as if it were a model of the library."""

import tempfile
import unittest
from types import SimpleNamespace
from unittest.mock import patch

import torch
from transformers.models.auto import modeling_auto
from transformers_tests import test_modeling_common
from transformers_tests.test_configuration_common import ConfigTester
from transformers_tests.test_modeling_common import GenerationTesterMixin, ModelTesterMixin, ids_tensor
from transformers_tests.test_training_mixin import TrainingTesterMixin

from lsgpt import (
    LSGPTConfig,
    LSGPTForCausalLM,
    LSGPTForSequenceClassification,
    LSGPTForTokenClassification,
    LSGPTModel,
)


# The tests that are not run, with the reason. Not listed are those that skip themselves, for want of an accelerator,
# FlashAttention, experts, a tensor-parallel plan and the like.
NOT_ROTARY = "this model has no rotary positions, although its configuration has the field `rope_parameters`"
SKIPS_WITHOUT_ROTARY = {
    "test_model_rope_scaling_from_config_0_linear": NOT_ROTARY,
    "test_model_rope_scaling_from_config_1_dynamic": NOT_ROTARY,
    "test_model_rope_scaling_from_config_2_yarn": NOT_ROTARY,
    "test_model_rope_with_partial_rotation": NOT_ROTARY,
}

# The tables of class names by which the tests decide what a class is; only models inside the library are in them.
CLASS_TABLES = {
    "MODEL_MAPPING_NAMES": LSGPTModel,
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES": LSGPTForCausalLM,
    "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES": LSGPTForSequenceClassification,
    "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES": LSGPTForTokenClassification,
}


class LSGPTModelTester:
    """A tiny model and its inputs, under the names that the mixins read."""

    base_model_class = LSGPTModel
    causal_lm_class = LSGPTForCausalLM
    sequence_classification_class = LSGPTForSequenceClassification

    def __init__(self, parent: unittest.TestCase, **config_kwargs):
        self.parent = parent
        self.is_training = True
        self.batch_size = 13
        self.seq_length = 7
        self.vocab_size = 99
        self.hidden_size = 32
        self.num_hidden_layers = 2
        self.num_attention_heads = 4
        self.config_kwargs = {
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "num_hidden_layers": self.num_hidden_layers,
            "num_attention_heads": self.num_attention_heads,
            "num_global_heads": 2,
            "sliding_window": 3,  # less than half of the tokens: local heads are then computed in blocks
            "intermediate_size": 40,
            "max_position_embeddings": 512,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 0,
            **config_kwargs,
        }

    def get_config(self) -> LSGPTConfig:
        return LSGPTConfig(**self.config_kwargs)

    def prepare_config_and_inputs_for_common(self) -> tuple[LSGPTConfig, dict[str, torch.Tensor]]:
        """A batch whose row i has i + 1 real tokens, padded on the right."""
        input_ids = ids_tensor([self.batch_size, self.seq_length], self.vocab_size)
        attention_mask = torch.ones_like(input_ids).tril()
        return self.get_config(), {"input_ids": input_ids, "attention_mask": attention_mask}


class LSGPTModelTest(ModelTesterMixin, GenerationTesterMixin, TrainingTesterMixin, unittest.TestCase):
    """Learned positions, two global and two local heads in every layer."""

    config_kwargs = {}
    skips = SKIPS_WITHOUT_ROTARY
    model_tester = None
    all_model_classes = (
        LSGPTModel,
        LSGPTForCausalLM,
        LSGPTForSequenceClassification,
        LSGPTForTokenClassification,
    )
    _torch_compile_train_cls = LSGPTForCausalLM
    training_overfit_steps, training_overfit_learning_rate = 100, 4e-3  # larger steps than the default, and fewer

    def setUp(self):
        if self._testMethodName in self.skips:
            self.skipTest(self.skips[self._testMethodName])
        self.model_tester = LSGPTModelTester(self, **self.config_kwargs)
        for table, model_class in CLASS_TABLES.items():
            table = patch.dict(getattr(modeling_auto, table), {LSGPTConfig.model_type: model_class.__name__})
            table.start()
            self.addCleanup(table.stop)

    def test_config(self):
        ConfigTester(self, config_class=LSGPTConfig, **self.model_tester.config_kwargs).run_common_tests()

    def test_can_init_all_missing_weights(self):
        """Transformers exempts models of before 2023, by the copyright line of the file that it looks up here."""
        with tempfile.NamedTemporaryFile("w", suffix=".py") as file:
            file.write("# Copyright 2025\n")
            file.flush()
            with patch.object(test_modeling_common, "inspect", SimpleNamespace(getfile=lambda _: file.name)):
                super().test_can_init_all_missing_weights()


class LSGPTRotaryModelTest(LSGPTModelTest):
    """Blocks of today with all that there is: RMSNorm, gated MLP, rotary positions, grouped queries, sinks, biases."""

    config_kwargs = {
        "norm_type": "rms_norm",
        "gated_mlp": True,
        "hidden_act": "silu",
        "attention_sinks": True,
        "position_embedding_type": "rope",
        "num_key_value_heads": 2,
        "qk_norm": True,
        "use_bias": True,
    }
    skips = {}


class LSGPTSingleKindLayersModelTest(LSGPTModelTest):
    """A layer of local heads only, then one of global heads only; sinusoidal positions, tied embeddings."""

    config_kwargs = {
        "num_global_heads": [0, 4],
        "position_embedding_type": "sinusoidal",
        "tie_word_embeddings": True,
    }
    # Initial token embeddings are small beside sinusoids of amplitude 1, so that the first steps gain little.
    training_overfit_steps = 160
