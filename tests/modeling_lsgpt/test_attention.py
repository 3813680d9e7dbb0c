"""Every engine against the dense reference: outputs, gradients of q, k and v, exact zeros where nothing may flow.

Some tests need a GPU (`make test-gpu`). The flash_attention engines also need the flash-attn package: only their
refusals are tested here.
"""

import inspect
import itertools
from functools import partial

import pytest
import torch
from reference import assert_as_exact_as, autograd_functions, dense_attention, late_sinks, visible_pairs
from transformers import AttentionInterface, DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from lsgpt.modeling_lsgpt import (
    ALL_ATTENTION_FUNCTIONS,
    FULL_WINDOW,
    GLOBAL,
    LOCAL,
    LSGPTAttention,
    LSGPTConfig,
    attention_lsgpt,
    create_masks,
    describe_visibility,
    local_lsgpt,
)
from lsgpt.modeling_lsgpt.attention_lsgpt import Beginning, Past
from lsgpt.modeling_lsgpt.local_lsgpt import past_attention_forward


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # where Triton's kernels run in its interpreter
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16  # the interpreter multiplies bfloat16 wrongly

WINDOW = 10
on_a_gpu = pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")

LENGTHS = (1, WINDOW - 1, WINDOW, WINDOW + 1, 63, 111)
HEADS = {  # query heads, global heads, key/value heads
    "H6-G1": (6, 1, 6),
    "H12-G1": (12, 1, 12),
    "H12-G3": (12, 3, 12),
    "H12-G4-KV6": (12, 4, 6),
    "H6-G3-KV2": (6, 3, 2),
    "H4-global": (4, 4, 4),
    "H4-local": (4, 0, 4),
    "H4-local-KV1": (4, 0, 1),
}


def build(heads, engine, dtype, window=WINDOW, head_dim=20, layer_idx=0, num_global_heads=None, **config):
    num_heads, num_global, num_kv_heads = heads
    config = LSGPTConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        num_global_heads=num_global if num_global_heads is None else num_global_heads,
        head_dim=head_dim,
        sliding_window=window,
        **config,
    )
    config._attn_implementation = engine
    return LSGPTAttention(config, layer_idx).to(dtype), config


def masks_for(config, embeds, *args, **kwargs):
    return create_masks(config, describe_visibility(config, embeds, *args, **kwargs))


def attend(attention, qkv, masks, sinks=None, **kwargs):
    """What a layer does between its projections, without a cache: outputs only."""
    if sinks is not None:
        del attention.sinks
        attention.sinks = sinks  # of local heads, not a parameter, so that gradients reach what it was made from
    return attention.attend(*qkv, masks, **kwargs)[0]


def random_qkv(batch_size, heads, length, head_dim, dtype, gradients=True):
    shapes = [(batch_size, n, length, head_dim) for n in (heads[0], heads[2], heads[2])]
    return [torch.randn(shape, dtype=torch.float64).to(dtype).requires_grad_(gradients) for shape in shapes]


def pad(batch_size, length, side):
    """Row b has b tokens of padding at the given side."""
    mask = torch.ones(batch_size, length, dtype=torch.long)
    for row in range(1, batch_size):
        if side == "left":
            mask[row, :row] = 0
        else:
            mask[row, -row:] = 0
    return mask


def pack(batch_size, length):
    """Positions and numbers of documents of growing lengths; rows differ."""
    documents = torch.zeros(batch_size, length, dtype=torch.long)
    positions = torch.zeros(batch_size, length, dtype=torch.long)
    for row in range(batch_size):
        start, size, number = 0, 1 + row, 0
        while start < length:
            stop = min(start + size, length)
            documents[row, start:stop] = number
            positions[row, start:stop] = torch.arange(stop - start)
            start, size, number = stop, size + 5, number + 1
    return positions, documents


def scenario(name, batch_size, length):
    """What the model is told, and what the reference is told."""
    if name in ("left", "right"):
        mask = pad(batch_size, length, name)
        return {"attention_mask": mask}, {"padding_mask": mask}
    if name == "packed":
        positions, documents = pack(batch_size, length)
        return {"position_ids": positions}, {"documents": documents}
    if name == "packed-ones":
        positions, documents = pack(batch_size, length)
        ones = torch.ones(batch_size, length, dtype=torch.long)
        return {"position_ids": positions, "attention_mask": ones}, {"documents": documents}
    if name == "packed-right":
        positions, documents = pack(batch_size, length)
        mask = pad(batch_size, length, "right")
        return {"position_ids": positions, "attention_mask": mask}, {"documents": documents, "padding_mask": mask}
    return {}, {}


