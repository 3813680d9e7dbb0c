"""LSGPT built from vLLM's parallel layers and paged attention.

A decoder layer has one `Attention` module for each kind of head that it has. To vLLM these are separate layers of the
key/value cache: its hybrid cache manager keeps all blocks of the global heads, and frees those of the local heads that
have left the window.

Shapes: T tokens of all requests in a step, D `head_dim`, R the number of tensor-parallel ranks.
"""

import inspect
import re
from collections.abc import Iterable
from fractions import Fraction

import torch
from torch import nn
from torch.nn import functional as F
from transformers.activations import ACT2FN
from vllm.compilation.decorators import support_torch_compile
from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.layernorm import LayerNorm, RMSNorm
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.weight_utils import sharded_weight_loader
from vllm.model_executor.models.interfaces import SupportsQuant
from vllm.model_executor.models.utils import AutoWeightsLoader, WeightsMapper, maybe_prefix
from vllm.model_executor.utils import set_weight_attrs
from vllm.sequence import IntermediateTensors
from vllm.v1.attention.selector import get_attn_backend

from lsgpt.modeling_lsgpt.configuration_lsgpt import LOCAL, LSGPTConfig
from lsgpt.modeling_lsgpt.modeling_lsgpt import LSGPTSinusoidalPositions


def supported_head_size(head_dim: int, cache_dtype: str, has_sinks: bool, has_window: bool) -> int:
    """
    Returns the smallest head width of the attention backend that fits `head_dim`; heads are padded to it with zeros.
    Heads with a window may have a backend of their own.

    Raises:
        ValueError: If there is none, or the heads have sinks and the backend does not support them.
    """
    options = {"has_sink": has_sinks, "has_sliding_window": has_window}
    backend = get_attn_backend(head_dim, torch.get_default_dtype(), cache_dtype, **options)
    # Checked here, because some backends ignore arguments that they do not know.
    if has_sinks and "sinks" not in inspect.signature(backend.get_impl_cls()).parameters:
        raise ValueError(
            "`attention_sinks` must be False for attention backends of vLLM without sinks; got True, and "
            f"{backend.get_name()} has none (choose another one with `--attention-backend`)"
        )
    sizes = backend.get_supported_head_sizes() or [head_dim]  # a backend without a list has already accepted it
    if head_dim > max(sizes):
        raise ValueError(
            f"`head_dim` must be at most {max(sizes)} for vLLM's attention backend {backend.get_name()}; "
            f"got {head_dim}"
        )
    return min(size for size in sizes if size >= head_dim)


