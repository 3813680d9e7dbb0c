"""The choice of global heads: on small random models against dense computations, on a GPT-2 that is trained here."""

import itertools
import json
import re

import pytest
import torch
from PIL import Image
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

import lsgpt_cli
from lsgpt.conversion import (
    Sinks,
    calibrate,
    choose_global_heads,
    convert_pretrained,
    make_passages,
    measure_changes,
    perplexity,
    read_blocks,
    recall,
    with_global_heads,
)
from lsgpt.conversion.calibration import DEPTHS, count_global_heads, write_report
from lsgpt.conversion.heads import SINK_LOGITS
from lsgpt.modeling_lsgpt import attention_layers
from lsgpt.training import load_documents, train_tokenizer


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


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    """
    A folder with a trained GPT-2 and its tokenizer of bytes, and a file of text like that which it has read.

    The text is the source of Python's standard library, in passages of 32 characters, each followed by itself. So some
    heads have to look 32 characters back, while others serve the spelling of what comes next; text as it stands would
    teach heads to differ only in a far longer training.
    """
    torch.manual_seed(0)
    source = "".join(load_documents("stdlib")["train"]["text"]).encode("ascii", "ignore").decode()
    starts = torch.randint(len(source) - PASSAGE, (12_900,)).tolist()
    # With the end-of-text token, a document fills a block.
    documents = [(source[start : start + PASSAGE] * 2)[:-1] for start in starts]
    tokenizer = train_tokenizer([], vocab_size=258)
    end = tokenizer.eos_token_id
    blocks = torch.tensor([[*ids, end] for ids in tokenizer(documents)["input_ids"]])
    size, held_out = blocks.shape[1], 100

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
    batches = blocks[held_out:].split(16)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 5e-3, total_steps=len(batches), pct_start=0.1)
    for batch in batches:
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()

    folder = tmp_path_factory.mktemp("gpt2")
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    lines = [json.dumps({"text": text}) for text in documents[:held_out]]
    (folder / "text.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def converted(gpt2):
    """The trained model as LSGPT, blocks of text to measure on and to evaluate, and what each balance chooses."""
    model = convert_pretrained(GPT2LMHeadModel.from_pretrained(gpt2 / "model"))
    tokenizer = AutoTokenizer.from_pretrained(gpt2 / "model")
    text = str(gpt2 / "text.jsonl")
    by_balance = {
        balance: calibrate(model, tokenizer, text, COUNT, WINDOW, balance) for balance in ("layer", "overall")
    }
    return model, read_blocks(text, tokenizer, 64, 32), by_balance


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
    passages = [(ids, 5) for ids in torch.randint(97, (3, 31))]
    changes = measure_changes(model, blocks, 8, passages)
    assert not any(module._forward_pre_hooks for module in model.modules())
    local = with_global_heads(model, [[], []], 8, changes.sinks)

    def share(inputs):
        result = outputs = 0
        for ids, count in inputs:
            calls = attention_inputs(model, ids)
            before, after = head_outputs(model, calls, ids), head_outputs(local, calls, ids)
            squares = (before - after - changes.sinks.values[:, None])[:, -count:].square()
            result = result + squares.unflatten(2, (3, 2)).sum((1, 3, 4))
            outputs = outputs + before[:, -count:].square().sum((1, 2, 3))
        return result / outputs[:, None]

    torch.testing.assert_close(changes.text, share((ids, 40) for ids in blocks), rtol=1e-6, atol=1e-9)
    expected = share((ids[:-1], count) for ids, count in passages)
    torch.testing.assert_close(changes.retrieval, expected, rtol=1e-9, atol=1e-9)
    shares = changes.text / changes.text.sum() + changes.retrieval / changes.retrieval.sum()
    torch.testing.assert_close(changes.scores, shares / 2)


@torch.no_grad()
def test_sinks_are_those_that_change_the_outputs_least(grouped_model):
    """Of the grid of logits, each with the best value, by a dense computation over all queries together."""
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
            of_all = logits.masked_fill(distance < 0, -torch.inf)
            in_window = logits.masked_fill((distance < 0) | (distance >= window), -torch.inf)
            full.append(of_all.softmax(-1) @ value)
            local.append(in_window.softmax(-1) @ value)
            lse.append(in_window.logsumexp(-1))
            if len(lse) == 1:
                grid = of_all.logsumexp(-1)[:, -128:].mean(1, keepdim=True) + SINK_LOGITS
        full, local, lse = torch.cat(full, 1), torch.cat(local, 1), torch.cat(lse, 1)
        weights = torch.tensor([1 / t for t in range(1, 151)] * 2, dtype=torch.float64)[:, None]
        for head in range(6):
            changes = full[head] - (lse[head] - grid[head][:, None]).sigmoid()[..., None] * local[head]
            values = (changes * weights).sum(1) / weights.sum()
            best = ((changes - values[:, None]).square() * weights).sum((1, 2)).argmin()
            torch.testing.assert_close(sinks.logits[i, head], grid[head, best])
            torch.testing.assert_close(sinks.values[i, head], values[best], rtol=1e-5, atol=1e-8)


@torch.no_grad()
def test_value_of_the_sinks_is_in_the_bias_of_the_output_projection(grouped_model):
    """Once each, of local heads only; and a bias that was there stays."""
    model = grouped_model(use_bias=["qkv_proj", "o_proj"])
    sinks = Sinks(torch.randn(2, 6), torch.randn(2, 6, 12))
    result = with_global_heads(model, [[1], [0, 1, 2]], 8, sinks)
    assert result.config.attention_sinks
    assert result.config.use_bias == ["qkv_proj", "o_proj"]
    assert result.config.num_global_heads == [2, 6]
    first, second = attention_layers(result)
    before = [layer.o_proj for layer in attention_layers(model)]
    local = [0, 1, 4, 5]
    torch.testing.assert_close(first.sinks, sinks.logits[0, local])
    weights = before[0].weight.split(12, dim=1)
    added = sum(weights[head] @ sinks.values[0, head] for head in local)
    torch.testing.assert_close(first.o_proj.bias, before[0].bias + added)
    torch.testing.assert_close(second.o_proj.bias, before[1].bias)


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
    sinks = Sinks(torch.randn(2, 6), torch.randn(2, 6, 12))
    other = with_global_heads(model, [[2, 0, 1], [1, 2, 0]], 8, sinks)
    assert other.config.num_global_heads == 6
    assert not other.config.attention_sinks
    assert not torch.equal(attention_layers(other)[0].q_proj.weight, attention_layers(model)[0].q_proj.weight)
    torch.testing.assert_close(other(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_mixed_heads_are_put_in_order(grouped_model):
    """With a window that hides nothing, and sinks that take nothing, local heads are the source's."""
    model, ids = grouped_model(), torch.randint(97, (1, 40))
    sinks = Sinks(torch.full((2, 6), -1e4), torch.zeros(2, 6, 12))
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
    for passages in ([], [(ids, 5) for ids in blocks]):
        changes = measure_changes(model, blocks, 8, passages)
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


def test_only_models_with_global_heads_alone_are_taken(tiny_model):
    model, sinks = tiny_model(), Sinks(torch.zeros(2, 6), torch.zeros(2, 6, 12))
    with pytest.raises(ValueError, match="`model` must have 6 global heads in each layer; got `num_global_heads` 2"):
        measure_changes(model, torch.randint(97, (1, 40)), 8)
    with pytest.raises(ValueError, match="`model` must have 6 global heads"):
        with_global_heads(model, [[0], [0]], 8, sinks)
    with pytest.raises(ValueError, match=r"`global_kv_heads` must be different .* from 0 to 2; got \[3\] for layer 1"):
        with_global_heads(tiny_model(num_global_heads=6, num_key_value_heads=3), [[0], [3]], 8, sinks)


def test_passages_hide_the_key_outside_the_window():
    tokenizer = train_tokenizer([], vocab_size=258)
    blocks = [torch.full((200,), tokenizer("x")["input_ids"][0]), torch.full((200,), tokenizer("y")["input_ids"][0])]
    passages = make_passages(tokenizer, blocks, [190, 200, 100], 20, [12345, 67890])
    assert [(len(p.ids), p.depth) for p in passages] == [(n, d) for _ in range(2) for n in (190, 200) for d in DEPTHS]
    for passage in passages:
        text = tokenizer.decode(passage.ids)
        answer = tokenizer.decode(passage.ids[-passage.answer_length :])
        assert answer.strip() in ("12345", "67890")
        assert text.count(answer.strip()) == 3
        end_of_needle = text.rindex(" is the pass key.")
        # Even the query that predicts the first token of the answer, the earliest, does not see it.
        assert end_of_needle < len(text) - passage.answer_length - 20
    starts = [tokenizer.decode(p.ids).index("The pass key") for p in passages]
    assert starts[:5] == sorted(starts[:5])
    assert starts[4] - starts[0] > 20


@torch.no_grad()
def test_neither_text_nor_pass_keys_of_the_choice_are_those_of_the_evaluation(grouped_model, tmp_path, monkeypatch):
    texts = [json.dumps({"text": f"{i} is the square root of {i * i}. " * 9}) for i in range(24)]
    (tmp_path / "text.jsonl").write_text("\n".join(texts), encoding="utf-8")
    seen = []

    def remember(tokenizer, blocks, lengths, window, keys):
        seen.append(({tuple(block.tolist()) for block in blocks}, set(keys)))
        return []

    monkeypatch.setattr("lsgpt.conversion.calibration.make_passages", remember)
    calibrate(grouped_model(vocab_size=258), train_tokenizer([], 258), str(tmp_path / "text.jsonl"), 1, 4)
    (blocks, keys), (other_blocks, other_keys) = seen
    assert blocks and keys and blocks.isdisjoint(other_blocks) and keys.isdisjoint(other_keys)


def test_recall_is_the_share_of_answer_tokens_that_greedy_text_would_have(tiny_model):
    model, tokenizer = tiny_model(vocab_size=258), train_tokenizer([], vocab_size=258)
    passages = make_passages(tokenizer, [torch.randint(256, (200,)) for _ in range(3)], [180, 200], 20, [12345, 67890])
    # Half of them end with what the model says, so that some tokens are right.
    for passage in passages[::2]:
        for i in range(passage.answer_length, 0, -1):
            passage.ids[-i] = model(passage.ids[None, :-i]).logits[0, -1].argmax()
    expected = {}
    for ids, length, depth in passages:
        right = [model(ids[None, :-i]).logits[0, -1].argmax() == ids[-i] for i in range(length, 0, -1)]
        expected.setdefault((len(ids), depth), []).append(sum(right).item() / length)
    actual = recall(model, passages)
    assert actual == pytest.approx({place: sum(values) / 2 for place, values in expected.items()})
    assert max(actual.values()) > 0.4


@pytest.mark.parametrize("balance", ["layer", "overall"])
def test_calibrated_choice_beats_first_and_random_heads(balance, converted):
    """
    Random heads are all choices that there are, and the first heads those of the model with its heads in turned order,
    because the order of heads is chance.
    """
    model, (_, held_out), by_balance = converted
    held_out, sinks = held_out[:12], by_balance[balance].changes.sinks

    def evaluate(heads):
        return perplexity(with_global_heads(model, heads, WINDOW, sinks), held_out)

    sets = list(itertools.combinations(range(HEADS), 2))
    random = [evaluate(heads) for heads in itertools.product(sets, repeat=LAYERS)]
    first = [evaluate([[(turn + i) % HEADS for i in range(2)]] * LAYERS) for turn in range(HEADS)]
    chosen = evaluate(by_balance[balance].global_kv_heads)
    assert chosen < 1.3 * perplexity(model, held_out)
    assert sum(random) / len(random) > 1.5 * chosen
    assert sum(first) / len(first) > 1.5 * chosen


def test_command(gpt2, tmp_path, capsys):
    command = ["convert", str(gpt2 / "model"), str(tmp_path / "out"), "--global-kv-heads", "0.5", "--window", "16"]
    assert lsgpt_cli.main([*command, "--calibrate", str(gpt2 / "text.jsonl")]) == 0
    output = capsys.readouterr().out

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    source = convert_pretrained(GPT2LMHeadModel.from_pretrained(gpt2 / "model"))
    assert model.config.sliding_window == WINDOW
    assert sum(model.config.num_global_heads_per_layer) == COUNT
    blocks, held_out = read_blocks(str(gpt2 / "text.jsonl"), tokenizer, 64, 16)
    before, after = perplexity(source, held_out), perplexity(model, held_out)

    report = (tmp_path / "out" / "report.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| (.+?) \| ([\d.]+)", report.split("## Retrieval")[0], re.MULTILINE))
    assert float(rows["the source: all heads global"]) == pytest.approx(before, abs=1e-3)
    assert float(rows["the choice: this checkpoint"]) == pytest.approx(after, abs=1e-3)
    assert f"{after:.3f}" in output
    changes = measure_changes(source, blocks, WINDOW)
    first = choose_global_heads(torch.tensor([[4, 3, 2, 1]] * LAYERS), COUNT)
    expected = perplexity(with_global_heads(source, first, WINDOW, changes.sinks), held_out)
    assert float(rows["the first heads: the same number"]) == pytest.approx(expected, abs=1e-3)
    assert float(rows["random heads: the same number"]) > after
    assert "1,024 tokens" in report
    assert "Not measured: blocks of the text have no room" in report
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


def test_report_on_retrieval(tiny_model, tmp_path):
    """Of each model, at every depth of passages of the only length that the model has positions for."""
    model = tiny_model(num_global_heads=6, num_key_value_heads=3, vocab_size=258)
    tokenizer = train_tokenizer([], vocab_size=258)
    text = tmp_path / "text.txt"
    text.write_text("All work and no play makes Jack a dull boy. " * 20)
    calibration = calibrate(model, tokenizer, str(text), 0.4, 8, max_blocks=1)
    assert calibration.changes.retrieval is not None
    assert calibration.num_tokens == (256, 256)
    names = ["source", "chosen", "first", "random"]
    assert list(calibration.perplexities) == list(calibration.retrieval) == names
    for shares in calibration.retrieval.values():
        assert list(shares) == [(256, depth) for depth in DEPTHS]
    again = calibrate(model, tokenizer, str(text), 0.4, 8, max_blocks=1)
    torch.testing.assert_close(again, calibration, rtol=0, atol=0)  # also the random heads

    config = with_global_heads(model, calibration.global_kv_heads, 8, calibration.changes.sinks).config
    report = write_report(tmp_path, "a model", "a text", calibration, config).read_text(encoding="utf-8")
    section = report.split("## Retrieval")[1].split("##")[0]
    rows = [line.split(" | ") for line in section.splitlines() if line.startswith("| 256 ")]
    assert [row[1] for row in rows] == ["10%", "30%", "50%", "70%", "90%"]
    expected = [f"{calibration.retrieval[name][256, 0.3]:.2f}" for name in names]
    assert [cell.strip(" |") for cell in rows[1][2:]] == expected


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
    ],
)
def test_mistakes_get_one_line_and_status_2(gpt2, options, message, tmp_path, capsys):
    short = tmp_path / "short.txt"
    short.write_text("a few words")
    options = [option.replace("SHORT", str(short)) for option in options]
    if "--calibrate" not in options:
        options += ["--calibrate", str(gpt2 / "text.jsonl")]
    assert lsgpt_cli.main(["convert", str(gpt2 / "model"), str(tmp_path / "out"), *options]) == 2
    last_line = capsys.readouterr().err.splitlines()[-1]
    assert last_line.startswith("lsgpt: error: ")
    assert message in last_line
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--global-kv-heads", "0"], "argument --global-kv-heads: must be an integer of 1 or more, or a share"),
        (["--global-kv-heads", "1.0"], "argument --global-kv-heads: must be an integer of 1 or more, or a share"),
        (["--balance", "best"], "argument --balance: invalid choice: 'best'"),
    ],
)
def test_wrong_usage_exits_with_2(options, message, capsys):
    with pytest.raises(SystemExit) as error:
        lsgpt_cli.main(["convert", "gpt2", "folder", *options])
    assert error.value.code == 2
    assert message in capsys.readouterr().err
