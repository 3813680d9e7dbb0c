"""Converts checkpoints of nanoGPT, and of the paper's code, which is nanoGPT with local heads.

The parameters have the same names as in GPT-2. The rows of an attention layer's `c_attn` are those of all queries,
then of all keys, then of all values.
"""

import pickle
from pathlib import Path

import torch

from lsgpt.modeling_lsgpt import LSGPTConfig, LSGPTForCausalLM
from lsgpt.utilities import refuse_tensors

from .heads import with_global_heads
from .weights import model_from_weights, rename_gpt2


_SIZES = ("n_layer", "n_head", "n_embd", "block_size", "vocab_size")


def load_nanogpt(path: str | Path) -> LSGPTForCausalLM:
    """
    Loads and converts a checkpoint that nanoGPT or the paper's code wrote (`ckpt.pt`); see `convert_nanogpt`.

    Raises:
        ValueError: If the file is something else, or holds more than tensors and plain values; and as in
            `convert_nanogpt`.
    """
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        needed = ", ".join(torch.serialization.get_unsafe_globals_in_checkpoint(path)) or str(error)
        raise ValueError(
            f"{str(path)!r} must hold tensors and plain values only, because reading anything else can run code from "
            f"the file; this one needs {needed}. If you trust it, save its `model` and `model_args` again"
        ) from error
    except (RuntimeError, EOFError) as error:
        raise ValueError(f"{str(path)!r} must be a complete file written by `torch.save`: {error}") from error
    if not isinstance(checkpoint, dict) or not {"model", "model_args"} <= checkpoint.keys():
        found = ", ".join([*map(str, checkpoint)][:5]) if isinstance(checkpoint, dict) else type(checkpoint).__name__
        raise ValueError(
            f"{str(path)!r} must be a checkpoint of nanoGPT, with `model` and `model_args`; it has {found}. For a "
            "model of Transformers, name its folder"
        )
    return convert_nanogpt(checkpoint["model"], checkpoint["model_args"])


