"""Metrics over tokens, not over batches: each figure is that of a loop over single tokens in float64."""

import json
import math
import socket
from collections import defaultdict
from types import SimpleNamespace

import evaluate
import fresh
import numpy as np
import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import DataCollatorForSeq2Seq, PreTrainedTokenizerFast, Trainer, TrainingArguments

from lsgpt.training.data import train_tokenizer
from lsgpt.training.metrics import LanguageModelingMetrics, count_bytes, token_losses
from lsgpt.training.token_metrics import TokenMetrics


TEXTS = [
    "def count(words):\n    return {word: words.count(word) for word in words}\n",
    "for line in lines:\n    print(line)\n",
    "import os, sys\n",
    "ab",
    "x = 1\n",
    "yes",
    "class Circle:\n    def area(self):\n        return 3.14159 * self.radius * self.radius\n",
]
NUM_IGNORED = [3, 0, 5, 0, 1, 2, 60]  # labels at the beginning of each row


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """Where `evaluate` keeps files."""
    monkeypatch.setattr(evaluate.config, "HF_METRICS_CACHE", tmp_path / "cache")
    return tmp_path / "cache"


@pytest.fixture
def tokenizer():
    return train_tokenizer(TEXTS, 270)


def make_rows(tokenizer):
    rows = []
    for text, num_ignored in zip(TEXTS, NUM_IGNORED):
        ids = [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]
        rows.append({"input_ids": ids, "labels": [-100] * num_ignored + ids[num_ignored:]})
    return rows


@torch.no_grad()
def score(model, rows):
    """The losses of all tokens, one row at a time."""
    losses = []
    for row in rows:
        ids = row["input_ids"]
        logits = model(torch.tensor([ids])).logits[0].double()
        losses.append([0.0] + [-math.log(logits[i - 1].softmax(-1)[ids[i]]) for i in range(1, len(ids))])
    return losses


def brute_force(losses, labels, bytes_per_token):
    total = num_bytes = count = 0
    by_position = defaultdict(list)
    for row_losses, row_labels in zip(losses, labels):
        for position, (loss, label) in enumerate(zip(row_losses, row_labels)):
            if position > 0 and label != -100:
                total += loss
                count += 1
                num_bytes += bytes_per_token[label]
                by_position[position].append(loss)
    longest = max(map(len, labels))
    return {
        "loss": total / count,
        "perplexity": math.exp(total / count),
        "bits_per_byte": total / math.log(2) / num_bytes,
        "loss_by_position": [np.mean(by_position[i]) if by_position[i] else math.nan for i in range(1, longest)],
    }


def check(results, expected, names, rel):
    assert sorted(results) == sorted(names)
    for name in names:
        assert results[name] == pytest.approx(expected[name], rel=rel, nan_ok=True), name


# --- token_losses


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_token_losses_are_those_of_the_next_token(dtype):
    logits = (4 * torch.randn(3, 7, 11)).to(dtype).requires_grad_()
    labels = torch.randint(11, (3, 7))
    labels[0, 4:] = labels[1, :3] = labels[2, 2] = -100
    losses = token_losses((logits, "another output"), labels)
    assert losses.dtype == torch.float32 and not losses.requires_grad
    for row in range(3):
        for t in range(7):
            expected = 0.0
            if t > 0 and labels[row, t] != -100:
                expected = -logits[row, t - 1].double().log_softmax(-1)[labels[row, t]].item()
                assert expected > 0
            assert losses[row, t].item() == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert torch.equal(token_losses(logits, labels), losses)
    assert torch.equal(token_losses(logits[:, :1], labels[:, :1]), torch.zeros(3, 1))


def test_logits_of_another_shape_are_refused():
    with pytest.raises(ValueError, match=r"`logits` must have the shape .* got \(2, 5, 9\) and \(2, 6\)"):
        token_losses(torch.zeros(2, 5, 9), torch.zeros(2, 6).long())


# --- the modules


