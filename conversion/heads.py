"""Global and local heads for a pretrained model: measure where heads attend, choose, and put the global ones first.

Shapes: L layers, H heads, D `head_dim`, n tokens in a block.
"""

import copy
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from tqdm.auto import tqdm

from lsgpt.modeling_lsgpt import GLOBAL, LSGPTConfig, LSGPTForCausalLM, Visibility, attention_layers
from lsgpt.modeling_lsgpt.engines_lsgpt import eager_attention_weights


BALANCES = ("layer", "overall")

QUERIES_AT_ONCE = 128
"""Number of queries of one layer whose attention weights are in memory together."""


def build_model(config: LSGPTConfig, weights: dict[str, torch.Tensor]) -> LSGPTForCausalLM:
    """The model of a configuration and a state dict, whose tensors it takes as they are; in evaluation mode."""
    with torch.device("meta"):  # no time for initial weights, no memory for a second copy
        model = LSGPTForCausalLM(config)
    model.load_state_dict(weights, assign=True)
    if model.model.rotary_emb is not None:  # its frequencies are in no state dict
        model.model.rotary_emb = type(model.model.rotary_emb)(config)
    model.tie_weights()
    return model.eval()


def with_global_heads(model: LSGPTForCausalLM, global_heads: Sequence[Sequence[int]], window: int) -> LSGPTForCausalLM:
    """
    The same model with some heads global, which then come first, and the others local.

    To permute the heads of a layer, rows of the query, key and value projections and columns of the output projection,
    changes nothing, so the logits differ only by what the window hides.

    Args:
        model: A model whose heads are all global, each with keys of its own. It stays as it is, and shares with the
            new one the tensors that are equal.
        global_heads: For each layer the heads that stay global.
        window: Number of keys that a query of a local head sees, its own included.

    Raises:
        ValueError: A model with local heads or shared keys, heads that it does not have, or a window below 2.
    """
    _check_model(model)
    config, weights = copy.deepcopy(model.config), model.state_dict()
    num_heads = config.num_attention_heads
    for layer, chosen in enumerate(global_heads):
        if len(set(chosen)) < len(chosen) or not set(chosen) <= set(range(num_heads)):
            raise ValueError(
                f"`global_heads` must be different heads from 0 to {num_heads - 1}; got {list(chosen)} for layer "
                f"{layer}"
            )
        order = torch.tensor([*chosen, *(head for head in range(num_heads) if head not in chosen)])
        prefix = f"model.layers.{layer}.self_attn."
        # Norms of queries and keys are the same for all heads, and so is the bias of the output projection.
        projections = {f"{x}_proj.{kind}": 0 for x in "qkv" for kind in ("weight", "bias")} | {"o_proj.weight": 1}
        for name, dim in projections.items():
            if prefix + name in weights:
                heads = weights[prefix + name].unflatten(dim, (num_heads, config.head_dim))
                weights[prefix + name] = heads.index_select(dim, order.to(heads.device)).flatten(dim, dim + 1)
    counts = [len(chosen) for chosen in global_heads]
    config.num_global_heads = counts[0] if counts == counts[:1] * config.num_hidden_layers else counts
    config.sliding_window = window
    config.validate_architecture()
    return build_model(config, weights)


@torch.no_grad()
def measure_locality(model: LSGPTForCausalLM, blocks: Iterable[torch.Tensor], window: int) -> torch.Tensor:
    """
    The share of its attention that each head spends on the last `window` keys, the query's own included: the mean over
    the queries from which the window hides something, those at position `window` and later.

    Args:
        model: A model whose heads are all global, each with keys of its own.
        blocks: Token ids `(n,)` each, with `n > window`.
        window: Number of keys.

    Returns:
        `(L, H)` numbers between 0 and 1 in float64, on the CPU.

    Raises:
        ValueError: A model with local heads or shared keys.
    """
    _check_model(model)
    layers = attention_layers(model)
    totals = torch.zeros(len(layers), model.config.num_attention_heads, dtype=torch.float64)

    def adder(total: torch.Tensor):
        def add(layer, args, kwargs):
            # What the layer is about to compute, on whatever engine.
            heads = layer.project(*args, kwargs["position_embeddings"])
            length, device = heads.key.shape[2], heads.key.device
            all_heads = Visibility(length, length, device=device)
            for rows in all_heads.query_positions[window:].split(QUERIES_AT_ONCE):
                pairs = (0, 0, rows[:, None], all_heads.key_positions)
                in_window = replace(all_heads, window=window).sees(*pairs)
                queries = heads._replace(query=heads.query[:, :, rows])
                weights = eager_attention_weights(queries, all_heads.sees(*pairs)[None, None])
                total.add_(weights.masked_fill(~in_window, 0.0).double().sum((0, 2, 3)).cpu())

        return add

    handles = [layer.register_forward_pre_hook(adder(total), with_kwargs=True) for layer, total in zip(layers, totals)]
    num_queries = 0
    try:
        for block in tqdm(blocks, desc="Measuring heads", leave=False):
            model(input_ids=block[None].to(model.device), use_cache=False, logits_to_keep=1)
            num_queries += len(block) - window
    finally:
        for handle in handles:
            handle.remove()
    return totals / num_queries


def _check_model(model: LSGPTForCausalLM):
    config = model.config
    all_global = config.layer_types == [GLOBAL] * config.num_hidden_layers
    if not all_global or config.num_key_value_heads != config.num_attention_heads:
        raise ValueError(
            f"`model` must have {config.num_attention_heads} global heads, each with keys of its own; got "
            f"`num_global_heads` {config.num_global_heads} and `num_key_value_heads` {config.num_key_value_heads}"
        )


def choose_global_heads(locality: torch.Tensor, count: int, balance: str = "layer") -> list[list[int]]:
    """
    The least local heads, to be made global.

    Args:
        locality (`(L, H)`): What `measure_locality` returns.
        count: Number of global heads in a layer.
        balance: `"layer"` takes `count` heads in each layer; `"overall"` the `count * L` least local ones of the whole
            model, so that layers may have different numbers.

    Returns:
        For each layer the chosen heads, ascending.

    Raises:
        ValueError: No such balance.
    """
    if balance not in BALANCES:
        raise ValueError(f"`balance` must be one of {', '.join(BALANCES)}; got {balance!r}")
    if balance == "layer":
        return locality.argsort(dim=1, stable=True)[:, :count].sort(dim=1).values.tolist()
    chosen = torch.zeros(locality.numel(), dtype=torch.bool)
    chosen[locality.flatten().argsort(stable=True)[: count * len(locality)]] = True
    return [row.nonzero().flatten().tolist() for row in chosen.view_as(locality)]
