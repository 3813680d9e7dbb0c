"""The attention engines, one of which is chosen per forward pass according to `attn_implementation`.

An engine is one class and one entry of `ENGINES`. It rejects what it does not support, converts a `Visibility` into
the form that it needs, such as a dense mask, and computes attention. `docs/attention.md` shows how to add one.

Shapes: B batch, T queries, S keys, H query heads, H_kv key/value heads, D `head_dim`.
"""

import inspect
import warnings
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention
from transformers import Cache
from transformers.integrations.flex_attention import compile_friendly_flex_attention
from transformers.integrations.sdpa_attention import repeat_kv
from transformers.modeling_flash_attention_utils import lazy_import_flash_attention
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils.import_utils import is_torchdynamo_exporting, is_tracing

from .configuration_lsgpt import GLOBAL, LOCAL, LSGPTConfig
from .cpu_lsgpt import causal_attention_forward, head_dim_to_compute, num_causal_parts
from .local_lsgpt import blocked_attention_forward, blocked_mask, sink_attention_forward
from .visibility_lsgpt import Visibility


NO_SINK = -1e4
"""Logit for heads without a sink when all heads of a layer are computed together; its weight is exactly 0."""


class Heads(NamedTuple):
    """Queries, keys and values of one kind of head in a layer, or of all its heads with the global ones first."""

    groups: tuple[nn.Module, ...]
    """The `HeadGroup`s of these heads. Transformers' attention functions read the attributes of the first one."""
    query: torch.Tensor
    """`(B, H, T, D)`."""
    key: torch.Tensor
    """`(B, H_kv, S, D)`, like `value`: of the cached and the new tokens."""
    value: torch.Tensor
    sinks: torch.Tensor | None = None
    """`(H,)`, one extra logit per head in the softmax's denominator, without a value; `None` if no head has one."""

    @property
    def group(self) -> nn.Module:
        """The first group, from which attributes shared by all groups of a layer can be read."""
        return self.groups[0]

    @property
    def kind(self) -> str:
        """The kind of the first group, the key under which an `AttentionPlan` has the entries for these heads."""
        return self.group.kind

    def split(self) -> list["Heads"]:
        """Splits the heads by kind."""
        num_heads = [group.num_heads for group in self.groups]
        kv_heads = [group.num_key_value_heads for group in self.groups]
        queries, keys, values = (x.split(n, 1) for x, n in zip(self[1:4], (num_heads, kv_heads, kv_heads)))
        result = [Heads((group,), *tensors) for group, *tensors in zip(self.groups, queries, keys, values)]
        if self.sinks is not None:  # then the last group is local
            result[-1] = result[-1]._replace(sinks=self.sinks[-num_heads[-1] :])
        return result

    def update_cache(self, past_key_values: Cache | None) -> "Heads":
        """
        Adds keys and values to the cache layer of these heads, and returns the heads with all keys to attend to.
        Raises `ValueError` if the cache is not of this model.
        """
        if past_key_values is None:
            return self
        layer_idx = self.group.layer_idx
        if layer_idx < len(past_key_values.layers):
            layer = past_key_values.layers[layer_idx]
            if layer.is_initialized and layer.keys.shape[1] != self.key.shape[1]:
                raise ValueError(
                    "`past_key_values` must be filled by this model, whose cache layers have different numbers of "
                    f"key/value heads; layer {layer_idx} has {layer.keys.shape[1]} instead of {self.key.shape[1]}. "
                    "(PEFT's prefix tuning fills all layers alike; use prompt tuning or LoRA)"
                )
        length, _ = past_key_values.get_mask_sizes(self.key.shape[2], layer_idx)
        key, value = past_key_values.update(self.key, self.value, layer_idx)
        # While it records the past for a rollback, Transformers 5.17's sliding layer returns more than `length` keys.
        return self._replace(key=key[:, :, -length:], value=value[:, :, -length:])

    @property
    def num_global_heads(self) -> int:
        """Number of global query heads."""
        return sum(group.num_heads for group in self.groups if group.kind == GLOBAL)

    def to(self, dtype: torch.dtype) -> "Heads":
        """Returns the heads in another precision."""
        return Heads(self.groups, *(x if x is None else x.to(dtype) for x in self[1:]))


