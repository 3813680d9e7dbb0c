"""The models that are timed against each other, all of the same shape.

A peer's name consists of a family in `FAMILIES` and an engine. In training, all families compute the logits of all
tokens, so that their times can be compared; LSGPT without logits is a separate family. They are compared with the
Transformers model that has the same blocks: Llama for RMSNorm and gated MLPs, GPT-2 for all others.
"""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, PreTrainedConfig
from transformers.initialization import no_init_weights
from transformers.integrations.sdpa_attention import repeat_kv
from transformers.utils import is_flash_attn_2_available

from lsgpt.configuration import list_presets, load_config, load_preset
from lsgpt.modeling_lsgpt import (
    ALL_ATTENTION_FUNCTIONS,
    CACHE,
    LOCAL,
    LSGPTAttention,
    LSGPTConfig,
    attention_layers,
    create_masks,
    describe_visibility,
)
from lsgpt.modeling_lsgpt.modeling_lsgpt import NO_SINK


FAMILIES = {
    "lsgpt": "LSGPT: a few global heads, the others local",
    "lsgpt-no-logits": "LSGPT as `lsgpt train` runs it (`skip_logits=True`); the others compute all logits",
    "mhsa": "plain multi-head attention: LSGPT's code and weights with all heads global",
    "gpt2": "Transformers' GPT-2 of the same shape",
    "gpt2-gelu": "GPT-2 with LSGPT's activation function, which is faster than GPT-2's own",
    "llama": "Transformers' Llama of the same shape, with LSGPT's weights",
    "limit": "LSGPT without its local heads' attention: a bound that it cannot beat",
    "telemetry": "LSGPT with the largest logit of every head measured in each step",
}
"""Descriptions of the families of peers."""

BASELINES = ("lsgpt", "mhsa")
"""Families that are always timed. They differ only in the kinds of their heads."""

STOCK = ("gpt2", "gpt2-gelu", "llama")
"""Families that are models of Transformers; the blocks of a model decide which of them it is compared with."""

PAIRS = (
    ("lsgpt", "mhsa"),
    ("lsgpt", "gpt2"),
    ("mhsa", "gpt2"),
    ("lsgpt", "llama"),
    ("mhsa", "llama"),
    ("lsgpt-no-logits", "mhsa"),
    ("lsgpt-no-logits", "gpt2"),
    ("lsgpt-no-logits", "llama"),
    ("lsgpt-no-logits", "lsgpt"),
    ("lsgpt", "gpt2-gelu"),
    ("lsgpt", "limit"),
    ("limit", "gpt2"),
    ("limit", "llama"),
    ("limit", "mhsa"),
    ("telemetry", "lsgpt"),
)
"""Families that are compared."""

ENGINES = ("sdpa", "eager", "flex_attention", "flash_attention_2", "triton")
"""All engines. `eager` is timed for `mhsa` only: it computes local heads densely, as a reference."""

SDPA_BACKENDS = {"sdpa-flash": SDPBackend.FLASH_ATTENTION, "sdpa-cudnn": SDPBackend.CUDNN_ATTENTION}
"""Kernels of `scaled_dot_product_attention` that are timed on CUDA besides the one that PyTorch chooses."""

NOT_AVAILABLE = (
    "attn_implementation=",  # our engines suggest another engine when they refuse
    "No available kernel",  # `sdpa_kernel` where the only permitted kernel cannot run
    "cuDNN",
    "FlashAttention only supports",
    "C++ compiler",
    "C compiler",
    "working triton installation",
)
"""Parts of `ValueError` and `RuntimeError` messages that say that something cannot run here, not that it is broken."""

DENSE_BYTES = 2**28
"""Largest dense tensors, in bytes: attention weights of `eager`, and masks of `flex_attention` on the CPU."""

SPARE_POSITIONS = 64
"""Learned positions beyond the benchmarked length, for decoded tokens."""


class Shape(NamedTuple):
    """
    What is benchmarked.

    Args:
        config: Configuration of the LSGPT model.
        length: Number of tokens in a sequence; in decoding, before the decoded ones.
        batch_size: Number of sequences.
        device: `"cpu"` or `"cuda"`.
        dtype: Precision of weights and computation.
        engines: Which of `ENGINES` to time.
        int8: Whether torchao keeps the weights of linear layers in 8 bits.
    """

    config: LSGPTConfig
    length: int
    batch_size: int = 1
    device: str = "cpu"
    dtype: torch.dtype = torch.float32
    engines: tuple[str, ...] = ENGINES
    int8: bool = False

    def token_ids(self) -> torch.Tensor:
        """Random tokens `(batch_size, length)`."""
        return torch.randint(self.config.vocab_size, (self.batch_size, self.length), device=self.device)


