"""The attention implementation `triton`: global and local heads in one launch of a fused kernel, forward and backward.

The algorithm is FlashAttention-2's (arXiv:2307.08691): a program holds one block of queries and walks over the blocks
of keys that they see, or vice versa for the gradients of keys and values. Specific to Long Short-attention are the
order of the programs and the length of their walks: programs of global heads come first, those with the longest walks
before all others, and the many short programs of local heads fill the gaps that they leave.

The kernels are for NVIDIA GPUs, in float16, bfloat16 and float32; they have been tested on an H200. With
`TRITON_INTERPRET=1` they run on a CPU, slowly, as they do in the tests. Importing this file requires the package
`triton`.

Shapes: B batch, T queries, S keys, H query heads, H_kv key/value heads, D `head_dim`, W `sliding_window`.
"""

from typing import NamedTuple

import torch

from lsgpt.modeling_lsgpt import Visibility


try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise ImportError(
        'attn_implementation="triton" needs the package `triton`, which comes with PyTorch for CUDA; install it '
        '(`pip install triton`), or use attn_implementation="sdpa"'
    ) from error


MAX_HEAD_DIM = 128
"""With wider heads, the blocks do not fit into a GPU's shared memory."""


class Spans(NamedTuple):
    """
    Padding and packed documents as intervals. The kernel itself applies causality and the window: the last query has
    the position of the last key, and positions are counted from the first key.
    """

    first: torch.Tensor | None = None
    """`(B, S)`, int32: the first key that the query at each position may see; S (no key) at padding."""
    last: torch.Tensor | None = None
    """`(B, S)`, int32: position of the last query that may see each key, -1 for padding."""


def make_spans(visibility: Visibility) -> Spans:
    """The spans of one kind of head; if nothing was cached, both kinds have the same."""
    padding_mask, documents = visibility.padding_mask, visibility.documents
    if documents is None:
        if padding_mask is None:
            return Spans()
        documents = torch.zeros_like(padding_mask, dtype=torch.int)
    total = documents.shape[-1]
    position = torch.arange(total, device=documents.device)
    changes = torch.nn.functional.pad(documents.diff(dim=-1) != 0, (1, 1), value=True)
    first = torch.where(changes[:, :-1], position, 0).cummax(-1).values
    last = torch.where(changes[:, 1:], position, total).flip(-1).cummin(-1).values.flip(-1)
    if padding_mask is not None:
        first, last = first.masked_fill(~padding_mask, total), last.masked_fill(~padding_mask, -1)
    offset = visibility.kv_offset
    return Spans(*((x[:, offset:] - offset).int().contiguous() for x in (first, last)))


def fused_attention_forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    spans: Spans,
    num_global_heads: int,
    window: int,
    scaling: float,
    sinks: torch.Tensor | None = None,
    measure: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """
    Long Short-attention for the heads of a layer.

    Args:
        query (`(B, H, T, D)`), key (`(B, H_kv, S, D)`), value (`(B, H_kv, S, D)`): All in the same precision, with
            the global heads first.
        spans: Padding and packed documents.
        num_global_heads: Number of query heads that see all keys up to their own position.
        window: W, the number of keys that a query of the other heads sees, including its own.
        scaling: Factor of the dot products.
        sinks (`(H,)` or `(B or 1, H, T)`, *optional*): One extra logit per head in the softmax's denominator.
        measure: Whether to return the largest logits.

    Returns:
        Outputs `(B, T, H, D)`; and the largest `|q . k * scaling|` of each head over the pairs that attend, `(H,)` in
        float32, or `None`.

    Raises:
        ValueError: If the kernels do not support the tensors.
    """
    _check(query)
    # The memory layout that the projections produce, so this usually copies nothing.
    tensors = (x.transpose(1, 2).contiguous() for x in (query, key, value))
    if sinks is not None and sinks.ndim == 3:
        sinks = sinks.expand(len(query), -1, -1).contiguous()
    output, _, max_logits = _attend(*tensors, *spans, sinks, num_global_heads, window, scaling, measure)
    return output, max_logits if measure else None


