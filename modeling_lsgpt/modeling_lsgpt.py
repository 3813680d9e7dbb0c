"""LSGPT: a decoder with blocks like GPT-2's, Llama's or Gemma's and Long Short-attention (arXiv:2505.15548).

The heads of each layer come in kinds, the global ones first. Each kind has its own mask, cache layer and call of the
attention function; everything else is as in Transformers' Llama.

Shapes: B batch, T new tokens, S cached and new tokens, H heads, D `head_dim`, V `vocab_size`.
"""

from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from transformers import Cache, DynamicCache, GenerationMixin, PreTrainedModel
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.integrations.sdpa_attention import repeat_kv
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.modeling_layers import (
    GenericForSequenceClassification,
    GenericForTokenClassification,
    GradientCheckpointingLayer,
)
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs, can_return_tuple, logging
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from .attention_lsgpt import (
    ALL_ATTENTION_FUNCTIONS,
    ALL_HEADS,
    AttentionMasks,
    create_masks,
    create_masks_for_generate,
)
from .cache_lsgpt import CACHE, accept_cache, prepare_cache
from .checks_lsgpt import check_ids, check_inputs, check_layers, check_range, check_shape
from .configuration_lsgpt import GLOBAL, HEAD_KINDS, LOCAL, LSGPTConfig
from .linear_lsgpt import make_linear
from .loss_lsgpt import causal_lm_loss, refuse_loss_arguments
from .visibility_lsgpt import describe_visibility, resolve_positions


logger = logging.get_logger(__name__)


class LSGPTSinusoidalPositions(nn.Module):
    """The fixed position embeddings of "Attention Is All You Need" (arXiv:1706.03762, section 3.5)."""

    def __init__(self, hidden_size: int):
        super().__init__()
        self.hidden_size = hidden_size

    def forward(self, position_ids: torch.Tensor) -> torch.Tensor:
        """Maps positions `(B, T)` to embeddings `(B, T, hidden_size)` in float32, alternating sines and cosines."""
        even = torch.arange(0, self.hidden_size, 2, dtype=torch.float32, device=position_ids.device)
        angles = position_ids[..., None].float() / 10_000.0 ** (even / self.hidden_size)
        return torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(-2)


class LSGPTMLP(nn.Module):
    """The position-wise feed-forward network: up projection, activation (of the gate, if gated), down projection."""

    def __init__(self, config: LSGPTConfig):
        super().__init__()
        bias = config.has_bias("mlp")
        width, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = make_linear(config, width, inner, bias=bias) if config.gated_mlp else None
        self.up_proj = make_linear(config, width, inner, bias=bias)
        self.down_proj = make_linear(config, inner, width, bias=bias)
        self.down_proj.writes_to_residual_stream = True  # for `_init_weights`
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Maps hidden states `(..., hidden_size)` to changes of the same shape."""
        if self.gate_proj is None:
            return self.down_proj(self.act_fn(self.up_proj(hidden_states)))
        return self.down_proj(self.act_fn(self.gate_proj(hidden_states)) * self.up_proj(hidden_states))


def make_norm(config: LSGPTConfig, exists: bool = True) -> nn.Module:
    """Creates a norm of width `hidden_size`, or `nn.Identity` where the architecture has none."""
    if not exists:
        return nn.Identity()
    if config.norm_type == "layer_norm":
        return nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps, bias=config.has_bias("norm"))
    return nn.RMSNorm(config.hidden_size, eps=config.layer_norm_eps)


NO_SINK = -1e4
"""Logit of the sink for queries and heads without one, if others in the same call have it; its weight is exactly 0."""


def eager_attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    scaling: float,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs,
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Attention written out in PyTorch: the reference for other functions, and the only one with attention weights.

    The mask `(B or 1, 1, T, S)` is boolean, True where a query may attend, or additive. With a boolean mask, the
    weights of masked pairs are exactly 0, even if a query may see nothing at all. With sinks `s_aux`, `(H,)` or
    `(B or 1, H, T)`, a query's weights sum to less than 1, because the sink's share is not included. Returns outputs
    `(B, T, H, D)` and weights `(B, H, T, S)`.
    """
    key_states = repeat_kv(key, module.num_key_value_groups)
    value_states = repeat_kv(value, module.num_key_value_groups)
    attn_weights = torch.matmul(query, key_states.transpose(2, 3)) * scaling
    if softcap is not None:
        attn_weights = softcap * torch.tanh(attn_weights / softcap)
    is_boolean = attention_mask.dtype == torch.bool
    if is_boolean:
        attn_weights = attn_weights.masked_fill(~attention_mask, torch.finfo(attn_weights.dtype).min)
    else:
        attn_weights = attn_weights + attention_mask
    if s_aux is not None:
        sinks = s_aux[..., None] if s_aux.ndim == 3 else s_aux[:, None, None]
        sinks = sinks.to(attn_weights.dtype).expand(*attn_weights.shape[:3], 1)
        attn_weights = torch.cat([attn_weights, sinks], dim=-1)
    softmax_dtype = torch.promote_types(attn_weights.dtype, torch.float32)
    attn_weights = F.softmax(attn_weights, dim=-1, dtype=softmax_dtype)[..., : key.shape[2]]
    if is_boolean:
        attn_weights = attn_weights.masked_fill(~attention_mask, 0.0)
    attn_weights = F.dropout(attn_weights.to(query.dtype), p=dropout, training=module.training)
    return torch.matmul(attn_weights, value_states).transpose(1, 2).contiguous(), attn_weights