def ragged():
    """Rows of 1 to 9 tokens, the first ones far easier than the others, and nothing to predict at position 5."""
    lengths = [2, 3, 9, 1, 8, 5, 7]
    levels = [0.1, 0.2, 6, 6, 5, 7, 6]
    losses = [(level + torch.rand(n)).tolist() for level, n in zip(levels, lengths)]
    labels = [torch.randint(20, (n,)).tolist() for n in lengths]
    ignored = [(row, 5) for row, n in enumerate(lengths) if n > 5] + [(2, 0), (2, 1), (4, 7)]
    for row, position in ignored:
        labels[row][position] = -100
    return losses, labels


BYTES = [0, *range(1, 20)]
NAMES = ["loss", "perplexity", "loss_by_position"]


@pytest.mark.parametrize("counted", [None, BYTES])
def test_uneven_batches_weight_every_token_equally(counted):
    losses, labels = ragged()
    expected = brute_force(losses, labels, BYTES)
    assert math.isnan(expected["loss_by_position"][4])
    module, batch_means = TokenMetrics(counted), []
    names = [*NAMES, *(["bits_per_byte"] if counted else [])]
    check(module.compute(predictions=losses, references=labels), expected, names, rel=1e-9)
    for batch in (slice(0, 2), slice(2, 3), slice(3, 7)):
        module.add_batch(predictions=losses[batch], references=labels[batch])
        batch_means.append(brute_force(losses[batch], labels[batch], BYTES))
    check(module.compute(), expected, names, rel=1e-9)
    for name in {"loss", "bits_per_byte"} & {*names}:
        assert np.mean([means[name] for means in batch_means]) < 0.9 * expected[name]  # the data tells them apart


def test_tensors_arrays_and_lists_are_the_same():
    losses, labels = 3 * torch.rand(4, 6), torch.randint(20, (4, 6))
    expected = brute_force(losses.tolist(), labels.tolist(), BYTES)
    for convert in (lambda x: x, lambda x: x.numpy(), lambda x: x.tolist()):
        results = TokenMetrics(convert(torch.tensor(BYTES))).compute(
            predictions=convert(losses), references=convert(labels)
        )
        check(results, expected, [*NAMES, "bits_per_byte"], rel=1e-9)


def test_losses_that_are_not_finite_show():
    assert TokenMetrics().compute(predictions=[[0.0, 900.0]], references=[[1, 1]])["perplexity"] == math.inf
    results = TokenMetrics().compute(predictions=[[0.0, 1.0, math.nan]], references=[[1, 1, 1]])
    assert math.isnan(results["loss"]) and math.isnan(results["perplexity"])


@pytest.mark.parametrize(
    ("counted", "predictions", "references", "message"),
    [
        (None, [[0, 1], [0, 1]], [[1, 1], [1]], "must be as long .* got 2 losses and 1 labels in row 1"),
        (None, [[0, 1]], [[1, 1], [1, 1]], r"predictions \(1\) and references \(2\)"),
        (None, [[0, 1], [0]], [[1, -100], [1]], "a label other than -100 .* got none in 2 rows"),
        (None, None, None, "must be given rows"),
        ([1, 2], [[0, 1]], [[0, 2]], "got 2 entries and labels from 2 to 2"),
        ([1, 2], [[0, 1, 1]], [[0, -1, 1]], "got 2 entries and labels from -1 to 1"),
        ([1, 0], [[0, 1]], [[0, 1]], "must have bytes; got 0 bytes in 1 tokens"),
    ],
)
def test_bad_rows_are_named_and_leave_no_file(cache, counted, predictions, references, message):
    with pytest.raises(ValueError, match=message):
        TokenMetrics(counted).compute(predictions=predictions, references=references)
    assert not [path for path in cache.rglob("*") if path.is_file()]


def test_no_network(monkeypatch):
    calls = []

    def refuse(*args, **kwargs):
        calls.append(args)
        raise OSError("no network")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    with pytest.raises(OSError):
        socket.create_connection(("localhost", 80))
    calls.clear()
    TokenMetrics(BYTES).compute(predictions=[[0.0, 1.0]], references=[[1, 1]])
    assert not calls


# --- bytes of tokens


def check_bytes(tokenizer, text, added=0):
    counts = count_bytes(tokenizer)
    assert counts.shape == (len(tokenizer),) and counts.dtype == torch.int64
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert counts[ids].sum() == len(text.encode()) + added


UNICODE = "naïve 東京 🙂\n\ttabs  and  spaces, 100% "