def check(heads, engine, dtype, length, name="plain", batch_size=3, gradients=True, head_dim=20, **kwargs):
    attention, config = build(heads, engine, dtype, head_dim=head_dim, **kwargs)
    qkv = random_qkv(batch_size, heads, length, head_dim, dtype, gradients)
    told, truth = scenario(name, batch_size, length)
    embeds = torch.empty(batch_size, length, 0, dtype=dtype)
    masks = masks_for(config, embeds, **told)
    visible = visible_pairs(heads[0], heads[1], config.sliding_window, length, length, **truth)
    softcap = config.attn_logit_softcapping

    plain_dtype = torch.float32 if dtype == torch.float64 else dtype
    if config.attention_sinks:
        qkv.append(torch.randn(heads[0], dtype=torch.float64).to(dtype).requires_grad_(gradients))
        is_global = torch.arange(heads[0]) < heads[1]

    exact_qkv = [x.detach().double().requires_grad_() for x in qkv]
    plain_qkv = [x.detach().to(plain_dtype, copy=True).requires_grad_() for x in qkv]

    def sinks_of(tensors, nothing):
        if not config.attention_sinks:
            return None
        sinks = tensors[3].masked_fill(is_global, nothing)
        return late_sinks(sinks, visible, config.sliding_window) if config.attention_sinks == FULL_WINDOW else sinks

    outputs = [
        attend(attention, qkv[:3], masks, qkv[3][~is_global] if config.attention_sinks else None),
        dense_attention(*exact_qkv[:3], visible, softcap, sinks_of(exact_qkv, -torch.inf))[0],
        dense_attention(*plain_qkv[:3], visible, softcap, sinks_of(plain_qkv, -torch.inf))[0],
    ]
    # What a padding token computes is nobody's business, as long as it is finite.
    assert torch.isfinite(outputs[0]).all()
    real = truth.get("padding_mask", torch.ones(batch_size, length)).bool()
    assert_as_exact_as(*([output[real]] for output in outputs), head_dim, "output")
    if gradients:
        upstream = torch.randn_like(outputs[1]).to(dtype) * real[:, :, None, None]
        for output in outputs:
            output.backward(upstream.to(output.dtype))
        inputs = (qkv, exact_qkv, plain_qkv)
        assert_as_exact_as(*([x.grad for x in tensors[:3]] for tensors in inputs), head_dim, "gradients")
        if config.attention_sinks:
            assert_as_exact_as(*([x.grad for x in tensors[3:]] for tensors in inputs), head_dim, "sinks' gradients")


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("engine", ["eager", "sdpa"])
def test_equals_dense_reference(engine, heads, length):
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        check(heads, engine, dtype, length)


@pytest.mark.parametrize("name", ["left", "right", "packed", "packed-ones", "packed-right"])
@pytest.mark.parametrize("engine", ["eager", "sdpa"])
def test_padding_and_packing_equal_dense_reference(engine, name):
    for heads, length in itertools.product(("H6-G1", "H12-G4-KV6", "H4-global", "H4-local-KV1"), LENGTHS[1:]):
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            check(HEADS[heads], engine, dtype, length, name)


@pytest.mark.parametrize("name", ["plain", "left", "packed", "packed-right"])
def test_flex_attention_equals_dense_reference(name):
    for heads in ("H12-G1", "H12-G4-KV6", "H4-local") if name == "plain" else ("H12-G4-KV6",):
        check(HEADS[heads], "flex_attention", torch.float32, 63, name, gradients=False, head_dim=16)


def test_masks_of_flex_attention_are_kept_between_steps():
    """Making a `BlockMask` takes longer than a small layer."""
    config, embeds = build((6, 3, 2), "flex_attention", torch.float32, head_dim=16)[1], torch.empty(2, 63, 0)
    first, second = masks_for(config, embeds).masks, masks_for(config, embeds).masks
    assert all(first[kind] is second[kind] for kind in (GLOBAL, LOCAL))
    padded = masks_for(config, embeds, pad(2, 63, "left")).masks
    assert padded[GLOBAL] is not first[GLOBAL]


SINKS = {"attention_sinks": True}
LATE = {"attention_sinks": FULL_WINDOW}
both_sinks = pytest.mark.parametrize("sinks", [SINKS, LATE], ids=["always", "late"])