eager_attention_forward.takes_sinks_of_queries = True  # type: ignore[attr-defined]


class HeadGroup(NamedTuple):
    """The heads of one kind in a layer, or all its heads."""

    kind: str
    num_heads: int
    cache_layer: int
    """Index of the cache layer in which the kind's keys and values are kept."""
    has_sinks: bool


class LSGPTAttention(nn.Module):
    """Multi-head attention with several kinds of heads: first the global heads, then the local ones."""

    def __init__(self, config: LSGPTConfig, layer_idx: int):
        super().__init__()
        self.config = config
        self.head_dim = config.head_dim
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling = self.head_dim**-0.5
        self.softcap = config.attn_logit_softcapping
        self.attention_dropout = config.attention_dropout
        self.is_causal = True
        q_size, kv_size = config.num_attention_heads * self.head_dim, config.num_key_value_heads * self.head_dim
        self.q_proj = make_linear(config, config.hidden_size, q_size, bias=config.has_bias("qkv_proj"))
        self.k_proj = make_linear(config, config.hidden_size, kv_size, bias=config.has_bias("qkv_proj"))
        self.v_proj = make_linear(config, config.hidden_size, kv_size, bias=config.has_bias("qkv_proj"))
        self.o_proj = make_linear(config, q_size, config.hidden_size, bias=config.has_bias("o_proj"))
        self.o_proj.writes_to_residual_stream = True  # for `_init_weights`
        self.q_norm = self.k_norm = None
        if config.qk_norm:
            widths = (q_size, kv_size) if config.qk_norm == "all_heads" else (self.head_dim, self.head_dim)
            self.q_norm, self.k_norm = (nn.RMSNorm(width, eps=config.layer_norm_eps) for width in widths)

        first_cache_layer = sum(map(len, config.num_heads_by_kind[:layer_idx]))
        self.head_groups = tuple(
            HeadGroup(kind, num_heads, first_cache_layer + i, HEAD_KINDS[kind].has_sinks)
            for i, (kind, num_heads) in enumerate(config.num_heads_by_kind[layer_idx].items())
        )
        self.all_heads = HeadGroup(ALL_HEADS, config.num_attention_heads, cache_layer=-1, has_sinks=True)
        self.num_heads_by_kind = [heads.num_heads for heads in self.head_groups]
        self.num_key_value_heads_by_kind = [n // self.num_key_value_groups for n in self.num_heads_by_kind]
        # One learned logit for each head of the kinds with sinks, which belongs to no token. They are the last heads.
        num_sinks = sum(heads.num_heads for heads in self.head_groups if heads.has_sinks)
        self.sinks = nn.Parameter(torch.zeros(num_sinks)) if config.attention_sinks and num_sinks else None

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: AttentionMasks,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """
        Args:
            hidden_states (`(B, T, hidden_size)`): Normalized input of the layer.
            attention_mask: The masks of each kind of head.
            position_embeddings: Cosines and sines `(B, T, D)` of the rotary embedding, or `None`.
            past_key_values: The cache, updated here.

        Returns:
            Outputs `(B, T, hidden_size)`, and the weights `(B, H, T, S)` if `output_attentions` asks for them with
            `eager`.
        """
        states = self.project(hidden_states, position_embeddings)
        attn_output, attn_weights = self.attend(*states, attention_mask, past_key_values, **kwargs)
        return self.o_proj(attn_output.reshape(*hidden_states.shape[:-1], -1)), attn_weights

    def project(
        self, hidden_states: torch.Tensor, position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns queries `(B, H, T, D)`, keys and values `(B, H_kv, T, D)`, normed and rotated if configured."""
        hidden_shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        query_states, key_states = self.q_proj(hidden_states), self.k_proj(hidden_states)
        if self.q_norm is not None:  # over each head, or over all of them
            query_states = self.q_norm(query_states.unflatten(-1, (-1, *self.q_norm.normalized_shape)))
            key_states = self.k_norm(key_states.unflatten(-1, (-1, *self.k_norm.normalized_shape)))
        query_states = query_states.view(hidden_shape).transpose(1, 2)
        key_states = key_states.view(hidden_shape).transpose(1, 2)
        value_states = self.v_proj(hidden_states).view(hidden_shape).transpose(1, 2)
        if position_embeddings is not None:
            query_states, key_states = apply_rotary_pos_emb(query_states, key_states, *position_embeddings)
        return query_states, key_states, value_states

    def attend(
        self,
        query_states: torch.Tensor,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        attention_mask: AttentionMasks,
        past_key_values: Cache | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """
        Calls the attention function for each kind of head, with the kind's own cache layer, mask and window.

        Takes queries, keys and values of the new tokens, `(B, H, T, D)` or `(B, H_kv, T, D)`, and returns outputs
        `(B, T, H, D)`, and the attention weights as `forward` does.
        """
        calls = self.split_heads(query_states, key_states, value_states, attention_mask, past_key_values)
        if ALL_HEADS in attention_mask.masks:  # a fused kernel, which takes only new tokens: nothing was cached
            if past_key_values is not None:
                # Those from the cache, so that gradients flow through the exchange of `context_parallel_lsgpt`.
                key_states = torch.cat([key for _, _, key, _ in calls], dim=1)
                value_states = torch.cat([value for *_, value in calls], dim=1)
            calls = [(self.all_heads, query_states, key_states, value_states)]

        attention_interface = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        attn_outputs, attn_weights = [], []
        for heads, query, key, value in calls:
            output, weights = attention_interface(
                self,
                query,
                key,
                value,
                attention_mask.masks[heads.kind],
                dropout=self.attention_dropout if self.training else 0.0,
                scaling=self.scaling,
                sliding_window=attention_mask.visibility[heads.kind].window,
                softcap=self.softcap,
                s_aux=None if self.sinks is None else self.sinks_of(heads, attention_mask.sees_sink[heads.kind]),
                **kwargs,
            )
            attn_outputs.append(output)
            attn_weights.append(weights)
        if kwargs.get("output_attentions", self.config.output_attentions):
            if attn_weights[0] is not None:
                return join_weights(calls, attn_weights, attention_mask)
            logger.warning_once("no attention weights are returned: `output_attentions` needs `eager` attention")
        return torch.cat(attn_outputs, dim=2), None

    def split_heads(
        self,
        query_states: torch.Tensor,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        attention_mask: AttentionMasks | None = None,
        past_key_values: Cache | None = None,
    ) -> list[tuple[HeadGroup, torch.Tensor, torch.Tensor, torch.Tensor]]:
        """
        Returns each kind of head with its queries, keys and values. With a cache, updates it, and returns keys and
        values of earlier tokens, too.
        """
        calls = []
        for heads, query, key, value in zip(
            self.head_groups,
            query_states.split(self.num_heads_by_kind, dim=1),
            key_states.split(self.num_key_value_heads_by_kind, dim=1),
            value_states.split(self.num_key_value_heads_by_kind, dim=1),
        ):
            if past_key_values is not None:
                key, value = past_key_values.update(key, value, heads.cache_layer)
                length = attention_mask.visibility[heads.kind].kv_length
                if key.shape[2] > length:  # Transformers 5.17, while it records the past for a rollback
                    key, value = key[:, :, -length:], value[:, :, -length:]
            calls.append((heads, query, key, value))
        return calls

    def sinks_of(self, heads: HeadGroup, sees_sink: torch.Tensor | bool) -> torch.Tensor | None:
        """The sinks of some heads, `(H,)`, or `(B or 1, H, T)` if only some queries see them; `None` without any."""
        if not heads.has_sinks:
            return None
        sinks = self.sinks
        if len(sinks) < heads.num_heads:
            sinks = F.pad(sinks, (heads.num_heads - len(sinks), 0), value=NO_SINK)
        return sinks if isinstance(sees_sink, bool) else torch.where(sees_sink[:, None], sinks[:, None], NO_SINK)


def join_weights(
    calls: list[tuple], attn_weights: list[torch.Tensor], attention_mask: AttentionMasks
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Joins the attention weights of all kinds of heads in one tensor `(B, H, T, S)` over all keys, in which those of
    local heads are padded because their cache begins later. The outputs `(B, T, H, D)` are computed anew from this
    tensor, so that gradients flow through the weights that the caller receives.
    """
    seen = [attention_mask.visibility[heads.kind] for heads, *_ in calls]
    end = max(each.kv_offset + each.kv_length for each in seen)
    padding = [(each.kv_offset, end - each.kv_offset - each.kv_length) for each in seen]
    joined = torch.cat([F.pad(weights, sides) for weights, sides in zip(attn_weights, padding)], dim=1)
    values = torch.cat([F.pad(value, (0, 0, *sides)) for (*_, value), sides in zip(calls, padding)], dim=1)
    return (joined @ repeat_kv(values, joined.shape[1] // values.shape[1])).transpose(1, 2), joined


class LSGPTDecoderLayer(GradientCheckpointingLayer):
    """One block: attention and MLP, each added to the residual stream, with norms before or after them, or both."""

    def __init__(self, config: LSGPTConfig, layer_idx: int):
        super().__init__()
        is_before, is_after = config.norm_type != "rms_norm_after", config.norm_type.endswith(("_after", "_around"))
        self.input_layernorm = make_norm(config, is_before)
        self.self_attn = LSGPTAttention(config, layer_idx)
        self.post_self_attn_layernorm = make_norm(config, is_after)
        self.post_attention_layernorm = make_norm(config, is_before)  # Llama's name for the one before the MLP
        self.mlp = LSGPTMLP(config)
        self.post_mlp_layernorm = make_norm(config, is_after)
        self.dropout = nn.Dropout(config.resid_dropout)

    def forward(self, hidden_states: torch.Tensor, **kwargs) -> torch.Tensor:
        """Maps `(B, T, hidden_size)` to the same shape; `kwargs` go to the attention."""
        past_key_values = kwargs.pop(CACHE, None)
        attended, _ = self.self_attn(self.input_layernorm(hidden_states), past_key_values=past_key_values, **kwargs)
        hidden_states = hidden_states + self.dropout(self.post_self_attn_layernorm(attended))
        outputs = self.mlp(self.post_attention_layernorm(hidden_states))
        return hidden_states + self.dropout(self.post_mlp_layernorm(outputs))


class LSGPTPreTrainedModel(PreTrainedModel):
    """Base class of the LSGPT models: configuration, weight initialization and supported features of Transformers."""

    config: LSGPTConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["LSGPTDecoderLayer"]
    _skip_keys_device_placement = ["past_key_values", "cache"]
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True
    _can_record_outputs = {"hidden_states": LSGPTDecoderLayer, "attentions": LSGPTAttention}

    def __init__(self, config: LSGPTConfig):
        config.validate_architecture()  # again: fields may have been changed
        super().__init__(config)

    @classmethod
    def maybe_distribute_model(cls, model, distributed_config, mesh_manager):
        """As in Transformers, but without pipelines, whose later stages would not know the length of the cache."""
        if distributed_config is not None and (distributed_config.pp_size or 1) > 1:
            raise ValueError(
                f"`pp_size` of the `DistributedConfig` must be 1; got {distributed_config.pp_size}: LSGPT cannot be "
                "split into a pipeline. Use `fsdp_size`, or `device_map` to spread the layers over several GPUs"
            )
        return super().maybe_distribute_model(model, distributed_config, mesh_manager)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module):
        super()._init_weights(module)
        if isinstance(module, LSGPTAttention) and module.sinks is not None:
            init.zeros_(module.sinks)
        # GPT-2's scaled initialization: the residual stream is a sum over 2L branches. The projections are marked,
        # because Transformers does not call this for custom modules without parameters of their own.
        if getattr(module, "writes_to_residual_stream", False):
            std = self.config.initializer_range / (2 * self.config.num_hidden_layers) ** 0.5
            init.normal_(module.weight, mean=0.0, std=std)

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


class LSGPTModel(LSGPTPreTrainedModel):
    """The decoder without a head: token ids to hidden states."""

    def __init__(self, config: LSGPTConfig, counts_left_padding: bool = True):
        super().__init__(config)
        self.counts_left_padding = counts_left_padding
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.embed_positions = self.rotary_emb = self.local_rotary_emb = None
        if config.position_embedding_type == "learned":
            self.embed_positions = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        elif config.position_embedding_type == "sinusoidal":
            self.embed_positions = LSGPTSinusoidalPositions(config.hidden_size)
        elif config.position_embedding_type == "rope":
            self.rotary_emb = LlamaRotaryEmbedding(config.with_rope_of(GLOBAL))
            if LOCAL in config.rope_parameters:
                self.local_rotary_emb = LlamaRotaryEmbedding(config.with_rope_of(LOCAL))
        self.dropout = nn.Dropout(config.embd_dropout)
        self.layers = nn.ModuleList(LSGPTDecoderLayer(config, i) for i in range(config.num_hidden_layers))
        self.norm = make_norm(config)
        self.gradient_checkpointing = False
        self.post_init()

    @accept_cache
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
                of `create_masks_for_generate`.
            position_ids (`(B, T)`, *optional*): Positions; where they do not continue within a row, another packed
                document begins. By default they continue from the cache's length; in classifiers, they do not count
                padding on the left, so that a row has the same scores in a batch and alone.
            past_key_values: A Transformers cache, such as `DynamicCache(config=model.config)`. It may be passed as
                `cache`, its name from Transformers 5.24 on.
            use_cache: Whether to return a cache.
            **kwargs: `output_hidden_states`, `output_attentions` (with `attn_implementation="eager"` only;
                `(B, H, T, past + T)` for each layer, global heads first), and arguments of the attention function.

        Raises:
            ValueError: If inputs have the wrong shape, ids are outside the vocabulary, there are more tokens than
                learned positions, or the attention implementation does not support the call.
        """
        check_inputs(self.config, input_ids, inputs_embeds, position_ids)
        if kwargs.get("is_causal") is False:
            raise ValueError("`is_causal` must not be False: the heads of LSGPT see no later tokens")
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        if past_key_values is not None:
            self._prepare_cache(past_key_values, inputs_embeds.shape[1])
        past_length = past_key_values.get_seq_length() if past_key_values is not None else 0
        position_ids = resolve_positions(inputs_embeds, position_ids, past_length, **kwargs)
        visibility = describe_visibility(self.config, inputs_embeds, attention_mask, past_key_values, position_ids)
        attention_masks = create_masks(self.config, visibility)
        if position_ids is None:
            position_ids = self._default_position_ids(inputs_embeds, attention_mask, past_length)

        hidden_states = inputs_embeds
        position_embeddings = local_embeddings = None
        if self.embed_positions is not None:
            if self.config.position_embedding_type == "learned":
                check_ids(self.config, "position_ids", position_ids, "max_position_embeddings")
            hidden_states = hidden_states + self.embed_positions(position_ids).to(hidden_states.dtype)
        elif self.rotary_emb is not None:
            position_embeddings = local_embeddings = self.rotary_emb(hidden_states, position_ids)
            if self.local_rotary_emb is not None:
                local_embeddings = self.local_rotary_emb(hidden_states, position_ids)
        hidden_states = self.dropout(hidden_states)

        # `assistant_early_exit` lowers the number of layers in the configuration.
        for layer, kinds in zip(self.layers, self.config.num_heads_by_kind):
            hidden_states = layer(
                hidden_states,
                attention_mask=attention_masks,
                position_ids=position_ids,
                position_embeddings=position_embeddings if GLOBAL in kinds else local_embeddings,
                use_cache=use_cache,
                **{CACHE: past_key_values},  # by the name that gradient checkpointing looks for
                **kwargs,
            )
        return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden_states), **{CACHE: past_key_values})

    def _prepare_cache(self, past_key_values: Cache, q_length: int):
        prepare_cache(self.config, past_key_values, q_length)
        check_layers(self.layers)
        has_gradients = torch.is_grad_enabled()
        # Before Transformers 5.24, checkpointing includes passes that no gradients flow through.
        checkpoints = self.gradient_checkpointing and self.training and (has_gradients or CACHE == "past_key_values")
        # In a training step, an empty cache stays empty, as in other models; without gradients, it is for `generate`.
        if checkpoints and (past_key_values.get_seq_length() > 0 or not has_gradients):
            raise ValueError(
                "`past_key_values` must be None with gradient checkpointing, which leaves them empty, so that "
                "`generate` would see one token at a time; call `model.eval()` or "
                "`model.gradient_checkpointing_disable()` first, or pass use_cache=False"
            )

    def _default_position_ids(
        self, inputs_embeds: torch.Tensor, attention_mask: torch.Tensor | dict | None, past_length: int | torch.Tensor
    ) -> torch.Tensor:
        """Positions `(B or 1, T)` that continue from the cache's length; in classifiers, without left padding."""
        num_new = inputs_embeds.shape[1]
        has_limit = self.config.position_embedding_type == "learned" and self.counts_left_padding
        if has_limit and type(past_length) is int and not torch.compiler.is_compiling():
            # Without a look at values: on a GPU, where they are not checked, the error would end the process.
            check_range(self.config, "position_ids", 0, past_length + num_new - 1, "max_position_embeddings")
        position_ids = torch.arange(num_new, device=inputs_embeds.device)[None] + past_length
        if not self.counts_left_padding and isinstance(attention_mask, torch.Tensor) and attention_mask.ndim == 2:
            num_left = (attention_mask.cumsum(-1) == 0).sum(-1, keepdim=True)
            position_ids = (position_ids - num_left).clamp(min=0)
        return position_ids


def slice_logits_to_keep(hidden_states: torch.Tensor, logits_to_keep: int | torch.Tensor) -> torch.Tensor:
    """Selects positions like the function of this name that Transformers 5.17 does not have yet."""
    if isinstance(logits_to_keep, int):
        return hidden_states[:, -logits_to_keep:]
    if logits_to_keep.ndim == 2 and logits_to_keep.dtype == torch.bool:
        return hidden_states[logits_to_keep]
    if logits_to_keep.ndim == 2:
        return torch.take_along_dim(hidden_states, logits_to_keep[..., None], dim=1)
    return hidden_states[:, logits_to_keep]


class LSGPTForCausalLM(LSGPTPreTrainedModel, GenerationMixin):
    """The decoder with a language modelling head."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    # `generate` creates the masks for static caches itself; this makes it create ours.
    create_masks_for_generate = staticmethod(create_masks_for_generate)

    def __init__(self, config: LSGPTConfig):
        super().__init__(config)
        self.model = LSGPTModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = make_linear(config, config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Maps final hidden states `(..., hidden_size)` to logits `(..., V)`."""
        logits, softcap = self.lm_head(hidden_states), self.config.final_logit_softcapping
        return logits if softcap is None else softcap * torch.tanh(logits / softcap)

    def init_continuous_batching(self, *args, **kwargs):
        """Raises `ValueError`: Transformers' continuous batching needs layers with equal caches."""
        raise ValueError(
            "Transformers' continuous batching needs the same number of key/value heads in every cache layer, but in "
            "LSGPT they differ; use `generate`, or serve the model with vLLM"
        )

    def _prepare_position_ids_for_generation(self, inputs_tensor, model_kwargs):
        """
        As in Transformers, but none without padding: the default of `forward` is the same, and `forward` need not look
        for packed documents in every step.
        """
        mask = model_kwargs.get("attention_mask")
        if mask is None or (mask == 1).all():
            return None
        return super()._prepare_position_ids_for_generation(inputs_tensor, model_kwargs)

    @accept_cache
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
            logits_to_keep: Number of last positions to compute logits for (0: all); a tensor of indices, equal for all
                rows `(P,)` or for each `(B, P)`; or a boolean mask `(B, T)`.
            skip_logits: Whether to return only the loss, without ever holding the logits of all tokens at once. In
                training on long blocks, they are by far the largest tensor.
            teacher_logits (`(B, T, V)`, *optional*): Logits of a teacher model for the same tokens.
            **kwargs: Also `num_items_in_batch`, the number of labels by which the summed loss is divided. Only with
                `skip_logits`, `label_smoothing`, `z_loss` and `teacher_logits`, see `causal_lm_loss`.

        Returns:
            Logits `(B, T, V)`, or those of the positions that `logits_to_keep` selects (`(N, V)` for a mask), unless
            they are skipped; and the loss if there are `labels`.

        Raises:
            ValueError: If `LSGPTModel` rejects the inputs, labels have the wrong shape or are outside the vocabulary,
                logits are skipped without labels, or something is passed that the loss would not use.
        """
        if skip_logits and labels is None:
            raise ValueError("`skip_logits` must be False without `labels`: there would be nothing to return")
        has_own_loss = skip_logits and self.loss_function is ForCausalLMLoss
        if not has_own_loss:
            refuse_loss_arguments(teacher_logits, **kwargs)
        if teacher_logits is not None and kwargs.get("label_smoothing"):
            raise ValueError("`label_smoothing` must be 0 with `teacher_logits`, which leave no labels to smooth")
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        hidden_states = slice_logits_to_keep(outputs.last_hidden_state, logits_to_keep)
        if labels is not None:
            if hidden_states.ndim == 2:  # the kept tokens of all rows in one list, without their next tokens
                raise ValueError("`logits_to_keep` must not be a mask with `labels`; set labels to -100 instead")
            shift_labels = kwargs.get("shift_labels")
            for name, given in (("labels", labels), ("shift_labels", shift_labels)):
                check_shape(name, given, "one label for each token with logits", hidden_states.shape[:2])
            shape = *labels.shape, self.config.vocab_size
            check_shape("teacher_logits", teacher_logits, "one logit for each entry of the vocabulary", shape)
            check_ids(self.config, "labels", labels, "vocab_size", ignored=kwargs.get("ignore_index", -100))
            labels = labels.long()
            if shift_labels is not None:
                kwargs["shift_labels"] = shift_labels.long()

        logits = loss = None
        if has_own_loss:
            head = self.lm_head if self.config.final_logit_softcapping is None else self.compute_logits
            loss = causal_lm_loss(hidden_states, head, labels, teacher_logits=teacher_logits, **kwargs)
        else:
            logits = self.compute_logits(hidden_states)
            if labels is not None:
                loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
            if skip_logits:
                logits = None
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            **{CACHE: getattr(outputs, CACHE)},
        )


class LSGPTForSequenceClassification(GenericForSequenceClassification, LSGPTPreTrainedModel):
    """The decoder with a classification head on the last token of each sequence."""

    # The generic classes return the mean of a batch, whatever `Trainer` says about the other batches of a step.
    accepts_loss_kwargs = False

    def __init__(self, config: LSGPTConfig):
        LSGPTPreTrainedModel.__init__(self, config)  # the generic class would look for the decoder in `AutoModel`
        self.num_labels = config.num_labels
        self.model = LSGPTModel(config, counts_left_padding=False)
        self.score = nn.Linear(config.hidden_size, self.num_labels, bias=False)
        self.post_init()


class LSGPTForTokenClassification(GenericForTokenClassification, LSGPTPreTrainedModel):
    """The decoder with a classification head on each token."""

    accepts_loss_kwargs = False

    def __init__(self, config: LSGPTConfig):
        LSGPTPreTrainedModel.__init__(self, config)
        self.num_labels = config.num_labels
        self.model = LSGPTModel(config, counts_left_padding=False)
        dropout = getattr(config, "classifier_dropout", None)
        self.dropout = nn.Dropout(0.1 if dropout is None else dropout)
        self.score = nn.Linear(config.hidden_size, self.num_labels)
        self.post_init()


def is_lsgpt(model: nn.Module) -> bool:
    """Whether a model, bare or wrapped, is an LSGPT model."""
    # By name, because code loaded from a checkpoint defines its own classes.
    return any(type(module).__name__ == LSGPTAttention.__name__ for module in model.modules())


def attention_layers(model: nn.Module) -> list[nn.Module]:
    """The `LSGPTAttention`s of an LSGPT model, bare or wrapped, in order. Raises `ValueError` for other models."""
    layers = [module for module in model.modules() if type(module).__name__ == LSGPTAttention.__name__]
    if not layers:
        raise ValueError(f"`model` must be an LSGPT model; got {type(model).__name__}")
    return layers


# Transformers looks here to find out whether to shift a model's labels, for example for label smoothing in `Trainer`.
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[LSGPTConfig.model_type] = LSGPTForCausalLM.__name__

__all__ = [
    "LSGPTForCausalLM",
    "LSGPTForSequenceClassification",
    "LSGPTForTokenClassification",
    "LSGPTModel",
    "LSGPTPreTrainedModel",
]