class Attended(NamedTuple):
    """The result of an engine."""

    output: torch.Tensor
    """`(B, T, H, D)`."""
    weights: torch.Tensor | None = None
    """`(B, H, T, S)`, if requested; only `EagerEngine` returns them."""
    max_logits: torch.Tensor | None = None
    """The largest `|q . k * scaling|` of each head, `(H,)` in float32, if the engine computes it on the way."""


class Engine:
    """Base class of engines. Subclasses implement `attend`, and override other methods where they differ."""

    def refuse(self, config: LSGPTConfig, heads: Heads):
        """Raises `ValueError`, with a remedy, if the engine does not support the model or the tensors."""

    def form(self, visibility: Visibility) -> Any:
        """
        Converts a visibility to the form that `attend` takes. Called once per forward pass for each kind of head.
        Raises `ValueError`, with a remedy, if the engine has no form for it.
        """
        return visibility.dense()

    def form_of_all_heads(self, config: LSGPTConfig, visibility: dict[str, Visibility]) -> Any:
        """
        The form with which one call per layer computes all heads, if nothing has been cached; `None` if the engine
        needs a separate call for each kind of head.
        """
        return None

    def attend(self, heads: Heads, form: Any, measure: bool = False, **kwargs) -> Attended:
        """
        Computes attention for one kind of head, or for all heads if `form` is from `form_of_all_heads`. `measure`
        requests `max_logits` from engines that have them; `kwargs` come from the caller of the model.
        """
        raise NotImplementedError


def eager_attention_weights(heads: Heads, mask: torch.Tensor) -> torch.Tensor:
    """
    The weights `(B, H, T, S)` of each key for each query, in the queries' precision after a softmax in float32.

    `mask` `(B or 1, 1, T, S)` is boolean, True where a query may attend, or additive. With a boolean mask, the weights
    of masked pairs are exactly 0, even if a query may see nothing at all. With a sink, a query's weights sum to less
    than 1, because the sink's share is not included.
    """
    group, key = heads.group, repeat_kv(heads.key, heads.group.num_key_value_groups)
    logits = torch.matmul(heads.query, key.transpose(2, 3)) * group.scaling
    if group.softcap is not None:
        logits = group.softcap * torch.tanh(logits / group.softcap)
    is_boolean = mask.dtype == torch.bool
    logits = logits.masked_fill(~mask, torch.finfo(logits.dtype).min) if is_boolean else logits + mask
    if heads.sinks is not None:
        logits = torch.cat([logits, heads.sinks.to(logits.dtype)[:, None, None].expand(*logits.shape[:3], 1)], dim=-1)
    weights = F.softmax(logits, dim=-1, dtype=torch.promote_types(logits.dtype, torch.float32))[..., : key.shape[2]]
    if is_boolean:
        weights = weights.masked_fill(~mask, 0.0)
    return F.dropout(weights.to(heads.query.dtype), p=group.dropout, training=group.training)


class EagerEngine(Engine):
    """Attention written out in PyTorch: the reference for other engines, and the only one with attention weights."""

    def attend(self, heads, form, measure=False, **kwargs):
        value = repeat_kv(heads.value, heads.group.num_key_value_groups)
        return Attended(torch.matmul(eager_attention_weights(heads, form), value).transpose(1, 2).contiguous())

    def attend_with_weights(self, calls: list[Heads], forms: list[torch.Tensor], offsets: list[int]) -> Attended:
        """
        Attends for all kinds of heads, and also returns the weights; `offsets` are the positions of each kind's first
        key.

        The weights of all heads are joined in one tensor over all keys, in which those of local heads are padded
        because their cache begins later. The outputs are computed from this tensor, so gradients flow through the
        weights that the caller receives.
        """
        weights = [eager_attention_weights(heads, form) for heads, form in zip(calls, forms)]
        lengths = [heads.key.shape[2] for heads in calls]
        end = max(offset + length for offset, length in zip(offsets, lengths))
        ends = [end - offset - length for offset, length in zip(offsets, lengths)]
        joined = torch.cat([F.pad(w, pads) for w, pads in zip(weights, zip(offsets, ends))], dim=1)
        outputs = []
        for heads, part, offset in zip(calls, joined.split([w.shape[1] for w in weights], dim=1), offsets):
            value = repeat_kv(heads.value, heads.group.num_key_value_groups)
            outputs.append(part[..., offset : offset + value.shape[2]] @ value)
        return Attended(torch.cat(outputs, dim=1).transpose(1, 2), joined)


