"""LSGPT: a pre-norm decoder with GPT-2's or Llama's blocks and Long Short-attention (arXiv:2505.15548).

Shapes: B batch, T new tokens, V `vocab_size`.
"""

import sys
from functools import cache

import torch
from torch import nn
from transformers import AutoModel, Cache, DynamicCache, GenerationMixin, PreTrainedModel
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.modeling_layers import (
    GenericForSequenceClassification,
    GenericForTokenClassification,
    GradientCheckpointingLayer,
)
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs, can_return_tuple
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.import_utils import is_tracing
from transformers.utils.output_capturing import capture_outputs

from .attention_lsgpt import LSGPTAttention
from .cache_lsgpt import make_room
from .configuration_lsgpt import LSGPTConfig
from .cpu_lsgpt import Linear
from .engines_lsgpt import plan_attention
from .loss_lsgpt import causal_lm_loss, refuse_loss_arguments
from .visibility_lsgpt import create_attention_masks, describe_visibility


class LSGPTSinusoidalPositions(nn.Module):
    """The fixed position embeddings of "Attention Is All You Need" (arXiv:1706.03762, section 3.5)."""

    def __init__(self, hidden_size: int):
        super().__init__()
        self.hidden_size = hidden_size

    def forward(self, position_ids: torch.Tensor) -> torch.Tensor:
        """Maps positions `(B, T)` to embeddings `(B, T, hidden_size)` in float32, alternating sines and cosines."""
        exponents = torch.arange(0, self.hidden_size, 2, device=position_ids.device) / self.hidden_size
        angles = position_ids[..., None].float() / 10_000.0**exponents
        return torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(-2)


class LSGPTMLP(nn.Module):
    """The position-wise feed-forward network: up projection, activation (of the gate, if gated), down projection."""

    def __init__(self, config: LSGPTConfig):
        super().__init__()
        bias = config.has_bias("mlp")
        self.gate_proj = None
        if config.gated_mlp:
            self.gate_proj = Linear(config.hidden_size, config.intermediate_size, bias=bias)
        self.up_proj = Linear(config.hidden_size, config.intermediate_size, bias=bias)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size, bias=bias)
        self.down_proj.writes_to_residual_stream = True  # for `_init_weights`
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        if self.gate_proj is None:
            return self.down_proj(self.act_fn(self.up_proj(hidden_states)))
        return self.down_proj(self.act_fn(self.gate_proj(hidden_states)) * self.up_proj(hidden_states))


def make_norm(config: LSGPTConfig) -> nn.Module:
    """Creates a norm over the residual stream."""
    if config.norm_type == "rms_norm":
        return nn.RMSNorm(config.hidden_size, eps=config.layer_norm_eps)
    return nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps, bias=config.has_bias("norm"))


class LSGPTDecoderLayer(GradientCheckpointingLayer):
    """One pre-norm block: attention and MLP, each added to the residual stream."""

    def __init__(self, config: LSGPTConfig, layer_idx: int):
        super().__init__()
        self.input_layernorm = make_norm(config)
        self.self_attn = LSGPTAttention(config, layer_idx)
        self.post_attention_layernorm = make_norm(config)
        self.mlp = LSGPTMLP(config)
        self.dropout = nn.Dropout(config.resid_dropout)

    def forward(self, hidden_states: torch.Tensor, **kwargs) -> torch.Tensor:
        """Maps `(B, T, hidden_size)` to the same shape; `kwargs` go to the attention."""
        attended, _ = self.self_attn(self.input_layernorm(hidden_states), **kwargs)
        hidden_states = hidden_states + self.dropout(attended)
        return hidden_states + self.dropout(self.mlp(self.post_attention_layernorm(hidden_states)))


