"""Long Short-attention: global heads (full causal) and local heads (causal sliding window) in one layer.

Shapes: B batch, T queries, S keys, H query heads, H_kv key/value heads, D `head_dim`.
"""

import torch
from torch import nn
from torch.nn import functional as F
from transformers import Cache
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from .configuration_lsgpt import LOCAL, LSGPTConfig
from .cpu_lsgpt import Linear
from .engines_lsgpt import NO_SINK, Attended, AttentionPlan, Heads
from .telemetry_lsgpt import max_logits


class HeadGroup(nn.Module):
    """
    The heads of one kind in one decoder layer. A group owns one cache layer and has the attributes that Transformers'
    attention functions read from the module that calls them.
    """

    def __init__(self, config: LSGPTConfig, kind: str, num_heads: int, layer_idx: int):
        super().__init__()
        self.config = config
        self.kind = kind
        self.layer_idx = layer_idx  # index of the cache layer, not of the decoder layer
        self.num_heads = num_heads
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.num_key_value_heads = num_heads // self.num_key_value_groups
        self.scaling = config.head_dim**-0.5
        self.softcap = config.attn_logit_softcapping
        self.is_causal = True

    @property
    def sliding_window(self) -> int | None:
        """Number of keys that a query sees; `None` for global heads."""
        return self.config.sliding_window if self.kind == LOCAL else None

    @property
    def dropout(self) -> float:
        """Probability of dropping an attention weight; 0 outside training."""
        return self.config.attention_dropout if self.training else 0.0


class LSGPTAttention(nn.Module):
    """Multi-head attention with two groups of heads: first the global heads, then the local ones."""

    def __init__(self, config: LSGPTConfig, layer_idx: int):
        super().__init__()
        self.config = config
        self.head_dim = config.head_dim
        q_size, kv_size = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
        self.q_proj = Linear(config.hidden_size, q_size, bias=config.has_bias("qkv_proj"))
        self.k_proj = Linear(config.hidden_size, kv_size, bias=config.has_bias("qkv_proj"))
        self.v_proj = Linear(config.hidden_size, kv_size, bias=config.has_bias("qkv_proj"))
        self.o_proj = Linear(q_size, config.hidden_size, bias=config.has_bias("o_proj"))
        self.o_proj.writes_to_residual_stream = True  # for `_init_weights`
        self.q_norm = nn.RMSNorm(config.head_dim, eps=config.layer_norm_eps) if config.qk_norm else None
        self.k_norm = nn.RMSNorm(config.head_dim, eps=config.layer_norm_eps) if config.qk_norm else None
        first_cache_layer = sum(len(groups) for groups in config.head_groups[:layer_idx])
        self.head_groups = nn.ModuleList(
            HeadGroup(config, kind, num_heads, first_cache_layer + i)
            for i, (kind, num_heads) in enumerate(config.head_groups[layer_idx].items())
        )
        num_local_heads = config.head_groups[layer_idx].get(LOCAL, 0)
        # One learned logit per local head, which belongs to no token.
        self.sinks = nn.Parameter(torch.zeros(num_local_heads)) if config.attention_sinks and num_local_heads else None
        # Whether to compute attention in float32 even under autocast and in half-precision models; for comparisons.
        self.in_float32 = False
        # Running maximum of each head's |logit|, `(H,)` in float32; `None` if not measured. See `telemetry_lsgpt`.
        self.max_logits: torch.Tensor | None = None

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_plan: AttentionPlan,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        past_key_values: Cache | None = None,
        **kwargs,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """
        Args:
            hidden_states (`(B, T, hidden_size)`): Normalised input of the layer.
            attention_plan: The attention engine, and which keys each query may attend to.
            position_embeddings: Cosines and sines `(B, T, D)` of the rotary embedding, or `None`.
            past_key_values: The cache, updated here.

        Returns:
            Outputs `(B, T, hidden_size)`, and the weights `(B, H, T, S)` if `output_attentions` asks for them on the
            `eager` engine.
        """
        heads = self.project(hidden_states, position_embeddings)
        by_kind = [each.update_cache(past_key_values) for each in heads.split()]
        attended = self.attend(attention_plan.calls(heads, by_kind), attention_plan, **kwargs)
        if self.max_logits is not None:
            self.measure(by_kind, attention_plan, attended)
        return self.o_proj(attended.output.flatten(2)), attended.weights

    def project(
        self, hidden_states: torch.Tensor, position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None
    ) -> Heads:
        """Projects the new tokens to queries, keys and values of all heads, with QK-norm and RoPE if configured."""
        hidden_shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        query = self.q_proj(hidden_states).view(hidden_shape).transpose(1, 2)
        key = self.k_proj(hidden_states).view(hidden_shape).transpose(1, 2)
        value = self.v_proj(hidden_states).view(hidden_shape).transpose(1, 2)
        if self.q_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        if position_embeddings is not None:
            query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        sinks = self.sinks
        if sinks is not None:
            sinks = F.pad(sinks, (query.shape[1] - len(sinks), 0), value=NO_SINK)
        return Heads(tuple(self.head_groups), query, key, value, sinks)

    def attend(self, calls: list[Heads], plan: AttentionPlan, **kwargs) -> Attended:
        """Runs `AttentionPlan.attend`, in float32 if `in_float32` is set."""
        measure = self.max_logits is not None
        if not self.in_float32:
            return plan.attend(calls, measure, **kwargs)
        query = calls[0].query
        with torch.autocast(query.device.type, enabled=False):
            attended = plan.attend([heads.to(torch.float32) for heads in calls], measure, **kwargs)
        return attended._replace(output=attended.output.to(query.dtype))

    def measure(self, by_kind: list[Heads], plan: AttentionPlan, attended: Attended):
        """Updates the running maxima; computes those of this forward pass if the engine has not returned any."""
        new = attended.max_logits
        if new is None:
            new = torch.cat(
                [max_logits(each.query, each.key, each.group.scaling, plan.visibility[each.kind]) for each in by_kind]
            )
        self.max_logits = torch.maximum(self.max_logits.to(new.device), new)
