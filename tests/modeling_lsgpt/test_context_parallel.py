"""Sequences that are split over processes are computed as in one process; what cannot be split is refused."""

import sys
from contextlib import contextmanager
from functools import partial, wraps
from pathlib import Path

import fresh
import pytest
import torch
from accelerate import Accelerator
from accelerate.hooks import ModelHook, add_hook_to_module
from accelerate.state import AcceleratorState
from transformers import DynamicCache
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from lsgpt import LSGPTForCausalLM, LSGPTForSequenceClassification
from lsgpt.modeling_lsgpt import GLOBAL, attention_lsgpt
from lsgpt.modeling_lsgpt.context_parallel_lsgpt import (
    ContextParallelCache,
    ExchangeTokens,
    check_inputs,
    count_tokens_sent,
    split_sequences,
    take_part,
)
from lsgpt.modeling_lsgpt.visibility_lsgpt import describe_visibility
from lsgpt.training import ContextParallelismConfig


SCRIPT = Path(__file__).with_name("split_sequences.py")


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(["--configurations", "12", "--first", "1000"], id="sdpa and eager"),
        pytest.param(["--configurations", "1", "--first", "73"], id="without masks"),
        pytest.param(["--configurations", "2", "--first", "95", "--engine", "flex_attention"], id="flex_attention"),
        pytest.param(["--configurations", "4", "--autocast"], id="autocast"),
        pytest.param(["--configurations", "1", "--first", "180", "--compiled"], id="compiled layers"),
        pytest.param(
            ["--configurations", "2", "--first", "62", "--engine", "triton"], id="triton", marks=pytest.mark.kernels
        ),
    ],
)
def test_random_configurations(options, request):
    """More of them by hand: `python tests/modeling_lsgpt/split_sequences.py --configurations 200`."""
    start = "import runpy, sys; del sys.argv[0]; runpy.run_path(sys.argv[0], run_name='__main__')"
    program = fresh.Program("-c", start, SCRIPT, *options, TRITON_INTERPRET="1")
    assert program.wait(timeout=300) == 0, program.output + program.errors
    if request.node.callspec.id == "without masks":
        assert "'Beginning'" in program.output and "'Past'" in program.output


def test_gradients_are_summed_in_float32(monkeypatch):
    """Of three processes, the first one's token is also seen by the others."""
    monkeypatch.setattr(torch.distributed, "get_rank", lambda group=None: 0)
    incoming = [torch.zeros(0, 1, 1, 1), torch.full((2, 1, 1, 1), 2.0**-8)]  # forward and backward

    def exchange(output, *_, **__):
        output.copy_(incoming.pop(0))

    monkeypatch.setattr(torch.distributed, "all_to_all_single", exchange)
    states = torch.ones(1, 1, 1, 1, dtype=torch.bfloat16, requires_grad=True)
    output = ExchangeTokens.apply(states, [1, 1, 1], [1, 0, 0], None)
    output.backward(torch.ones_like(output))
    assert states.grad.item() == 1 + 2**-7  # in bfloat16, 1 + 2**-8 would be 1, twice


@pytest.mark.parametrize("window", [2, 4, 5, 6, 9, 14, 100, None])
def test_every_process_receives_what_its_queries_see(window):
    length, processes = 5, 4
    for receiver in range(processes):
        begin = receiver * length
        queries = set(range(begin, begin + length))
        if window is None:  # the second half is that of another process
            partner = (processes - 1 - receiver) * length
            queries = {*range(begin, begin + 3), *range(partner + 3, partner + 5)}
        needed = {k for q in queries for k in range(q + 1) if window is None or k > q - window}
        received = set()
        for sender in range(processes):
            count = count_tokens_sent(sender, receiver, processes, length, window)
            received |= set(range((sender + 1) * length - count, (sender + 1) * length))
        own = set(range(begin, begin + length))  # of which it has all anyway
        assert needed <= received and received - needed <= own


