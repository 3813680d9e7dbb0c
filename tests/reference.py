"""Oracles: Long Short-attention and the whole model written from the definition, densely and without the library.

Nothing here imports the code under test. Shapes: B batch, T queries, S keys, H query heads, H_kv key/value heads, D.
"""

import torch
from torch.nn import functional as F


def visible_pairs(num_heads, num_global_heads, window, q_length, kv_length, padding_mask=None, documents=None):
    """
    Who sees whom, `(B or 1, H, T, S)`: the last query stands at the last key.

    A global head sees `k <= q`, a local one `q - window < k <= q`; never padding (`padding_mask` `(B, S)`, True for
    real tokens), never another document (`documents` `(B, S)`, numbers).
    """
    q = torch.arange(q_length)[:, None] + (kv_length - q_length)
    k = torch.arange(kv_length)
    head = torch.arange(num_heads)[:, None, None]
    visible = (k <= q) & ((head < num_global_heads) | (k > q - window))
    visible = visible[None]
    if padding_mask is not None:
        visible = visible & padding_mask[:, None, None, :].bool()
    if documents is not None:
        same = documents[:, -q_length:, None] == documents[:, None, :]
        visible = visible & same[:, None]
    return visible


def dense_attention(query, key, value, visible, softcap=None, sinks=None):
    """
    Attention of `query` `(B, H, T, D)` over `key` and `value` `(B, H_kv, S, D)`: outputs `(B, T, H, D)` and weights
    `(B, H, T, S)`, in the inputs' precision. A query that sees nothing gets 0. With `sinks` `(H,)` or `(B, H, T)`, the
    exponential of a head's sink is added to the softmax's denominators.
    """
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    logits = query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits.masked_fill(~visible, torch.finfo(logits.dtype).min)
    if sinks is not None:
        sinks = sinks[..., None] if sinks.ndim == 3 else sinks[:, None, None]
        logits = torch.cat([sinks.expand(*logits.shape[:3], 1), logits], dim=-1)
    weights = logits.softmax(-1)[..., -visible.shape[-1] :] * visible
    return (weights @ value).transpose(1, 2), weights


def late_sinks(sinks, visible, window):
    """Sinks `(H,)` that only queries with `window` visible keys see, as `(B or 1, H, T)`."""
    return torch.where(visible.sum(-1) >= window, sinks[:, None], -torch.inf)


def assert_as_exact_as(actual, exact, plain, head_dim, what=""):
    """
    The error of `actual` against the float64 result `exact` is at most twice that of `plain`, the dense computation
    in the same precision, give or take the rounding of one dot product over `head_dim` (root mean squares).

    In float64, where there is nothing more exact to compare with, `plain` is computed in float32 and its error scaled
    to float64's. Each argument is a list of tensors, measured together.
    """

    def join(tensors):
        return torch.cat([x.detach().double().flatten() for x in tensors])

    def rms(x):
        return x.pow(2).mean().sqrt()

    eps, plain_eps = torch.finfo(actual[0].dtype).eps, torch.finfo(plain[0].dtype).eps
    actual, exact, plain = join(actual), join(exact), join(plain)
    allowed = 2 * (rms(plain - exact) * (eps / plain_eps) + eps * head_dim**0.5 * rms(exact))
    error = rms(actual - exact)
    assert torch.isfinite(actual).all(), f"{what}: not finite"
    assert error <= allowed, f"{what}: error {error:.3e}, allowed {allowed:.3e}"