def _check(query: torch.Tensor):
    remedy = 'use attn_implementation="sdpa"'
    if query.device.type != "cuda" and not IS_INTERPRETED:
        raise ValueError(
            f"`triton` runs on CUDA devices; got tensors on {query.device}. Move the model there, or {remedy}"
        )
    if query.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise ValueError(
            f"`triton` computes in float16, bfloat16 or float32; got {query.dtype}. Load the model "
            f"in one of these, or {remedy}"
        )
    if IS_INTERPRETED and query.dtype == torch.bfloat16:
        raise ValueError("Triton's interpreter multiplies bfloat16 wrongly; use float16 or float32 with it")
    if query.shape[-1] > MAX_HEAD_DIM:
        raise ValueError(f"`head_dim` must be at most {MAX_HEAD_DIM} with `triton`; got {query.shape[-1]}; {remedy}")


# Custom operators, so that `torch.compile` and `torch.export` do not look inside.
@torch.library.custom_op("lsgpt::attend", mutates_args=())
def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    first: torch.Tensor | None,
    last: torch.Tensor | None,
    sinks: torch.Tensor | None,
    num_global_heads: int,
    window: int,
    scaling: float,
    measure: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """
    Takes query `(B, T, H, D)`, key and value `(B, S, H_kv, D)`, all contiguous. Returns outputs `(B, T, H, D)`,
    log-sum-exps to base 2 `(B, H, T)`, and the largest logits `(H,)`, or `(0,)` if they are not measured.
    """
    output, lse, max_logits = _like_results(query, measure)
    call = _describe(query, key, first, last, num_global_heads, window, scaling)
    options = _options(_forward_kernel, query)
    num_blocks = triton.cdiv(query.shape[1], options["BLOCK_Q"])
    largest = lse.new_empty(*lse.shape[:2], num_blocks if measure else 0)
    with torch.cuda.device_of(query):
        _forward_kernel[(num_blocks * lse.shape[0] * lse.shape[1],)](
            query,
            key,
            value,
            output,
            lse,
            largest,
            sinks,
            **call,
            **options,
            MEASURE=measure,
            SINKS_OF_QUERIES=sinks is not None and sinks.ndim == 3,
        )
    return output, lse, largest.amax((0, 2)) if measure else max_logits


@_attend.register_fake
def _like_results(query, *args):
    batch_size, q_length, num_heads, _ = query.shape
    measure = args[-1]
    lse = query.new_empty(batch_size, num_heads, q_length, dtype=torch.float32)
    return torch.empty_like(query), lse, lse.new_empty(num_heads if measure else 0)