@both_sinks
@pytest.mark.parametrize("name", ["plain", "left", "right", "packed", "packed-right"])
@pytest.mark.parametrize("engine", ["eager", "sdpa"])
def test_sinks_equal_dense_reference(engine, name, sinks):
    for heads, length in itertools.product(("H6-G1", "H12-G4-KV6", "H4-local-KV1"), LENGTHS):
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            if length > 1 or name == "plain":
                check(HEADS[heads], engine, dtype, length, name, **sinks)


@both_sinks
@pytest.mark.parametrize("name", ["plain", "left", "packed-right"])
def test_sinks_of_flex_attention_equal_dense_reference(name, sinks):
    for heads, counts in (("H12-G4-KV6", None), ("H12-G4-KV6", [4, 6]), ("H4-local", None)):
        check(HEADS[heads], "flex_attention", torch.float32, 63, name, 2, False, 16, num_global_heads=counts, **sinks)


@pytest.mark.parametrize("engine", ["eager", "flex_attention"])
def test_sinks_are_not_soft_capped(engine):
    gradients = engine == "eager"
    check(HEADS["H6-G1"], engine, torch.float32, 40, "plain", 2, gradients, 16, attn_logit_softcapping=0.5, **SINKS)


@both_sinks
@pytest.mark.parametrize("length", [1, WINDOW, 63])
def test_sinks_where_no_kernel_returns_the_log_sum_exp(length, sinks, monkeypatch):
    """As on other devices than the CPU: the sink is a key of its own."""
    monkeypatch.setattr(local_lsgpt._SinkAttention, "apply", None)
    monkeypatch.setattr(local_lsgpt, "HAS_CPU_OPERATORS", False)
    for name in ("plain", "left", "packed") if length > 1 else ("plain",):
        for head_dim in (20, 16):
            check(HEADS["H12-G4-KV6"], "sdpa", torch.float32, length, name, head_dim=head_dim, **sinks)
        check(HEADS["H12-G4-KV6"], "sdpa", torch.float16, length, name, **sinks)


def test_sinks_on_the_cpu_take_the_operator_that_returns_the_log_sum_exp():
    """But with dropout, which it does not have, the sink is a key of its own."""
    for dropout in (0.0, 0.5):
        for heads, length in (((4, 0, 4), 200), ((4, 0, 2), WINDOW)):  # in blocks, and in one piece
            attention, config = build(heads, "sdpa", torch.float32, attention_dropout=dropout, **SINKS)
            qkv, masks = random_qkv(1, heads, length, 20, torch.float32), masks_for(config, torch.empty(1, length, 0))
            output = attend(attention.train(), qkv, masks, torch.zeros(4))
            assert ("_SinkAttentionBackward" in autograd_functions(output)) == (dropout == 0)


def test_dropout_beside_sinks():
    heads, length = (4, 0, 4), 200
    attention, config = build(heads, "sdpa", torch.float32, attention_dropout=0.5, **SINKS)
    masks = masks_for(config, torch.empty(1, length, 0))
    q, k, _ = random_qkv(1, heads, length, 20, torch.float32)
    qkv, sinks = (q, k, torch.ones(1, 4, length, 20)), torch.full((4,), 2.0)
    trained, evaluated = (attend(attention.train(mode), qkv, masks, sinks) for mode in (True, False))
    assert trained.std() > 2 * evaluated.std()
    torch.testing.assert_close(trained.mean((0, 1, 3)), evaluated.mean((0, 1, 3)), atol=0.05, rtol=0)
    assert (evaluated < 1).all()  # the sink takes the rest


@pytest.mark.kernels
@pytest.mark.parametrize("name", ["plain", "left", "packed-right"])
@both_sinks
def test_sinks_of_triton_equal_dense_reference(name, sinks):
    with torch.device(DEVICE):
        check(HEADS["H6-G3-KV2"], "triton", torch.float32, 49, name, batch_size=2, **sinks)
        check(HEADS["H4-local-KV1"], "triton", HALF, 63, name, batch_size=2, head_dim=36, **sinks)