@pytest.mark.parametrize("text", [*TEXTS, UNICODE, " x", "▁ <0xAB>"])
def test_bytes_of_byte_level_tokens(tokenizer, text):
    tokenizer.add_tokens(["東京 é", AddedToken("<|user|>", special=True)])
    check_bytes(tokenizer, text)
    check_bytes(tokenizer, f"{text}東京 é")
    assert count_bytes(tokenizer)[tokenizer("<|endoftext|><|pad|><|user|>")["input_ids"]].tolist() == [0, 0, 0]
    assert (count_bytes(tokenizer) > 2).sum() > 3  # merges


@pytest.mark.parametrize("prepend_scheme", ["never", "first", "always"])
@pytest.mark.parametrize("kind", ["Unigram", "BPE"])
def test_bytes_of_metaspace_tokens(kind, prepend_scheme):
    """With tokens for single bytes, so that no text is unknown."""
    pieces = ["▁", "e", "s", "an", "and", "▁and", "▁tabs", "spac", "東", "ï", "ret", "urn", "▁a", "a", "n", "d", "▁an"]
    tokens = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    to_text = [decoders.ByteFallback(), decoders.Fuse()]
    if kind == "Unigram":
        scores = [(token, -20.0 if token.startswith("<") else -5.0 + len(token)) for token in tokens]
        backend = Tokenizer(models.Unigram(scores, unk_id=0, byte_fallback=True))
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend_scheme)
        backend.decoder = decoders.Sequence([*to_text, decoders.Metaspace(prepend_scheme=prepend_scheme)])
    else:  # as Llama 2 and Gemma do it
        merges = [("a", "n"), ("an", "d"), ("▁", "and")]
        vocab = {token: i for i, token in enumerate(tokens)}
        backend = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True))
        steps = [] if prepend_scheme == "never" else [normalizers.Prepend("▁")]
        backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
        backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), *to_text])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", unk_token="<unk>")
    for text in (UNICODE, *TEXTS):
        check_bytes(tokenizer, text, added=int(prepend_scheme != "never"))
    counts = dict(zip(tokenizer.convert_ids_to_tokens(range(len(tokenizer))), count_bytes(tokenizer).tolist()))
    expected = {"<s>": 0, "<unk>": 0, "<0x00>": 1, "<0xFF>": 1, "▁": 1, "▁and": 4, "東": 3}
    assert {token: counts[token] for token in expected} == expected


def test_other_tokenizers_are_refused():
    backend = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1, "##b": 2}))
    backend.decoder = decoders.WordPiece()
    with pytest.raises(ValueError, match=r"byte-level or a metaspace decoder; got .* decoder .*WordPiece"):
        count_bytes(PreTrainedTokenizerFast(tokenizer_object=backend))


# --- in a Trainer


def expected_of(model, tokenizer, rows):
    bytes_per_token = [len(tokenizer.decode([i], skip_special_tokens=True)) for i in range(len(tokenizer))]  # ASCII
    return brute_force(score(model.double(), rows), [row["labels"] for row in rows], bytes_per_token)


@pytest.mark.parametrize("eval_accumulation_steps", [None, 1])
def test_trainer_evaluates_as_brute_force(tiny_model, tokenizer, tmp_path, eval_accumulation_steps):
    model, rows, metrics = (
        tiny_model(vocab_size=len(tokenizer)),
        make_rows(tokenizer),
        LanguageModelingMetrics(tokenizer),
    )
    trainer = Trainer(
        model,
        TrainingArguments(
            tmp_path,
            per_device_eval_batch_size=3,
            eval_accumulation_steps=eval_accumulation_steps,
            use_cpu=True,
            report_to="none",
        ),
        data_collator=DataCollatorForSeq2Seq(tokenizer),
        eval_dataset=rows,
        compute_metrics=metrics,
        preprocess_logits_for_metrics=token_losses,
    )
    results = trainer.evaluate()
    expected = expected_of(model, tokenizer, rows)
    for name in ("perplexity", "bits_per_byte"):
        assert results[f"eval_{name}"] == pytest.approx(expected[name], rel=1e-5)
    assert isinstance(metrics.loss_by_position, np.ndarray)
    np.testing.assert_allclose(metrics.loss_by_position, expected["loss_by_position"], rtol=1e-4)
    assert abs(results["eval_loss"] - expected["loss"]) > 0.3  # the mean over batches is another one