@pytest.mark.parametrize("processes", [1, 2, 3, 4, 5])
def test_every_process_computes_as_many_pairs_of_global_heads(tiny_config, monkeypatch, processes):
    config, length = tiny_config(), 8
    create = partial(attention_lsgpt.create_masks, config)
    config._attn_implementation = "sdpa"
    whole = describe_visibility(config, torch.zeros(1, processes * length))
    pairs, queries = [], []
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: processes)
    for rank in range(processes):
        monkeypatch.setattr(torch.distributed, "get_rank", lambda group, rank=rank: rank)
        spans = [masks.visibility[GLOBAL] for masks in ContextParallelCache(whole, create, None).masks]
        pairs.append(sum(int(span.dense().sum()) for span in spans))
        queries += [position for span in spans for position in span.query_positions.tolist()]
    assert len(set(pairs)) == 1 and sum(pairs) == int(whole[GLOBAL].dense().sum())
    assert sorted(queries) == list(range(processes * length))


def inputs(**others):
    ids = torch.arange(24).view(2, 12)
    return {"input_ids": ids, "labels": ids, **others}


@pytest.mark.parametrize(
    ("others", "message"),
    [
        ({"past_key_values": DynamicCache()}, "`past_key_values` must be unset .* leave it out"),
        ({"cache": DynamicCache()}, "`cache` must be unset .* leave it out"),
        ({"logits_to_keep": 3}, "`logits_to_keep` must be unset"),
        ({"output_attentions": True}, "`output_attentions` must be unset .* in evaluation mode"),
        ({"attention_mask": torch.ones(2, 1, 12, 12).bool()}, "must have 2 dimensions .* pass `position_ids`"),
        ({"attention_mask": {}}, "must have 2 dimensions"),
        ({"labels": torch.ones(2, 13)}, r"`labels` must have shape \(2, 12\).* got \(2, 13\)"),
        ({"shift_labels": torch.ones(2, 11)}, r"`shift_labels` must have shape \(2, 12\).* got \(2, 11\)"),
        ({"position_ids": torch.ones(1, 13)}, r"`position_ids` must have shape \(2, 12\).* got \(1, 13\)"),
        ({"attention_mask": torch.ones(2, 13)}, r"`attention_mask` must have shape \(2, 12\).* got \(2, 13\)"),
        ({"teacher_logits": torch.ones(2, 11, 5)}, r"`teacher_logits` must have shape \(2, 12\).* got \(2, 11, 5\)"),
        ({"input_ids": torch.ones(2, 13), "labels": torch.ones(2, 13)}, "multiple of 2 tokens.* got 13. Pad them"),
    ],
)
def test_what_cannot_be_split_is_refused(tiny_config, others, message):
    with pytest.raises(ValueError, match=message):
        check_inputs(tiny_config(), inputs(**others), 2)


def test_attentions_that_the_configuration_asks_for_are_refused(tiny_config):
    config = tiny_config(attn_implementation="eager", output_attentions=True)
    with pytest.raises(ValueError, match="`output_attentions` must be unset"):
        check_inputs(config, inputs(), 2)


def test_training_without_labels_is_refused(tiny_config):
    with pytest.raises(ValueError, match=r"`labels` must be passed.* `compute_loss_func` cannot be used"):
        check_inputs(tiny_config(), {"input_ids": torch.arange(24).view(2, 12)}, 2)


@pytest.mark.parametrize(
    "others",
    [
        {},
        {"logits_to_keep": 0, "output_attentions": False},
        {"position_ids": torch.tensor([[*range(5), *range(7)]]), "attention_mask": torch.ones(2, 12)},
    ],
)
def test_other_inputs_are_not_refused(tiny_config, others):
    assert check_inputs(tiny_config(), inputs(**others), 2) == 6


def test_other_models_are_refused(tiny_config):
    with pytest.raises(ValueError, match=r"must be an LSGPTForCausalLM .* got LSGPTForSequenceClassification"):
        split_sequences(LSGPTForSequenceClassification(tiny_config()), None)