@pytest.mark.parametrize("options", [{}, SINKS, LATE], ids=str)
@pytest.mark.parametrize("length", [WINDOW, 63])
def test_padding_sees_something_where_kernels_need_it(length, options, monkeypatch):
    """As on GPUs, where gradients would be NaN; dense and in blocks."""
    config = build(HEADS["H12-G4-KV6"], "sdpa", torch.float32)[1]
    left = {"attention_mask": pad(3, length, "left")}
    on_cpu = masks_for(config, torch.empty(3, length, 0), **left).masks
    assert not any(mask.any(-1).all() for mask in on_cpu.values())
    monkeypatch.setattr(attention_lsgpt, "TAKE_EMPTY_ROWS", ())
    on_gpu = masks_for(config, torch.empty(3, length, 0), **left).masks
    assert on_gpu[LOCAL].ndim == (4 if length == WINDOW else 5)
    for kind, mask in on_gpu.items():
        seen = on_cpu[kind].any(-1)
        assert mask.any(-1).all() and torch.equal(mask[seen], on_cpu[kind][seen])
    check(HEADS["H12-G4-KV6"], "sdpa", torch.float32, length, "left", **options)


@on_a_gpu
@pytest.mark.parametrize("name", ["plain", "left", "right", "packed", "packed-right"])
@pytest.mark.parametrize("engine", ["eager", "sdpa", "triton"])
def test_engines_on_a_gpu_equal_dense_reference(engine, name):
    with torch.device(DEVICE):
        for heads, length in itertools.product(("H12-G1", "H12-G4-KV6", "H4-global", "H4-local-KV1"), (63, 301)):
            for dtype, sinks in itertools.product((torch.float32, torch.bfloat16), ({}, SINKS, LATE)):
                if heads != "H4-global" or not sinks:
                    check(HEADS[heads], engine, dtype, length, name, 2, head_dim=32, window=50, **sinks)


@on_a_gpu
@pytest.mark.parametrize("options", [{}, SINKS, LATE, {"attn_logit_softcapping": 0.5}], ids=str)
@pytest.mark.parametrize("name", ["plain", "left", "packed-right"])
def test_flex_attention_on_a_gpu_equals_dense_reference(name, options, fresh_compiler):
    """Compiled, and with gradients, as it is used there."""
    with torch.device(DEVICE):
        for dtype in (torch.float32, torch.bfloat16):
            check(HEADS["H12-G4-KV6"], "flex_attention", dtype, 301, name, 2, head_dim=32, window=50, **options)


@pytest.mark.parametrize("parameter", ["s_aux", "learnable_sink", "dropout_p", None])
def test_flash_attention_without_sinks_or_dropout_is_refused(parameter, monkeypatch):
    """FlashAttention is not here: only what its functions are asked about their arguments."""

    def varlen_function(query, key, value):
        pass

    signature = inspect.signature(varlen_function)
    if parameter:
        new = inspect.Parameter(parameter, inspect.Parameter.KEYWORD_ONLY)
        varlen_function.__signature__ = signature.replace(parameters=[*signature.parameters.values(), new])
    functions = (None, varlen_function, None, None, None)
    monkeypatch.setattr(attention_lsgpt, "lazy_import_flash_attention", lambda name: (functions, None))
    monkeypatch.setitem(AttentionInterface._global_mapping, "flash_attention_3", lambda *args, **kwargs: ("ran", None))
    attention_lsgpt._flash_takes.cache_clear()
    attention, _ = build((4, 2, 4), "flash_attention_3", torch.bfloat16)
    qkv = random_qkv(1, (4, 2, 4), 12, 20, torch.bfloat16)
    for options, taking, message in (
        (
            {"s_aux": torch.zeros(4)},
            ("s_aux", "learnable_sink"),
            "`attention_sinks` need a FlashAttention whose functions take `s_aux`",
        ),
        ({"dropout": 0.5}, ("dropout_p",), r'"flash_attention_3" does not support `attention_dropout`, which is 0.5'),
    ):
        call = partial(ALL_ATTENTION_FUNCTIONS["flash_attention_3"], attention, *qkv, None, **options)
        if parameter in taking:
            assert call()[0] == "ran"
        else:
            with pytest.raises(ValueError, match=message):
                call()
    attention_lsgpt._flash_takes.cache_clear()


@pytest.mark.parametrize("head_dim", [8, 16])
@pytest.mark.parametrize("length", [8, 24, 40, 72])
def test_flex_attention_of_small_heads_on_every_cpu(length, head_dim):
    """What PyTorch compiles for these shapes is wrong on CPUs with AVX2 and without AVX-512."""
    with torch._inductor.config.patch("cpp.simdlen", 256):
        check(HEADS["H6-G1"], "flex_attention", torch.float32, length, gradients=False, head_dim=head_dim)