class SdpaEngine(Engine):
    """PyTorch's `scaled_dot_product_attention`. Local heads process sequences in blocks, at linear cost."""

    def form(self, visibility):
        """`None` if no mask is needed besides causality, a blocked mask (5-D), or a dense mask (4-D)."""
        v = visibility
        window = v.window or v.kv_length
        if v.mask is None and v.q_length > 1 and v.kv_length > 2 * window:
            return blocked_mask(v)
        # Exporting would hard-code causal attention without a mask, even for single queries after a cache.
        if not is_torchdynamo_exporting():
            is_first = isinstance(v.q_offset, int) and v.q_offset == v.kv_offset == 0 and v.q_length > 1
            has_all = v.padding_mask is None and v.documents is None and v.mask is None
            is_causal = is_first and v.q_length <= window and not v.has_sinks
            if has_all and (v.sees_everything or is_causal):
                return None
        return v.dense()

    def attend(self, heads, form, measure=False, **kwargs):
        group, (_, query, key, value, sinks) = heads.group, heads
        if form is not None and form.ndim == 5:
            return Attended(blocked_attention_forward(query, key, value, form, group.scaling, group.dropout, sinks))
        if sinks is not None:
            return Attended(sink_attention_forward(query, key, value, form, sinks, group.scaling, group.dropout))
        if form is None and not group.dropout:
            num_parts = num_causal_parts(query, key, value)
            if num_parts > 1:
                return Attended(causal_attention_forward(query, key, value, group.scaling, num_parts))
        head_dim = query.shape[-1]
        missing = head_dim_to_compute(query) - head_dim
        if not missing:
            return attend_through_transformers("sdpa", heads, form, **kwargs)
        wide = Heads(heads.groups, *(F.pad(x, (0, missing)) for x in (query, key, value)))
        return Attended(attend_through_transformers("sdpa", wide, form, **kwargs).output[..., :head_dim])


def attend_through_transformers(name: str, heads: Heads, mask: Any, **kwargs) -> Attended:
    """Calls an attention function of Transformers with the arguments that all of them take."""
    group, (_, query, key, value, sinks) = heads.group, heads
    if group.softcap is not None:
        kwargs["softcap"] = group.softcap
    if sinks is not None:
        kwargs["s_aux"] = sinks  # Transformers' name for sinks
    attend = ALL_ATTENTION_FUNCTIONS[name]
    options = {"dropout": group.dropout, "scaling": group.scaling, "sliding_window": group.sliding_window}
    return Attended(attend(group, query, key, value, mask, **options, **kwargs)[0])


class TransformersEngine(Engine):
    """Any function registered with Transformers' `AttentionInterface`; it gets a dense mask."""

    def __init__(self, name: str):
        self.name = name

    def refuse(self, config, heads):
        # A function that takes any keyword may ignore the sinks.
        if heads.sinks is not None and "s_aux" not in inspect.signature(ALL_ATTENTION_FUNCTIONS[self.name]).parameters:
            raise ValueError(
                f'`attention_sinks` need an attention function with an argument `s_aux`; "{self.name}" has none. Use '
                'attn_implementation="sdpa"'
            )

    def attend(self, heads, form, measure=False, **kwargs):
        return attend_through_transformers(self.name, heads, form, **kwargs)


