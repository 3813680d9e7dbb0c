"""The choice of global heads: on small random models against dense computations, on a GPT-2 that is trained here."""

import itertools
import json
import math
import re
import shutil

import pytest
import torch
import torch.nn.functional as F
from accelerate.hooks import ModelHook, add_hook_to_module
from matplotlib.patches import Rectangle
from PIL import Image
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

import lsgpt_cli
from lsgpt.conversion import (
    Sinks,
    budget_heads,
    calibrate,
    choose_global_heads,
    convert_pretrained,
    measure_changes,
    perplexity,
    read_blocks,
    recall,
    with_global_heads,
)
from lsgpt.conversion.calibration import _cost_lengths, count_global_heads, plot_scores, write_report
from lsgpt.conversion.heads import SINK_LOGITS
from lsgpt.conversion.retrieval import KINDS, make_passages
from lsgpt.modeling_lsgpt import attention_layers
from lsgpt.training import load_documents, train_tokenizer
from lsgpt.utilities.environment import describe_environment


PASSAGE = 32
WINDOW = 16
LAYERS, HEADS = 2, 4
COUNT = 4

GROUPED = {
    "num_global_heads": 6,
    "num_key_value_heads": 3,
    "qk_norm": True,
    "position_embedding_type": "rope",
    "norm_type": "rms_norm",
    "gated_mlp": True,
    "use_bias": ["qkv_proj"],
}
"""All that changes how heads are permuted and measured."""