def test_a_process_takes_its_part_of_every_input(tiny_config, monkeypatch):
    """The second of two. What comes after its last token is not to be predicted."""
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: 2)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda group: 1)
    labels, positions = torch.arange(24).view(2, 12), torch.tensor([[*range(6), *range(3), *range(3)]])
    embeds, teacher = torch.randn(2, 12, 48), torch.randn(2, 12, 97)
    whole = {"inputs_embeds": embeds, "position_ids": positions, "labels": labels, "teacher_logits": teacher}
    others = {"ignore_index": 8, "use_cache": True, "cu_seq_lens_q": torch.tensor([0, 3, 12])}
    part, _ = take_part(tiny_config(), {**whole, **others}, None)
    assert all(torch.equal(part[name], x[:, 6:]) for name, x in whole.items())
    assert part["shift_labels"].tolist() == [[7, 8, 9, 10, 11, 8], [19, 20, 21, 22, 23, 8]]
    assert part["num_items_in_batch"] == (22 - 1) / 2  # the two processes take the mean of their losses
    assert part["last_position"] == 5  # in the other part, of a document
    assert part["ignore_index"] == 8 and not part.keys() & {"use_cache", "cu_seq_lens_q"}
    part, _ = take_part(tiny_config(), {**whole, "shift_labels": labels}, None)
    assert torch.equal(part["shift_labels"], labels[:, 6:])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seq_idx": torch.tensor([[0] * 5 + [1] * 7])}, "`position_ids`, which begin at 0 in every document, or"),
        ({"cu_seq_lens_k": torch.tensor([0, 5, 12])}, "`position_ids`, which begin at 0 in every document, or"),
        ({"input_ids": torch.tensor([[*range(11), 97]])}, "`input_ids` must be between 0 and 96"),
        ({"labels": torch.tensor([[*range(11), 97]])}, "`labels` must be between 0 and 96 .*, or -100"),
        ({"position_ids": torch.tensor([[*range(11), 20]])}, "`position_ids` must be between 0 and 19"),
        (dict.fromkeys(("input_ids", "labels"), torch.ones(1, 24).long()), "got 23; learned positions end there"),
        (
            dict.fromkeys(("input_ids", "labels"), torch.ones(1, 24, device="meta").long()),
            "got 23; learned positions end there",
        ),
    ],
)
def test_what_a_part_does_not_show_is_refused_by_all(tiny_config, monkeypatch, changes, message):
    """A process that computes its own part, without the fault, would wait for one that has an error."""
    ids = torch.arange(12)[None]
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: 2)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda group: 0)
    with pytest.raises(ValueError, match=message):
        take_part(tiny_config(max_position_embeddings=20), {"input_ids": ids, "labels": ids, **changes}, None)