class Benchmark(NamedTuple):
    """
    One benchmark at one shape, ready to run.

    Args:
        peers: The argument of `lsgpt.benchmarks.timing.measure`.
        gates: Checks to run before anything is timed; each raises `RuntimeError` if a peer computes something wrong.
        skipped: For each peer that cannot run here, the reason.
        repeats: How many times one call does what is timed.
        cache_bytes: For each family, the bytes of its key/value cache, if the benchmark has one.
    """

    peers: dict[str, Callable[[], Callable]]
    gates: list[Callable[[], None]]
    skipped: dict[str, str]
    repeats: int = 1
    cache_bytes: dict[str, int] = {}


@dataclass
class Peer:
    """A model with additional arguments for every call and, if given, the only SDPA kernel that it may use."""

    model: nn.Module
    options: dict = field(default_factory=dict)
    backend: SDPBackend | None = None

    def __call__(self, **inputs):
        with only(self.backend):
            return self.model(**inputs, **self.options)


class Peers(dict):
    """Peers by name. Those that cannot run here are left out, with the reason in `skipped`."""

    def __init__(self):
        super().__init__()
        self.skipped: dict[str, str] = {}

    def add(self, name: str, make: Callable[[], Callable], trial: Callable[[Callable], object] | None = None):
        """
        Adds what `make` returns if it passes the `trial`. A peer without a trial is always added.

        Raises:
            RuntimeError: If the trial fails for another reason than that this machine lacks something.
        """
        if trial is None:
            self[name] = make()
            return
        try:
            peer = make()
            trial(peer)
        except Exception as error:
            if not is_unavailable(error):
                raise RuntimeError(f"{name} fails in a small trial with {type(error).__name__}: {error}") from error
            self.skipped[name] = " ".join(str(error).split())[:160] or type(error).__name__
        else:
            self[name] = peer

    def add_engines(
        self,
        shape: Shape,
        queries: int,
        kept_layers: int,
        make: Callable[[LSGPTConfig, str, SDPBackend | None], Callable],
        trial: Callable[[Callable], object],
    ):
        """
        Adds `lsgpt` and `mhsa` on every engine.

        Args:
            shape: What is benchmarked.
            queries: Number of queries in one call.
            kept_layers: Number of layers whose attention weights exist at the same time.
            make: Makes a peer from a configuration, an engine and an SDPA kernel.
            trial: Runs a peer on a small input.
        """
        mhsa, heads = shape.config.equal_mhsa(), shape.config.num_attention_heads
        pairs = shape.batch_size * queries * shape.length
        for family, config in (("lsgpt", shape.config), ("mhsa", mhsa)):
            for engine in shape.engines:
                name = f"{family} {engine}"
                if name == "lsgpt eager":
                    continue
                if engine == "eager" and pairs * heads * kept_layers * shape.dtype.itemsize > DENSE_BYTES:
                    self.skipped[name] = "it is dense, and its attention weights are too large"
                elif engine == "flex_attention" and shape.device == "cpu" and pairs * heads > DENSE_BYTES:
                    self.skipped[name] = "on the CPU, its mask is made from a dense one, which is too large"
                elif engine == "triton" and shape.device == "cpu":
                    self.skipped[name] = "its kernels need a GPU"
                elif "flash" in engine and not is_flash_attn_2_available():
                    self.skipped[name] = "flash-attn is not installed, or there is no GPU for it"
                else:
                    self.add(name, partial(make, config, engine, None), None if engine == "sdpa" else trial)
        for name, backend in SDPA_BACKENDS.items():
            if shape.device == "cuda":
                self.add(f"mhsa {name}", partial(make, mhsa, "sdpa", backend), trial)


def is_unavailable(error: Exception) -> bool:
    """Whether an error says that something cannot run on this machine, rather than that it is broken."""
    if isinstance(error, ImportError | NotImplementedError | torch.OutOfMemoryError):
        return True
    return isinstance(error, ValueError | RuntimeError) and any(text in str(error) for text in NOT_AVAILABLE)