def reference_logits(model, input_ids, position_ids=None, padding_mask=None, documents=None):
    """Logits `(B, T, V)` of an `LSGPTForCausalLM`'s weights, computed in float64 from its state dict."""
    config = model.config
    weights = {name: tensor.double() for name, tensor in model.state_dict().items()}
    heads, kv_heads, head_dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    batch_size, length = input_ids.shape
    if position_ids is None:
        position_ids = torch.arange(length).expand(batch_size, -1)

    def linear(name, x):
        return F.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))

    def norm(name, x, is_there=True):
        if not is_there:
            return x
        if config.norm_type.startswith("rms_norm"):
            return rms_norm(name, x)
        return F.layer_norm(
            x, x.shape[-1:], weights[f"{name}.weight"], weights.get(f"{name}.bias"), config.layer_norm_eps
        )

    def rms_norm(name, x):
        return x / (x.pow(2).mean(-1, keepdim=True) + config.layer_norm_eps).sqrt() * weights[f"{name}.weight"]

    def rotate(x, has_global_heads):
        rope = config.rope_parameters
        theta = rope.get("full_attention" if has_global_heads else "sliding_attention", rope)["rope_theta"]
        half = head_dim // 2
        angles = position_ids[:, None, :, None] * theta ** (-torch.arange(half, dtype=torch.float64) / half)
        a, b = x[..., :half], x[..., half:]
        return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), -1)

    x = F.embedding(input_ids, weights["model.embed_tokens.weight"])
    if config.position_embedding_type == "learned":
        x = x + F.embedding(position_ids, weights["model.embed_positions.weight"])
    elif config.position_embedding_type == "sinusoidal":
        i = torch.arange(0, config.hidden_size, 2, dtype=torch.float64)
        angles = position_ids[..., None] / 10000 ** (i / config.hidden_size)
        table = torch.zeros_like(x)
        table[..., 0::2], table[..., 1::2] = angles.sin(), angles.cos()
        x = x + table

    activation = {"gelu": F.gelu, "relu": F.relu, "silu": F.silu}[config.hidden_act]
    before = config.norm_type != "rms_norm_after"
    after = config.norm_type in ("rms_norm_after", "rms_norm_around")
    counts = config.num_global_heads
    counts = counts if isinstance(counts, list) else [counts] * config.num_hidden_layers
    for i, num_global_heads in enumerate(counts):
        layer = f"model.layers.{i}"
        y = norm(f"{layer}.input_layernorm", x, before)
        q, k = linear(f"{layer}.self_attn.q_proj", y), linear(f"{layer}.self_attn.k_proj", y)
        if config.qk_norm == "all_heads":
            q, k = rms_norm(f"{layer}.self_attn.q_norm", q), rms_norm(f"{layer}.self_attn.k_norm", k)
        q = q.view(batch_size, length, heads, head_dim).transpose(1, 2)
        k = k.view(batch_size, length, kv_heads, head_dim).transpose(1, 2)
        v = linear(f"{layer}.self_attn.v_proj", y).view(batch_size, length, kv_heads, head_dim).transpose(1, 2)
        if config.qk_norm is True:
            q, k = rms_norm(f"{layer}.self_attn.q_norm", q), rms_norm(f"{layer}.self_attn.k_norm", k)
        if config.position_embedding_type == "rope":
            q, k = rotate(q, num_global_heads > 0), rotate(k, num_global_heads > 0)
        visible = visible_pairs(
            heads, num_global_heads, config.sliding_window, length, length, padding_mask, documents
        )
        sinks = weights.get(f"{layer}.self_attn.sinks")
        if sinks is not None:
            sinks = torch.cat([torch.full((num_global_heads,), -torch.inf, dtype=torch.float64), sinks])
            if config.attention_sinks == "full_window":
                sinks = late_sinks(sinks, visible, config.sliding_window)
        attended, _ = dense_attention(q, k, v, visible, config.attn_logit_softcapping, sinks)
        y = linear(f"{layer}.self_attn.o_proj", attended.flatten(2))
        x = x + norm(f"{layer}.post_self_attn_layernorm", y, after)
        y = norm(f"{layer}.post_attention_layernorm", x, before)
        up = linear(f"{layer}.mlp.up_proj", y)
        up = activation(linear(f"{layer}.mlp.gate_proj", y)) * up if config.gated_mlp else activation(up)
        x = x + norm(f"{layer}.post_mlp_layernorm", linear(f"{layer}.mlp.down_proj", up), after)
    logits = F.linear(norm("model.norm", x), weights["lm_head.weight"])
    softcap = config.final_logit_softcapping
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def autograd_functions(tensor):
    """Names of what made a tensor, from the last function back along the first inputs."""
    node, names = tensor.grad_fn, []
    while node is not None:
        names.append(node.name())
        node = node.next_functions[0][0] if node.next_functions else None
    return names