@contextmanager
def alone():
    """A group with this process only."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def test_the_model_gets_its_part_of_the_arguments_and_no_others(tiny_model):
    model, seen = tiny_model().train(), []
    forward = model.forward

    @wraps(forward)
    def record(*args, **kwargs):
        seen.append(kwargs)
        return forward(*args, **kwargs)

    model.forward = record
    ids = torch.randint(97, (1, 8))
    with alone():
        end = split_sequences(model, torch.distributed.group.WORLD)
        loss = model(ids, labels=ids, z_loss=0.1, skip_logits=True).loss
        end()
    given, masks = {"input_ids", "labels", "z_loss", "skip_logits"}, {"attention_mask", "past_key_values", "use_cache"}
    assert set(seen[0]) == given | masks | {"position_ids", "shift_labels", "num_items_in_batch"}
    torch.testing.assert_close(loss, model(ids, labels=ids, z_loss=0.1, skip_logits=True).loss)
    assert model.forward is record and "past_key_values" not in seen[1]


def test_hooks_of_the_modules_stay(tiny_model):
    model = tiny_model(position_embedding_type="rope")
    modules = [model, model.model.rotary_emb, model.model.layers[0].self_attn]
    add_hook_to_module(model.model.rotary_emb, ModelHook())
    before = [{**vars(module)} for module in modules]
    split_sequences(model, None)()
    assert [vars(module) for module in modules] == before


def test_only_split_steps_take_rotary_frequencies_of_whole_rows(tiny_model):
    lengths = {"original_max_position_embeddings": 16, "factor": 4.0}
    factors = {"short_factor": [1.0] * 6, "long_factor": [1.0, 2.0, 3.0, 4.0, 6.0, 8.0]}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, **lengths, **factors}
    model = tiny_model(position_embedding_type="rope", rope_parameters=rope)
    ids = torch.randint(97, (1, 20))
    expected = model(ids[:, :8]).logits
    with alone():
        end = split_sequences(model, torch.distributed.group.WORLD)
        model.train()(ids, labels=ids)  # with the factors of long rows
        in_evaluation = model.eval()(ids[:, :8]).logits
        end()
    assert torch.equal(in_evaluation, expected) and torch.equal(model.train()(ids[:, :8]).logits, expected)


def test_models_with_code_of_their_own(tiny_model, tmp_path, monkeypatch):
    """A model from a checkpoint's code gets masks of this code, whose classes are others than ours."""
    tiny_model().save_pretrained(tmp_path)
    model = get_class_from_dynamic_module("modeling_lsgpt.LSGPTForCausalLM", tmp_path).from_pretrained(tmp_path)
    assert not isinstance(model.train(), LSGPTForCausalLM)
    own = sys.modules[type(model).__module__.replace(".modeling_lsgpt", ".attention_lsgpt")]
    for code in (attention_lsgpt, own):
        monkeypatch.setattr(code, "MASKED_PAIRS", 0)  # so that there is a `Past`
    ids = torch.randint(97, (1, 8))
    with alone():
        end = split_sequences(model, torch.distributed.group.WORLD)
        loss = model(ids, labels=ids).loss
        end()
    torch.testing.assert_close(loss, model(ids, labels=ids).loss)


def test_a_split_follows_the_state_of_accelerate(tiny_model, tiny_config, monkeypatch):
    """It ends where a later training is not split; models without a language-modeling head are not evaluated so."""
    begun, ended, model = [], [], tiny_model()
    monkeypatch.setattr(
        ContextParallelismConfig, "split", lambda self, model: begun.append(model) or (lambda: ended.append(model))
    )
    AcceleratorState._reset_state(True)
    try:
        state = Accelerator(cpu=True).state
        state.parallelism_config = ContextParallelismConfig(cp_size=2)
        for _ in range(2):
            model.train()
            model.eval()
        LSGPTForSequenceClassification(tiny_config()).eval()
        assert begun == [model] and ended == []
        state.parallelism_config = None
        model.train()
        assert begun == ended == [model]
    finally:
        AcceleratorState._reset_state(True)


DIFFERENT_ROWS = """
import sys
import torch
from torch import distributed, multiprocessing
from lsgpt import LSGPTConfig, LSGPTForCausalLM
from lsgpt.modeling_lsgpt.context_parallel_lsgpt import split_sequences

def work(rank, folder):
    distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    model = LSGPTForCausalLM(LSGPTConfig(vocab_size=9, hidden_size=12, num_hidden_layers=1, num_attention_heads=2))
    for difference in ("none", "tokens", "rows"):
        end = split_sequences(model, distributed.group.WORLD)
        ids = torch.arange(8)[None].repeat(1 + (rank if difference == "rows" else 0), 1)
        if difference == "tokens":
            ids[0, -1] -= rank
        try:
            model.train()(input_ids=ids, labels=ids)
            outcome = "trained"
        except ValueError as error:
            outcome = str(error)
        model.eval()(input_ids=ids)
        end()
        print(f"{rank} {difference}: {outcome}", flush=True)
    distributed.destroy_process_group()

torch.set_num_threads(1)
multiprocessing.start_processes(work, sys.argv[1:], nprocs=2, start_method="fork")
"""


def test_processes_with_different_rows_all_notice_it(tmp_path):
    program = fresh.Program("-c", DIFFERENT_ROWS, tmp_path)
    assert program.wait(timeout=120) == 0, program.errors
    for rank in (0, 1):
        assert f"{rank} none: trained" in program.output
        for difference in ("tokens", "rows"):
            message = "the processes that share a sequence must have the same rows"
            assert f"{rank} {difference}: {message}" in program.output