@pytest.mark.kernels
@pytest.mark.parametrize("name", ["plain", "left", "right", "packed", "packed-right"])
def test_triton_equals_dense_reference(name):
    with torch.device(DEVICE):  # in float32, blocks of 32
        check(HEADS["H6-G3-KV2"], "triton", torch.float32, 79, name, batch_size=2)


@pytest.mark.kernels
def test_triton_with_a_window_that_just_reaches_into_a_block():
    with torch.device(DEVICE):  # query 64 sees key 31, the last of the first block
        check(HEADS["H6-G3-KV2"], "triton", torch.float32, 79, batch_size=2, window=34)


@pytest.mark.kernels
@pytest.mark.parametrize("name", ["plain", "packed-right"])
def test_triton_in_half_precision(name):
    with torch.device(DEVICE):  # blocks of 128 and 64
        check((3, 1, 3), "triton", HALF, 290, name, batch_size=1, window=100, head_dim=36)


@pytest.mark.kernels
@pytest.mark.parametrize("length", [1, WINDOW + 1, 63])
@pytest.mark.parametrize("heads", ["H4-global", "H4-local", "H4-local-KV1"])
def test_triton_with_one_kind_of_heads(heads, length):
    with torch.device(DEVICE):
        check(HEADS[heads], "triton", HALF, length, "left", batch_size=2, head_dim=128)


@pytest.mark.parametrize("window", [2, 63, 64, 65, 264])
@pytest.mark.parametrize("head_dim", [8, 36])
def test_windows_around_the_block_length(window, head_dim):
    for length in (127, 128, 129, 541):
        check((4, 2, 2), "sdpa", torch.float32, length, "right", window=window, head_dim=head_dim)


@pytest.mark.parametrize("engine", ["eager", "flex_attention"])
def test_logit_softcapping(engine):
    check(
        HEADS["H6-G1"], engine, torch.float32, 40, gradients=engine == "eager", head_dim=16, attn_logit_softcapping=2.0
    )


@pytest.mark.parametrize("name", ["plain", "left", "packed"])
@pytest.mark.parametrize(("head_dim", "width"), [(4, 16), (8, 16), (12, 12), (20, 20)])
def test_narrow_heads_are_filled_up(head_dim, width, name, monkeypatch):
    widths = set()

    def recording(module, query, *args, **kwargs):
        widths.add(query.shape[-1])
        return sdpa_attention_forward(module, query, *args, **kwargs)

    monkeypatch.setattr(attention_lsgpt, "sdpa_attention_forward", recording)
    check((4, 2, 2), "sdpa", torch.float32, 40, name, batch_size=2, head_dim=head_dim)
    assert widths == {width}


@pytest.mark.parametrize("layer_idx", [0, 1])
def test_counts_per_layer(layer_idx):
    counts = [1, 4]
    check((6, counts[layer_idx], 6), "sdpa", torch.float32, 63, layer_idx=layer_idx, num_global_heads=counts)


@pytest.mark.parametrize("engine", ["eager", "sdpa", "flex_attention"])
def test_nothing_flows_from_outside_the_window(engine, fresh_compiler):
    """Values that a query may not see get a gradient of exactly 0, and keys too; so do later tokens."""
    heads, length = (6, 2, 6), 80
    attention, config = build(heads, engine, torch.float32, head_dim=16)
    masks = masks_for(config, torch.empty(1, length, 0))
    visible = visible_pairs(6, 2, WINDOW, length, length)[0]
    for query_position in (0, WINDOW - 1, WINDOW, 64, length - 1):
        q, k, v = random_qkv(1, heads, length, 16, torch.float32, gradients=engine != "flex_attention")
        if engine == "flex_attention":  # no backward on the CPU: change the values instead
            before = attend(attention, (q, k, v), masks)[0, query_position]
            hidden = ~visible[:, query_position]
            k[0, hidden] = k[0, hidden] * 3 + 1
            v[0, hidden] = v[0, hidden] * 3 + 1
            after = attend(attention, (q, k, v), masks)[0, query_position]
            assert torch.equal(before, after)
        else:
            attend(attention, (q, k, v), masks)[0, query_position].sum().backward()
            for gradient in (k.grad[0], v.grad[0]):
                assert (gradient[~visible[:, query_position]] == 0).all()
            assert (v.grad[0][visible[:, query_position]] != 0).all()