class LSGPTPreTrainedModel(PreTrainedModel):
    """Base class of the LSGPT models: configuration, weight initialisation and supported features of Transformers."""

    config: LSGPTConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["LSGPTDecoderLayer"]
    _skip_keys_device_placement = ["past_key_values"]
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True
    _can_record_outputs = {"hidden_states": LSGPTDecoderLayer, "attentions": LSGPTAttention}

    def __init__(self, config: LSGPTConfig):
        config.validate_architecture()  # again: fields may have been changed
        super().__init__(config)
        _register_decoder(type(config))  # type: ignore[arg-type]  # dataclasses are hashable

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        # FSDP2 creates a new class for a sharded model. With our class's name, Transformers finds the code to save
        # with a checkpoint and recognizes the kind of model.
        if cls.__module__.startswith("torch."):
            sharded = next(base for base in cls.__mro__ if not base.__module__.startswith("torch."))
            cls.__module__, cls.__name__, cls.__qualname__ = sharded.__module__, sharded.__name__, sharded.__qualname__

    @torch.no_grad()
    def _init_weights(self, module: nn.Module):
        super()._init_weights(module)
        if isinstance(module, LSGPTAttention) and module.sinks is not None:
            init.zeros_(module.sinks)
        # GPT-2's scaled initialisation: the residual stream is a sum over 2L branches. The projections are marked,
        # because Transformers does not call this for custom modules without parameters of their own.
        if getattr(module, "writes_to_residual_stream", False):
            std = self.config.initializer_range / (2 * self.config.num_hidden_layers) ** 0.5
            init.normal_(module.weight, mean=0.0, std=std)

    def _check_ids(self, name: str, ids: torch.Tensor, limit: str, ignored: int | None = None):
        """
        Checks that ids, except `ignored` ones, are integers from 0 to `config.<limit> - 1`. Values are checked on the
        CPU only, because reading them on another device would force a synchronisation.
        """
        if ids.dtype not in (torch.int32, torch.int64):
            raise ValueError(
                f"`{name}` must be integers, of dtype torch.int64 or torch.int32; got {ids.dtype}; convert them with "
                "`.long()`"
            )
        if ids.device.type != "cpu" or is_tracing(ids):
            return
        if ignored is not None:
            ids = ids[ids != ignored]
        if not ids.numel():
            return
        low, high = ids.aminmax()
        size = getattr(self.config, limit)
        if low < 0 or high >= size:
            worst = low.item() if low < 0 else high.item()
            rule = f"between 0 and {size - 1} (`{limit}` is {size})"
            rule += "" if ignored is None else f", or {ignored} to be ignored"
            remedy = {
                "vocab_size": "does the tokenizer belong to this model?",
                "max_position_embeddings": "learned positions end there: shorten the input, or train a model with "
                'more of them or with position_embedding_type="rope"',
            }[limit]
            raise ValueError(f"`{name}` must be {rule}; got {worst}; {remedy}")

    def _sdpa_can_dispatch(self, is_init_check: bool = False) -> bool:
        if self.config.attn_logit_softcapping is not None:
            raise ValueError(
                "PyTorch's scaled_dot_product_attention cannot soft-cap logits (`attn_logit_softcapping`); use "
                'attn_implementation="eager" or "flex_attention"'
            )
        return super()._sdpa_can_dispatch(is_init_check)

    def _flash_attn_can_dispatch(self, *args, **kwargs) -> bool:
        try:
            return super()._flash_attn_can_dispatch(*args, **kwargs)
        except ImportError as error:
            raise ImportError(f'{error} Install it, or use attn_implementation="sdpa"') from error


@cache
def _register_decoder(config_class: type):
    """
    Makes `AutoModel` build `LSGPTModel`, because the generic classification heads use `AutoModel`. This is done for
    each configuration class, not once for this file's `LSGPTConfig`: from a checkpoint's code, Transformers imports
    the configuration twice, once for itself and once for this file.
    """
    AutoModel.register(config_class, LSGPTModel, exist_ok=True)