def test_metrics_for_a_trainer_hold_two_figures(tokenizer):
    metrics = LanguageModelingMetrics(tokenizer)
    assert metrics.loss_by_position is None
    labels = np.array([[5, 6, 7], [5, 6, -100]])
    losses = np.array([[0, 1, 2], [0, 3, -100]], dtype=np.float32)  # as a Trainer pads them
    results = metrics(SimpleNamespace(predictions=losses, label_ids=labels))
    check(results, brute_force(losses, labels, count_bytes(tokenizer).tolist()), ["perplexity", "bits_per_byte"], 1e-9)
    np.testing.assert_array_equal(metrics.loss_by_position, [2, 2])
    with pytest.raises(ValueError, match=r"preprocess_logits_for_metrics=token_losses`; got \(2, 3, 9\) and \(2, 3\)"):
        metrics(SimpleNamespace(predictions=np.zeros((2, 3, 9)), label_ids=labels))


TWO_PROCESSES = """
import json, sys
from pathlib import Path
from transformers import AutoTokenizer, DataCollatorForSeq2Seq, Trainer, TrainingArguments
from lsgpt import LSGPTForCausalLM
from lsgpt.training import LanguageModelingMetrics, TokenMetrics, token_losses

folder = Path(sys.argv[1])
given = json.loads((folder / "given.json").read_text())
tokenizer = AutoTokenizer.from_pretrained(folder)
metrics = LanguageModelingMetrics(tokenizer)
trainer = Trainer(
    LSGPTForCausalLM.from_pretrained(folder),
    TrainingArguments(folder / "out", per_device_eval_batch_size=2, report_to="none", use_cpu=True),
    data_collator=DataCollatorForSeq2Seq(tokenizer),
    eval_dataset=given["rows"],
    compute_metrics=metrics,
    preprocess_logits_for_metrics=token_losses,
)
assert trainer.accelerator.num_processes == 2
results = {"trainer": {**trainer.evaluate(), "loss_by_position": metrics.loss_by_position.tolist()}}

rank = trainer.accelerator.process_index
part = slice(0, 2) if rank == 0 else slice(2, None)
results["metrics"] = TokenMetrics(num_process=2, process_id=rank, cache_dir=folder / "shared").compute(
    predictions=given["losses"][part], references=given["labels"][part]
)
(folder / f"results-{rank}.json").write_text(json.dumps(results))
"""


def test_two_processes(tiny_model, tokenizer, tmp_path):
    """A Trainer shares out rows and fills up the last batch with the first row; `evaluate` exchanges files."""
    model, rows, (losses, labels) = tiny_model(vocab_size=len(tokenizer)), make_rows(tokenizer), ragged()
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    given = {"rows": rows, "losses": losses, "labels": labels}
    (tmp_path / "given.json").write_text(json.dumps(given), encoding="utf-8")
    fresh.run_together(2, "-c", TWO_PROCESSES, tmp_path)
    both = [json.loads((tmp_path / f"results-{rank}.json").read_text()) for rank in range(2)]

    expected = expected_of(model, tokenizer, rows)
    with_a_row_twice = expected_of(model, tokenizer, [*rows, rows[0]])
    for results in both:
        for name in ("perplexity", "bits_per_byte"):
            assert results["trainer"][f"eval_{name}"] == pytest.approx(expected[name], rel=1e-5)
            assert with_a_row_twice[name] != pytest.approx(expected[name], rel=1e-3)
        np.testing.assert_allclose(results["trainer"]["loss_by_position"], expected["loss_by_position"], rtol=1e-4)

    expected = brute_force(losses, labels, BYTES)
    check(both[0]["metrics"], expected, NAMES, rel=1e-9)
    assert both[1]["metrics"] is None
    assert list((tmp_path / "shared").rglob("*.lock")) and not list((tmp_path / "shared").rglob("*.arrow"))


def test_bytes_of_a_vocabulary_with_gaps():
    backend = Tokenizer(models.BPE({"a": 0, "b": 7}, []))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    assert count_bytes(tokenizer).tolist() == [1, 0, 0, 0, 0, 0, 0, 1]