class LSGPTAttention(nn.Module):
    """Attention with two groups of heads, each with its own cache: first the global heads, then the local ones."""

    def __init__(self, vllm_config: VllmConfig, layer_idx: int, prefix: str):
        super().__init__()
        config: LSGPTConfig = vllm_config.model_config.hf_config
        quant_config, ranks = vllm_config.quant_config, get_tensor_model_parallel_world_size()
        heads, kv_heads, self.head_dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        groups = heads // kv_heads  # query heads that share a key/value head
        # Each rank has the same share of each kind of head; `load_weights` orders the heads accordingly.
        self.qkv_proj = QKVParallelLinear(
            config.hidden_size,
            self.head_dim,
            heads,
            kv_heads,
            bias=config.has_bias("qkv_proj"),
            quant_config=quant_config,
            prefix=f"{prefix}.qkv_proj",
        )
        self.o_proj = RowParallelLinear(
            heads * self.head_dim,
            config.hidden_size,
            bias=config.has_bias("o_proj"),
            quant_config=quant_config,
            prefix=f"{prefix}.o_proj",
        )
        self.q_norm = RMSNorm(self.head_dim, eps=config.layer_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(self.head_dim, eps=config.layer_norm_eps) if config.qk_norm else None
        self.rotary_emb = None
        if config.position_embedding_type == "rope":
            rope = dict(config.rope_parameters)
            if rope.get("factor") is not None:
                rope["factor"] = float(rope["factor"])  # vLLM takes a whole number for a list
            self.rotary_emb = get_rope(self.head_dim, config.max_position_embeddings, rope_parameters=rope)

        num_heads_by_kind = config.num_heads_by_kind[layer_idx]
        self.sinks = None
        if config.attention_sinks and LOCAL in num_heads_by_kind:
            # Rank r gets the r-th piece, as with its local heads; see `in_rank_order`.
            self.sinks = nn.Parameter(torch.zeros(num_heads_by_kind[LOCAL] // ranks), requires_grad=False)
            set_weight_attrs(self.sinks, {"weight_loader": sharded_weight_loader(0)})

        self.attention_by_kind = nn.ModuleDict()
        self.q_sizes, self.kv_sizes = [], []  # widths of each kind on this rank
        for kind, num_heads in num_heads_by_kind.items():
            sinks = {} if self.sinks is None or kind != LOCAL else {"sinks": self.sinks}
            self.attention_by_kind[kind] = Attention(
                num_heads // ranks,
                supported_head_size(self.head_dim, vllm_config.cache_config.cache_dtype, bool(sinks), kind == LOCAL),
                self.head_dim**-0.5,
                num_kv_heads=num_heads // groups // ranks,
                cache_config=vllm_config.cache_config,
                quant_config=quant_config,
                logits_soft_cap=config.attn_logit_softcapping,
                # The last `sliding_window` keys, including the query's own, which is vLLM's convention, too.
                per_layer_sliding_window=config.sliding_window if kind == LOCAL else None,
                prefix=f"{prefix}.{kind}",
                **sinks,
            )
            self.q_sizes.append(num_heads // ranks * self.head_dim)
            self.kv_sizes.append(num_heads // groups // ranks * self.head_dim)

    def forward(self, hidden_states: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Maps `(T, hidden_size)` at `positions` `(T,)` to the same shape."""
        qkv, _ = self.qkv_proj(hidden_states)
        query, key, value = qkv.split([sum(self.q_sizes), sum(self.kv_sizes), sum(self.kv_sizes)], dim=-1)
        if self.q_norm is not None:
            query = self.q_norm(query.unflatten(-1, (-1, self.head_dim))).flatten(-2)
            key = self.k_norm(key.unflatten(-1, (-1, self.head_dim))).flatten(-2)
        if self.rotary_emb is not None:
            query, key = self.rotary_emb(positions, query, key)
        outputs = [
            self._attend(group, q, k, v)
            for group, q, k, v in zip(
                self.attention_by_kind.values(),
                query.split(self.q_sizes, dim=-1),
                key.split(self.kv_sizes, dim=-1),
                value.split(self.kv_sizes, dim=-1),
            )
        ]
        output, _ = self.o_proj(torch.cat(outputs, dim=-1))
        return output

    def _attend(self, group: Attention, *heads: torch.Tensor) -> torch.Tensor:
        padding = group.head_size - self.head_dim
        if padding == 0:
            return group(*heads)
        padded = [F.pad(x.unflatten(-1, (-1, self.head_dim)), (0, padding)).flatten(-2) for x in heads]
        output = group(*padded).unflatten(-1, (-1, group.head_size))
        return output[..., : self.head_dim].flatten(-2)


class LSGPTMLP(nn.Module):
    """The position-wise feed-forward network: up, activation (of a gate, if there is one), down."""

    def __init__(self, vllm_config: VllmConfig, prefix: str):
        super().__init__()
        config, quant_config = vllm_config.model_config.hf_config, vllm_config.quant_config
        self.gated = config.gated_mlp
        if self.gated:
            self.gate_up_proj = MergedColumnParallelLinear(
                config.hidden_size,
                [config.intermediate_size] * 2,
                bias=config.has_bias("mlp"),
                quant_config=quant_config,
                prefix=f"{prefix}.gate_up_proj",
            )
        else:
            self.up_proj = ColumnParallelLinear(
                config.hidden_size,
                config.intermediate_size,
                bias=config.has_bias("mlp"),
                quant_config=quant_config,
                prefix=f"{prefix}.up_proj",
            )
        self.down_proj = RowParallelLinear(
            config.intermediate_size,
            config.hidden_size,
            bias=config.has_bias("mlp"),
            quant_config=quant_config,
            prefix=f"{prefix}.down_proj",
        )
        self.act_fn = ACT2FN[config.hidden_act]  # vLLM has fewer, both gated and not

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        if self.gated:
            gate_up, _ = self.gate_up_proj(hidden_states)
            gate, up = gate_up.chunk(2, dim=-1)
            hidden_states = self.act_fn(gate) * up
        else:
            up, _ = self.up_proj(hidden_states)
            hidden_states = self.act_fn(up)
        hidden_states, _ = self.down_proj(hidden_states)
        return hidden_states


def make_norm(config: LSGPTConfig) -> nn.Module:
    """Makes a norm for the residual stream."""
    if config.norm_type == "rms_norm":
        return RMSNorm(config.hidden_size, eps=config.layer_norm_eps)
    return LayerNorm(config.hidden_size, eps=config.layer_norm_eps, bias=config.has_bias("norm"))


class LSGPTDecoderLayer(nn.Module):
    """One pre-norm block: attention and MLP, each with a norm before it and a residual connection around it."""

    def __init__(self, vllm_config: VllmConfig, layer_idx: int, prefix: str):
        super().__init__()
        config = vllm_config.model_config.hf_config
        self.input_layernorm = make_norm(config)
        self.self_attn = LSGPTAttention(vllm_config, layer_idx, f"{prefix}.self_attn")
        self.post_attention_layernorm = make_norm(config)
        self.mlp = LSGPTMLP(vllm_config, f"{prefix}.mlp")

    def forward(self, hidden_states: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Maps `(T, hidden_size)` at `positions` `(T,)` to the same shape."""
        hidden_states = hidden_states + self.self_attn(self.input_layernorm(hidden_states), positions)
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


@support_torch_compile
class LSGPTModel(nn.Module):
    """The decoder without a head: token ids to hidden states."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        super().__init__()
        config: LSGPTConfig = vllm_config.model_config.hf_config
        self.config = config
        self.embed_tokens = VocabParallelEmbedding(
            config.vocab_size,
            config.hidden_size,
            quant_config=vllm_config.quant_config,
            prefix=f"{prefix}.embed_tokens",
        )
        self.embed_positions = None
        if config.position_embedding_type == "learned":
            self.embed_positions = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        elif config.position_embedding_type == "sinusoidal":
            self.embed_positions = LSGPTSinusoidalPositions(config.hidden_size)
        self.layers = nn.ModuleList(
            LSGPTDecoderLayer(vllm_config, i, f"{prefix}.layers.{i}") for i in range(config.num_hidden_layers)
        )
        self.norm = make_norm(config)

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Maps token ids `(T,)`, or embeddings `(T, hidden_size)`, at `positions` `(T,)` to `(T, hidden_size)`."""
        hidden_states = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if self.embed_positions is not None:
            hidden_states = hidden_states + self.embed_positions(positions).to(hidden_states.dtype)
        for layer in self.layers:
            hidden_states = layer(hidden_states, positions)
        return self.norm(hidden_states)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """
        Loads a checkpoint's tensors, and returns the names of the parameters that it filled.

        Raises:
            ValueError: If a tensor does not fit how vLLM quantizes its layer, or cannot be divided among the ranks.
        """
        # For each name in a checkpoint, vLLM's fused layer and the part of it that the tensor fills.
        stacked: dict[str, tuple[str, str | int]] = {f".{name}_proj": (".qkv_proj", name) for name in "qkv"}
        if self.config.gated_mlp:
            stacked |= {".gate_proj": (".gate_up_proj", 0), ".up_proj": (".gate_up_proj", 1)}
        mapper = WeightsMapper(orig_to_new_stacked=stacked)
        ranks = get_tensor_model_parallel_world_size()
        parameters = dict(self.named_parameters())

        def prepare():
            for name, weight in weights:
                parameter = parameters.get(mapper.map_name(name))
                check_fits(name, weight, parameter)
                yield name, in_rank_order(name, weight, parameter, self.config, ranks)

        return AutoWeightsLoader(self).load_weights(prepare(), mapper=mapper)


def check_fits(name: str, weight: torch.Tensor, parameter: nn.Parameter | None):
    """
    Checks a checkpoint's tensor against the parameter that it is to fill. vLLM itself only warns if one of them is
    quantized and the other is not.

    Raises:
        ValueError: If they do not fit, or the tensor belongs to a quantized key/value cache.
    """
    if re.fullmatch(r".*\.self_attn\.(attn\.|[qkv]_proj\.)?[qkv]_(scale|zero_point)", name):
        raise ValueError(
            f"a checkpoint must not have scales of the key/value cache; got `{name}` (quantize without "
            "`kv_cache_scheme`; vLLM's option `--kv-cache-dtype` needs no scales)"
        )
    match = re.fullmatch(r".*\.(self_attn|mlp)\.\w+_proj\.(.+)", name)
    if match is None or match[2] == "bias":  # GPTQ writes biases of zeros, which vLLM ignores
        return
    if parameter is None or (match[2] == "weight" and is_quantized(weight) != is_quantized(parameter)):
        raise ValueError(
            f"a checkpoint's `quantization_config` must say which layers are quantized, and how; got `{name}` of type "
            f"{weight.dtype} for a layer that vLLM quantizes otherwise or not at all (list the layers that are not "
            "quantized, at least `lm_head`: for compressed-tensors under `ignore`, for AWQ under "
            "`modules_to_not_convert`)"
        )


def is_quantized(weight: torch.Tensor) -> bool:
    """Whether a matrix has integers or floating-point numbers of 8 bits."""
    return not weight.is_floating_point() or weight.dtype.itemsize == 1


def in_rank_order(
    name: str, weight: torch.Tensor, parameter: nn.Parameter | None, config: LSGPTConfig, ranks: int
) -> torch.Tensor:
    """
    Orders the heads in a tensor of an attention projection for tensor parallelism. vLLM gives the r-th contiguous
    piece of them to rank r, so each piece must have its share of the global heads, followed by its share of the local
    ones. This holds for matrices as for what quantization adds to them, such as scales; vLLM's `parameter` says which
    of its axes is divided among the ranks.

    Raises:
        ValueError: If the tensor cannot be divided in this way.
    """
    match = re.fullmatch(r"layers\.(\d+)\.self_attn\.([qkvo])_proj\.(.+)", name)
    if ranks == 1 or match is None or parameter is None or weight.numel() == 1 or match[3] == "weight_shape":
        return weight
    # The output projection has the heads as its inputs.
    heads, others = ("input_dim", "output_dim") if match[2] == "o" else ("output_dim", "input_dim")
    dim, other = getattr(parameter, heads, None), getattr(parameter, others, None)
    if dim is None and other is not None and weight.numel() == weight.shape[other]:
        return weight  # has no axis of heads
    groups = 1 if match[2] in "qo" else config.num_attention_heads // config.num_key_value_heads
    counts = [num_heads // groups for num_heads in config.num_heads_by_kind[int(match[1])].values()]
    if dim is not None:
        # Entries along the axis cover this many channels each: 1, or more in packed integers and in groups' scales.
        channels, size = sum(counts) * config.head_dim, weight.shape[dim]
        width = Fraction(channels, size)
        if getattr(parameter, "packed_dim", None) == dim:
            width = Fraction(parameter.packed_factor)
        # The pieces that keep their order are each rank's heads of one kind.
        pieces = [Fraction(count // ranks * config.head_dim) / width for count in counts]
        if size * width == channels and all(piece.denominator == 1 for piece in pieces):
            kinds = weight.split([piece.numerator * ranks for piece in pieces], dim)
            kinds = [kind.unflatten(dim, (ranks, -1)) for kind in kinds]
            return torch.cat(kinds, dim + 1).flatten(dim, dim + 1)
    raise ValueError(
        f"`tensor_parallel_size` must be 1 for this checkpoint; got {ranks}, and `{name}` of shape "
        f"{tuple(weight.shape)} cannot be divided among them, as it does not keep the heads of layer {match[1]} "
        f"({', '.join(f'{count} {kind}' for kind, count in zip(config.num_heads_by_kind[int(match[1])], counts))}, of "
        f"{config.head_dim} channels each) apart: quantize with groups of at most `head_dim` channels, or one scale "
        "for each channel"
    )


class LSGPTForCausalLM(nn.Module, SupportsQuant):
    """The decoder with a language-modelling head, with the methods that vLLM calls."""

    # Where a checkpoint's `quantization_config` names layers, it names them as Transformers does.
    packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        super().__init__()
        config: LSGPTConfig = vllm_config.model_config.hf_config
        self.config = config
        self.model = LSGPTModel(vllm_config=vllm_config, prefix=maybe_prefix(prefix, "model"))
        self.lm_head = ParallelLMHead(
            config.vocab_size,
            config.hidden_size,
            quant_config=vllm_config.quant_config,
            prefix=maybe_prefix(prefix, "lm_head"),
        )
        if config.tie_word_embeddings:
            self.lm_head = self.lm_head.tie_weights(self.model.embed_tokens)
        self.logits_processor = LogitsProcessor(config.vocab_size)

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Maps token ids `(T,)` to embeddings `(T, hidden_size)`, without positions."""
        return self.model.embed_tokens(input_ids)

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `LSGPTModel`."""
        return self.model(input_ids, positions, intermediate_tensors, inputs_embeds)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        """Maps hidden states `(N, hidden_size)` to logits `(N, vocab_size)`."""
        return self.logits_processor(self.lm_head, hidden_states)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Loads a checkpoint's tensors, and returns the names of the parameters that it filled."""
        return AutoWeightsLoader(self).load_weights(weights)
