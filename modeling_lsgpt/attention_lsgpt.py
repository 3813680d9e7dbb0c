"""Long Short-attention: global heads (full causal) and local heads (causal sliding window) in one layer.

Shapes: B batch, T queries, S keys, H query heads, H_kv key/value heads, D `head_dim`.
"""

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask
from transformers import Cache
from transformers.integrations.sdpa_attention import repeat_kv
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from .configuration_lsgpt import GLOBAL, LOCAL, LSGPTConfig
from .linear_lsgpt import Linear
from .masking_lsgpt import Spans, engine_of_step
from .sdpa_lsgpt import blocked_attention_forward, causal_attention_forward, num_causal_parts
from .telemetry_lsgpt import max_logits


def attention_weights(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    softcap: float | None = None,
) -> torch.Tensor:
    """
    The weights `(B, H, T, S)` that each query gives to each key, in the queries' precision after a softmax in float32.

    Args:
        module: Has `num_key_value_groups`, the number of query heads that share a key/value head, and `training`.
        query (`(B, H, T, D)`), key (`(B, H_kv, S, D)`): Inputs of one group of heads.
        attention_mask (`(B, 1, T, S)`, *optional*): Boolean, True where a query may attend; or added to the logits.
            With a boolean one the weights of masked pairs are exactly 0, also where a query may see nothing at all.
        scaling: Factor of the dot products.
        dropout: Probability of dropping an attention weight.
        softcap: Bound `c` of the logits, `c * tanh(logits / c)`.
    """
    logits = torch.matmul(query, repeat_kv(key, module.num_key_value_groups).transpose(2, 3)) * scaling
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    is_boolean = attention_mask is not None and attention_mask.dtype == torch.bool
    if is_boolean:
        logits = logits.masked_fill(~attention_mask, torch.finfo(logits.dtype).min)
    elif attention_mask is not None:
        logits = logits + attention_mask
    weights = F.softmax(logits, dim=-1, dtype=torch.promote_types(logits.dtype, torch.float32))
    if is_boolean:
        weights = weights.masked_fill(~attention_mask, 0.0)
    return F.dropout(weights.to(query.dtype), p=dropout, training=module.training)