def build_models(shape: Shape, task: str) -> tuple[Shape, Peers]:
    """
    Builds the peers as models.

    The GPT-2s share one set of parameters and all others another, because memory is scarce at long lengths.

    Args:
        shape: What is benchmarked.
        task: What the models must be able to do: `"prefill"`, `"train"` or `"decode"`.

    Returns:
        The shape, with as many positions as its length needs, and the peers.
    """
    config = copy.deepcopy(shape.config)
    config.max_position_embeddings = max(config.max_position_embeddings, shape.length + SPARE_POSITIONS)
    shape, training = shape._replace(config=config), task == "train"
    torch.manual_seed(0)
    model = new_model(config, shape).train(training)

    def try_out(peer: Peer):
        ids = torch.randint(config.vocab_size, (1, min(shape.length, 2 * config.sliding_window + 1)))
        ids = ids.to(shape.device)
        with torch.set_grad_enabled(training):
            output = peer(input_ids=ids, labels=ids, use_cache=not training)
            if task == "decode":
                peer(input_ids=ids[:, :1], **{CACHE: output[CACHE]}, use_cache=True)
        if training:
            output.loss.backward()
            peer.model.zero_grad()

    peers = Peers()
    peers.add_engines(
        shape,
        1 if task == "decode" else shape.length,
        config.num_hidden_layers if training else 1,
        lambda config, engine, backend: Peer(twin(model, engine, config), backend=backend),
        try_out,
    )
    if stock_family(config) == "llama":
        peers["llama sdpa"] = Peer(twin(model, "sdpa", llama_config(config)))
    else:
        gpt2 = new_model(gpt2_config(config), shape).train(training)
        peers["gpt2 sdpa"] = Peer(gpt2)
        peers["gpt2-gelu sdpa"] = Peer(twin(gpt2, "sdpa", gpt2_config(config, config.hidden_act)))
        for peer in (peers["gpt2 sdpa"], peers["gpt2-gelu sdpa"]):
            peer.model.loss_type = "ForCausalLM"  # it uses this one anyway, after a warning
    peers["limit sdpa"] = make_limit(model)
    if training:
        for name, peer in list(peers.items()):
            family, engine = name.split(maxsplit=1)
            if family == "lsgpt":
                peers[f"lsgpt-no-logits {engine}"] = replace(peer, options={"skip_logits": True})
    return shape, peers


def new_model(config: PreTrainedConfig, shape: Shape) -> nn.Module:
    """Makes a model on the engine `sdpa` with random weights, in the precision and on the device of `shape`."""
    config = copy.deepcopy(config)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=shape.dtype).to(shape.device)
    if shape.int8:
        from torchao.quantization import Int8WeightOnlyConfig, quantize_  # noqa: PLC0415 (optional)

        quantize_(model, Int8WeightOnlyConfig())
    return model


def twin(model: nn.Module, engine: str, config: PreTrainedConfig | None = None) -> nn.Module:
    """
    Makes a model that shares the parameters of `model`, on another engine or with another configuration. Parameters
    that it lacks are left out: sinks without local heads, and in Llama biases and norms of queries and keys.
    """
    weight = model.lm_head.weight
    config = copy.deepcopy(model.config if config is None else config)
    with no_init_weights():
        other = AutoModelForCausalLM.from_config(config, attn_implementation=engine, dtype=weight.dtype)
    other.to(weight.device).train(model.training)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    missing, _ = other.load_state_dict(parameters, strict=False, assign=True)
    assert not missing, missing
    return other


def load_shape(name: str, **overrides) -> LSGPTConfig:
    """
    Loads the configuration of a preset or of the checkpoint in a folder, with overrides as in `load_preset` and
    without dropout, so that all models compute the same.

    Raises:
        ValueError: There is neither, or the model has no equal among the peers.
    """
    is_folder = name not in list_presets() and Path(name).is_dir()
    config = (load_config if is_folder else load_preset)(name, **overrides)
    config.attention_dropout = config.resid_dropout = config.embd_dropout = 0.0
    for cap in ("attn_logit_softcapping", "final_logit_softcapping"):
        if getattr(config, cap) is not None:
            raise ValueError(
                "`lsgpt bench` compares attention implementations and models that cannot soft-cap logits; "
                f"`{cap}` of {name} is {getattr(config, cap)}"
            )
    if config.norm_type not in ("layer_norm", "rms_norm"):
        raise ValueError(
            "`lsgpt bench` compares models with GPT-2 or Llama, whose norms are before attention and MLP; "
            f"`norm_type` of {name} is {config.norm_type!r}"
        )
    is_of_gpt2 = config.num_key_value_heads == config.num_attention_heads
    is_of_gpt2 = is_of_gpt2 and config.head_dim * config.num_attention_heads == config.hidden_size
    if stock_family(config) == "gpt2" and not is_of_gpt2:
        raise ValueError(
            "`lsgpt bench` compares models with GPT-2, unless they have RMSNorm and gated MLPs, as Llama does. GPT-2 "
            "has no grouped queries, and `head_dim` is `hidden_size` / `num_attention_heads`; that does not hold for "
            f"{name}"
        )
    return config