class LSGPTModel(LSGPTPreTrainedModel):
    """The decoder without a head: token ids to hidden states."""

    def __init__(self, config: LSGPTConfig):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.embed_positions = self.rotary_emb = None
        if config.position_embedding_type == "learned":
            self.embed_positions = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        elif config.position_embedding_type == "sinusoidal":
            self.embed_positions = LSGPTSinusoidalPositions(config.hidden_size)
        elif config.position_embedding_type == "rope":
            self.rotary_emb = LlamaRotaryEmbedding(config)
        self.dropout = nn.Dropout(config.embd_dropout)
        self.layers = nn.ModuleList(LSGPTDecoderLayer(config, i) for i in range(config.num_hidden_layers))
        self.norm = make_norm(config)
        self.gradient_checkpointing = False
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | dict | None = None,
        position_ids: torch.LongTensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutputWithPast:
        """
        Args:
            input_ids (`(B, T)`): Token ids; either these or `inputs_embeds` `(B, T, hidden_size)`.
            attention_mask: Padding `(B, past + T)`, 0 for padding; a custom mask `(B, 1, T, past + T)`; or the masks
                of `create_attention_masks`.
            position_ids (`(B, T)`, *optional*): Positions; where they do not continue within a row, another packed
                document begins. By default they continue from the cache's length.
            past_key_values: A Transformers cache, such as `DynamicCache(config=model.config)`.
            use_cache: Whether to return a cache.
            **kwargs: `output_hidden_states`, `output_attentions` (engine `eager` only; `(B, H, T, past + T)` for
                each layer, global heads first), and arguments of the attention function.

        Raises:
            ValueError: If inputs have the wrong shape, ids are outside the vocabulary, there are more tokens than
                learned positions, or the attention engine does not support the call.
        """
        self._check_inputs(input_ids, inputs_embeds, position_ids)
        self._check_parallelism()
        if kwargs.get("cache") is not None:
            raise ValueError(
                "Transformers' continuous batching needs the same number of key/value heads in every cache layer, but "
                "in LSGPT they differ; use `generate`, or serve the model with vLLM"
            )
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        if past_key_values is not None:
            if not isinstance(past_key_values, Cache):
                raise ValueError(
                    "`past_key_values` must be a cache, such as `DynamicCache(config=model.config)`; got "
                    f"{type(past_key_values).__name__}"
                )
            make_room(past_key_values)

        visibility = describe_visibility(self.config, inputs_embeds, attention_mask, past_key_values, position_ids)
        attention_plan = plan_attention(self.config, visibility)
        if position_ids is None:
            past_length = past_key_values.get_seq_length() if past_key_values is not None else 0
            position_ids = torch.arange(inputs_embeds.shape[1], device=inputs_embeds.device) + past_length
            position_ids = position_ids[None]

        hidden_states, position_embeddings = inputs_embeds, None
        if self.embed_positions is not None:
            if self.config.position_embedding_type == "learned":
                self._check_ids("position_ids", position_ids, "max_position_embeddings")
            hidden_states = hidden_states + self.embed_positions(position_ids).to(hidden_states.dtype)
        elif self.rotary_emb is not None:
            position_embeddings = self.rotary_emb(hidden_states, position_ids)
        hidden_states = self.dropout(hidden_states)

        for layer in self.layers[: self.config.num_hidden_layers]:  # fewer while the first layers draft
            hidden_states = layer(
                hidden_states,
                attention_plan=attention_plan,
                position_ids=position_ids,
                position_embeddings=position_embeddings,
                past_key_values=past_key_values,
                use_cache=use_cache,
                **kwargs,
            )
        return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden_states), past_key_values=past_key_values)

    def _check_inputs(self, input_ids, inputs_embeds, position_ids):
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("pass exactly one of `input_ids` and `inputs_embeds`")
        if input_ids is not None:
            if input_ids.ndim != 2 or input_ids.shape[1] == 0:
                raise ValueError(
                    "`input_ids` must have shape (batch, tokens) with at least one token; "
                    f"got {tuple(input_ids.shape)}"
                )
            self._check_ids("input_ids", input_ids, "vocab_size")
        else:
            size = self.config.hidden_size
            if inputs_embeds.ndim != 3 or inputs_embeds.shape[1] == 0 or inputs_embeds.shape[2] != size:
                raise ValueError(
                    f"`inputs_embeds` must have shape (batch, tokens, {size}) with at least one token; "
                    f"got {tuple(inputs_embeds.shape)}"
                )
        batch_size, length = (input_ids if input_ids is not None else inputs_embeds).shape[:2]
        if position_ids is not None and tuple(position_ids.shape) not in ((batch_size, length), (1, length)):
            raise ValueError(
                f"`position_ids` must have shape ({batch_size}, {length}), like the inputs; "
                f"got {tuple(position_ids.shape)}"
            )

    def _check_parallelism(self):
        state = sys.modules.get("accelerate.state")  # not imported: a checkpoint must load without it
        if not self.training or is_tracing() or state is None or not state.is_initialized():
            return
        parallelism = getattr(state.AcceleratorState(), "parallelism_config", None)
        for field in ("cp_size", "sp_size"):
            if getattr(parallelism, field, 1) > 1:
                raise ValueError(
                    f"`{field}` of Accelerate's `ParallelismConfig` must be 1; got {getattr(parallelism, field)}: it "
                    "splits every sequence over processes, and local heads would lose their window at each boundary"
                )


