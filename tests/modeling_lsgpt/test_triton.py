"""The attention implementation `triton` in the model. Against the dense reference it stands in `test_attention.py`."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, StaticCache

from lsgpt import measure_max_logits, triton_kernels
from lsgpt.training import attend_in_float32


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPE = {
    "position_embedding_type": "rope",
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "num_global_heads": [2, 4],
}


@pytest.fixture
def models(tiny_model):
    """The same weights on `sdpa` and on `triton`."""
    return [tiny_model(engine=engine, **SHAPE).to(DEVICE) for engine in ("sdpa", "triton")]


def inputs_of(name):
    ids = torch.randint(97, (2, 40), device=DEVICE)
    mask = torch.ones_like(ids)
    mask[0, -7:] = mask[0, 10:12] = mask[1, :5] = 0  # at the end, inside, and at the beginning
    positions = torch.cat([torch.arange(15), torch.arange(25)]).expand(2, -1).to(DEVICE)
    inputs = {"plain": {}, "ones": {"attention_mask": torch.ones_like(ids)}, "padding": {"attention_mask": mask}}
    inputs["packed"] = {"position_ids": positions}
    return {"input_ids": ids, "labels": ids, **inputs[name]}


@pytest.mark.parametrize("name", ["ones", "padding", "packed", "sinks"])
def test_model_equals_sdpa(models, tiny_model, name):
    if name == "sinks":
        models = [tiny_model(engine=engine, attention_sinks=True, **SHAPE).to(DEVICE) for engine in ("sdpa", "triton")]
        name = "padding"
    inputs = inputs_of(name)
    outputs = [model(**inputs) for model in models]
    is_real = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])).bool()
    torch.testing.assert_close(*(output.logits[is_real] for output in outputs), rtol=1e-4, atol=1e-4)
    gradients = [
        torch.autograd.grad(output.logits[is_real].square().mean(), list(model.parameters()))
        for output, model in zip(outputs, models)
    ]
    torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-5)


@torch.no_grad()
def test_under_autocast(models):
    """Rotary queries and keys are in float32 then, and values are not."""
    ids, dtypes = torch.randint(97, (2, 40), device=DEVICE), set()
    models[1].model.layers[0].self_attn.o_proj.register_forward_pre_hook(lambda _, args: dtypes.add(args[0].dtype))
    with torch.autocast(DEVICE, torch.float16):
        logits = [model(ids, use_cache=False).logits for model in models]
    assert dtypes == {torch.float16}
    torch.testing.assert_close(*logits, rtol=0.02, atol=0.05)


@torch.no_grad()
def test_dropout_of_what_sdpa_computes(tiny_model, on_gpu_if_any):
    """A mask of 4 dimensions, in which no two passes are alike then."""
    model, ids = tiny_model(engine="triton", attention_dropout=0.5).train(), torch.randint(97, (2, 20))
    first, second = (model(ids, attention_mask=torch.ones(2, 1, 20, 20).tril().bool()).logits for _ in range(2))
    assert not torch.equal(first, second)


@torch.no_grad()
def test_windows_hold_if_the_first_layer_has_no_global_heads(tiny_model, on_gpu_if_any):
    ids = torch.randint(97, (2, 45))
    fused, reference = (tiny_model(engine=engine, num_global_heads=[0, 2]) for engine in ("triton", "eager"))
    torch.testing.assert_close(fused(ids).logits, reference(ids).logits, rtol=1e-4, atol=1e-4)


def test_packed_documents_continue_from_a_cache(models):
    ids, positions = torch.randint(97, (1, 40), device=DEVICE), inputs_of("packed")["position_ids"][:1]
    logits = []
    for model in models:
        cache = DynamicCache(config=model.config)
        parts = [(ids[:, part], positions[:, part]) for part in (slice(20), slice(20, 40))]
        steps = [model(x, position_ids=p, past_key_values=cache).logits for x, p in parts]
        logits.append(torch.cat(steps, dim=1))
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-4)
    alone = [models[0](part).logits for part in ids.split((15, 25), dim=1)]
    torch.testing.assert_close(logits[1], torch.cat(alone, dim=1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("first", [29, 30, 31, 32])
def test_chunks_that_begin_at_the_edge_of_a_block_of_keys(models, first):
    """Blocks have 32 keys: the mask, which blocks before the diagonal do without, begins in time."""
    ids, found = torch.randint(97, (2, 40), device=DEVICE), []
    for model in models:
        cache, parts = DynamicCache(config=model.config), ids.split((first, 40 - first), dim=1)
        logits = torch.cat([model(part, past_key_values=cache).logits for part in parts], dim=1)
        found.append((logits, torch.autograd.grad(logits.square().mean(), list(model.parameters()))))
    (plain, expected), (fused, gradients) = found
    torch.testing.assert_close(fused, plain, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(gradients, expected, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("name", ["padding", "packed"])
def test_max_logits_come_from_the_kernel(models, name, monkeypatch):
    inputs = inputs_of(name)
    expected = measure_max_logits(models[0], **inputs)
    monkeypatch.delattr("lsgpt.telemetry.max_logits")  # no pass of its own
    torch.testing.assert_close(measure_max_logits(models[1], **inputs), expected)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"prefill_chunk_size": 15},
        {"cache_implementation": "static"},
        {"num_beams": 2},
        {"prompt_lookup_num_tokens": 3},
    ],
    ids=lambda options: next(iter(options), "greedy"),
)
def test_generates_the_same_text(models, options):
    ids = torch.randint(97, (1, 40), device=DEVICE)
    texts = [model.generate(ids, max_new_tokens=12, do_sample=False, **options) for model in models]
    assert torch.equal(*texts)


@torch.no_grad()
def test_single_tokens_see_the_sinks(tiny_model):
    ids, logits = torch.randint(97, (1, 41), device=DEVICE), []
    for engine in ("sdpa", "triton"):
        model = tiny_model(engine=engine, attention_sinks=True, **SHAPE).to(DEVICE)
        cache = DynamicCache(config=model.config)
        model(ids[:, :40], past_key_values=cache)
        logits.append(model(ids[:, 40:], past_key_values=cache).logits)
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-4)


def test_attention_in_float32_of_a_half_precision_model(tiny_model):
    """As `fp32-attention` of `lsgpt.training` switches it on."""
    model = tiny_model(torch.float16, "triton", **SHAPE).to(DEVICE)
    exact = tiny_model(torch.float16, "sdpa", **SHAPE).to(DEVICE)
    ids = inputs_of("plain")["input_ids"]
    outputs = []
    for each in (model, exact):
        first = each.model.layers[0].self_attn.o_proj
        first.register_forward_pre_hook(lambda layer, inputs: outputs.append(inputs[0]))
        each(ids)
        attend_in_float32(each)
        each(ids)
    plain, in_float32, _, expected = outputs
    # Both round float32 numbers to half precision that are the same up to the order of sums. So hardly any differ, and
    # by one place, or near zero by the rounding error of float32 for the largest numbers, which the sums contain.
    rounding = torch.finfo(torch.float32).eps / 2 * expected.abs().max().item()
    torch.testing.assert_close(in_float32, expected, rtol=torch.finfo(torch.float16).eps, atol=rounding)
    assert (in_float32 == expected).float().mean() > 0.995 > (plain == expected).float().mean()


def test_custom_masks_go_to_sdpa(models):
    ids = torch.randint(97, (1, 12), device=DEVICE)
    mask = torch.ones(12, 12, dtype=torch.bool, device=DEVICE).tril()[None, None]
    mask[..., 3] = False
    torch.testing.assert_close(*(model(ids, attention_mask=mask).logits for model in models))


def test_what_it_cannot_do_is_refused(tiny_model, tiny_config):
    ids = torch.randint(97, (1, 12), device=DEVICE)
    with pytest.raises(ValueError, match=r'does not support `attention_dropout`.*use attn_implementation="sdpa"'):
        tiny_model(engine="triton", attention_dropout=0.1).to(DEVICE).train()(ids)
    with pytest.raises(
        ValueError, match=r'does not support `attn_logit_softcapping`.*use attn_implementation="eager"'
    ):
        tiny_model(engine="triton", attn_logit_softcapping=20.0).to(DEVICE)(ids)
    for num_global_heads in (0, 2):  # what is left to `sdpa` is refused as well
        model = tiny_model(engine="triton", attn_logit_softcapping=20.0, num_global_heads=num_global_heads).to(DEVICE)
        with pytest.raises(ValueError, match="`triton` does not support `attn_logit_softcapping`"):
            model(ids, past_key_values=StaticCache(config=model.config, max_cache_len=20))
    with pytest.raises(ValueError, match="computes in float16, bfloat16 or float32; got"):
        tiny_model(torch.float64, "triton").to(DEVICE)(ids)
    with pytest.raises(ValueError, match="`head_dim` must be at most 128 with `triton`; got 160"):
        tiny_model(engine="triton", head_dim=160).to(DEVICE)(ids)
    llama = LlamaConfig(
        vocab_size=97, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    with pytest.raises(ValueError, match="belongs to LSGPT; other models cannot use it"):
        LlamaForCausalLM._from_config(llama, attn_implementation="triton").to(DEVICE)(ids)


def test_without_a_gpu_the_error_says_what_to_do(tiny_model, monkeypatch):
    monkeypatch.setattr(triton_kernels, "IS_INTERPRETED", False)
    with pytest.raises(ValueError, match="`triton` runs on CUDA devices; got tensors on cpu"):
        tiny_model(engine="triton")(torch.randint(97, (1, 12)))


@pytest.mark.kernels
def test_kernels_compile_for_gpus_and_fit():
    """For compute capability 8.6, with the least shared memory since Ampere, and 9.0."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = Path(__file__).parent / "compile_kernels.py"
    result = subprocess.run([sys.executable, script], capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr
    kernels = [json.loads(line) for line in result.stdout.splitlines()]
    assert len(kernels) == 9
    for kernel in kernels:
        assert kernel["shared"] <= 99 * 1024, kernel
        assert kernel["spilled"] == 0 or kernel["capability"] < 90, kernel


@pytest.mark.kernels
def test_operators_keep_their_promises():
    """PyTorch's own check of custom operators: schema, autograd, fake tensors, tracing with dynamic shapes."""
    query = torch.randn(2, 20, 4, 16, device=DEVICE, requires_grad=True)
    key, value = (torch.randn(2, 20, 2, 16, device=DEVICE, requires_grad=True) for _ in range(2))
    first = torch.zeros(2, 20, dtype=torch.int, device=DEVICE)
    sinks = torch.zeros(4, device=DEVICE, requires_grad=True)
    for begin, end, of_heads, measure in ((None, None, sinks, False), (first, first + 19, None, True)):
        torch.library.opcheck(triton_kernels._attend, (query, key, value, begin, end, of_heads, 2, 7, 0.25, measure))


def test_compiles_without_a_break(models, fresh_compiler):
    model, compiled = models[1], torch.compile(models[1], fullgraph=True, backend="aot_eager")
    inputs = {name: x for name, x in inputs_of("plain").items() if name == "input_ids"}
    weights = list(model.parameters())
    expected, actual = model(**inputs, use_cache=False).logits, compiled(**inputs, use_cache=False).logits
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    gradients = [torch.autograd.grad(logits.square().mean(), weights) for logits in (actual, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-5)