class FlashEngine(TransformersEngine):
    """FlashAttention, which gets padding as a 2-D mask and finds packed documents by their positions."""

    def refuse(self, config, heads):
        query = heads.query
        is_half = query.dtype in (torch.float16, torch.bfloat16) or torch.is_autocast_enabled(query.device.type)
        if not is_half:
            raise ValueError(
                f"FlashAttention computes in float16 or bfloat16; got {query.dtype}. Load the model with "
                'dtype=torch.bfloat16, or use attn_implementation="sdpa"'
            )
        # Transformers would silently ignore sinks and dropout.
        if heads.sinks is not None and not _flash_takes(self.name, "s_aux", "learnable_sink"):
            raise ValueError(
                f"`attention_sinks` need a FlashAttention whose functions take `s_aux` or `learnable_sink`; those of "
                f'"{self.name}" do not. Use attn_implementation="flash_attention_4", "triton" or "sdpa"'
            )
        if heads.group.dropout and not _flash_takes(self.name, "dropout_p"):
            raise ValueError(
                f'"{self.name}" does not support `attention_dropout`, which is {heads.group.dropout} here; use '
                'attn_implementation="sdpa", or set it to 0'
            )

    def form(self, visibility):
        """Padding mask `(B, S)`, or `None` if there is no padding."""
        v = visibility
        if v.mask is not None:
            raise ValueError('FlashAttention does not support a 4-D `attention_mask`; use attn_implementation="sdpa"')
        if v.documents is not None and (v.batch_size > 1 or v.padding_mask is not None or not v.is_square):
            raise ValueError(
                "FlashAttention supports packed documents only in a single row without padding and without a cache; "
                'pass a batch of 1 in one forward pass, or use attn_implementation="sdpa"'
            )
        return None if v.padding_mask is None else v.padding_mask[:, v.kv_offset : v.kv_offset + v.kv_length]


@cache
def _flash_takes(name: str, *arguments: str) -> bool:
    """Whether the functions of a FlashAttention have one of the arguments."""
    _, varlen_function, *_ = lazy_import_flash_attention(name)[0]
    return not inspect.signature(varlen_function).parameters.keys().isdisjoint(arguments)


class FlexEngine(Engine):
    """PyTorch's FlexAttention, which compiles a kernel for the mask; one call for both kinds of heads if possible."""

    def refuse(self, config, heads):
        query = heads.query
        if heads.group.dropout:
            raise ValueError(
                f"FlexAttention does not support `attention_dropout`, which is {heads.group.dropout} here; use "
                'attn_implementation="sdpa", or set it to 0'
            )
        if query.device.type == "cpu" and query.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                "PyTorch's FlexAttention has no backward pass on the CPU; train with "
                'attn_implementation="sdpa", or run the model under torch.no_grad()'
            )

    def form(self, visibility):
        if visibility.mask is not None and visibility.mask.dtype != torch.bool:
            raise ValueError(
                "`flex_attention` needs a boolean 4-D mask, True where a token may attend; got "
                f'{visibility.mask.dtype}. Convert the mask, or use attn_implementation="sdpa" for an additive one'
            )
        return _block_mask(visibility)

    def form_of_all_heads(self, config, visibility):
        """A mask with a head axis, if all layers have the same number of heads of each kind."""
        counts = set(config.num_global_heads_per_layer)
        if len(counts) > 1 or len(visibility) == 1 or not visibility[LOCAL].is_square:
            return None
        of_all = replace(visibility[LOCAL], num_global_heads=counts.pop())
        if of_all.mask is not None:
            return None
        num_heads = config.num_attention_heads
        if of_all.is_plain and not is_tracing():
            return _plain_block_mask(of_all.q_length, of_all.window, of_all.num_global_heads, num_heads, of_all.device)
        return _block_mask(of_all, num_heads)

    def attend(self, heads, form, measure=False, **kwargs):
        group, (_, query, key, value, sinks) = heads.group, heads
        is_compiled = query.device.type != "cpu" or is_tracing(query)
        if is_compiled and sinks is None:
            return attend_through_transformers("flex_attention", heads, form, **kwargs)

        def cap(logit, *indices):
            return logit if group.softcap is None else group.softcap * torch.tanh(logit / group.softcap)

        # Not Transformers' function: in half precision it rounds the log-sum-exp, which is needed for the sinks.
        attend = partial(compile_friendly_flex_attention, training=group.training) if is_compiled else _flex_uncompiled
        if is_compiled:
            key, value = (repeat_kv(x, group.num_key_value_groups) for x in (key, value))
        options = {"score_mod": cap, "block_mask": form, "scale": group.scaling, "enable_gqa": True}
        output, aux = attend(query, key, value, **options, return_aux=AuxRequest(lse=True))
        if sinks is not None:
            output = output * torch.sigmoid(aux.lse - sinks[:, None])[..., None].to(output.dtype)
        return Attended(output.transpose(1, 2))