def test_eager_weights_are_zero_outside_the_window_and_sum_to_one():
    heads, length = (6, 2, 6), 40
    attention, config = build(heads, "eager", torch.float32)
    masks = masks_for(config, torch.empty(1, length, 0))
    qkv = random_qkv(1, heads, length, 20, torch.float32)
    weights = attention.attend(*qkv, masks, output_attentions=True)[1]
    visible = visible_pairs(6, 2, WINDOW, length, length).expand_as(weights)
    assert (weights[~visible] == 0).all() and (weights[visible] > 0).all()
    torch.testing.assert_close(weights.sum(-1), torch.ones(1, 6, length))
    assert (weights[0, 2:, -1] > 0).sum(-1).eq(WINDOW).all()  # exactly `sliding_window` keys, its own included


@pytest.mark.parametrize("engine", ["eager", "sdpa"])
def test_all_global_and_wide_windows_are_plain_causal_attention(engine):
    length = 300
    qkv = random_qkv(2, (4, 4, 4), length, 20, torch.float64)
    expected = torch.nn.functional.scaled_dot_product_attention(*qkv, is_causal=True).transpose(1, 2)
    for num_global_heads, window in ((4, 2), (4, 64), (1, length), (0, length), (0, length + 1)):
        attention, config = build((4, num_global_heads, 4), engine, torch.float64, window=window)
        masks = masks_for(config, torch.empty(2, length, 0))
        torch.testing.assert_close(attend(attention, qkv, masks), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("engine", ["eager", "sdpa"])
def test_a_query_that_sees_nothing_gets_zero(engine):
    heads, length = (4, 2, 4), 60
    attention, config = build(heads, engine, torch.float32)
    mask = torch.ones(2, length)
    mask[1, :15] = 0
    masks = masks_for(config, torch.empty(2, length, 0), mask)
    output = attend(attention, random_qkv(2, heads, length, 20, torch.float32), masks)
    assert not output[1, :15].any()
    assert output[0].any(-1).all() and output[1, 15:].any(-1).all()


class LargestTensor(torch.utils._python_dispatch.TorchDispatchMode):
    """Records the number of elements of the largest tensor that any operation makes, backward included."""

    numel = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        output = function(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(output):
            if isinstance(tensor, torch.Tensor):
                self.numel = max(self.numel, tensor.untyped_storage().nbytes() // tensor.element_size())
        return output


@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("name", ["plain", "left", "packed", "packed-ones", "packed-right"])
def test_local_heads_never_build_a_square(name, has_sinks):
    heads, length, head_dim = (2, 0, 2), 4096, 4
    attention, config = build(heads, "sdpa", torch.float32, window=16, head_dim=head_dim, attention_sinks=has_sinks)
    told, _ = scenario(name, 2, length)
    qkv = random_qkv(2, heads, length, head_dim, torch.float32)
    with LargestTensor() as largest:
        masks = masks_for(config, torch.empty(2, length, 0), **told)
        attend(attention, qkv, masks, torch.zeros(2) if has_sinks else None).sum().backward()
    assert masks.masks[LOCAL].ndim == 5
    assert largest.numel <= 2 * length * 2 * (64 + 16)  # batch x tokens x heads x span of a block


@pytest.mark.parametrize(
    ("engine", "dtype"),
    [
        ("eager", torch.bool),
        ("eager", torch.float32),
        ("sdpa", torch.bool),
        ("sdpa", torch.float32),
        ("flex_attention", torch.bool),
    ],
)
def test_custom_4d_mask_applies_to_global_heads_and_inside_the_window(engine, dtype):
    heads, length, head_dim = (4, 2, 4), 50, 16
    attention, config = build(heads, engine, torch.float32, head_dim=head_dim)
    allowed = torch.rand(2, 1, length, length) < 0.7
    allowed |= torch.eye(length, dtype=torch.bool)
    allowed &= torch.ones(length, length, dtype=torch.bool).tril()
    custom = allowed
    if dtype != torch.bool:
        custom = torch.zeros(allowed.shape).masked_fill(~allowed, torch.finfo(torch.float32).min)
    masks = masks_for(config, torch.empty(2, length, 0), custom)
    qkv = random_qkv(2, heads, length, head_dim, torch.float32, gradients=False)
    actual = attend(attention, qkv, masks)
    expected, _ = dense_attention(*qkv, visible_pairs(4, 2, WINDOW, length, length) & allowed)
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("engine", ["eager", "sdpa"])
@pytest.mark.parametrize("probability", [0.2, 0.5])
def test_dropout_drops_its_share_in_each_head_and_keeps_the_mean(engine, probability):
    """Of n equal weights on values of 1: the outputs then have a mean of 1 and a variance of p / ((1 - p) n)."""
    heads, length = (4, 2, 4), 300
    attention, config = build(heads, engine, torch.float32, attention_dropout=probability)
    masks = masks_for(config, torch.empty(8, length, 0))
    query = torch.randn(8, 4, length, 20)
    qkv = query, torch.zeros_like(query), torch.ones_like(query)
    trained = attend(attention.train(), qkv, masks)[..., 0].double()
    num_keys = torch.arange(1, length + 1)[:, None].expand(-1, 4).clone()
    num_keys[:, 2:].clamp_(max=WINDOW)
    torch.testing.assert_close(trained.mean((0, 1)), torch.ones(4).double(), atol=0.03, rtol=0)
    variance = ((trained - 1).square() * num_keys).mean((0, 1))
    torch.testing.assert_close(variance, torch.full((4,), probability / (1 - probability)).double(), rtol=0.15, atol=0)
    evaluated = attend(attention.eval(), qkv, masks)
    torch.testing.assert_close(evaluated, torch.ones_like(evaluated))


def test_dropout_of_the_first_tokens_and_of_the_others():
    """As above, of a text of one to four windows, whose first tokens are computed without a mask."""
    attention, config = build((4, 0, 4), "sdpa", torch.float32, attention_dropout=0.5)
    masks, query = masks_for(config, torch.empty(400, 3 * WINDOW, 0)), torch.randn(400, 4, 3 * WINDOW, 20)
    qkv = query, torch.zeros_like(query), torch.ones_like(query)
    trained = attend(attention.train(), qkv, masks)[..., 0].double()
    num_keys = torch.arange(1, 3 * WINDOW + 1).clamp(max=WINDOW)[:, None]
    for part in (slice(WINDOW - 1), slice(WINDOW - 1, None)):
        variance = ((trained[:, part] - 1).square() * num_keys[part]).mean((0, 1))
        torch.testing.assert_close(variance, torch.ones(4).double(), rtol=0.15, atol=0)


@pytest.mark.parametrize("has_operators", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_part_that_follows_a_past_needs_no_mask(dtype, has_operators, monkeypatch):
    """Outputs and gradients, with grouped queries, also if a later PyTorch lacks the operators of the CPU."""
    monkeypatch.setattr(local_lsgpt, "HAS_CPU_OPERATORS", has_operators)
    visible = visible_pairs(6, 6, 0, 21, 50)
    exact = [torch.randn(2, heads, length, 12, dtype=torch.float64) for heads, length in ((6, 21), (2, 50), (2, 50))]
    weights = torch.randn(2, 21, 6, 12, dtype=torch.float64)
    results = []
    for tensors in (exact, *[[x.to(dtype) for x in exact]] * 2):
        tensors = [x.clone().requires_grad_() for x in tensors]
        if len(results) == 2:
            output = past_attention_forward(*tensors, scaling=12**-0.5)
            assert any("_PastAttention" in name for name in autograd_functions(output)) == has_operators
        else:
            output = dense_attention(*tensors, visible)[0]
        results.append([output, *torch.autograd.grad((output * weights.to(output.dtype)).sum(), tensors)])
    wanted, plain, found = results
    if dtype == torch.float64:
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    else:
        assert_as_exact_as(found, wanted, plain, 12)


def test_a_past_with_dropout_is_masked():
    """Each value names its key, so that outputs are the weights that are left: in the mean, those without dropout."""
    tensors = torch.randn(1, 2, 5, 9), torch.randn(1, 2, 9, 9), torch.eye(9).expand(1, 2, -1, -1)
    attend, many = ALL_ATTENTION_FUNCTIONS["sdpa"], (x.expand(10_000, -1, -1, -1) for x in tensors)
    output, _ = attend(None, *many, Past(4), scaling=1 / 3, dropout=0.5)
    weights, _ = dense_attention(*tensors, visible_pairs(2, 2, 0, 5, 9))
    torch.testing.assert_close(output.mean(0, keepdim=True), weights, rtol=0, atol=0.05)
    assert not torch.allclose(output[:1], weights)


def test_chunks_of_a_long_prompt_are_not_masked(tiny_model, monkeypatch):
    ids = torch.randint(97, (2, 200))
    masks = []
    create = attention_lsgpt.sdpa_mask
    monkeypatch.setitem(
        attention_lsgpt.ALL_MASK_ATTENTION_FUNCTIONS._local_mapping,
        "sdpa",
        lambda **options: masks.append(create(**options)) or masks[-1],
    )
    monkeypatch.setattr(attention_lsgpt, "MASKED_PAIRS", 50 * 100)
    model = tiny_model()
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        chunks = [model(chunk, past_key_values=cache).logits for chunk in ids.split(50, dim=1)]
        kinds = [mask.ndim if isinstance(mask, torch.Tensor) else mask for mask in masks]
        # Global and local heads of each chunk; at first, the past is short, then only windows have masks.
        assert kinds == [None, 5, Past(50), 5, Past(100), 5, Past(150), 5]
        torch.testing.assert_close(torch.cat(chunks, dim=1), model(ids).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("length", "sinks", "needs_gradients", "kind"),
    [
        (29, "full_window", False, (29, None)),
        (29, "full_window", True, 4),  # for a gradient of the sinks
        (29, True, False, 4),
        (29, False, True, None),
        (30, False, True, None),
        (30, "full_window", False, 4),
        (36, "full_window", True, (29, 4)),
        (37, "full_window", True, (29, 5)),
        (61, False, True, (29, 5)),
        (120, "full_window", True, (29, 5)),
        (120, True, True, 5),
        (121, "full_window", True, 5),
    ],
)
def test_first_tokens_need_no_mask(tiny_model, monkeypatch, length, sinks, needs_gradients, kind):
    masks, results = [], []
    create = attention_lsgpt.sdpa_mask
    for engine in ("sdpa", "eager"):
        values = {"sliding_window": 30, "attention_sinks": sinks, "num_key_value_heads": 3, "num_global_heads": 2}
        model = tiny_model(torch.float64, engine, **values)
        ids = torch.arange(2 * length).view(2, length) % 97
        functions = attention_lsgpt.ALL_MASK_ATTENTION_FUNCTIONS._local_mapping
        monkeypatch.setitem(functions, "sdpa", lambda **options: masks.append(create(**options)) or masks[-1])
        with torch.set_grad_enabled(needs_gradients):
            output = model(ids, labels=ids)
        gradients = torch.autograd.grad(output.loss, list(model.parameters())) if needs_gradients else ()
        results.append((output.logits, *gradients))
    torch.testing.assert_close(*results)
    of_local = masks[1]
    if isinstance(of_local, Beginning):
        assert (of_local.length, of_local.rest if of_local.rest is None else of_local.rest.ndim) == kind
    else:
        assert (of_local if of_local is None else of_local.ndim) == kind


@pytest.mark.parametrize("length", [29, 30, 31, 32])
@torch.no_grad()
def test_a_past_ends_where_a_text_outgrows_the_window(tiny_model, monkeypatch, length):
    monkeypatch.setattr(attention_lsgpt, "MASKED_PAIRS", 1)
    ids, options = torch.randint(97, (2, length)), {"dtype": torch.float64, "sliding_window": 30}
    model = tiny_model(**options)
    cache = DynamicCache(config=model.config)
    chunks = [model(chunk, past_key_values=cache).logits for chunk in ids.split((12, length - 12), dim=1)]
    torch.testing.assert_close(torch.cat(chunks, dim=1), tiny_model(engine="eager", **options)(ids).logits)


@pytest.mark.parametrize("values", [{"sliding_window": 40}, {"sliding_window": 100, "attention_sinks": True}])
@torch.no_grad()
def test_windows_and_sinks_keep_their_masks_in_large_chunks(tiny_model, monkeypatch, values):
    """What a local head sees of a past is less than everything, or there is a sink beside it."""
    monkeypatch.setattr(attention_lsgpt, "MASKED_PAIRS", 1000)
    model, ids = tiny_model(**values), torch.randint(97, (1, 60))
    cache = DynamicCache(config=model.config)
    chunks = [model(chunk, past_key_values=cache).logits for chunk in ids.split(30, dim=1)]
    expected = tiny_model(engine="eager", **values)(ids).logits
    torch.testing.assert_close(torch.cat(chunks, dim=1), expected, rtol=1e-4, atol=1e-4)


def test_a_trained_mask_beside_sinks_has_gradients(tiny_model):
    ids, gradients = torch.randint(97, (1, 20)), []
    bias = torch.randn(1, 1, 20, 20) + torch.full((20, 20), torch.finfo(torch.float32).min).triu(1)
    for engine in ("sdpa", "eager"):
        mask = bias.clone().requires_grad_()
        model = tiny_model(engine=engine, attention_sinks=True)
        model(ids, attention_mask=mask, labels=ids).loss.backward()
        gradients.append(mask.grad)
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)
    assert gradients[0].abs().max() > 1e-3