def eager_attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    softcap: float | None = None,
    **kwargs,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention written out, the reference for the other engines: outputs `(B, T, H, D)` and `attention_weights`."""
    weights = attention_weights(module, query, key, attention_mask, scaling, dropout, softcap)
    value = repeat_kv(value, module.num_key_value_groups)
    return torch.matmul(weights, value).transpose(1, 2).contiguous(), weights


def refuse_other_models(module: nn.Module, *args, **kwargs):
    """
    What Transformers finds under the name `triton`. LSGPT never gets here: where the engine's masks are `Spans`,
    `LSGPTAttention` calls the kernel, and elsewhere `engine_of_step` has another engine attend.
    """
    raise ValueError(f'attn_implementation="triton" is an engine of LSGPT; {type(module).__name__} cannot use it')


ALL_ATTENTION_FUNCTIONS.register("triton", refuse_other_models)


class HeadGroup(nn.Module):
    """
    The heads of one kind in one decoder layer. It owns one cache layer, and has the attributes that Transformers'
    attention functions read from the module that calls them.
    """

    def __init__(self, config: LSGPTConfig, kind: str, num_heads: int, layer_idx: int):
        super().__init__()
        self.config = config
        self.kind = kind
        self.layer_idx = layer_idx  # of the cache layer, not of the decoder layer
        self.num_heads = num_heads
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.num_key_value_heads = num_heads // self.num_key_value_groups
        self.sliding_window = config.sliding_window if kind == LOCAL else None
        self.scaling = config.head_dim**-0.5
        self.softcap = config.attn_logit_softcapping
        self.is_causal = True
        # Whether to compute in float32 under autocast and in half-precision models; a switch for comparisons.
        self.in_float32 = False
        # Running maximum of each head's |logit|, `(H,)` in float32, while somebody measures; see `telemetry_lsgpt`.
        self.max_logit: torch.Tensor | None = None

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_masks: dict,
        past_key_values: Cache | None = None,
        **kwargs,
    ) -> torch.Tensor:
        """
        Args:
            query (`(B, H, T, D)`), key (`(B, H_kv, T, D)`), value (`(B, H_kv, T, D)`): This group's heads.
            attention_masks: What `create_attention_masks` returns.
            past_key_values: The cache, updated here.
            **kwargs: Passed on to the engine.

        Returns:
            Outputs `(B, T, H, D)`.
        """
        key, value, _ = self.update_cache(key, value, past_key_values)
        self.measure_logits(query, key, attention_masks)
        return self.attend(query, key, value, attention_masks[self.kind], **kwargs)

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask, **kwargs) -> torch.Tensor:
        """
        Attention of `query` `(B, H, T, D)` over `key` and `value` `(B, H_kv, S, D)`, on the engine that `mask` is made
        for: outputs `(B, T, H, D)`. The heads are this group's, or all of the layer where the mask has a head axis.
        """
        if self.in_float32:
            with torch.autocast(query.device.type, enabled=False):
                output = self._attend(query.float(), key.float(), value.float(), mask, **kwargs)
            return output.to(query.dtype)
        return self._attend(query, key, value, mask, **kwargs)

    def _attend(self, query, key, value, mask, **kwargs) -> torch.Tensor:
        if isinstance(mask, torch.Tensor) and mask.ndim == 5:
            return blocked_attention_forward(query, key, value, mask, self.scaling, self.dropout)

        if kwargs.get("cache") is not None:
            raise ValueError(
                "Transformers' continuous batching keeps as many key/value heads in every cache layer, and those of "
                "LSGPT differ; use `generate`, or serve the model with vLLM"
            )
        engine = engine_of_step(self.config, query.shape[2])
        self._check_engine(engine, query)
        if engine == "sdpa" and mask is None and self.sliding_window is None and not self.dropout:
            num_parts = num_causal_parts(query, key, value)
            if num_parts > 1:
                return causal_attention_forward(query, key, value, self.scaling, num_parts)
        if self.softcap is not None:
            kwargs["softcap"] = self.softcap
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(engine, eager_attention_forward)
        output, _ = attend(
            self,
            query,
            key,
            value,
            mask,
            dropout=self.dropout,
            scaling=self.scaling,
            sliding_window=self.sliding_window,
            **kwargs,
        )
        return output

    @property
    def dropout(self) -> float:
        """Probability of dropping an attention weight, now."""
        return self.config.attention_dropout if self.training else 0.0

    def update_cache(
        self, key: torch.Tensor, value: torch.Tensor, past_key_values: Cache | None
    ) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Adds `(B, H_kv, T, D)` to this group's cache layer: keys and values to attend to, first one's position."""
        if past_key_values is None:
            return key, value, 0
        length, offset = past_key_values.get_mask_sizes(key.shape[2], self.layer_idx)
        key, value = past_key_values.update(key, value, self.layer_idx)
        # While it records the past for a rollback, Transformers 5.17's sliding layer returns more than it announced.
        return key[:, :, -length:], value[:, :, -length:], offset

    def measure_logits(self, query: torch.Tensor, key: torch.Tensor, attention_masks: dict):
        """Raises the running maxima to those of `query` and `key`, as an engine gets them, while somebody measures."""
        if self.max_logit is None:
            return
        mask = attention_masks[self.kind]
        is_dense = isinstance(mask, torch.Tensor) and mask.ndim == 4
        limits = {name: attention_masks.get(name) for name in ("padding_mask", "documents")}
        limits = {name: None if limit is None else limit[:, -key.shape[2] :] for name, limit in limits.items()}
        self.raise_max_logit(
            max_logits(query, key, self.scaling, self.sliding_window, mask if is_dense else None, **limits)
        )

    def raise_max_logit(self, new: torch.Tensor):
        """Raises the running maxima to those of a forward pass, `(H,)`."""
        self.max_logit = torch.maximum(self.max_logit.to(new.device), new)

    def _check_engine(self, engine: str, query: torch.Tensor):
        if engine == "flex_attention" and query.device.type == "cpu" and query.requires_grad:
            raise ValueError(
                "PyTorch's FlexAttention has no backward pass on the CPU; train with "
                'attn_implementation="sdpa", or run the model under torch.no_grad()'
            )
        is_half = query.dtype in (torch.float16, torch.bfloat16) or torch.is_autocast_enabled(query.device.type)
        if "flash" in engine and not is_half:
            raise ValueError(
                f"FlashAttention computes in float16 or bfloat16; got {query.dtype}. Load the model with "
                'dtype=torch.bfloat16, or use attn_implementation="sdpa"'
            )


