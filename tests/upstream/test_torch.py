"""What we rely on in PyTorch and Triton beyond what they promise, one test for each thing."""

import math

import numpy as np
import pytest
import torch
from gguf import GGUFWriter
from torch import nn
from torch.nn.attention.bias import causal_lower_right
from transformers.integrations.gguf import read_gguf_metadata


def test_read_gguf_metadata_returns_values_and_the_lengths_of_lists_of_texts(tmp_path):
    writer = GGUFWriter(tmp_path / "tiny.gguf", "llama")
    writer.add_token_list(["a", "b", "c"])
    writer.add_tensor("rope_freqs.weight", np.ones(2, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    metadata, tensors = read_gguf_metadata(str(tmp_path / "tiny.gguf"))
    assert metadata == {"general.architecture": "llama", "tokenizer.ggml.tokens": 3}
    assert tensors == ("rope_freqs.weight",)


def test_scaled_dot_product_flash_attention_for_cpu_and_its_backward():
    forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    assert str(forward.default._schema).endswith(
        "(Tensor query, Tensor key, Tensor value, float dropout_p=0., bool is_causal=False, *, "
        "Tensor? attn_mask=None, float? scale=None) -> (Tensor output, Tensor logsumexp)"
    )
    assert str(backward.default._schema).endswith(
        "(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out, Tensor logsumexp, float dropout_p, "
        "bool is_causal, *, Tensor? attn_mask=None, float? scale=None) "
        "-> (Tensor grad_query, Tensor grad_key, Tensor grad_value)"
    )
    query, key, value = torch.randn(3, 1, 2, 5, 4)
    _, lse = forward(query, key, value, 0.0, True, scale=0.5)
    logits = (query @ key.mT * 0.5).masked_fill(torch.ones(5, 5).triu(1).bool(), -math.inf)
    torch.testing.assert_close(lse, logits.logsumexp(-1))  # natural, (B, H, T)


def test_scaled_dot_product_flash_attention_for_cpu_takes_masks_and_other_log_sum_exps():
    """The log-sum-exp is that of the masked logits; with a sink in it, the backward pass has the sink's weights."""
    query, key, value, gradient = torch.randn(4, 1, 2, 5, 4)
    inputs = [x.requires_grad_() for x in (query, key, value)]
    mask = torch.zeros(1, 1, 5, 5).masked_fill(torch.ones(5, 5).triu(1).bool(), -math.inf)
    logits = query @ key.mT * 0.5 + mask
    weights = torch.cat([logits, torch.ones(1, 2, 5, 1)], dim=-1).softmax(-1)[..., :-1]
    expected = torch.autograd.grad(weights @ value, inputs, gradient)
    with torch.no_grad():
        options = {"attn_mask": mask, "scale": 0.5}
        attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        output, lse = attend(query, key, value, 0.0, False, **options)
        torch.testing.assert_close(lse, logits.logsumexp(-1))
        with_sink = torch.logaddexp(lse, torch.ones(()))
        output = output * (lse - with_sink).exp()[..., None]
        torch.testing.assert_close(output, weights @ value)
        backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        gradients = backward(gradient, query, key, value, output, with_sink, 0.0, False, **options)
    for actual, right in zip(gradients, expected, strict=True):
        torch.testing.assert_close(actual, right)


def test_compile_friendly_flex_attention_passes_aux_request_on():
    from torch.nn.attention.flex_attention import AuxRequest, create_block_mask  # noqa: PLC0415
    from transformers.integrations.flex_attention import compile_friendly_flex_attention  # noqa: PLC0415

    query, key, value = torch.randn(3, 1, 2, 5, 4)
    mask = create_block_mask(lambda b, h, q, k: k <= q, None, None, 5, 5, device="cpu")
    options = {"score_mod": lambda logit, *indices: logit, "block_mask": mask, "scale": 0.5, "enable_gqa": True}
    with torch.compiler.set_stance("force_eager"):
        for training in (False, True):
            output, aux = compile_friendly_flex_attention(
                query, key, value, training=training, return_aux=AuxRequest(lse=True), **options
            )
            logits = (query @ key.mT * 0.5).masked_fill(torch.ones(5, 5).triu(1).bool(), -math.inf)
            torch.testing.assert_close(output, logits.softmax(-1) @ value)
            torch.testing.assert_close(aux.lse, logits.logsumexp(-1))  # natural, (B, H, T)


def test_triton_interpreter_is_known_by_the_type_of_kernels():
    triton = pytest.importorskip("triton")

    @triton.jit
    def kernel(x):
        pass

    assert isinstance(kernel, triton.JITFunction) == (not triton.knobs.runtime.interpret)


def test_dynamo_configuration_names():
    assert {"recompile_limit", "fail_on_recompile_limit_hit"} <= set(torch._dynamo.config.get_config_copy())


def test_autograd_runs_what_is_ready_in_the_reverse_order_of_its_creation():
    """All processes that share a sequence must exchange gradients in the same order."""
    seen = []

    class Note(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, name):
            ctx.name = name
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            seen.append(ctx.name)
            return gradient, None

    x = torch.ones(2, requires_grad=True)
    exchanged = [Note.apply(x * 2, name) for name in ("global keys", "global values", "local keys", "local values")]
    outputs = [exchanged[0].exp() * exchanged[1], (exchanged[2] * exchanged[3]).exp().sin()]
    torch.cat(outputs).sum().backward()
    assert seen == ["local values", "local keys", "global values", "global keys"]


def test_causal_lower_right_shows_queries_what_came_before():
    query, key, value = torch.randn(1, 2, 5, 8), *torch.randn(2, 1, 2, 9, 8)
    attend = torch.nn.functional.scaled_dot_product_attention
    actual = attend(query, key, value, attn_mask=causal_lower_right(5, 9), scale=0.3)
    expected = attend(query, key, value, attn_mask=torch.ones(5, 9).tril(4).bool(), scale=0.3)
    assert actual.equal(expected)


def test_tensors_of_vmap_are_known_by_is_functorch_wrapped_tensor():
    is_wrapped, seen = torch._C._functorch.is_functorch_wrapped_tensor, []
    torch.func.vmap(lambda x: seen.append(is_wrapped(x)) or x)(torch.ones(2))
    assert seen == [True] and not is_wrapped(torch.ones(2))


def test_modules_keep_hooks_in_four_dictionaries():
    linear = nn.Linear(1, 1)
    register = {
        "_forward_pre_hooks": linear.register_forward_pre_hook,
        "_forward_hooks": linear.register_forward_hook,
        "_backward_pre_hooks": linear.register_full_backward_pre_hook,
        "_backward_hooks": linear.register_full_backward_hook,
    }
    for name, add in register.items():
        assert len(getattr(linear, name)) == 0
        add(lambda *_: None)
        assert len(getattr(linear, name)) == 1
