"""The loss without logits: which way it is computed, that it is exact, and what it costs."""

import json

import pytest
import torch
from accelerate import cpu_offload
from peft import LoraConfig, get_peft_model
from reference import autograd_functions
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from lsgpt import LSGPTForCausalLM
from lsgpt.modeling_lsgpt import loss_lsgpt
from lsgpt.modeling_lsgpt.loss_lsgpt import CHUNK_LENGTH, LinearCrossEntropy, _is_plain_matrix, causal_lm_loss


def batch(length=45):
    return torch.randint(97, (2, length))


def loss_and_gradients(model, autocast=False, loss_scale=1, **inputs):
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        output = model(**inputs)
    (output.loss * loss_scale).backward()
    return output, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def is_fused(loss) -> bool:
    """Whether `loss` comes from the function that makes its gradients in the forward pass."""
    return "LinearCrossEntropyBackward" in autograd_functions(loss)


def count_flops(run) -> int:
    """Floating-point operations of matrix products, backward passes included."""
    in_place = {torch.ops.aten.addmm_: lambda sums, left, right, **_: 2 * left[0] * left[1] * right[1]}
    with FlopCounterMode(display=False, custom_mapping=in_place) as counter:
        run()
    return counter.get_total_flops()


def assert_same_loss(model, fused: bool, **inputs):
    """With and without logits, and by which way without."""
    expected, expected_gradients = loss_and_gradients(model, **inputs)
    output, gradients = loss_and_gradients(model, skip_logits=True, **inputs)
    assert expected.logits is not None and output.logits is None
    assert is_fused(output.loss) == fused and not is_fused(expected.loss)
    torch.testing.assert_close(output.loss, expected.loss)
    torch.testing.assert_close(gradients, expected_gradients)