class LSGPTAttention(nn.Module):
    """Multi-head attention whose heads come in two groups: first the global heads, then the local ones."""

    def __init__(self, config: LSGPTConfig, layer_idx: int):
        super().__init__()
        self.config = config
        self.head_dim = config.head_dim
        q_size, kv_size = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
        self.q_proj = Linear(config.hidden_size, q_size, bias=config.use_bias)
        self.k_proj = Linear(config.hidden_size, kv_size, bias=config.use_bias)
        self.v_proj = Linear(config.hidden_size, kv_size, bias=config.use_bias)
        self.o_proj = Linear(q_size, config.hidden_size, bias=config.use_bias)
        self.o_proj.writes_to_residual_stream = True  # for `_init_weights`
        self.q_norm = nn.RMSNorm(config.head_dim, eps=config.layer_norm_eps) if config.qk_norm else None
        self.k_norm = nn.RMSNorm(config.head_dim, eps=config.layer_norm_eps) if config.qk_norm else None
        first_cache_layer = sum(len(groups) for groups in config.head_groups[:layer_idx])
        self.head_groups = nn.ModuleList(
            HeadGroup(config, kind, num_heads, first_cache_layer + i)
            for i, (kind, num_heads) in enumerate(config.head_groups[layer_idx].items())
        )

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: dict,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        past_key_values: Cache | None = None,
        **kwargs,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """
        Args:
            hidden_states (`(B, T, hidden_size)`): Normalised input of the layer.
            attention_mask: What `create_attention_masks` returns.
            position_embeddings: Cosines and sines `(B, T, D)` of rotary positions, or `None`.
            past_key_values: The cache, updated here.

        Returns:
            Outputs `(B, T, hidden_size)`, and the weights `(B, H, T, S)` if `output_attentions` asks for them on the
            `eager` engine.
        """
        input_shape = hidden_states.shape[:-1]
        hidden_shape = (*input_shape, -1, self.head_dim)
        query = self.q_proj(hidden_states).view(hidden_shape).transpose(1, 2)
        key = self.k_proj(hidden_states).view(hidden_shape).transpose(1, 2)
        value = self.v_proj(hidden_states).view(hidden_shape).transpose(1, 2)
        if self.q_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        if position_embeddings is not None:
            query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        output, weights = self.attend(query, key, value, attention_mask, past_key_values, **kwargs)
        return self.o_proj(output.reshape(*input_shape, -1)), weights

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_masks: dict,
        past_key_values: Cache | None = None,
        **kwargs,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """
        Long Short-attention of `query` `(B, H, T, D)` over `key` and `value` `(B, H_kv, T, D)`: outputs
        `(B, T, H, D)`, and the weights `(B, H, T, S)` if `output_attentions` asks for them on the `eager` engine.
        """
        kv_heads = [group.num_key_value_heads for group in self.head_groups]
        heads = list(
            zip(
                self.head_groups,
                query.split([group.num_heads for group in self.head_groups], dim=1),
                key.split(kv_heads, dim=1),
                value.split(kv_heads, dim=1),
            )
        )
        asked = kwargs.get("output_attentions", self.config.output_attentions)
        if asked and self.config._attn_implementation == "eager":
            return self._attend_with_weights(heads, attention_masks, past_key_values)
        first_mask = attention_masks[self.head_groups[0].kind]
        if isinstance(first_mask, Spans):
            return self._attend_fused(query, key, value, heads, attention_masks, past_key_values), None
        if isinstance(first_mask, BlockMask) and len(heads) == 2 and first_mask is attention_masks[LOCAL]:
            for group, q, k, v in heads:
                group.update_cache(k, v, past_key_values)  # nothing was cached, so these are the keys to attend to
                group.measure_logits(q, k, attention_masks)
            return self.head_groups[0].attend(query, key, value, first_mask, **kwargs), None
        outputs = [group(q, k, v, attention_masks, past_key_values, **kwargs) for group, q, k, v in heads]
        return torch.cat(outputs, dim=2), None

    def _attend_fused(self, query, key, value, heads, attention_masks, past_key_values) -> torch.Tensor:
        """The `triton` engine: one launch for both kinds of heads, or one for each where they have cached keys."""
        from .triton_lsgpt import fused_attention_forward  # noqa: PLC0415 (not everybody has Triton)

        groups = list(self.head_groups)
        if groups[0].dropout or groups[0].softcap is not None:
            what = "attention_dropout" if groups[0].dropout else "attn_logit_softcapping"
            raise ValueError(
                f"the `triton` engine cannot do `{what}`, which is {getattr(self.config, what)} here; use "
                'attn_implementation="eager", or do without'
            )
        cached = [group.update_cache(k, v, past_key_values)[:2] for group, _, k, v in heads]
        if all(k.shape[2] == query.shape[2] for k, _ in cached):
            calls = [(groups, query, key, value)]
        else:
            calls = [([group], q, k, v) for (group, q, _, _), (k, v) in zip(heads, cached)]
        outputs = []
        for groups, q, k, v in calls:
            dtype = torch.float32 if groups[0].in_float32 else v.dtype  # under autocast, queries may be more precise
            output, max_logits = fused_attention_forward(
                *(x.to(dtype) for x in (q, k, v)),
                attention_masks[groups[0].kind],
                num_global_heads=sum(group.num_heads for group in groups if group.kind == GLOBAL),
                window=self.config.sliding_window,
                scaling=groups[0].scaling,
                measure=groups[0].max_logit is not None,
            )
            outputs.append(output.to(v.dtype))
            if max_logits is not None:
                for group, new in zip(groups, max_logits.split([group.num_heads for group in groups])):
                    group.raise_max_logit(new)
        return torch.cat(outputs, dim=2) if len(outputs) > 1 else outputs[0]

    def _attend_with_weights(self, heads, attention_masks, past_key_values):
        """
        The eager engine, through one tensor of weights for all heads: those of local heads, whose cache begins later,
        on the full key axis. The outputs are computed from that tensor, so gradients reach what the caller is given.
        """
        weights, values, offsets = [], [], []
        for group, query, key, value in heads:
            key, value, offset = group.update_cache(key, value, past_key_values)
            group.measure_logits(query, key, attention_masks)
            mask = attention_masks[group.kind]
            weights.append(attention_weights(group, query, key, mask, group.scaling, group.dropout, group.softcap))
            values.append(repeat_kv(value, group.num_key_value_groups))
            offsets.append(offset)
        length = max(offset + value.shape[2] for offset, value in zip(offsets, values))
        joined = torch.cat([F.pad(w, (o, length - o - w.shape[-1])) for w, o in zip(weights, offsets)], dim=1)
        parts = joined.split([group.num_heads for group in self.head_groups], dim=1)
        outputs = [w[..., o : o + v.shape[2]] @ v for w, o, v in zip(parts, offsets, values)]
        return torch.cat(outputs, dim=1).transpose(1, 2), joined
