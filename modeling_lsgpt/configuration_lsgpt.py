"""Configuration of LSGPT: a GPT whose attention layers mix a few global heads with many local heads.

Long Short-attention is described in S. Hajra, arXiv:2505.15548.
"""

import copy
import difflib
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig
from transformers.activations import ACT2FN
from transformers.generation import GenerationConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.utils import logging


logger = logging.get_logger(__name__)

GLOBAL = "full_attention"
"""The global heads. This is Transformers' name for full causal attention, in `layer_types` and mask dictionaries."""

LOCAL = "sliding_attention"
"""The local heads. This is Transformers' name for attention in a sliding window."""


class HeadKind(NamedTuple):
    """What caches, masks, attention functions and cost estimates need to know about a kind of head."""

    layer_type: str
    """Transformers' type of its cache layers: `"full_attention"` keeps all tokens, `"sliding_attention"` a window."""
    has_window: bool = False
    """Whether a query sees only the last `config.sliding_window` keys, its own included."""
    has_sinks: bool = False
    """Whether `config.attention_sinks` gives these heads sinks."""
    overlay: Callable | None = None
    """
    Maps the configuration to a mask function of Transformers, `(batch, head, query, key)` to bool: a further condition
    for a query to see a key. Positions count from 0, with padding and cached tokens included.
    """


HEAD_KINDS = {GLOBAL: HeadKind(GLOBAL), LOCAL: HeadKind(LOCAL, has_window=True, has_sinks=True)}
"""The kinds of heads by name. `docs/attention.md` adds a third."""

FULL_WINDOW = "full_window"
"""The value of `attention_sinks` for sinks that only queries with a full window see."""

PARTS_WITH_BIAS = ("qkv_proj", "o_proj", "mlp", "norm")
"""Parts that `use_bias` can list: query, key and value projections; attention output projection; MLPs; layer norms."""

CHOICES = {
    "attention_sinks": (False, True, FULL_WINDOW),
    "hidden_act": ACT2FN,
    "position_embedding_type": ("learned", "sinusoidal", "rope", "none"),
    "norm_type": ("layer_norm", "rms_norm", "rms_norm_after", "rms_norm_around"),
    "qk_norm": (False, True, "all_heads"),
}
"""Allowed values of the fields that have only a few."""

# Where the Auto classes find the code inside a checkpoint, whichever of the four models was saved.
AUTO_MAP = {
    "AutoConfig": "configuration_lsgpt.LSGPTConfig",
    "AutoModel": "modeling_lsgpt.LSGPTModel",
    "AutoModelForCausalLM": "modeling_lsgpt.LSGPTForCausalLM",
    "AutoModelForSequenceClassification": "modeling_lsgpt.LSGPTForSequenceClassification",
    "AutoModelForTokenClassification": "modeling_lsgpt.LSGPTForTokenClassification",
}

# Keyword arguments that are not fields but have a meaning in Transformers.
_TRANSFORMERS_KWARGS = {
    "_attn_implementation_internal",
    "_commit_hash",
    "_experts_implementation_internal",
    "_name_or_path",
    "attn_implementation",
    "auto_map",
    "classifier_dropout",
    "experts_implementation",
    "model_type",
    "name_or_path",
    "num_labels",
    "output_attentions",
    "per_layer_config",
    "quantization_config",
    "rope_scaling",
    "rope_theta",
    "tie_last_hidden_states",
    "torch_dtype",
    "transformers_weights",
    *getattr(GenerationConfig, "_get_default_generation_params", dict)(),  # may go in a later Transformers
}