@torch.library.custom_op("lsgpt::differentiate", mutates_args=())
def _differentiate(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    lse: torch.Tensor,
    first: torch.Tensor | None,
    last: torch.Tensor | None,
    sinks: torch.Tensor | None,
    num_global_heads: int,
    window: int,
    scaling: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of query, key, value and sinks (`(0,)` if there are none), given the gradient of the outputs."""
    gradient = gradient.contiguous()
    delta = (output.float() * gradient.float()).sum(-1).transpose(1, 2).contiguous()
    gradients = _like_inputs(gradient, query, key, value, output, lse, first, last, sinks)
    if sinks is not None:
        weights = torch.exp2((sinks if sinks.ndim == 3 else sinks[:, None]).float() * _LOG2_E - lse)
        of_queries = -(weights * delta)
        gradients[3].copy_(of_queries if sinks.ndim == 3 else of_queries.sum((0, 2)))
    known = query, key, value, gradient, lse, delta
    call = _describe(query, key, first, last, num_global_heads, window, scaling)
    with torch.cuda.device_of(query):
        options = _options(_backward_keys_kernel, query)
        programs = triton.cdiv(key.shape[1], options["BLOCK_K"]) * key.shape[0] * key.shape[2]
        _backward_keys_kernel[(programs,)](*known, *gradients[1:3], **call, **options)
        options = _options(_backward_queries_kernel, query)
        programs = triton.cdiv(query.shape[1], options["BLOCK_Q"]) * query.shape[0] * query.shape[2]
        _backward_queries_kernel[(programs,)](*known, gradients[0], **call, **options)
    return gradients


@_differentiate.register_fake
def _like_inputs(gradient, query, key, value, output, lse, first, last, sinks, *args):
    of_sinks = query.new_empty(0) if sinks is None else torch.empty_like(sinks)
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), of_sinks


def _keep_for_backward(ctx, inputs, output):
    query, key, value, first, last, sinks, *numbers, _ = inputs
    ctx.save_for_backward(query, key, value, *output[:2], first, last, sinks)
    ctx.numbers = numbers


def _backward(ctx, gradient, *_):
    *gradients, of_sinks = _differentiate(gradient, *ctx.saved_tensors, *ctx.numbers)
    return *gradients, None, None, of_sinks if len(of_sinks) else None, *(None,) * 4


_attend.register_autograd(_backward, setup_context=_keep_for_backward)


def _options(kernel, query: torch.Tensor) -> dict[str, int]:
    """
    Options for compiling a kernel: the sizes of the block that a program holds and of the blocks that it walks over,
    and the numbers of warps and stages. In half precision, nothing spills out of Hopper's registers, and every GPU
    since Ampere has enough shared memory.
    """
    held, walked = ("BLOCK_K", "BLOCK_Q") if kernel is _backward_keys_kernel else ("BLOCK_Q", "BLOCK_K")
    if query.dtype == torch.float32:
        return {held: 32, walked: 32, "num_warps": 4, "num_stages": 2}
    is_small = query.shape[-1] <= 64 or kernel is _forward_kernel
    return {held: 128, walked: 64 if is_small else 32, "num_warps": 8, "num_stages": 2}


def _describe(query, key, first, last, num_global_heads, window, scaling) -> dict:
    """The arguments that all kernels share."""
    batch_size, q_length, num_heads, head_dim = query.shape
    return {
        "first": first,
        "last": last,
        "batch_size": batch_size,
        "q_length": q_length,
        "kv_length": key.shape[1],
        "window": window,
        "scaling": scaling,
        "HEADS": num_heads,
        "GLOBAL_HEADS": num_global_heads,
        "GROUPS": num_heads // key.shape[2],
        "HEAD_DIM": head_dim,
        "BLOCK_D": max(triton.next_power_of_2(head_dim), 16),
    }


_LOG2_E = 1.4426950408889634
LOG2_E = tl.constexpr(_LOG2_E)  # the kernels compute exponentials as powers of 2

# Lines group the kernels' arguments by topic; the formatter would give each argument its own line.
# fmt: off


@triton.jit
def _find_place(blocks, batch_size, HEADS: tl.constexpr, GLOBAL_HEADS: tl.constexpr, LAST_BLOCK_FIRST: tl.constexpr):
    """
    Block, head and sequence of this program. Global heads come first, starting with the blocks with the longest walks;
    the blocks of a local head are consecutive, because neighbouring blocks share keys.
    """
    program = tl.program_id(0)
    num_global = batch_size * GLOBAL_HEADS * blocks
    if program < num_global:
        block = program // (batch_size * GLOBAL_HEADS)
        if LAST_BLOCK_FIRST:
            block = blocks - 1 - block
        place = program % (batch_size * GLOBAL_HEADS)
        head = place % GLOBAL_HEADS
        sequence = place // GLOBAL_HEADS
    else:
        block = (program - num_global) % blocks
        place = (program - num_global) // blocks
        head = GLOBAL_HEADS + place % (HEADS - GLOBAL_HEADS)
        sequence = place // (HEADS - GLOBAL_HEADS)
    return block, head, sequence


@triton.jit
def _point_at_rows(
    x, sequence, head, start, length, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Pointers and mask of the rows `start` to `start + BLOCK` of one head in `(B, length, HEADS, HEAD_DIM)`."""
    rows, columns = tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK_D)[None, :]
    x += ((sequence.to(tl.int64) * length + start) * HEADS + head) * HEAD_DIM
    return x + rows * (HEADS * HEAD_DIM) + columns, (start + rows < length) & (columns < HEAD_DIM)