def _flex_uncompiled(*args, **kwargs):
    # On CPUs without AVX-512, PyTorch 2.13 compiles kernels that are wrong for heads of 8 and 16 dimensions.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the warning that it is not compiled
        return flex_attention(*args, **kwargs)


def _mask_function(visibility: Visibility):
    """`Visibility.sees` for indices that count from the first query and the first key, as FlexAttention needs it."""

    def sees(batch, head, query, key):
        return visibility.sees(batch, head, query + visibility.q_offset, key + visibility.kv_offset)

    sees.visibility = visibility  # type: ignore[attr-defined]  # for `_move_block_mask`
    return sees


def _move_block_mask(mask: BlockMask, device: torch.device | str) -> BlockMask:
    """`BlockMask.to` leaves behind the tensors that the mask function reads."""
    moved = mask.to(device)
    moved.mask_mod = _mask_function(mask.mask_mod.visibility.to(device))
    return moved


def _block_mask(visibility: Visibility, num_heads: int | None = None) -> BlockMask:
    v = visibility
    batch_size = None if v.is_plain else v.batch_size
    is_compiled = torch.device(v.device).type == "cuda"  # on the CPU, compiling takes longer than it saves
    return create_block_mask(
        _mask_function(v), batch_size, num_heads, v.q_length, v.kv_length, device=v.device, _compile=is_compiled
    )


@lru_cache(maxsize=8)
def _plain_block_mask(length: int, window: int, num_global_heads: int, num_heads: int, device) -> BlockMask:
    """The mask of all heads without a cache, padding or documents, kept because every step uses the same one."""
    return _block_mask(Visibility(length, length, 0, 0, window, num_global_heads, device=device), num_heads)


class TritonEngine(Engine):
    """Our fused GPU kernel: both kinds of heads in one launch, with the largest logits as a by-product."""

    def refuse(self, config, heads):
        dropout = heads.group.dropout
        if dropout or config.attn_logit_softcapping is not None:
            what = "attention_dropout" if dropout else "attn_logit_softcapping"
            raise ValueError(
                f"the `triton` engine does not support `{what}`, which is {getattr(config, what)} here; use "
                'attn_implementation="eager", or disable it'
            )

    def form(self, visibility):
        """Padding and documents as `Spans`; the kernel itself applies causality and the window."""
        from .triton_lsgpt import make_spans  # noqa: PLC0415 (Triton is optional)

        return make_spans(visibility)

    def form_of_all_heads(self, config, visibility):
        first = next(iter(visibility.values()))
        return self.form(first) if first.is_square else None

    def attend(self, heads, form, measure=False, **kwargs):
        from .triton_lsgpt import fused_attention_forward  # noqa: PLC0415

        group, dtype = heads.group, heads.value.dtype  # under autocast, queries may have a higher precision
        window = heads.groups[-1].sliding_window or 0
        _, query, key, value, _ = heads.to(dtype)
        output, max_logits = fused_attention_forward(
            query, key, value, form, heads.num_global_heads, window, group.scaling, heads.sinks, measure
        )
        return Attended(output, max_logits=max_logits)


ENGINES: dict[str, Engine] = {
    "eager": EagerEngine(),
    "sdpa": SdpaEngine(),
    "flex_attention": FlexEngine(),
    "flash_attention_2": FlashEngine("flash_attention_2"),
    "flash_attention_3": FlashEngine("flash_attention_3"),
    "flash_attention_4": FlashEngine("flash_attention_4"),
    "triton": TritonEngine(),
}
"""
Engines by `attn_implementation`; `register_engine` adds one. For other functions registered with Transformers, see
`choose_engine`.
"""