def make_gpt2(folder, num_steps):
    """
    Fills a folder with a GPT-2 and its tokenizer of bytes, and a file of text like that which it has read.

    The text is the source of Python's standard library, in passages of 32 characters, each followed by itself. So some
    heads have to look 32 characters back, while others serve the spelling of what comes next; text as it stands would
    teach heads to differ only in a far longer training.
    """
    torch.manual_seed(0)
    held_out = 100
    source = "".join(load_documents("stdlib")["train"]["text"]).encode("ascii", "ignore").decode()
    starts = torch.randint(len(source) - PASSAGE, (held_out + 16 * num_steps,)).tolist()
    # With the end-of-text token, a document fills a block.
    documents = [(source[start : start + PASSAGE] * 2)[:-1] for start in starts]
    tokenizer = train_tokenizer([], vocab_size=258)
    end = tokenizer.eos_token_id
    blocks = torch.tensor([[*ids, end] for ids in tokenizer(documents)["input_ids"]])
    size = blocks.shape[1]

    config = GPT2Config(
        vocab_size=258,
        n_positions=size,
        n_embd=64,
        n_layer=LAYERS,
        n_head=HEADS,
        initializer_range=0.1,  # about 1 / sqrt(n_embd)
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=end,
        eos_token_id=end,
    )
    model = GPT2LMHeadModel(config)
    # Positions that start as sinusoids are learned in a fraction of the time.
    angles = torch.arange(size)[:, None] / 10_000 ** (torch.arange(0, 64, 2) / 64)
    model.transformer.wpe.weight.data = 0.3 * torch.stack((angles.sin(), angles.cos()), -1).flatten(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 5e-3, total_steps=max(num_steps, 1), pct_start=0.1)
    for batch in blocks[held_out:].view(num_steps, 16, size):
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()

    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    lines = [json.dumps({"text": text}) for text in documents[:held_out]]
    (folder / "text.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    """The folder of a trained model."""
    return make_gpt2(tmp_path_factory.mktemp("gpt2"), 800)


@pytest.fixture(scope="module")
def untrained(tmp_path_factory):
    """The folder of a model whose text does not matter."""
    return make_gpt2(tmp_path_factory.mktemp("untrained"), 0)


@pytest.fixture
def grouped_model(tiny_model):
    """A model of today's blocks with shared keys, whose biases and norms are not what they start as."""

    def build(**values):
        model = tiny_model(**{**GROUPED, **values})
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                torch.nn.init.normal_(parameter, mean=1.0 if "norm" in name else 0.0, std=0.3)
        return model

    return build


def attention_inputs(model, ids):
    """What each layer's attention is called with in a forward pass: `(args, kwargs)`."""
    calls = []
    handles = [
        layer.register_forward_pre_hook(lambda _, args, kwargs: calls.append((args, kwargs)), with_kwargs=True)
        for layer in attention_layers(model)
    ]
    model(ids[None], use_cache=False)
    for handle in handles:
        handle.remove()
    return calls


def head_outputs(model, calls, ids):
    """
    The outputs `(L, n, H, D)` of all heads, before the output projection, for the layers' inputs in `calls`, which may
    come from another model.
    """
    outputs = []
    for layer, own, (args, _) in zip(attention_layers(model), attention_inputs(model, ids), calls):
        handle = layer.o_proj.register_forward_pre_hook(lambda _, args: outputs.append(args[0][0]))
        layer(*args, **own[1])
        handle.remove()
    return torch.stack(outputs).unflatten(2, (-1, model.config.head_dim))


@torch.no_grad()
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_measured_change_is_that_of_the_outputs_of_a_model_with_local_heads(grouped_model, softcap):
    model = grouped_model(dtype=torch.float64, engine="eager", attn_logit_softcapping=softcap)
    blocks = torch.randint(97, (2, 40))
    changes = measure_changes(model, blocks, 8)
    local = with_global_heads(model, [[], []], 8, changes.sinks)
    values = changes.sinks.values.repeat_interleave(2, dim=1)[:, None]
    changed = outputs = 0
    for ids in blocks:
        calls = attention_inputs(model, ids)
        before, after = head_outputs(model, calls, ids), head_outputs(local, calls, ids)
        squares = (before - after - values)[:, 7:].square()
        changed = changed + squares.unflatten(2, (3, 2)).sum((1, 3, 4))
        outputs = outputs + before.square().sum((1, 2, 3))
    torch.testing.assert_close(changes.text, changed / outputs[:, None], rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(changes.scores, changes.text / changes.text.sum())
    assert changes.retrieval is None


@torch.no_grad()
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_rise_of_the_loss_is_that_of_heads_between_global_and_local(grouped_model, monkeypatch, softcap):
    """By small steps away from one half, with dense attention in which the sink is one more key."""
    model = grouped_model(dtype=torch.float64, engine="eager", attn_logit_softcapping=softcap)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    passages = [(ids, ids.where(torch.arange(200) % 7 == 5, -100)) for ids in torch.randint(97, (2, 200))]
    changes = measure_changes(model, torch.randint(97, (2, 40)), 8, passages)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any({"attend", "forward"} & vars(module).keys() for module in model.modules())
    assert torch.equal(changes.scores, changes.retrieval / changes.retrieval.abs().sum())

    distance = torch.arange(200)[:, None] - torch.arange(200)
    parts = torch.full((2, 6, 1, 1), 0.5, dtype=torch.float64)
    for i, layer in enumerate(attention_layers(model)):

        def attend(query, key, value, *args, i=i, **kwargs):
            key, value = (x[0].repeat_interleave(2, dim=0) for x in (key, value))
            logits = query[0] @ key.mT / 12**0.5
            logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
            full = logits.masked_fill(distance < 0, -torch.inf).softmax(-1) @ value
            sink = changes.sinks.logits[i, :, None].where(torch.arange(200) >= 7, -torch.inf)[..., None]
            logits = torch.cat([logits.masked_fill((distance < 0) | (distance >= 8), -torch.inf), sink], dim=-1)
            sink_value = changes.sinks.values[i].repeat_interleave(2, dim=0)[:, None]
            local = logits.softmax(-1) @ torch.cat([value, sink_value], dim=1)
            return torch.lerp(full, local, parts[i]).transpose(0, 1)[None], None

        monkeypatch.setattr(layer, "attend", attend)

    def loss():
        total = 0
        for ids, labels in passages:
            losses = F.cross_entropy(model(ids[None], use_cache=False).logits[0, :-1], ids[1:], reduction="none")
            total = total + losses[labels[1:] != -100].mean() + losses[7::8].mean()
        return total / len(passages)

    for layer, head in itertools.product(range(2), range(3)):
        of_head, step = parts[layer, 2 * head : 2 * head + 2], 1e-4
        ends = []
        for sign in (1, -1):
            of_head.fill_(0.5 + sign * step)
            ends.append(loss())
        of_head.fill_(0.5)
        torch.testing.assert_close(
            changes.retrieval[layer, head], (ends[0] - ends[1]) / (2 * step), rtol=1e-5, atol=1e-9
        )


def test_texts_within_the_window_are_refused(grouped_model):
    with pytest.raises(ValueError, match="blocks must be at least as long as the window of 8 tokens; got 7"):
        measure_changes(grouped_model(), torch.randint(97, (2, 7)), 8)
    measure_changes(grouped_model(), torch.randint(97, (2, 8)), 8)  # one query has a full window
    with pytest.raises(ValueError, match="passages must be longer than the window of 8 tokens; got 8 tokens"):
        measure_changes(grouped_model(), torch.randint(97, (2, 40)), 8, [(torch.arange(8), torch.arange(8))])


@torch.no_grad()
def test_queries_without_a_full_window_are_those_of_the_source(grouped_model):
    """They see the first tokens, and no sink, whatever its value."""
    model, ids = grouped_model(dtype=torch.float64), torch.randint(97, (2, 40))
    sinks = Sinks(torch.randn(2, 6), torch.randn(2, 3, 12))
    local = with_global_heads(model, [[1], []], 8, sinks)
    before, after = model(ids).logits, local(ids).logits
    torch.testing.assert_close(after[:, :7], before[:, :7], rtol=1e-9, atol=1e-9)
    assert ((after - before)[:, 8:].abs().amax(-1) > 1e-3).all()


@torch.no_grad()
def test_sinks_are_those_that_change_the_outputs_least(grouped_model):
    """
    By a dense computation over all queries together: of the grid, each logit is the best for the values, and the
    values are the best for the logits.
    """
    model, window = grouped_model(dtype=torch.float64, engine="eager"), 8
    blocks = torch.randint(97, (2, 150))
    sinks = measure_changes(model, blocks, window).sinks
    inputs = [attention_inputs(model, ids) for ids in blocks]
    distance = torch.arange(150)[:, None] - torch.arange(150)
    for i, layer in enumerate(attention_layers(model)):
        full, local, lse = [], [], []
        for calls in inputs:
            args, kwargs = calls[i]
            query, *states = layer.project(*args, kwargs["position_embeddings"])
            key, value = (x[0].repeat_interleave(2, dim=0) for x in states)
            logits = query[0] @ key.mT / 12**0.5
            in_window = logits.masked_fill((distance < 0) | (distance >= window), -torch.inf)
            full.append((logits.masked_fill(distance < 0, -torch.inf).softmax(-1) @ value)[:, window - 1 :])
            local.append((in_window.softmax(-1) @ value)[:, window - 1 :])
            lse.append(in_window.logsumexp(-1))
            if len(lse) == 1:
                grid = lse[0][:, -128:].mean(1, keepdim=True) + SINK_LOGITS
        full, local = torch.cat(full, 1), torch.cat(local, 1)
        lse = torch.cat([x[:, window - 1 :] for x in lse], 1)
        gates = (lse[..., None] - grid[:, None]).sigmoid()[..., None]  # `(H, T, K, 1)`
        left = full[:, :, None] - gates * local[:, :, None]
        values = sinks.values[i].repeat_interleave(2, dim=0)
        changes = (left - (1 - gates) * values[:, None, None]).square().sum((1, 3))
        best = changes.argmin(1)
        torch.testing.assert_close(sinks.logits[i], grid.gather(1, best[:, None])[:, 0])
        heads = torch.arange(6)
        products = ((1 - gates) * left).sum(1)[heads, best].unflatten(0, (3, 2)).sum(1)
        rests = (1 - gates).square().sum(1)[heads, best].unflatten(0, (3, 2)).sum(1)
        torch.testing.assert_close(sinks.values[i], products / rests, rtol=1e-5, atol=1e-8)


@torch.no_grad()
def test_value_of_the_sinks_is_in_two_biases(grouped_model):
    """Of local heads only; and biases that were there stay."""
    model = grouped_model(use_bias=["qkv_proj", "o_proj"])
    sinks = Sinks(torch.randn(2, 6), torch.randn(2, 3, 12))
    result = with_global_heads(model, [[1], [0, 1, 2]], 8, sinks)
    assert result.config.attention_sinks == "full_window"
    assert result.config.use_bias == ["qkv_proj", "o_proj"]
    assert result.config.num_global_heads == [2, 6]
    first, second = attention_layers(result)
    before = attention_layers(model)
    torch.testing.assert_close(first.sinks, sinks.logits[0, [0, 1, 4, 5]])
    weights = before[0].o_proj.weight.split(12, dim=1)
    added = sum(weights[head] @ sinks.values[0, head // 2] for head in (0, 1, 4, 5))
    torch.testing.assert_close(first.o_proj.bias, before[0].o_proj.bias + added)
    moved = [x.view(3, 12)[[1, 0, 2]] for x in (before[0].v_proj.bias, sinks.values[0])]
    torch.testing.assert_close(first.v_proj.bias.view(3, 12)[0], moved[0][0])
    torch.testing.assert_close(first.v_proj.bias.view(3, 12)[1:], moved[0][1:] - moved[1][1:])
    torch.testing.assert_close(second.o_proj.bias, before[1].o_proj.bias)
    torch.testing.assert_close(second.v_proj.bias, before[1].v_proj.bias)


@torch.no_grad()
def test_biases_that_the_source_lacks(grouped_model):
    model, ids = grouped_model(use_bias=False), torch.randint(97, (1, 7))
    result = with_global_heads(model, [[1], [0]], 8, Sinks(torch.randn(2, 6), torch.randn(2, 3, 12)))
    assert result.config.use_bias == ["qkv_proj", "o_proj"]
    assert not any(layer.q_proj.bias.any() or layer.k_proj.bias.any() for layer in attention_layers(result))
    torch.testing.assert_close(result(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_a_model_without_local_heads_has_no_sinks_to_keep(grouped_model):
    """Even if its configuration asks for some."""
    model, ids = grouped_model(attention_sinks=True), torch.randint(97, (1, 40))
    result = with_global_heads(model, [[1], [0, 1, 2]], 40)
    assert not result.config.attention_sinks
    torch.testing.assert_close(result(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_order_of_global_heads_changes_nothing(grouped_model):
    model, ids = grouped_model(), torch.randint(97, (1, 40))
    sinks = Sinks(torch.randn(2, 6), torch.randn(2, 3, 12))
    other = with_global_heads(model, [[2, 0, 1], [1, 2, 0]], 8, sinks)
    assert other.config.num_global_heads == 6
    assert not other.config.attention_sinks
    assert not torch.equal(attention_layers(other)[0].q_proj.weight, attention_layers(model)[0].q_proj.weight)
    torch.testing.assert_close(other(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_mixed_heads_are_put_in_order(grouped_model):
    """With a window that hides nothing, and sinks that take nothing, local heads are the source's."""
    model, ids = grouped_model(), torch.randint(97, (1, 40))
    sinks = Sinks(torch.full((2, 6), -1e4), torch.zeros(2, 3, 12))
    other = with_global_heads(model, [[1], [2, 0]], 40, sinks)
    assert other.config.num_global_heads == [2, 4]
    torch.testing.assert_close(other(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("engine", ["eager", "flex_attention", "triton"])
def test_change_is_the_same_on_every_engine(grouped_model, engine):
    blocks = torch.randint(97, (2, 40))
    expected = measure_changes(grouped_model(), blocks, 8)
    actual = measure_changes(grouped_model(engine=engine), blocks, 8)
    assert (expected.text > 0).all()
    torch.testing.assert_close(actual.text, expected.text, rtol=1e-4, atol=1e-4)


def test_heads_of_a_model_in_half_precision_are_measured(grouped_model):
    """As most models on the Hub are: what is summed is in float32."""
    model, blocks = grouped_model(), torch.randint(97, (2, 40))
    passages = [(ids, ids) for ids in blocks]
    expected = measure_changes(model, blocks, 8, passages)
    actual = measure_changes(model.bfloat16(), blocks, 8, passages)
    torch.testing.assert_close(actual.text, expected.text, rtol=0.1, atol=0.01)
    torch.testing.assert_close(actual.retrieval, expected.retrieval, rtol=0.2, atol=0.05)
    assert with_global_heads(model, [[0], [1]], 8, actual.sinks).dtype == torch.bfloat16


def test_hooks_of_the_layers_stay(grouped_model):
    """They move the weights of a model that is divided between devices."""
    model = grouped_model()
    add_hook_to_module(model.model.layers[0], ModelHook())
    hooked, ids = vars(model.model.layers[0])["forward"], torch.arange(40)
    measure_changes(model, ids[None], 8, [(ids, ids)])
    assert vars(model.model.layers[0])["forward"] is hooked
    assert "forward" not in vars(model.model.layers[1]) and "attend" not in vars(model.model.layers[0].self_attn)


def test_the_picture_frames_the_chosen_heads(tmp_path, monkeypatch):
    corners = []
    monkeypatch.setattr(
        "lsgpt.conversion.calibration.Rectangle", lambda xy, *x, **y: corners.append(xy) or Rectangle(xy, *x, **y)
    )
    plot_scores(tmp_path / "heads.png", torch.rand(2, 4), [[3], [0, 1]])
    assert corners == [(2.5, -0.5), (-0.5, 0.5), (0.5, 0.5)]


def test_head_that_looks_far_back_is_chosen(tiny_model):
    """It attends to a few keys wherever they are; the others, whose queries are their keys, to their own token."""
    model = tiny_model(num_global_heads=6, num_key_value_heads=3, position_embedding_type="none")
    with torch.no_grad():
        for i, layer in enumerate(attention_layers(model)):
            layer.k_proj.weight *= 5.0
            for head in range(3):
                if (i, head) != (1, 2):
                    key = layer.k_proj.weight[12 * head : 12 * (head + 1)]
                    layer.q_proj.weight[24 * head : 24 * (head + 1)] = key.repeat(2, 1)
    blocks = torch.randint(97, (2, 100))
    changes = measure_changes(model, blocks, 8)
    assert choose_global_heads(changes.scores, 1) == [[], [2]]


def test_choice_of_the_heads_with_the_highest_scores():
    scores = torch.tensor([[0.1, 0.8, 0.2, 0.9], [0.1, 0.05, 0.7, 0.01], [0.5, 0.5, 0.5, 0.5]])
    assert choose_global_heads(scores, 3, "layer") == [[3], [2], [0]]
    assert choose_global_heads(scores, 6, "layer") == [[1, 3], [0, 2], [0, 1]]
    assert choose_global_heads(scores, 3) == [[1, 3], [2], []]
    with pytest.raises(ValueError, match="`balance` must be one of overall, layer; got 'best'"):
        choose_global_heads(scores, 1, "best")
    with pytest.raises(ValueError, match=r"`global_kv_heads` must be a multiple of the 3 layers .* got 4"):
        choose_global_heads(scores, 4, "layer")


def test_number_of_global_heads(tiny_config):
    config = tiny_config(num_global_heads=6, num_key_value_heads=3, num_hidden_layers=4)
    assert count_global_heads(config, 5, "overall") == 5
    assert count_global_heads(config, 0.2, "overall") == 2
    assert count_global_heads(config, 0.4, "layer") == 4
    for value in (0, 12, 0.01, 0.99, 1.0):
        with pytest.raises(ValueError, match="`global_kv_heads` must be between 1 and 11, or a share below 1"):
            count_global_heads(config, value, "overall")


@pytest.mark.parametrize(
    ("positions", "lengths"), [(64, [64]), (1024, [1024]), (3000, [1024, 2048, 3000]), (4096, [1024, 2048, 4096])]
)
def test_costs_are_shown_up_to_the_positions(tiny_config, positions, lengths):
    assert _cost_lengths(tiny_config(max_position_embeddings=positions)) == lengths


@pytest.mark.parametrize("positions", [8192, 131_072])
@pytest.mark.parametrize("share", [0.1, 0.2, 0.35, 0.9])
def test_share_of_the_cache(tiny_config, share, positions):
    """Of the cache at 8,192 tokens: global heads get half, windows the rest, together no more than asked for."""
    shape = {"num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 36}
    config = tiny_config(**shape, num_global_heads=9, head_dim=4, max_position_embeddings=positions)
    count, window = budget_heads(config, share)
    assert share - 1e-3 < (count * 8192 + (90 - count) * window) / (90 * 8192) <= share
    assert count / 90 <= share / 2 < (count + 1) / 90


def test_impossible_shares_of_the_cache(tiny_config):
    config = tiny_config(num_global_heads=6, num_key_value_heads=3)  # 6 key/value heads in all, 256 positions
    assert budget_heads(config, 0.5) == (1, 102)
    assert budget_heads(config, 0.99) == (2, 252)
    for share in (0.0, 0.1, 1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match=r"`cache_share` must be below 1, and at least 0.174 with `balance` over"):
            budget_heads(config, share)
    assert budget_heads(config, 0.174) == (1, 2)
    assert budget_heads(config, 0.5, "layer") == (2, 64)
    assert budget_heads(config, 0.35, "layer") == (2, 6)
    with pytest.raises(ValueError, match=r"at least 0.339 with `balance` layer: global key/value heads, 2 of 6, and"):
        budget_heads(config, 0.2, "layer")
    with pytest.raises(ValueError, match="`balance` must be overall if each layer has one key/value head"):
        budget_heads(tiny_config(num_global_heads=6, num_key_value_heads=1), 0.5, "layer")


@pytest.mark.parametrize(
    ("window", "block_size", "lengths"), [(6, 2048, 6 * [24]), (30, 2048, 3 * [60]), (6, 47, 3 * [24])]
)
def test_all_of_the_text_is_measured(untrained, monkeypatch, window, block_size, lengths):
    """
    A block has whole pieces, as many as fit into its usual size and the model's 64 positions, and the report's number
    of tokens is that of the pieces. These have four windows if this is within limits, and two in any case.
    """
    model = convert_pretrained(GPT2LMHeadModel.from_pretrained(untrained / "model"))
    tokenizer, pieces = AutoTokenizer.from_pretrained(untrained / "model"), []
    monkeypatch.setattr("lsgpt.conversion.calibration.BLOCK_SIZE", block_size)
    monkeypatch.setattr("lsgpt.conversion.calibration.MEASURED_LENGTHS", (20, 48))
    monkeypatch.setattr(
        "lsgpt.conversion.calibration.measure_changes", lambda *x: pieces.extend(x[1]) or measure_changes(*x)
    )
    calibration = calibrate(model, tokenizer, str(untrained / "text.jsonl"), 4, window, max_blocks=3)
    assert [len(piece) for piece in pieces] == lengths
    assert calibration.num_tokens == (sum(lengths), sum(lengths))


def test_only_models_with_global_heads_alone_are_taken(tiny_model):
    model, sinks = tiny_model(), Sinks(torch.zeros(2, 6), torch.zeros(2, 3, 12))
    with pytest.raises(ValueError, match="`model` must have 6 global heads in each layer; got `num_global_heads` 2"):
        measure_changes(model, torch.randint(97, (1, 40)), 8)
    with pytest.raises(ValueError, match="`model` must have 6 global heads"):
        with_global_heads(model, [[0], [0]], 8, sinks)
    with pytest.raises(ValueError, match=r"`global_kv_heads` must be different .* from 0 to 2; got \[3\] for layer 1"):
        with_global_heads(tiny_model(num_global_heads=6, num_key_value_heads=3), [[0], [3]], 8, sinks)


def test_calibrated_choice_beats_first_and_random_heads(gpt2):
    """
    Random heads are all choices that there are, and the first heads those of the model with its heads in turned order,
    because the order of heads is chance. Passages, here of the same text, choose by the loss.
    """
    model = convert_pretrained(GPT2LMHeadModel.from_pretrained(gpt2 / "model"))
    tokenizer, text = AutoTokenizer.from_pretrained(gpt2 / "model"), str(gpt2 / "text.jsonl")
    blocks, held_out = read_blocks(text, tokenizer, 64, 32)
    calibration = calibrate(model, tokenizer, text, COUNT, WINDOW)
    held_out, changes = held_out[:12], calibration.changes

    def evaluate(heads):
        return perplexity(with_global_heads(model, heads, WINDOW, changes.sinks), held_out)

    sets = list(itertools.combinations(range(HEADS), 2))
    random = [evaluate(heads) for heads in itertools.product(sets, repeat=LAYERS)]
    first = [evaluate([[(turn + i) % HEADS for i in range(2)]] * LAYERS) for turn in range(HEADS)]
    is_repeated = torch.arange(2 * PASSAGE) >= PASSAGE
    passages = [(ids, ids.where(is_repeated, -100)) for ids in blocks[:8]]
    for choice in (
        calibration.global_kv_heads,
        choose_global_heads(changes.scores, COUNT, "layer"),
        choose_global_heads(measure_changes(model, blocks[:8], WINDOW, passages).scores, COUNT),
    ):
        chosen = evaluate(choice)
        assert chosen < 1.3 * perplexity(model, held_out)
        assert sum(random) / len(random) > 1.5 * chosen
        assert sum(first) / len(first) > 1.5 * chosen


def test_command(gpt2, tmp_path, capsys):
    text = shutil.copy(gpt2 / "text.jsonl", tmp_path / "my text.jsonl")
    command = ["convert", str(gpt2 / "model"), str(tmp_path / "out"), "--global-kv-heads", "0.5", "--window", "16"]
    assert lsgpt_cli.main([*command, "--calibrate", str(text), "--max-blocks", "16"]) == 0
    output = capsys.readouterr().out
    assert re.search(r"Calibration takes about \d+ min\n", output)
    heal = f"lsgpt train heal --model_name_or_path {tmp_path / 'out'} --teacher {gpt2 / 'model'}"
    assert f"{heal} --dataset_name '{text}' --block_size 64\n" in output

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    source = convert_pretrained(GPT2LMHeadModel.from_pretrained(gpt2 / "model"))
    assert model.config.sliding_window == WINDOW
    assert sum(model.config.num_global_heads_per_layer) == COUNT
    _, held_out = read_blocks(str(gpt2 / "text.jsonl"), tokenizer, 64, 16)
    before, after = perplexity(source, held_out), perplexity(model, held_out)

    report = (tmp_path / "out" / "report.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| (.+?) \| ([\d.]+)", report.split("## Cost")[0], re.MULTILINE))
    assert float(rows["the source: all heads global"]) == pytest.approx(before, abs=1e-3)
    assert float(rows["the choice: this checkpoint"]) == pytest.approx(after, abs=1e-3)
    assert f"{after:.3f}" in output
    assert "1,024 tokens" in report
    assert "blocks of the text have no room to hide numbers" in report
    assert "the squared change of its" in report
    ratio = model.config.kv_cache_bytes(64) / model.config.equal_mhsa().kv_cache_bytes(64)
    cache = next(line for line in report.splitlines() if line.startswith("| 64 | KV cache"))
    assert cache.endswith(f"| {ratio:.1%} |")

    # The table's bold numbers are the largest, and of as many heads in each layer as the model has global ones.
    table = [line.split("|")[2:-1] for line in report.split("## Which")[1].splitlines() if re.match(r"\| \d", line)]
    assert len(table) == LAYERS
    assert [sum("**" in cell for cell in row) for row in table] == model.config.num_global_heads_per_layer
    bold = [float(cell.strip(" *%")) for row in table for cell in row if "**" in cell]
    assert min(bold) >= max(float(cell.strip(" %")) for row in table for cell in row if "**" not in cell)
    assert Image.open(tmp_path / "out" / "heads.png").format == "PNG"
    assert "(heads.png)" in report
    assert re.search(r"^\| time \| [\d.]+ (s|min) \|$", report, re.MULTILINE)
    assert all(f"| {key} | {value} |" in report for key, value in describe_environment().items())


def test_report_on_retrieval(tiny_model, tmp_path, monkeypatch):
    """Of both models, for every kind of question, about other numbers, in other text, than those that chose."""
    made, texts, distances = [], [], []

    def make(tokenizer, text, length, count, distance, seed=0):
        texts.append(text)
        distances.append(distance)
        made.append(make_passages(tokenizer, text, length, count, distance, seed))
        return made[-1]

    monkeypatch.setattr("lsgpt.conversion.calibration.make_passages", make)
    asked = []
    monkeypatch.setattr("lsgpt.conversion.calibration.recall", lambda *x, **y: asked.append(x[1]) or recall(*x, **y))
    model = tiny_model(num_global_heads=6, num_key_value_heads=3, vocab_size=258, max_position_embeddings=1024)
    tokenizer = train_tokenizer([], vocab_size=258)
    text = tmp_path / "text.txt"
    text.write_text("".join(f"line {i}\n" for i in range(400)))
    calibration = calibrate(model, tokenizer, str(text), 0.4, 8, max_blocks=1)
    assert calibration.changes.retrieval is not None
    answers = [{tuple(q.ids.tolist()) for passage in passages for q in passage.questions} for passages in made[-2:]]
    assert answers[0].isdisjoint(answers[1])
    assert distances[-2:] == [8, 8]  # outside the window
    parts = read_blocks(str(text), tokenizer, 1024, 1)
    assert all(torch.equal(ids, torch.cat(part)) for ids, part in zip(texts[-2:], parts))
    assert len(asked) == 2 and all(passages is made[-1] for passages in asked)
    assert (calibration.num_tokens, calibration.num_passages) == ((1024, 1024), 2)
    assert list(calibration.perplexities) == list(calibration.retrieval) == ["source", "chosen"]
    for shares in calibration.retrieval.values():
        assert list(shares) == list(KINDS)
    again = calibrate(model, tokenizer, str(text), 0.4, 8, max_blocks=1)
    torch.testing.assert_close(again[:-1], calibration[:-1], rtol=0, atol=0)  # the last is how long it took

    config = with_global_heads(model, calibration.global_kv_heads, 8, calibration.changes.sinks).config
    report = write_report(tmp_path, "a model", "a text", calibration, config).read_text(encoding="utf-8")
    assert "hidden in 2 passages" in report
    assert "how fast the loss\nrises" in report
    assert "| global heads | perplexity | literal | paraphrased | one of several |" in report
    assert f"{calibration.perplexities['chosen']:.3f} | 0.00 | 0.00 | 0.00 |" in report


def test_outputs_that_are_not_finite_choose_no_heads(tiny_model, tmp_path):
    model = tiny_model(num_global_heads=6, num_key_value_heads=3, vocab_size=258)
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight[0] = 3e38
    tokenizer = train_tokenizer([], vocab_size=258)
    (tmp_path / "text.txt").write_text("".join(f"line {i}\n" for i in range(400)))
    with pytest.raises(ValueError, match=r"outputs on the text must be finite .*; in torch.float32 they are not"):
        calibrate(model, tokenizer, str(tmp_path / "text.txt"), 2, 8, max_blocks=1)


def test_result_can_be_fine_tuned(gpt2, tmp_path):
    """With few global heads, and a window that costs something, a few steps win some of it back."""
    command = ["convert", str(gpt2 / "model"), str(tmp_path / "out"), "--global-kv-heads", "2", "--window", "8"]
    assert lsgpt_cli.main([*command, "--calibrate", str(gpt2 / "text.jsonl"), "--balance", "layer"]) == 0
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").config.num_global_heads == 1
    options = ["--model_name_or_path", str(tmp_path / "out"), "--output_dir", str(tmp_path / "tuned")]
    options += ["--dataset_name", str(gpt2 / "text.jsonl"), "--block_size", "64", "--max_steps", "20"]
    assert lsgpt_cli.main(["train", "finetune", *options, "--learning_rate", "2e-3", "--eval_strategy", "no"]) == 0
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    blocks, _ = read_blocks(str(gpt2 / "text.jsonl"), tokenizer, 64, 32)
    before, after = (
        perplexity(AutoModelForCausalLM.from_pretrained(tmp_path / name), blocks) for name in ("out", "tuned")
    )
    assert after < before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--global-kv-heads", "8", "--window", "9"], "`global_kv_heads` must be between 1 and 7"),
        (["--global-kv-heads", "0.01", "--window", "9"], "got 0.01, which is 0 heads"),
        (["--global-kv-heads", "3", "--window", "9", "--balance", "layer"], "must be a multiple of the 2 layers"),
        (["--global-kv-heads", "1", "--window", "64"], "`window` must be between 2 and 63"),
        (["--global-kv-heads", "1", "--window", "1"], "`window` must be between 2 and 63"),
        (["--global-kv-heads", "1", "--window", "9", "--calibrate", "SHORT"], "must have a block of 64 tokens"),
        (["--global-kv-heads", "1", "--window", "9", "--calibrate", "none.txt"], "none.txt"),
        (
            ["--global-kv-heads", "1"],
            "`global_kv_heads` and `window` must be given together, or `cache_share` instead",
        ),
        (["--window", "9", "--cache-share", "0.3"], "got `window` and `cache_share`"),
        (["--cache-share", "0.01"], "`cache_share` must be below 1, and at least"),
        (["--cache-share", "0.2", "--balance", "layer"], "with `balance` layer: global key/value heads, 2 of 8"),
    ],
)
def test_mistakes_get_one_line_and_status_2(untrained, options, message, tmp_path, capsys):
    short = tmp_path / "short.txt"
    short.write_text("a few words")
    options = [option.replace("SHORT", str(short)) for option in options]
    if "--calibrate" not in options:
        options += ["--calibrate", str(untrained / "text.jsonl")]
    assert lsgpt_cli.main(["convert", str(untrained / "model"), str(tmp_path / "out"), *options]) == 2
    output, errors = capsys.readouterr()
    assert "Calibration" not in output  # nothing was measured in vain
    last_line = errors.splitlines()[-1]
    assert last_line.startswith("lsgpt: error: ")
    assert message in last_line
    assert not (tmp_path / "out").exists()


def test_options_of_a_calibration_that_there_is_not(untrained, tmp_path, capsys):
    command = ["convert", str(untrained / "model"), str(tmp_path / "out"), "--balance", "layer", "--max-blocks", "7"]
    assert lsgpt_cli.main(command) == 2
    message = "`text` (`--calibrate`) must be given with `balance` and `max_blocks`: heads are measured on it"
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--global-kv-heads", "0"], "argument --global-kv-heads: must be an integer of 1 or more, or a fraction"),
        (["--global-kv-heads", "1.0"], "argument --global-kv-heads: must be an integer of 1 or more, or a fraction"),
        (["--balance", "best"], "argument --balance: invalid choice: 'best'"),
    ],
)
def test_wrong_usage_exits_with_2(options, message, capsys):
    with pytest.raises(SystemExit) as error:
        lsgpt_cli.main(["convert", "gpt2", "folder", *options])
    assert error.value.code == 2
    assert message in capsys.readouterr().err