@triton.jit
def _load_rows(
    x, sequence, head, start, length, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Loads rows of one head, `(BLOCK, BLOCK_D)`, with zeros beyond `length` and `HEAD_DIM`."""
    pointers, mask = _point_at_rows(x, sequence, head, start, length, HEADS, HEAD_DIM, BLOCK, BLOCK_D)
    return tl.load(pointers, mask=mask, other=0.0)


@triton.jit
def _store_rows(
    x, rows, sequence, head, start, length, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    pointers, mask = _point_at_rows(x, sequence, head, start, length, HEADS, HEAD_DIM, BLOCK, BLOCK_D)
    tl.store(pointers, rows.to(x.dtype.element_ty), mask=mask)


@triton.jit
def _load_numbers(x, row, start, length, other, BLOCK: tl.constexpr):
    """Loads the numbers `start` to `start + BLOCK` of one row of `(rows, length)`, with `other` beyond `length`."""
    columns = start + tl.arange(0, BLOCK)
    return tl.load(x + row.to(tl.int64) * length + columns, mask=columns < length, other=other)


@triton.jit
def _multiply(a, b):
    return tl.dot(a, b, input_precision="ieee")  # true float32, not TF32


@triton.jit
def _is_visible(positions, keys, reach, first_keys, last_queries, SPANS: tl.constexpr):
    """Whether the query at each position sees each key. Arguments broadcast, with queries and keys on either axis."""
    visible = (keys <= positions) & (keys > positions - reach)
    if SPANS:
        visible = visible & (keys >= first_keys) & (positions <= last_queries)
    return visible


@triton.jit
def _walk_over_keys(
    first, start, sequence, is_global, q_length, kv_length, window, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr
):
    """
    For a block of queries: their positions, the first keys that they may see, and their reach; then where the walk
    over the keys begins, where it starts to need a mask (in a global head, all queries see the blocks before the
    diagonal), and where it ends.
    """
    first_position = kv_length - q_length + start
    positions = first_position + tl.arange(0, BLOCK_Q)
    first_keys = positions
    if first is not None:
        first_keys = _load_numbers(first, sequence, first_position, kv_length, kv_length, BLOCK_Q)
    reach = tl.where(is_global, kv_length, window)
    begin = tl.maximum(first_position - reach + 1, 0)
    end = tl.minimum(first_position + BLOCK_Q, kv_length)
    if first is not None:
        begin = tl.maximum(begin, tl.min(first_keys))
    begin = begin // BLOCK_K * BLOCK_K
    masked = tl.where(is_global, (first_position + 1) // BLOCK_K * BLOCK_K, begin) if first is None else begin
    return positions, first_keys, reach, begin, masked, end


@triton.jit
def _forward_kernel(
    query, key, value, output, lse, largest, sinks, first, last, batch_size, q_length, kv_length, window, scaling,
    HEADS: tl.constexpr, GLOBAL_HEADS: tl.constexpr, GROUPS: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, MEASURE: tl.constexpr,
    SINKS_OF_QUERIES: tl.constexpr,
):
    """Outputs, log-sum-exps to base 2 `(B, H, T)`, and the largest logit of each block of queries `(B, H, blocks)`."""
    SPANS: tl.constexpr = first is not None
    KV_HEADS: tl.constexpr = HEADS // GROUPS
    blocks = tl.cdiv(q_length, BLOCK_Q)
    block, head, sequence = _find_place(blocks, batch_size, HEADS, GLOBAL_HEADS, True)
    kv_head = head // GROUPS
    start = block * BLOCK_Q
    positions, first_keys, reach, begin, masked, end = _walk_over_keys(
        first, start, sequence, head < GLOBAL_HEADS, q_length, kv_length, window, BLOCK_Q, BLOCK_K
    )

    q = _load_rows(query, sequence, head, start, q_length, HEADS, HEAD_DIM, BLOCK_Q, BLOCK_D)
    # The online softmax: running maximum and total of the weights, running sum of values.
    maximum = tl.full((BLOCK_Q,), float("-inf") if sinks is None else 0.0, tl.float32)
    total = tl.zeros((BLOCK_Q,), tl.float32)
    mean = tl.zeros((BLOCK_Q, BLOCK_D), tl.float32)
    top = tl.zeros((BLOCK_Q,), tl.float32)
    row = sequence.to(tl.int64) * HEADS + head
    if sinks is not None:  # every query sees its sink first
        if SINKS_OF_QUERIES:
            maximum += _load_numbers(sinks, row, start, q_length, 0.0, BLOCK_Q).to(tl.float32) * LOG2_E
        else:
            maximum += tl.load(sinks + head).to(tl.float32) * LOG2_E
        total += 1.0
    for MASKED in tl.static_range(2):  # first the blocks that need no mask
        for k_start in range(masked if MASKED else begin, end if MASKED else masked, BLOCK_K):
            k = _load_rows(key, sequence, kv_head, k_start, kv_length, KV_HEADS, HEAD_DIM, BLOCK_K, BLOCK_D)
            v = _load_rows(value, sequence, kv_head, k_start, kv_length, KV_HEADS, HEAD_DIM, BLOCK_K, BLOCK_D)
            logits = _multiply(q, tl.trans(k)) * (scaling * LOG2_E)
            sizes = tl.where(logits == logits, tl.abs(logits), float("inf"))  # maxima would ignore a NaN
            if MASKED:
                keys, last_queries = k_start + tl.arange(0, BLOCK_K), positions
                if SPANS:
                    last_queries = _load_numbers(last, sequence, k_start, kv_length, -1, BLOCK_K)
                visible = _is_visible(
                    positions[:, None], keys[None, :], reach, first_keys[:, None], last_queries[None, :], SPANS
                )
                logits = tl.where(visible, logits, float("-inf"))
                sizes = tl.where(visible, sizes, 0.0)
            if MEASURE:
                top = tl.maximum(top, tl.max(sizes, 1))
            new_maximum = tl.maximum(maximum, tl.max(logits, 1))
            shift = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)  # 0 for queries that have seen nothing
            weights = tl.exp2(logits - shift[:, None])
            decay = tl.exp2(maximum - shift)
            total = total * decay + tl.sum(weights, 1)
            mean = mean * decay[:, None] + _multiply(weights.to(v.dtype), v)
            maximum = new_maximum

    sees = total > 0
    total = tl.where(sees, total, 1.0)
    mean = mean / total[:, None]
    _store_rows(output, mean, sequence, head, start, q_length, HEADS, HEAD_DIM, BLOCK_Q, BLOCK_D)
    rows = start + tl.arange(0, BLOCK_Q)
    tl.store(lse + row * q_length + rows, tl.where(sees, maximum + tl.log2(total), 0.0), mask=rows < q_length)
    if MEASURE:
        tl.store(largest + row * blocks + block, tl.max(top) / LOG2_E)


@triton.jit
def _backward_keys_kernel(
    query, key, value, gradient, lse, delta, key_gradient, value_gradient, first, last, batch_size, q_length,
    kv_length, window, scaling, HEADS: tl.constexpr, GLOBAL_HEADS: tl.constexpr, GROUPS: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):
    """Gradients of keys and values: a program holds a block of them and walks over the queries that see it."""
    SPANS: tl.constexpr = first is not None
    KV_HEADS: tl.constexpr = HEADS // GROUPS
    blocks = tl.cdiv(kv_length, BLOCK_K)
    block, kv_head, sequence = _find_place(blocks, batch_size, KV_HEADS, GLOBAL_HEADS // GROUPS, False)
    start = block * BLOCK_K
    keys = start + tl.arange(0, BLOCK_K)
    offset = kv_length - q_length
    is_global = kv_head < GLOBAL_HEADS // GROUPS
    reach = tl.where(is_global, kv_length, window)
    end = tl.minimum(start + BLOCK_K - 1 + reach - offset, q_length)
    last_queries = keys
    if SPANS:
        last_queries = _load_numbers(last, sequence, start, kv_length, -1, BLOCK_K)
        end = tl.minimum(end, tl.max(last_queries) + 1 - offset)
    begin = tl.maximum(start - offset, 0) // BLOCK_Q * BLOCK_Q
    free = end  # from here on, all queries of a global head see the whole block
    if not SPANS:
        free = tl.where(is_global, tl.cdiv(tl.maximum(start + BLOCK_K - 1 - offset, 0), BLOCK_Q) * BLOCK_Q, end)

    k = _load_rows(key, sequence, kv_head, start, kv_length, KV_HEADS, HEAD_DIM, BLOCK_K, BLOCK_D)
    v = _load_rows(value, sequence, kv_head, start, kv_length, KV_HEADS, HEAD_DIM, BLOCK_K, BLOCK_D)
    k_gradient = tl.zeros((BLOCK_K, BLOCK_D), tl.float32)
    v_gradient = tl.zeros((BLOCK_K, BLOCK_D), tl.float32)
    for head in range(kv_head * GROUPS, (kv_head + 1) * GROUPS):
        row = sequence.to(tl.int64) * HEADS + head
        for FREE in tl.static_range(2):  # first the blocks that need a mask
            for q_start in range(free if FREE else begin, end if FREE else tl.minimum(free, end), BLOCK_Q):
                # Rows beyond the last query have zeros for query and gradient, so they contribute nothing.
                q = _load_rows(query, sequence, head, q_start, q_length, HEADS, HEAD_DIM, BLOCK_Q, BLOCK_D)
                g = _load_rows(gradient, sequence, head, q_start, q_length, HEADS, HEAD_DIM, BLOCK_Q, BLOCK_D)
                lse_of_query = _load_numbers(lse, row, q_start, q_length, 0.0, BLOCK_Q)
                delta_of_query = _load_numbers(delta, row, q_start, q_length, 0.0, BLOCK_Q)
                weights = tl.exp2(_multiply(k, tl.trans(q)) * (scaling * LOG2_E) - lse_of_query[None, :])
                if not FREE:
                    positions = offset + q_start + tl.arange(0, BLOCK_Q)
                    first_keys = positions
                    if SPANS:
                        first_keys = _load_numbers(first, sequence, offset + q_start, kv_length, kv_length, BLOCK_Q)
                    visible = _is_visible(
                        positions[None, :], keys[:, None], reach, first_keys[None, :], last_queries[:, None], SPANS
                    )
                    weights = tl.where(visible, weights, 0.0)
                v_gradient += _multiply(weights.to(g.dtype), g)
                logits_gradient = weights * (_multiply(v, tl.trans(g)) - delta_of_query[None, :])
                k_gradient += _multiply(logits_gradient.to(q.dtype), q)
    k_gradient *= scaling
    _store_rows(key_gradient, k_gradient, sequence, kv_head, start, kv_length, KV_HEADS, HEAD_DIM, BLOCK_K, BLOCK_D)
    _store_rows(value_gradient, v_gradient, sequence, kv_head, start, kv_length, KV_HEADS, HEAD_DIM, BLOCK_K, BLOCK_D)


@triton.jit
def _backward_queries_kernel(
    query, key, value, gradient, lse, delta, query_gradient, first, last, batch_size, q_length, kv_length, window,
    scaling, HEADS: tl.constexpr, GLOBAL_HEADS: tl.constexpr, GROUPS: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):
    """Gradients of queries: a program holds a block of them and walks over the keys that they see."""
    SPANS: tl.constexpr = first is not None
    KV_HEADS: tl.constexpr = HEADS // GROUPS
    block, head, sequence = _find_place(tl.cdiv(q_length, BLOCK_Q), batch_size, HEADS, GLOBAL_HEADS, True)
    kv_head = head // GROUPS
    start = block * BLOCK_Q
    positions, first_keys, reach, begin, masked, end = _walk_over_keys(
        first, start, sequence, head < GLOBAL_HEADS, q_length, kv_length, window, BLOCK_Q, BLOCK_K
    )

    q = _load_rows(query, sequence, head, start, q_length, HEADS, HEAD_DIM, BLOCK_Q, BLOCK_D)
    g = _load_rows(gradient, sequence, head, start, q_length, HEADS, HEAD_DIM, BLOCK_Q, BLOCK_D)
    row = sequence.to(tl.int64) * HEADS + head
    lse_of_query = _load_numbers(lse, row, start, q_length, 0.0, BLOCK_Q)
    delta_of_query = _load_numbers(delta, row, start, q_length, 0.0, BLOCK_Q)
    q_gradient = tl.zeros((BLOCK_Q, BLOCK_D), tl.float32)
    for MASKED in tl.static_range(2):  # first the blocks that need no mask
        for k_start in range(masked if MASKED else begin, end if MASKED else masked, BLOCK_K):
            k = _load_rows(key, sequence, kv_head, k_start, kv_length, KV_HEADS, HEAD_DIM, BLOCK_K, BLOCK_D)
            v = _load_rows(value, sequence, kv_head, k_start, kv_length, KV_HEADS, HEAD_DIM, BLOCK_K, BLOCK_D)
            weights = tl.exp2(_multiply(q, tl.trans(k)) * (scaling * LOG2_E) - lse_of_query[:, None])
            if MASKED:
                keys, last_queries = k_start + tl.arange(0, BLOCK_K), positions
                if SPANS:
                    last_queries = _load_numbers(last, sequence, k_start, kv_length, -1, BLOCK_K)
                visible = _is_visible(
                    positions[:, None], keys[None, :], reach, first_keys[:, None], last_queries[None, :], SPANS
                )
                weights = tl.where(visible, weights, 0.0)
            logits_gradient = weights * (_multiply(g, tl.trans(v)) - delta_of_query[:, None])
            q_gradient += _multiply(logits_gradient.to(k.dtype), k)
    q_gradient *= scaling
    _store_rows(query_gradient, q_gradient, sequence, head, start, q_length, HEADS, HEAD_DIM, BLOCK_Q, BLOCK_D)


IS_INTERPRETED = not isinstance(_forward_kernel, triton.JITFunction)
"""Whether Triton's interpreter runs the kernels, on any device. (`torch.compile` cannot ask this of a kernel.)"""