def choose_engine(config: LSGPTConfig, visibility: dict[str, Visibility]) -> Engine:
    """
    The engine of a forward pass: normally the configured one, which for names outside `ENGINES` is a `FlashEngine` or
    `TransformersEngine`. `sdpa` or `eager` replaces it for a single query, where no other engine gains anything, and
    replaces `triton` for custom masks and static caches, which its kernels do not support.
    """
    name, v = config._attn_implementation, next(iter(visibility.values()))
    is_single = v.q_length == 1 and name in ENGINES
    if is_single or (name == "triton" and (v.mask is not None or v.has_empty_slots)):
        has_softcap = config.attn_logit_softcapping is not None
        name = "eager" if name == "eager" or has_softcap else "sdpa"
    return ENGINES.get(name) or (FlashEngine if "flash" in name else TransformersEngine)(name)


@dataclass
class AttentionPlan:
    """What all layers share in a forward pass: the engine, and the visibility in the form that it takes."""

    engine: Engine
    visibility: dict[str, Visibility]
    """Which keys each query may attend to, for each kind of head."""
    forms: dict[str, Any]
    """The same in the engine's form."""
    is_joint: bool
    """Whether one form covers all heads, so that one call computes them."""

    def calls(self, heads: Heads, by_kind: list[Heads]) -> list[Heads]:
        """All heads of a layer in one call if the plan is joint (nothing was cached then), else one call per kind."""
        return [heads] if self.is_joint else by_kind

    def attend(self, calls: list[Heads], measure: bool = False, **kwargs) -> Attended:
        """
        Runs the engine for each of the `calls` and concatenates the results along the head axis, including the weights
        if `output_attentions` asks for them. Raises `ValueError` if the engine does not support a call.
        """
        config = calls[0].group.config
        for heads in calls:
            self.engine.refuse(config, heads)
        forms = [self.forms[heads.kind] for heads in calls]
        if isinstance(self.engine, EagerEngine) and kwargs.get("output_attentions", config.output_attentions):
            offsets = [self.visibility[heads.kind].kv_offset for heads in calls]
            return self.engine.attend_with_weights(calls, forms, offsets)
        results = [self.engine.attend(heads, form, measure, **kwargs) for heads, form in zip(calls, forms)]
        if len(results) == 1:
            return results[0]
        output = torch.cat([result.output for result in results], dim=2)
        has_maxima = results[0].max_logits is not None
        return Attended(output, max_logits=torch.cat([x.max_logits for x in results]) if has_maxima else None)

    def to(self, device: torch.device | str, **kwargs) -> "AttentionPlan":
        """Returns the plan on another device; needed if a model is spread over several."""

        def move(x):
            if isinstance(x, tuple):
                return type(x)(*map(move, x))
            if isinstance(x, BlockMask):
                return _move_block_mask(x, device)
            return x.to(device, **kwargs) if isinstance(x, torch.Tensor | Visibility) else x

        visibility, forms = ({k: move(x) for k, x in values.items()} for values in (self.visibility, self.forms))
        return AttentionPlan(self.engine, visibility, forms, self.is_joint)


def plan_attention(config: LSGPTConfig, visibility: dict[str, Visibility]) -> AttentionPlan:
    """Chooses the engine and creates the forms that it needs. Raises `ValueError` for what it does not support."""
    engine = choose_engine(config, visibility)
    joint = engine.form_of_all_heads(config, visibility)
    if joint is not None:
        return AttentionPlan(engine, visibility, dict.fromkeys(visibility, joint), True)
    forms = {kind: engine.form(each) for kind, each in visibility.items()}
    return AttentionPlan(engine, visibility, forms, False)


def refuse_other_models(module: nn.Module, *args, **kwargs):
    """Raises `ValueError` if a model other than LSGPT asks Transformers for one of LSGPT's own engines."""
    name, model = module.config._attn_implementation, type(module).__name__
    raise ValueError(f'attn_implementation="{name}" is an engine of LSGPT; {model} cannot use it')


def register_engine(name: str, engine: Engine):
    """
    Adds an engine, or replaces one, so that it can be chosen by `attn_implementation=name` in all ways that
    Transformers offers.
    """
    ENGINES[name] = engine
    if name != "eager" and name not in ALL_ATTENTION_FUNCTIONS:  # "eager" needs no registration
        ALL_ATTENTION_FUNCTIONS.register(name, refuse_other_models)


for _name, _engine in ENGINES.items():
    register_engine(_name, _engine)