def convert_nanogpt(state_dict: dict[str, torch.Tensor], model_args: dict) -> LSGPTForCausalLM:
    """
    Converts a state dict of nanoGPT or of the paper's code to an LSGPT model with the same logits.

    Two generations of the paper's code are told apart by their parameter names. In the first, `attn.c_attn` serves all
    heads, and local heads see `local_attn_span` keys. In the second, local heads have `attn.c_local_attn`, global
    heads have `attn.c_global_attn`, and local heads see one more key. Both put local heads first. Without local heads,
    the model is a plain nanoGPT. The activation is the exact GELU, as in nanoGPT since June 2023.

    Args:
        state_dict: The parameters, with or without the prefix that `torch.compile` adds to their names.
        model_args: The arguments of the model's configuration.

    Raises:
        ValueError: If sizes are missing, or tensors are missing, unknown, or do not have the shapes that follow from
            the sizes; the message names them.
    """
    if not isinstance(state_dict, dict) or not isinstance(model_args, dict):
        raise ValueError("`model` and `model_args` must be dictionaries, as nanoGPT writes them")
    for name in _SIZES:
        if not isinstance(model_args.get(name), int) or model_args[name] < 1:
            raise ValueError(f"`model_args` must have a positive integer {name!r}; got {model_args.get(name)!r}")
    weights = {name.removeprefix("_orig_mod."): tensor for name, tensor in state_dict.items()}
    masks = {name: weights.pop(name) for name in list(weights) if name.endswith((".attn.bias", ".attn.mask"))}
    has_two_projections = any(".attn.c_local_attn." in name or ".attn.c_global_attn." in name for name in weights)

    heads = model_args["n_head"]
    # Early versions of the paper's code always made half of the heads local.
    default = heads // 2 if "local_attn_span" in model_args else 0
    local_heads = model_args.get("n_local_head", default)
    if not isinstance(local_heads, int) or not 0 <= local_heads <= heads:
        raise ValueError(f"`n_local_head` must be between 0 and `n_head` ({heads}); got {local_heads!r}")
    window = model_args.get("local_attn_span")
    if local_heads and not isinstance(window, int):
        raise ValueError(f"`local_attn_span` must be the number of keys that local heads see; got {window!r}")

    head_dim = model_args.get("head_dim", model_args["n_embd"] // heads)
    kinds = {"c_attn": heads}
    if has_two_projections:
        kinds = {name: n for name, n in (("c_local_attn", local_heads), ("c_global_attn", heads - local_heads)) if n}
    _check_tensors(weights, _expected_shapes(weights, model_args, head_dim, kinds))
    _check_masks(masks, heads, local_heads, window)
    if has_two_projections:
        _stack_projections(weights, list(kinds), model_args["n_layer"])

    token_embeddings, lm_head = weights["transformer.wte.weight"], weights["lm_head.weight"]
    dropout = model_args.get("dropout", 0.0)
    config = LSGPTConfig(
        vocab_size=model_args["vocab_size"],
        hidden_size=model_args["n_embd"],
        num_hidden_layers=model_args["n_layer"],
        num_attention_heads=heads,
        head_dim=head_dim,
        num_global_heads=heads,
        intermediate_size=len(weights["transformer.h.0.mlp.c_fc.weight"]),
        hidden_act="gelu",
        max_position_embeddings=model_args["block_size"],
        use_bias="transformer.ln_f.bias" in weights,
        attention_dropout=dropout,
        resid_dropout=dropout,
        embd_dropout=dropout,
        # Plain nanoGPT saves the shared tensor under both names.
        tie_word_embeddings=torch.equal(token_embeddings, lm_head),
    )
    model = model_from_weights(config, rename_gpt2(weights, config.num_hidden_layers))
    if not local_heads:
        return model
    global_heads = [range(local_heads, heads)] * config.num_hidden_layers
    return with_global_heads(model, global_heads, window + 1 if has_two_projections else window)


def _expected_shapes(weights: dict, model_args: dict, head_dim: int, kinds: dict[str, int]) -> dict[str, tuple]:
    """Shapes of all parameters by name; `weights` determine the MLP's width and whether there are biases."""
    width, size = model_args["n_embd"], head_dim * model_args["n_head"]
    first_mlp = weights.get("transformer.h.0.mlp.c_fc.weight")
    inner = len(first_mlp) if first_mlp is not None else 4 * width
    layer = {
        "ln_1": (width,),
        **{f"attn.{name}": (3 * head_dim * count, width) for name, count in kinds.items()},
        "attn.c_proj": (width, size),
        "ln_2": (width,),
        "mlp.c_fc": (inner, width),
        "mlp.c_proj": (width, inner),
    }
    modules = {f"h.{i}.{name}": shape for i in range(model_args["n_layer"]) for name, shape in layer.items()}
    modules["ln_f"] = (width,)
    shapes = {
        "transformer.wte.weight": (model_args["vocab_size"], width),
        "transformer.wpe.weight": (model_args["block_size"], width),
        "lm_head.weight": (model_args["vocab_size"], width),
    }
    shapes |= {f"transformer.{name}.weight": shape for name, shape in modules.items()}
    if "transformer.ln_f.bias" in weights:
        shapes |= {f"transformer.{name}.bias": shape[:1] for name, shape in modules.items()}
    return shapes


def _check_tensors(weights: dict, expected: dict[str, tuple]):
    misshapen = [
        f"{name} {tuple(weights[name].shape)} instead of {shape}"
        for name, shape in expected.items()
        if name in weights and tuple(weights[name].shape) != shape
    ]
    refuse_tensors(
        [name for name in expected if name not in weights],
        [name for name in weights if name not in expected],
        misshapen,
    )


def _check_masks(masks: dict[str, torch.Tensor], heads: int, local_heads: int, window: int | None):
    """Checks `attn.mask` `(1, H, n, n)`, which the first generation saved; its last row shows each head's span."""
    for name, mask in masks.items():
        if name.endswith(".attn.bias"):
            continue  # plain causality
        if mask.ndim != 4:
            refuse_tensors([], [], [f"{name} {tuple(mask.shape)}"])
        length = mask.shape[-1]
        expected = [min(window or length, length)] * local_heads + [length] * (heads - local_heads)
        found = mask[0, :, -1].sum(-1).tolist()
        if found != expected:
            raise ValueError(
                f"{name} must let the heads see {expected} keys, as `n_local_head` and `local_attn_span` say; "
                f"it lets them see {found}"
            )


def _stack_projections(weights: dict, kinds: list[str], num_layers: int):
    """Replaces the projections of the two kinds of heads with one `c_attn`, local heads first."""
    for layer in range(num_layers):
        prefix = f"transformer.h.{layer}.attn."
        for suffix in ("weight", "bias"):
            parts = [weights.pop(f"{prefix}{kind}.{suffix}", None) for kind in kinds]
            if parts[0] is not None:
                queries_keys_values = zip(*(part.chunk(3) for part in parts))
                weights[f"{prefix}c_attn.{suffix}"] = torch.cat([torch.cat(x) for x in queries_keys_values])