@pytest.mark.parametrize("num_tokens", [1, 63, CHUNK_LENGTH, 2 * CHUNK_LENGTH + 87])
@pytest.mark.parametrize("ignore_index", [-100, 3, 255])
def test_gradients_made_in_the_forward_pass_are_those_of_the_dense_loss(num_tokens, ignore_index):
    """In float64 only rounding is left; the gradient that comes from above is not 1, and asked for twice."""
    states = torch.randn(num_tokens, 19, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(37, 19, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(37, (num_tokens,))
    targets[::5] = ignore_index
    dense = F.cross_entropy(states @ weight.T, targets, reduction="sum", ignore_index=ignore_index)
    loss = LinearCrossEntropy.apply(states, weight, targets, ignore_index)
    torch.testing.assert_close(loss, dense)
    expected = torch.autograd.grad(0.3 * dense, (states, weight))
    for retain_graph in (True, False):
        gradients = torch.autograd.grad(0.3 * loss, (states, weight), retain_graph=retain_graph)
        torch.testing.assert_close(gradients, expected)


@pytest.mark.parametrize("ignore_index", [-1, 255])
def test_labels_to_ignore_can_have_any_number(tiny_model, ignore_index):
    labels = torch.randint(97, (2, 12))
    labels[:, :5] = ignore_index
    inputs = {"input_ids": torch.randint(97, (2, 12)), "labels": labels, "ignore_index": ignore_index}
    assert_same_loss(tiny_model(), True, **inputs)


@pytest.mark.parametrize(("states_grad", "weight_grad"), [(True, True), (True, False), (False, True)])
def test_only_gradients_that_are_needed_are_made(states_grad, weight_grad):
    states, weight = torch.randn(9, 5, requires_grad=states_grad), torch.randn(11, 5, requires_grad=weight_grad)
    run = lambda: LinearCrossEntropy.apply(states, weight, torch.arange(9), -100).backward()  # noqa: E731
    assert count_flops(run) == 2 * 9 * 5 * 11 * (1 + states_grad + weight_grad)
    assert (states.grad is None, weight.grad is None) == (not states_grad, not weight_grad)


@pytest.mark.parametrize("values", [{}, {"tie_word_embeddings": True}], ids=["untied", "tied"])
@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
def test_without_logits_no_product_is_computed_twice(tiny_model, values, autocast):
    """A step has as many operations as with logits, an evaluation too: the gradients' are not among them."""
    model = tiny_model(**values).train()
    input_ids = batch()

    def step(skip_logits):
        output, _ = loss_and_gradients(model, autocast, input_ids=input_ids, labels=input_ids, skip_logits=skip_logits)
        assert is_fused(output.loss) == skip_logits

    def evaluate(skip_logits):
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            model(input_ids, labels=input_ids, skip_logits=skip_logits)

    for run in (step, evaluate):
        assert count_flops(lambda run=run: run(True)) == count_flops(lambda run=run: run(False))


@pytest.mark.parametrize("num_items_in_batch", [None, 700, torch.tensor(700)], ids=["mean", "int", "tensor"])
@pytest.mark.parametrize("tie", [False, True], ids=["untied", "tied"])
def test_loss_without_logits_is_the_same(tiny_model, tie, num_items_in_batch):
    model = tiny_model(tie_word_embeddings=tie, max_position_embeddings=600).train()
    input_ids = batch(length=600)  # more tokens than one chunk
    labels = input_ids.clone()
    labels[0, :50] = -100
    inputs = {"input_ids": input_ids, "labels": labels, "num_items_in_batch": num_items_in_batch}
    assert_same_loss(model, fused=True, **inputs)
    model.model.requires_grad_(False)  # the head alone is trained, or with tied weights nothing
    if not tie:
        assert_same_loss(model, fused=True, **inputs)


def test_loss_of_soft_capped_logits(tiny_model):
    """The cap is no part of the output projection's weight; without logits, it must not be left out."""
    model = tiny_model(max_position_embeddings=600, final_logit_softcapping=0.1).train()
    input_ids = batch(length=600)  # more tokens than one chunk
    assert model(input_ids).logits.abs().max() <= 0.1
    assert_same_loss(model, fused=False, input_ids=input_ids, labels=input_ids)


@pytest.mark.parametrize("is_matrix", [True, False])
@pytest.mark.parametrize(
    "settings", [{"z_loss": 0.1}, {"label_smoothing": 0.1}, {"z_loss": 0.1, "label_smoothing": 0.1}]
)
def test_z_loss_and_smoothing_are_those_of_their_formulas(tiny_model, settings, is_matrix):
    model = tiny_model(max_position_embeddings=600).train()
    input_ids = batch(length=600)  # more tokens than one chunk
    labels = input_ids.clone()
    labels[0, :50] = -100
    logits = model(input_ids).logits[:, :-1]
    z_loss, smoothing = settings.get("z_loss", 0.0), settings.get("label_smoothing", 0.0)
    probabilities = logits.softmax(-1)
    targets = (1 - smoothing) * F.one_hot(input_ids[:, 1:], 97) + smoothing / 97
    losses = -(targets * probabilities.log()).sum(-1) + z_loss * logits.exp().sum(-1).log() ** 2
    dense = losses[labels[:, 1:] != -100].sum() / 2000
    dense.backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    if not is_matrix:
        model.lm_head.register_forward_hook(lambda *_: None)
    inputs = {"input_ids": input_ids, "labels": labels, "num_items_in_batch": 2000, **settings}
    output, gradients = loss_and_gradients(model, skip_logits=True, **inputs)
    assert is_fused(output.loss) == is_matrix
    torch.testing.assert_close(output.loss, dense)
    torch.testing.assert_close(gradients, expected, rtol=1e-4, atol=1e-6)
    name = next(iter(settings))
    with pytest.raises(ValueError, match=f"`({name}|label_smoothing)` must be unset without `skip_logits`"):
        model(**inputs)
    if smoothing:
        with pytest.raises(ValueError, match="`label_smoothing` must be 0 with `teacher_logits`"):
            model(**inputs, skip_logits=True, teacher_logits=torch.zeros(*labels.shape, 97))


def test_targets_of_the_caller(tiny_model):
    input_ids = batch()
    shift_labels = torch.randint(97, input_ids.shape)
    assert_same_loss(tiny_model(), True, input_ids=input_ids, labels=input_ids, shift_labels=shift_labels)


def test_steps_add_up(tiny_model):
    """Two halves of a batch, with the number of labels of all, make the gradients of the whole."""
    model = tiny_model().train()
    input_ids = batch()
    _, expected = loss_and_gradients(model, input_ids=input_ids, labels=input_ids)
    model.zero_grad()
    for half in input_ids.split(1):
        model(half, labels=half, num_items_in_batch=88, skip_logits=True).loss.backward()
    torch.testing.assert_close({name: p.grad for name, p in model.named_parameters()}, expected)


@pytest.mark.parametrize("skip_logits", [False, True])
def test_nothing_to_predict(tiny_model, skip_logits):
    """Not a number, as with logits, but no gradient that would spoil the weights."""
    input_ids = batch()
    labels = torch.full_like(input_ids, -100)
    output, gradients = loss_and_gradients(tiny_model(), input_ids=input_ids, labels=labels, skip_logits=skip_logits)
    assert output.loss.isnan()
    assert not any(gradient.any() for gradient in gradients.values())


def test_loss_without_logits_in_bfloat16_is_not_rounded(tiny_model):
    model = tiny_model(initializer_range=0.02, max_position_embeddings=600).train()
    input_ids = batch(length=600)
    inputs = {"input_ids": input_ids, "labels": input_ids}
    _, exact_gradients = loss_and_gradients(model, **inputs)
    usual, usual_gradients = loss_and_gradients(model, autocast=True, **inputs)
    output, gradients = loss_and_gradients(model, autocast=True, skip_logits=True, **inputs)
    assert is_fused(output.loss) and output.loss.dtype == torch.float32
    torch.testing.assert_close(output.loss, usual.loss, rtol=1e-5, atol=0)
    for name, exact in exact_gradients.items():
        error = (gradients[name] - exact).norm()
        assert error <= 2 * (usual_gradients[name] - exact).norm(), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_loss_of_a_model_in_half_precision(tiny_model, dtype):
    model = tiny_model(dtype, initializer_range=0.02).train()
    input_ids = batch()
    # As in training in float16, whose smallest numbers have few bits.
    inputs = {"input_ids": input_ids, "labels": input_ids, "loss_scale": 2**10}
    usual, usual_gradients = loss_and_gradients(model, **inputs)
    output, gradients = loss_and_gradients(model, skip_logits=True, **inputs)
    assert is_fused(output.loss)
    torch.testing.assert_close(output.loss, usual.loss, rtol=1e-5, atol=0)
    for name, usual_gradient in usual_gradients.items():
        assert gradients[name].dtype == dtype
        difference = (gradients[name] - usual_gradient).float().norm()
        assert difference <= 4 * torch.finfo(dtype).eps * usual_gradient.float().norm(), name


def test_the_gradient_of_many_tokens_is_summed_in_float32(monkeypatch):
    """In half precision, a large sum would lose what chunks add to it."""
    monkeypatch.setattr(loss_lsgpt, "CHUNK_LENGTH", 8)
    states, weight = (torch.randn(8000, 19) + 1).bfloat16(), torch.randn(37, 19).bfloat16().requires_grad_()
    targets = torch.zeros(8000).long()
    LinearCrossEntropy.apply(states, weight, targets, -100, None, 0.0, 0.0).backward()
    exact = weight.detach().double().requires_grad_()
    F.cross_entropy(states.double() @ exact.T, targets, reduction="sum").backward()
    error = (weight.grad - exact.grad).norm()
    assert error <= 2 * torch.finfo(torch.bfloat16).eps * exact.grad.norm()


def test_loss_of_a_called_head_in_half_precision_is_computed_in_float32():
    states, labels = torch.randn(2, 40, 19).bfloat16(), torch.randint(37, (2, 40))
    head = torch.nn.Linear(19, 37).bfloat16()  # with a bias, so that it is called
    expected = F.cross_entropy(head(states).float()[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    torch.testing.assert_close(causal_lm_loss(states, head, labels), expected)


@pytest.mark.parametrize("bias", [False, True], ids=["matrix", "called"])
def test_distributions_of_a_teacher_in_half_precision_are_computed_in_float32(bias):
    states, labels, head = torch.randn(2, 40, 19), torch.randint(37, (2, 40)), torch.nn.Linear(19, 37, bias=bias)
    teacher = torch.randn(2, 40, 37).bfloat16()
    losses = [causal_lm_loss(states, head, labels, teacher_logits=each) for each in (teacher, teacher.float())]
    torch.testing.assert_close(*losses)


def test_compiled_and_checkpointed(tiny_model, fresh_compiler):
    model = tiny_model(num_hidden_layers=1, max_position_embeddings=600).train()
    input_ids = batch(length=300)
    inputs = {"input_ids": input_ids, "labels": input_ids, "use_cache": False}
    _, expected = loss_and_gradients(model, **inputs)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    _, gradients = loss_and_gradients(compiled, skip_logits=True, **inputs)
    torch.testing.assert_close({name.removeprefix("_orig_mod."): g for name, g in gradients.items()}, expected)
    model.gradient_checkpointing_enable()
    output, gradients = loss_and_gradients(model, skip_logits=True, **inputs)
    assert is_fused(output.loss)
    torch.testing.assert_close(gradients, expected)


def test_heads_that_are_more_than_a_matrix_are_called(tiny_model):
    """An adapter, a weight that is kept elsewhere, a hook: none is passed over. A resized head is a matrix again."""
    input_ids = batch()
    inputs = {"input_ids": input_ids, "labels": input_ids}
    resized = tiny_model()
    resized.resize_token_embeddings(120)
    assert type(resized.lm_head) is torch.nn.Linear
    assert_same_loss(resized, fused=True, **inputs)

    config = LoraConfig(target_modules=["lm_head"], init_lora_weights=False, task_type="CAUSAL_LM")
    assert_same_loss(get_peft_model(tiny_model(), config), fused=False, **inputs)

    hooked, calls = tiny_model(), []
    hooked.lm_head.register_forward_hook(lambda *_: calls.append(1))
    assert_same_loss(hooked, fused=False, **inputs)
    assert calls

    expected, offloaded = tiny_model(), tiny_model()
    cpu_offload(offloaded.lm_head, execution_device="cpu")
    with torch.no_grad():
        loss = offloaded(**inputs, skip_logits=True).loss
        torch.testing.assert_close(loss, expected(**inputs).loss)


def test_sharded_weights(tiny_model, tmp_path):
    """FSDP2: gathered with the whole model's they are a matrix, in a group of their own they are not."""
    torch.distributed.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        input_ids = batch()
        inputs = {"input_ids": input_ids, "labels": input_ids}
        expected, expected_gradients = loss_and_gradients(tiny_model(), **inputs)
        for alone in (False, True):
            model = tiny_model()
            mesh = torch.distributed.init_device_mesh("cpu", (1,))
            if alone:
                fully_shard(model.lm_head, mesh=mesh)
            fully_shard(model, mesh=mesh)
            output, gradients = loss_and_gradients(model, skip_logits=True, **inputs)
            assert is_fused(output.loss) == (not alone)
            torch.testing.assert_close(output.loss, expected.loss)
            torch.testing.assert_close({n: g.full_tensor() for n, g in gradients.items()}, expected_gradients)
        # Transformers knows a model by the name of its class, and finds its code by the module.
        assert type(model) is not LSGPTForCausalLM
        assert model._get_name() == "LSGPTForCausalLM"
        weights = {name: tensor.full_tensor() for name, tensor in model.state_dict().items()}
        model.save_pretrained(tmp_path / "saved", state_dict=weights)
        assert (tmp_path / "saved" / "loss_lsgpt.py").is_file()
        classes = json.loads((tmp_path / "saved" / "config.json").read_text("utf-8"))["auto_map"]
        assert classes["AutoModelForCausalLM"] == "modeling_lsgpt.LSGPTForCausalLM"
    finally:
        torch.distributed.destroy_process_group()


def test_a_loss_function_of_the_user_is_kept(tiny_model):
    model = tiny_model()
    model.loss_function = lambda logits, labels, vocab_size, **kwargs: logits.square().mean()
    input_ids = batch()
    assert_same_loss(model, fused=False, input_ids=input_ids, labels=input_ids)


@pytest.mark.parametrize("autocast", [False, True])
def test_loss_without_logits_never_holds_all_logits(tiny_model, autocast):
    model = tiny_model(vocab_size=2000, max_position_embeddings=1024)
    input_ids = torch.randint(2000, (4, 1024))

    def largest_allocation(skip_logits):
        with torch.profiler.profile(profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            loss_and_gradients(model, autocast, input_ids=input_ids, labels=input_ids, skip_logits=skip_logits)
        return max(event.self_cpu_memory_usage for event in profile.events())

    of_logits = 4096 * 2000 * (2 if autocast else 4)
    assert largest_allocation(False) >= of_logits
    assert largest_allocation(True) <= of_logits / 2  # a chunk of them in float32


def _with_bias(model):
    model.lm_head = torch.nn.Linear(model.config.hidden_size, model.config.vocab_size)
    torch.nn.init.normal_(model.lm_head.bias)


def _with_input_hook(model):
    model.lm_head.register_forward_pre_hook(lambda module, inputs: (2 * inputs[0],))


def _with_own_forward(model):
    """As Accelerate's hooks, which load the weight from the CPU or disk."""
    forward = model.lm_head.forward
    model.lm_head.forward = lambda states: 2 * forward(states)


def _with_gradient_hook(model):
    model.lm_head.register_full_backward_hook(lambda module, inputs, outputs: (2 * inputs[0],))


def _with_hook_before_the_gradient(model):
    model.lm_head.register_full_backward_pre_hook(lambda module, outputs: (2 * outputs[0],))


CHANGES = [_with_bias, _with_input_hook, _with_own_forward, _with_gradient_hook, _with_hook_before_the_gradient]


@pytest.mark.parametrize("change", CHANGES)
def test_whatever_changes_the_head_changes_the_loss(tiny_model, change):
    model, ids = tiny_model(), batch()
    change(model)
    assert_same_loss(model, fused=False, input_ids=ids, labels=ids)


def test_an_empty_placeholder_is_no_matrix(tiny_model):
    head = tiny_model().lm_head
    assert _is_plain_matrix(head, torch.device("cpu"))
    head.weight.data = torch.empty(0)
    assert not _is_plain_matrix(head, torch.device("cpu"))


def test_a_weight_of_another_kind_is_no_matrix(tiny_model):
    class Sharded(torch.nn.Parameter):
        pass

    head = tiny_model().lm_head
    head.weight = Sharded(head.weight.detach())
    assert not _is_plain_matrix(head, torch.device("cpu"))


@pytest.mark.parametrize("bias", [False, True])
def test_a_token_that_the_teacher_rules_out_costs_nothing(bias):
    head, states = torch.nn.Linear(8, 37, bias=bias), torch.randn(2, 40, 8)
    labels, teacher = torch.randint(37, (2, 40)), torch.randn(2, 40, 37)
    teacher[..., 5] = -1e4  # as good as infinite
    losses = []
    for value in (-1e4, -torch.inf):
        teacher[..., 5] = value
        losses.append(causal_lm_loss(states, head, labels, teacher_logits=teacher))
    assert losses[1].isfinite()
    torch.testing.assert_close(*losses)


def test_shifted_labels_of_another_shape_are_refused(tiny_model):
    model, ids = tiny_model(), batch(12)
    for skip_logits in (True, False):
        with pytest.raises(ValueError, match=r"`shift_labels` must have shape \(2, 6\), .* got \(2, 12\)"):
            model(ids, labels=ids[:, 6:], shift_labels=ids, logits_to_keep=6, skip_logits=skip_logits)