def stock_family(config: LSGPTConfig) -> str:
    """The family with the blocks of `config`: `"llama"` for RMSNorm and gated MLPs, `"gpt2"` for all others."""
    return "llama" if config.norm_type == "rms_norm" and config.gated_mlp else "gpt2"


def llama_config(config: LSGPTConfig) -> LlamaConfig:
    """Transformers' Llama with the layers, heads, widths, positions and vocabulary of `config`."""
    fields = (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "hidden_act",
        "max_position_embeddings",
        "rope_parameters",
        "tie_word_embeddings",
    )
    same = {name: copy.deepcopy(getattr(config, name)) for name in fields}
    return LlamaConfig(**same, rms_norm_eps=config.layer_norm_eps, bos_token_id=None, eos_token_id=None)


def gpt2_config(config: LSGPTConfig, activation: str = "gelu_new") -> GPT2Config:
    """Transformers' GPT-2 with the layers, heads, widths, positions and vocabulary of `config`, and no dropout."""
    return GPT2Config(
        vocab_size=config.vocab_size,
        n_positions=config.max_position_embeddings,
        n_embd=config.hidden_size,
        n_layer=config.num_hidden_layers,
        n_head=config.num_attention_heads,
        n_inner=config.intermediate_size,
        activation_function=activation,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=None,
        eos_token_id=None,
    )


def make_limit(model: nn.Module) -> Peer:
    """
    Makes a twin of `model` with `sdpa` that skips the attention and cache updates of local heads: a local head returns
    its values, as if each token saw only itself. The projections of all heads stay.
    """
    limit = twin(model, "sdpa")
    for layer in attention_layers(limit):
        layer.attend = partial(_attend_globally, layer)
    return Peer(limit)


def _attend_globally(layer, query, key, value, attention_mask, past_key_values=None, **kwargs):
    outputs = []
    for heads, q, k, v in layer.split_heads(query, key, value):
        if heads.kind == LOCAL:
            outputs.append(repeat_kv(v, layer.num_key_value_groups).transpose(1, 2))
            continue
        if past_key_values is not None:
            k, v = past_key_values.update(k, v, heads.cache_layer)
        mask = attention_mask.masks[heads.kind]
        outputs.append(ALL_ATTENTION_FUNCTIONS["sdpa"](layer, q, k, v, mask, scaling=layer.scaling)[0])
    return torch.cat(outputs, dim=2), None


def example_sinks(config: LSGPTConfig, num_global_heads: int, like: torch.Tensor) -> torch.Tensor | None:
    """Sinks `(H,)` of a layer, exact in every precision, `NO_SINK` for global heads. `None` without any."""
    num_local_heads = config.num_attention_heads - num_global_heads
    if not config.attention_sinks or num_local_heads == 0:
        return None
    sinks = torch.arange(num_local_heads, device=like.device, dtype=like.dtype) % 5 - 2
    return nn.functional.pad(sinks, (num_global_heads, 0), value=NO_SINK)


def attention_function(
    config: LSGPTConfig, engine: str, backend: SDPBackend | None = None, layer_idx: int = 0
) -> Callable:
    """
    Returns the attention of one layer as the model computes it, including the making of masks, with `example_sinks` if
    the model has sinks: a function that maps query `(B, H, T, D)`, key and value `(B, H_kv, T, D)` to outputs
    `(B, T, H, D)`.
    """
    config = copy.deepcopy(config)
    config._attn_implementation = engine
    with torch.device("meta"):  # the projections are not used
        layer = LSGPTAttention(config, layer_idx).eval()

    def attend(query, key, value):
        with only(backend):
            visibility = describe_visibility(config, query.new_empty(query.shape[0], query.shape[2], 0))
            num_global_heads = config.num_global_heads_per_layer[layer_idx]
            sinks = example_sinks(config, num_global_heads, query)
            layer.sinks = None if sinks is None else nn.Parameter(sinks[num_global_heads:], requires_grad=False)
            return layer.attend(query, key, value, create_masks(config, visibility))[0]

    return attend


def only(backend: SDPBackend | None):
    """A context in which `scaled_dot_product_attention` uses this kernel, or whichever it chooses."""
    return nullcontext() if backend is None else sdpa_kernel(backend)