class LSGPTForCausalLM(LSGPTPreTrainedModel, GenerationMixin):
    """The decoder with a language modelling head."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    # `generate` creates the masks for static caches itself; this makes it create ours.
    create_masks_for_generate = staticmethod(create_attention_masks)

    def __init__(self, config: LSGPTConfig):
        super().__init__(config)
        self.model = LSGPTModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def _prepare_position_ids_for_generation(self, inputs_tensor, model_kwargs):
        """
        As in Transformers, but none without padding: the default of `forward` is the same, and `forward` need not look
        for packed documents in every step.
        """
        mask = model_kwargs.get("attention_mask")
        if mask is None or (mask == 1).all():
            return None
        return super()._prepare_position_ids_for_generation(inputs_tensor, model_kwargs)

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | dict | None = None,
        position_ids: torch.LongTensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        skip_logits: bool = False,
        teacher_logits: torch.Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> CausalLMOutputWithPast:
        """
        Accepts the arguments of `LSGPTModel` and those below.

        Args:
            labels (`(B, T)`, *optional*): Token ids to predict, the same as `input_ids` (the shift happens inside);
                -100 is ignored.
            logits_to_keep: Number of last positions to compute logits for (0: all), or a tensor of their indices.
            skip_logits: Whether to return only the loss, without ever holding the logits of all tokens at once. In
                training on long blocks, they are by far the largest tensor.
            teacher_logits (`(B, T, V)`, *optional*): Logits of a teacher model for the same tokens. The loss is then
                the Kullback-Leibler divergence between its distributions and this model's, at every token that
                predicts a label. Only with `skip_logits`.
            **kwargs: Also `num_items_in_batch`, the number of labels by which the summed loss is divided; and
                `label_smoothing` and `z_loss`, see `causal_lm_loss`, only with `skip_logits`.

        Returns:
            Logits `(B, T, V)`, or those of the positions that `logits_to_keep` selects, unless they are skipped; and
            the loss if there are `labels`.

        Raises:
            ValueError: If `LSGPTModel` rejects the inputs, labels have the wrong shape or are outside the vocabulary,
                logits are skipped without labels, or something is passed that the loss would not use.
        """
        if skip_logits and labels is None:
            raise ValueError("`skip_logits` must be False without `labels`: there would be nothing to return")
        has_own_loss = skip_logits and self.loss_function is ForCausalLMLoss
        if not has_own_loss:
            refuse_loss_arguments(teacher_logits, **kwargs)
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        hidden_states = outputs.last_hidden_state[:, kept]
        if labels is not None and labels.shape != hidden_states.shape[:2]:
            raise ValueError(
                f"`labels` must have shape {tuple(hidden_states.shape[:2])}, one label for each token with logits; "
                f"got {tuple(labels.shape)}"
            )
        if labels is not None:
            self._check_ids("labels", labels, "vocab_size", ignored=kwargs.get("ignore_index", -100))
            labels = labels.long()

        if teacher_logits is not None and labels is not None:
            expected = (*labels.shape, self.config.vocab_size)
            if teacher_logits.shape != expected:
                raise ValueError(
                    f"`teacher_logits` must have shape {expected}, one logit for each entry of the vocabulary; got "
                    f"{tuple(teacher_logits.shape)}"
                )

        logits = loss = None
        if has_own_loss:
            loss = causal_lm_loss(hidden_states, self.lm_head, labels, teacher_logits=teacher_logits, **kwargs)
        else:
            logits = self.lm_head(hidden_states)
            if labels is not None:
                loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
            if skip_logits:
                logits = None
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


class LSGPTForSequenceClassification(GenericForSequenceClassification, LSGPTPreTrainedModel):
    """The decoder with a classification head on the last token of each sequence."""


class LSGPTForTokenClassification(GenericForTokenClassification, LSGPTPreTrainedModel):
    """The decoder with a classification head on each token."""


# Transformers looks here to find out whether to shift a model's labels, for example for label smoothing in `Trainer`.
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[LSGPTConfig.model_type] = LSGPTForCausalLM.__name__

__all__ = [
    "LSGPTForCausalLM",
    "LSGPTForSequenceClassification",
    "LSGPTForTokenClassification",
    "LSGPTModel",
    "LSGPTPreTrainedModel",
]