@strict
class LSGPTConfig(PreTrainedConfig):
    r"""
    Configuration of an LSGPT model. The defaults give GPT-2 small's shape, with 1 of 12 heads global and a window of
    100. With `norm_type="rms_norm"`, `gated_mlp=True` and `position_embedding_type="rope"`, the blocks are Llama's.

    In every layer, the first `num_global_heads` heads attend to the whole past. The others are *local*: a query at
    position `q` sees the keys `k` with `q - sliding_window < k <= q`: `sliding_window` keys, including its own.

    Args:
        vocab_size (`int`): Number of tokens.
        hidden_size (`int`): Width of the residual stream.
        num_hidden_layers (`int`): Number of decoder layers.
        num_attention_heads (`int`): Number of query heads in each layer, global and local together.
        num_key_value_heads (`int`, *optional*): Number of key/value heads (grouped-query attention); defaults to
            `num_attention_heads`.
        head_dim (`int`, *optional*): Width of one head, independent of the other widths; defaults to
            `hidden_size // num_attention_heads`.
        num_global_heads (`int` or `list[int]`): Number of global query heads in each layer, or one number for each
            layer. They come first. `num_attention_heads` gives plain multi-head attention, `0` an all-local model.
            Must be a multiple of the group size `num_attention_heads // num_key_value_heads`, because a key/value head
            cannot serve both kinds.
        sliding_window (`int`): Number of keys that a query of a local head sees, including its own; at least 2.
        attention_sinks (`bool` or `str`): Whether each local head has a learned *sink*, a logit in the denominator of
            its softmax that belongs to no token and has no value, so that the head can attend to nothing. With `True`,
            every query sees it, as in gpt-oss (arXiv:2508.10925). With `"full_window"`, only queries that see
            `sliding_window` keys do: in a pretrained model, the sink takes the place of a document's first tokens, and
            earlier queries still see these tokens.
        intermediate_size (`int`, *optional*): Width of the MLP; defaults to `4 * hidden_size`.
        hidden_act (`str`): Activation of the MLP, by its name in Transformers.
        gated_mlp (`bool`): Whether the MLP is gated, `down(act(gate(x)) * up(x))`, as in Llama (SwiGLU with `"silu"`),
            instead of `down(act(up(x)))`.
        max_position_embeddings (`int`): Longest sequence. A hard limit for `learned` positions only.
        position_embedding_type (`str`): `"learned"` and `"sinusoidal"` are added to the token embeddings (sinusoids
            unscaled, with amplitude 1), `"rope"` rotates queries and keys, and with `"none"` only the causal mask
            conveys the order.
        rope_parameters (`dict`, *optional*): Parameters of rotary embeddings, as in Transformers; only with `"rope"`.
            With the keys `"full_attention"` and `"sliding_attention"`, layers without global heads have their own.
        norm_type (`str`): Type of the norms before attention, MLP and output: `"layer_norm"` or `"rms_norm"`.
            `"rms_norm_after"` norms what attention and MLP add to the residual stream instead of what they read, as in
            OLMo-2; `"rms_norm_around"` both, as in Gemma 3.
        use_bias (`bool` or `list[str]`): Whether linear layers and layer norms have biases; or a list of the parts
            that have them, out of `"qkv_proj"` (queries, keys and values), `"o_proj"`, `"mlp"` and `"norm"`.
        qk_norm (`bool` or `str`): Whether each head's queries and keys go through an RMSNorm (before rotary
            embeddings); with `"all_heads"`, one norm goes over the queries of all heads, and one over their keys.
        attn_logit_softcapping (`float`, *optional*): If set to `c`, the logits `z` become `c * tanh(z / c)`.
        final_logit_softcapping (`float`, *optional*): The same for the logits of the vocabulary.
        attention_dropout (`float`): Dropout of the attention weights.
        resid_dropout (`float`): Dropout of each branch before it is added to the residual stream.
        embd_dropout (`float`): Dropout of the embeddings.
        layer_norm_eps (`float`): Epsilon of the norms, of either type.
        initializer_range (`float`): Standard deviation of the initial weights. Projections into the residual stream
            get `initializer_range / sqrt(2 * num_hidden_layers)`, as in GPT-2.
        use_cache (`bool`): Whether the model returns its key/value cache.
        tie_word_embeddings (`bool`): Whether the output projection shares the token embedding's weights.
        bos_token_id, eos_token_id, pad_token_id (`int`, *optional*): Special tokens.

    Raises:
        ValueError: If a value or a combination of values is invalid; the message names the field, rule and value.
        StrictDataclassFieldValidationError: (`huggingface_hub.errors`) If a value does not have its field's type.

    ```python
    >>> from lsgpt import LSGPTConfig, LSGPTForCausalLM

    >>> config = LSGPTConfig(num_hidden_layers=6, num_global_heads=2, sliding_window=64)
    >>> model = LSGPTForCausalLM(config)
    ```
    """

    model_type = "lsgpt"
    keys_to_ignore_at_inference = ["past_key_values", "cache"]  # its names before and since Transformers 5.24

    vocab_size: int = 50257
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    num_global_heads: int | list[int] = 1
    sliding_window: int = 100
    attention_sinks: bool | str = False
    intermediate_size: int | None = None
    hidden_act: str = "gelu"
    gated_mlp: bool = False
    max_position_embeddings: int = 1024
    position_embedding_type: str = "learned"
    rope_parameters: dict | None = None
    norm_type: str = "layer_norm"
    use_bias: bool | list[str] = False
    qk_norm: bool | str = False
    attn_logit_softcapping: float | int | None = None
    final_logit_softcapping: float | int | None = None
    attention_dropout: float | int = 0.0
    resid_dropout: float | int = 0.0
    embd_dropout: float | int = 0.0
    layer_norm_eps: float | int = 1e-5
    initializer_range: float | int = 0.02
    use_cache: bool = True
    tie_word_embeddings: bool = False
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None

    def __post_init__(self, **kwargs):
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.head_dim is None and self.num_attention_heads > 0:
            if self.hidden_size % self.num_attention_heads:
                raise ValueError(
                    f"`hidden_size` must be a multiple of `num_attention_heads` ({self.num_attention_heads}) if "
                    f"`head_dim` is not set; got {self.hidden_size}"
                )
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.intermediate_size is None:
            self.intermediate_size = 4 * self.hidden_size
        if self.rope_parameters is None and self.position_embedding_type == "rope":
            self.rope_parameters = {}  # Transformers fills in its defaults
        # Validate here too: `@strict` validates later, and wraps errors in a type that is not a `ValueError`.
        self.validate_architecture()

        dtype = kwargs.get("torch_dtype") if self.dtype is None else self.dtype
        if isinstance(dtype, str) and not isinstance(getattr(torch, dtype, None), torch.dtype):
            raise ValueError(f'`dtype` must be the name of a PyTorch dtype, such as "bfloat16"; got {dtype!r}')
        for name in ("rope_theta", "rope_scaling"):
            if kwargs.get(name) is not None and self.position_embedding_type != "rope":
                raise ValueError(
                    f'`{name}` must be unset without `position_embedding_type="rope"`; got {kwargs[name]!r}'
                )
        if kwargs.pop("per_layer_config", None) is not None:
            raise ValueError("`per_layer_config` must be unset, because `num_global_heads` determines it")
        if kwargs.pop("layer_types", self.layer_types) != self.layer_types:
            logger.warning("LSGPTConfig derives `layer_types` from `num_global_heads`, and ignores other values")
        for name in sorted(kwargs.keys() - _TRANSFORMERS_KWARGS):
            near = difflib.get_close_matches(name, self.__dataclass_fields__, n=1)
            hint = f"; did you mean `{near[0]}`?" if near else ""
            logger.warning(f"LSGPTConfig has no field `{name}`; the model does not use it{hint}")
        kwargs.setdefault("auto_map", dict(AUTO_MAP))
        super().__post_init__(**kwargs)
        if self.position_embedding_type != "rope":
            self.rope_parameters = None  # Transformers fills in defaults for every configuration that has the field
        elif GLOBAL in self.rope_parameters:
            self.rope_parameters.pop("rope_theta", None)  # Transformers 5.17 adds it beside the sets of parameters
        self.validate_rope()  # here, too, for the same reason
        self.validate_architecture()  # again: Transformers has moved arguments such as `rope_theta` into fields

    def validate_architecture(self):
        """Raises `ValueError` for invalid values and combinations: on construction, when a model is built, on save."""

        def refuse(field: str, rule: str):
            raise ValueError(f"`{field}` must be {rule}; got {getattr(self, field)!r}")

        counts = "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "max_position_embeddings"
        for field in (*counts, "vocab_size", "hidden_size", "head_dim", "intermediate_size"):
            if (getattr(self, field) or 0) <= 0:
                refuse(field, "a positive integer")
        for field, choices in CHOICES.items():
            if getattr(self, field) not in choices:
                refuse(field, f"one of {', '.join(map(str, choices))}")
        for field in ("attention_dropout", "resid_dropout", "embd_dropout"):
            if not 0 <= getattr(self, field) < 1:
                refuse(field, "a probability in [0, 1)")
        for field in ("layer_norm_eps", "initializer_range"):
            if not 0 < getattr(self, field) < math.inf:
                refuse(field, "positive and finite")
        for field in ("attn_logit_softcapping", "final_logit_softcapping"):
            if getattr(self, field) is not None and not 0 < getattr(self, field) < math.inf:
                refuse(field, "positive and finite, or None for no soft-capping")
        if self.sliding_window < 2:
            refuse("sliding_window", "at least 2 (the number of keys a local query sees)")

        heads, layers, global_heads = self.num_attention_heads, self.num_hidden_layers, self.num_global_heads
        if heads % self.num_key_value_heads:
            refuse("num_key_value_heads", f"a divisor of `num_attention_heads` ({heads})")
        if isinstance(global_heads, list) and len(global_heads) != layers:
            refuse("num_global_heads", f"one number, or a list with one number for each of the {layers} layers")
        global_heads, groups = self.num_global_heads_per_layer, heads // self.num_key_value_heads
        if min(global_heads) < 0 or max(global_heads) > heads:
            refuse("num_global_heads", f"between 0 (all local) and `num_attention_heads` ({heads}, all global)")
        if any(count % groups for count in global_heads):
            rule = f"a multiple of the {groups} query heads that share a key/value head"
            refuse("num_global_heads", f"{rule} (`num_attention_heads // num_key_value_heads`)")

        parts = self.use_bias if isinstance(self.use_bias, list) else []
        if not set(parts) <= set(PARTS_WITH_BIAS):
            known = ", ".join(PARTS_WITH_BIAS)
            refuse("use_bias", f"True, False, or a list of the parts that have biases, of {known}")
        if "norm" in parts and self.norm_type != "layer_norm":
            refuse("use_bias", 'without "norm", because an RMSNorm (`norm_type="rms_norm"`) has no bias')

        if self.position_embedding_type == "sinusoidal" and self.hidden_size % 2:
            refuse("hidden_size", 'even with `position_embedding_type="sinusoidal"`')
        if self.position_embedding_type == "rope":
            self._validate_rope_parameters(refuse)
        elif self.rope_parameters:
            refuse("rope_parameters", 'unset without `position_embedding_type="rope"`')

    def _validate_rope_parameters(self, refuse: Callable[[str, str], None]):
        rope, rope_types = self.rope_parameters, ("default", *ROPE_INIT_FUNCTIONS)
        if self.head_dim % 2:
            refuse("head_dim", 'even with `position_embedding_type="rope"`')
        if rope is None:
            refuse("rope_parameters", 'a dictionary with `position_embedding_type="rope"`')
        has_both = min(self.num_global_heads_per_layer) == 0 < max(self.num_global_heads_per_layer)
        if rope.keys() & {GLOBAL, LOCAL} and not (rope.keys() == {GLOBAL, LOCAL} and has_both):
            refuse(
                "rope_parameters",
                f"one set of parameters, or one each for {GLOBAL!r} (layers with global heads) and {LOCAL!r} (layers "
                f"without), if there are both; `num_global_heads` is {self.num_global_heads}",
            )
        for each in (rope.get(GLOBAL, rope), rope.get(LOCAL, rope)):
            if not isinstance(each, dict):
                refuse("rope_parameters", "a dictionary of parameters, or of two such dictionaries")
            for name in ("rope_theta", "factor"):
                value = each.get(name, 1.0)
                if not (isinstance(value, int | float) and 0 < value < math.inf):
                    refuse("rope_parameters", f"a dictionary whose `{name}` is a positive number")
            if each.get("rope_type", "default") not in rope_types:
                refuse("rope_parameters", f"a dictionary whose `rope_type` is one of {', '.join(rope_types)}")
            if each.get("partial_rotary_factor", 1.0) != 1.0:
                refuse("rope_parameters", "without `partial_rotary_factor`: LSGPT rotates whole heads")

    def validate_rope(self):
        """Raises `ValueError` if `rope_parameters` lack what their `rope_type` needs, or have a wrong type."""
        try:
            super().validate_rope()
        except (KeyError, TypeError) as error:
            raise ValueError(f"`rope_parameters` are invalid: {error.args[0]}; got {self.rope_parameters}") from error

    def validate_layer_type(self):
        """Does nothing: `layer_types` is derived, and has one entry per cache layer, not per decoder layer."""

    @property
    def num_global_heads_per_layer(self) -> list[int]:
        """Number of global query heads of each decoder layer."""
        if isinstance(self.num_global_heads, list):
            if len(self.num_global_heads) < self.num_hidden_layers:  # layers were added, as PEFT's replication does
                raise ValueError(
                    f"`num_global_heads` must have a number for each of the {self.num_hidden_layers} layers; got "
                    f"{self.num_global_heads}"
                )
            return self.num_global_heads[: self.num_hidden_layers]  # `assistant_early_exit` lowers their number
        return [self.num_global_heads] * self.num_hidden_layers

    @property
    def num_heads_by_kind(self) -> list[dict[str, int]]:
        """For each decoder layer, `{kind: number of query heads}`: `GLOBAL` before `LOCAL`, omitting empty kinds."""
        return [
            {kind: n for kind, n in ((GLOBAL, count), (LOCAL, self.num_attention_heads - count)) if n}
            for count in self.num_global_heads_per_layer
        ]

    @property
    def cache_layers(self) -> list[tuple[str, int]]:
        """
        Kind and number of query heads of every *cache layer*, in order. A decoder layer owns one cache layer for each
        kind of head that it has, so Transformers' own caches keep a window for local heads and everything for global
        heads.
        """
        return [item for layer in self.num_heads_by_kind for item in layer.items()]

    @property
    def layer_types(self) -> list[str]:
        """Transformers' type of every cache layer."""
        return [HEAD_KINDS[kind].layer_type for kind, _ in self.cache_layers]

    @property
    def per_layer_config(self) -> list["LSGPTConfig"]:
        """One shallow copy of this configuration per cache layer, with that layer's head counts."""
        views = []
        for _, num_heads in self.cache_layers:
            view = copy.copy(self)
            view.num_key_value_heads = num_heads * self.num_key_value_heads // self.num_attention_heads
            view.num_attention_heads = num_heads
            views.append(view)
        return views

    def window(self, kind: str) -> int | None:
        """The number of keys that a query sees in heads of a kind, its own included; `None` for its whole past."""
        return self.sliding_window if HEAD_KINDS[kind].has_window else None

    def has_bias(self, part: str) -> bool:
        """Whether a part of the model has biases: `"qkv_proj"`, `"o_proj"`, `"mlp"` or `"norm"`."""
        if part == "norm" and self.norm_type != "layer_norm":
            return False
        return part in self.use_bias if isinstance(self.use_bias, list) else self.use_bias

    def with_rope_of(self, kind: str) -> "LSGPTConfig":
        """A shallow copy with the rotary embedding of the layers with (`GLOBAL`) or without global heads (`LOCAL`)."""
        view = copy.copy(self)
        view.rope_parameters = (self.rope_parameters or {}).get(kind, self.rope_parameters)
        return view

    def equal_mhsa(self) -> "LSGPTConfig":
        """The same model with all heads global: plain multi-head self-attention."""
        mhsa = copy.deepcopy(self)
        mhsa.num_global_heads = self.num_attention_heads
        mhsa.rope_parameters = self.with_rope_of(GLOBAL).rope_parameters
        return mhsa

    def num_parameters(self) -> int:
        """
        Number of trainable parameters.

        Each layer has the query and output projections, `2 * d * H * D`, the key and value projections,
        `2 * d * H_kv * D`, an MLP of `2 * d * f`, or `3 * d * f` if it is gated, and two norms of `d` (or four, around
        both). Outside the layers are the final norm, the token embeddings `V * d`, as many again for an untied
        `lm_head`, and `P * d` learned positions. A projection with biases has one per output, a layer norm `d`
        (`lm_head` has none). `qk_norm` adds `2 * D` per layer, or `(H + H_kv) * D` over all heads; sinks add 1 per
        local head. Otherwise the split into global and local heads does not change the number.
        """
        d, f, layers = self.hidden_size, self.intermediate_size, self.num_hidden_layers
        q, kv = self.num_attention_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        biases = {"qkv_proj": q + 2 * kv, "o_proj": d, "mlp": f + d + (f if self.gated_mlp else 0), "norm": 2 * d}
        per_layer = self._matrix_parameters_per_layer() + (4 if self.norm_type == "rms_norm_around" else 2) * d
        per_layer += sum(size for part, size in biases.items() if self.has_bias(part))
        if self.qk_norm:
            per_layer += q + kv if self.qk_norm == "all_heads" else 2 * self.head_dim
        outside = self.vocab_size * d * (1 if self.tie_word_embeddings else 2)
        outside += d * (2 if self.has_bias("norm") else 1)
        if self.position_embedding_type == "learned":
            outside += self.max_position_embeddings * d
        if self.attention_sinks:
            outside += sum(num_heads for kind, num_heads in self.cache_layers if HEAD_KINDS[kind].has_sinks)
        return layers * per_layer + outside

    def flops_per_token(self, length: int) -> float:
        """
        Floating-point operations of the forward pass per token, averaged over a sequence of `length` tokens.

        Every weight of a matrix takes part in one multiplication and one addition per token: 2 operations (`lm_head`
        included; embeddings are look-ups). A head with `D` dimensions spends `2 * D` on the score of a visible key and
        `2 * D` on adding its value: `4 * D` per visible key. The query at position `t = 1..n` sees `t` keys in a
        global head, `min(t, W)` in a local one; the means are `(n + 1) / 2` and, for `n > W`,
        `W - W * (W - 1) / (2 * n)`. Masked-out pairs, softmax and norms are not counted. The backward pass takes
        twice as many operations.
        """
        windows = {kind: min(self.window(kind) or length, length) for kind, _ in self.cache_layers}
        visible_keys = {kind: w - w * (w - 1) / (2 * length) for kind, w in windows.items()}
        matrices = self.num_hidden_layers * self._matrix_parameters_per_layer() + self.vocab_size * self.hidden_size
        attended = sum(num_heads * visible_keys[kind] for kind, num_heads in self.cache_layers)
        return 2 * matrices + 4 * self.head_dim * attended

    def kv_cache_bytes(self, length: int, bytes_per_value: int = 2) -> int:
        """
        Size in bytes of one sequence's key/value cache after `length` tokens.

        A key/value head keeps a key and a value of `D` numbers per token: for all tokens in a global head, for the
        last `W` in a local one (`StaticCache` holds `W`, `DynamicCache` `W - 1`). Relative to multi-head attention,
        this is a fraction of `(G * n + (H - G) * W) / (H * n)`. `bytes_per_value` is 2 for bfloat16, 4 for float32.
        """
        groups = self.num_attention_heads // self.num_key_value_heads
        stored = sum(n // groups * min(self.window(kind) or length, length) for kind, n in self.cache_layers)
        return 2 * self.head_dim * stored * bytes_per_value

    def _matrix_parameters_per_layer(self) -> int:
        projections = 2 * (self.num_attention_heads + self.num_key_value_heads) * self.head_dim * self.hidden_size
        return projections + (3 if self.gated_mlp else 2) * self.hidden_size * self.intermediate_size


__all__ = ["LSGPTConfig"]
