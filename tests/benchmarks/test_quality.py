"""`lsgpt bench quality` with a small Llama and an LSGPT model: what it measures, and that it can be interrupted."""

import json
import math
import re
import sys
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import ANY

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional as F
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    LlamaConfig,
    LlamaForCausalLM,
)

import lsgpt_cli
from lsgpt.benchmarks import cache_methods, quality
from lsgpt.benchmarks.record import write_result
from lsgpt.conversion import ask, convert_pretrained, make_passages
from lsgpt.training.data import train_tokenizer


RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "quality"
SMALL = "--text text.txt --tokens 9000 --block_sizes 300 --lengths 600 --passages 3 --distance 64 --output out/q.json"


SIZES = {
    "vocab_size": 258,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory, request):
    folder = tmp_path_factory.mktemp("quality")
    text = "".join(f"line {i} of {i * i}\n" for i in range(1500))
    (folder / "text.txt").write_text(text)
    tokenizer = train_tokenizer([], 258)
    config = LlamaConfig(**SIZES, eos_token_id=tokenizer.eos_token_id)
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder / "source")
    tokenizer.save_pretrained(folder / "source")
    converted = ["--global-kv-heads", "1", "--window", "64", "--calibrate", str(folder / "text.txt")]
    command = ["convert", str(folder / "source"), str(folder / "ls"), *converted, "--max-blocks", "1"]
    assert lsgpt_cli.main(command) == 0
    return folder


def run(*options, models=("source", "ls")):
    assert lsgpt_cli.main(["bench", "quality", *models, *SMALL.split(), *options]) == 0


def test_figures(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    run()
    result = json.loads((folder / "out" / "q.json").read_text())
    source, ours = result["rows"]
    assert (source["model"], ours["model"]) == ("source", "ls")
    assert result["command"].startswith("lsgpt bench quality source ls")

    # Transformers' own figures, on the same blocks.
    model = LlamaForCausalLM.from_pretrained(folder / "source").eval()
    tokenizer = quality.load_tokenizer(str(folder / "source"))
    text = quality.read_text("text.txt", tokenizer, 16384)
    blocks = text[:9000].view(30, 300)
    with torch.no_grad():
        losses = torch.stack([model(block[None], labels=block[None]).loss for block in blocks]).double()
    found = source["perplexity"]["300"]
    assert found["value"] == pytest.approx(losses.mean().exp().item(), rel=1e-5)
    assert (found["blocks"], found["tokens"], found["ratio"]) == (30, 9000, 1.0)
    by_position = found["loss_by_position"]
    assert list(by_position) == ["0", "128", "256"]
    whole = (127 * by_position["0"] + 128 * by_position["128"] + 44 * by_position["256"]) / 299
    assert math.exp(whole) == pytest.approx(found["value"])
    low, high = ours["perplexity"]["300"]["interval"]
    assert low < ours["perplexity"]["300"]["ratio"] < high
    ratio = ours["perplexity"]["300"]["value"] / found["value"]
    assert ours["perplexity"]["300"]["ratio"] == pytest.approx(ratio)

    items = map(json.loads, (folder / "out" / "q.jsonl").read_text().splitlines())
    measured = [x["loss"] / 299 for x in items if (x["model"], x["kind"]) == ("source", "perplexity")]
    # In random order, so that a part of them is a sample of the text.
    assert sorted(measured) == pytest.approx(sorted(losses.tolist()), rel=1e-5)
    assert measured != pytest.approx(losses.tolist(), rel=1e-5)

    passages = make_passages(tokenizer, text, 600, 3, 64, seed=2)
    right = [[all(answer) for answer in ask(model, passage)] for passage in passages]
    kinds = source["retrieval"]["600"]
    assert kinds.pop("passages") == 3
    assert [kinds[kind]["exact"] for kind in kinds] == pytest.approx(torch.tensor(right).float().mean(0).tolist())
    n = ours["cache"]["tokens"]
    assert source["cache"]["bytes"] == 2 * 2 * 2 * 8 * n * 4
    assert ours["cache"]["bytes"] == pytest.approx(2 * 8 * (n + 3 * 63) * 4, rel=0.02)
    assert "| source |" in capsys.readouterr().out


def test_what_was_measured_is_not_measured_again(folder, monkeypatch):
    monkeypatch.chdir(folder)
    run("--output", "out/whole.json")
    run("--output", "out/parts.json", "--minutes", "0.0001")
    parts = folder / "out" / "parts.jsonl"
    assert len(parts.read_text().splitlines()) == 1
    with parts.open("a") as file:
        file.write('{"model": "sou')  # cut off by an interruption
    run("--output", "out/parts.json")
    whole, again = (json.loads((folder / "out" / f"{name}.json").read_text())["rows"] for name in ("whole", "parts"))
    assert whole == again
    monkeypatch.setattr(quality, "load", None)
    for name in ("whole", "parts"):
        run("--output", f"out/{name}.json")


def test_bytes_are_those_after_the_longest_passage(folder, monkeypatch):
    monkeypatch.chdir(folder)
    run("--lengths", "600", "700", "--output", "out/two.json", models=("source",))
    items = [json.loads(line) for line in (folder / "out" / "two.jsonl").read_text().splitlines()]
    assert {item["size"] for item in items if "bytes" in item} == {700}
    run("--lengths", "600", "--output", "out/two.json")
    source, ours = json.loads((folder / "out" / "two.json").read_text())["rows"]
    assert "cache" not in ours  # the source's are of the other length
    assert source["retrieval"].keys() == {"600", "700"} and ours["retrieval"].keys() == {"600"}


def test_other_texts_and_weights_are_refused(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    run("--output", "out/other.json", "--minutes", "0.0001")
    command = ["bench", "quality", "source", *SMALL.split(), "--output", "out/other.json"]
    assert lsgpt_cli.main([*command, "--distance", "65"]) == 2
    assert "`--output` must be new for another text, `--tokens` or `--distance`" in capsys.readouterr().err
    raw = folder / "out" / "other.jsonl"
    item = json.loads(raw.read_text())
    # Nearly the same sum of the weights, as with another number of threads.
    raw.write_text(json.dumps({**item, "weights": item["weights"] + 1e-9}) + "\n")
    assert lsgpt_cli.main([*command, "--minutes", "0.0001"]) == 0
    raw.write_text(json.dumps({**item, "weights": item["weights"] + 1}) + "\n")
    assert lsgpt_cli.main(command) == 2
    assert "`--output` must be new for a model whose weights have changed" in capsys.readouterr().err
    assert lsgpt_cli.main([*command[:-1], "out/long.json", "--tokens", "100000"]) == 2
    assert "`--text` must have at least 106496 tokens" in capsys.readouterr().err


def test_measurements_of_another_text_are_not_continued(folder, tmp_path, monkeypatch, capsys):
    """Nor those of other blocks of the same text."""
    monkeypatch.chdir(tmp_path)
    text = (folder / "text.txt").read_text(encoding="utf-8")
    Path("text.txt").write_text(text, encoding="utf-8")
    command = ["bench", "quality", str(folder / "source"), *SMALL.split(), "--minutes", "0.0001"]
    assert lsgpt_cli.main(command) == 0
    message = "`--output` must be new for another text, `--tokens` or `--distance`"
    assert lsgpt_cli.main([*command, "--tokens", "9300"]) == 2
    assert message in capsys.readouterr().err
    Path("text.txt").write_text(text.replace("line 1 ", "line 2 "), encoding="utf-8")
    assert lsgpt_cli.main(command) == 2
    assert message in capsys.readouterr().err


def test_every_block_is_whole(folder, tmp_path):
    """Documents are read until there are enough tokens for blocks of any size."""
    (tmp_path / "text").mkdir()
    for number in range(40):
        (tmp_path / "text" / f"{number}.txt").write_text("all of the words " * 60, encoding="utf-8")
    options = ["--text", str(tmp_path / "text"), "--tokens", "8192", "--lengths", "--block_sizes", "3000"]
    quality.main([str(folder / "source"), *options, "--output", str(tmp_path / "quality.json")])
    raw = [json.loads(line) for line in (tmp_path / "quality.jsonl").read_text().splitlines()]
    losses = [item["loss"] for item in raw]
    assert len(losses) == 3 and min(losses) > 0.9 * max(losses)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--output", "old.jsonl"], r"argument --output: must be a \.json file; got 'old.jsonl'"),
        (["--output", "."], r"argument --output: must be a \.json file; got '.'"),
        (["--block_sizes", "--lengths"], "`--block_sizes` or `--lengths` must have a number"),
        (["--block_sizes", "1"], "argument --block_sizes: must be an integer of 2 or more; got '1'"),
        (["--passages", "0"], "argument --passages: must be an integer of 1 or more; got '0'"),
        (["--tokens", "0"], "argument --tokens: must be an integer of 1 or more; got '0'"),
        (["--distance", "-600"], "argument --distance: must be an integer of 1 or more; got '-600'"),
        (["--minutes", "0"], "`--minutes` must be above 0; got 0"),
    ],
)
def test_options_without_a_meaning_are_refused(options, message, capsys):
    with pytest.raises(SystemExit):
        quality.main(["nowhere", "--text", "nowhere", *options])
    assert re.search(message, capsys.readouterr().err)


def test_models_with_too_few_positions_are_refused(tmp_path):
    GPT2Config(n_positions=1024).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"must be at most the 1024 positions of '.*'; got 8192"):
        quality.main([str(tmp_path), "--text", "nowhere", "--output", str(tmp_path / "quality.json")])


def test_capped_logits():
    """Of Gemma 2, as it is and converted: the loss is that of the model's own logits."""
    sizes = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "head_dim": 16}
    config = Gemma2Config(**sizes, num_attention_heads=2, num_key_value_heads=1, final_logit_softcapping=0.05)
    source = Gemma2ForCausalLM(config).eval()
    ids = torch.randint(97, (300,))
    for model in (source, convert_pretrained(source).eval()):
        with torch.no_grad():
            expected = model(ids[None], labels=ids[None]).loss.item() * 299
        assert quality.measure_block(model, ids)["loss"] == pytest.approx(expected, rel=1e-5)


def test_an_interval_without_end_is_written_as_json(tmp_path):
    """That of a single block."""
    write_result(tmp_path / "new" / "result.json", {"interval": [0.0, math.inf]})
    text = (tmp_path / "new" / "result.json").read_text()
    assert json.loads(text, parse_constant=pytest.fail) == {"interval": [0.0, "Infinity"]}


def test_at_least_so_many_tokens_and_all_sizes_in_each_round():
    options = SimpleNamespace(tokens=1000, block_sizes=[300], lengths=[600], passages=3)
    tasks = quality.list_tasks(options)
    assert [(kind[0], index) for kind, _, index in tasks] == [
        *(("p", 0), ("r", 0), ("p", 1), ("r", 1), ("p", 2), ("r", 2), ("p", 3))
    ]


def test_intervals():
    """Of Wilson, as tables list them."""
    assert quality.interval(95, 100) == pytest.approx((0.888, 0.978), abs=1e-3)
    assert quality.interval(100, 100) == pytest.approx((0.963, 1.0), abs=1e-3)
    assert quality.interval(0, 10)[0] == 0 and quality.interval(10, 10)[1] == 1
    # Three blocks whose losses differ by 1, 2 and 3 nats per token: Student's t is 4.303 with two degrees of freedom.
    losses = {"source": (0, 0, 0), "ours": (1, 2, 3)}
    found = {
        (name, "perplexity", 11, i): {"loss": 10 * x, "losses": [10 * x]}
        for name in losses
        for i, x in enumerate(losses[name])
    }
    _, ours = quality.summarize(list(losses), found)
    half = 4.303 / math.sqrt(3)
    assert ours["perplexity"]["11"]["interval"] == pytest.approx([math.exp(2 - half), math.exp(2 + half)], rel=1e-3)
    _, of_one_block = quality.summarize(list(losses), {key: item for key, item in found.items() if key[-1] == 0})
    assert of_one_block["perplexity"]["11"]["interval"] == [0.0, math.inf]


def test_models_are_compared_with_the_source_on_what_both_have():
    """Of the second, one block is still missing; of the third, one that the source lacks has been measured."""
    losses = {"source": {0: 1, 1: 2, 2: 3}, "second": {0: 2, 1: 4}, "third": {0: 2, 1: 3, 2: 4, 3: 9}}
    found = {
        (name, "perplexity", 11, i): {"loss": 10 * x, "losses": [10 * x]}
        for name, blocks in losses.items()
        for i, x in blocks.items()
    }
    rows = [row["perplexity"]["11"] for row in quality.summarize(list(losses), found)]
    assert [row["blocks"] for row in rows] == [3, 2, 3]
    assert [row["ratio"] for row in rows] == pytest.approx([1.0, math.exp(1.5), math.e])
    assert [row["value"] for row in rows] == pytest.approx([math.exp(2), math.exp(3), math.exp(3)])


def test_a_table_shows_what_has_not_been_measured():
    """A run that was stopped: every figure stands under its size, and what is missing is a dash."""
    source, ours = {"value": 9.0, "ratio": 1.0}, {"value": 18.0, "ratio": 2.0}
    rows = [
        {"model": "source", "perplexity": {"11": source, "22": source}, "retrieval": {"8": {"k": {"exact": 1.0}}}},
        {"model": "ours", "perplexity": {"22": ours}, "retrieval": {}},
        {"model": "later", "perplexity": {}, "retrieval": {}},
    ]
    lines = quality.format_rows(rows).splitlines()
    assert lines[0] == "| model | cache | perplexity at 11, 22 | k at 8 |"
    assert lines[2:] == [
        "| source |  | 9.00 (1.000), 9.00 (1.000) | 1.00 |",
        "| ours |  | -, 18.00 (2.000) | - |",
        "| later |  | -, - | - |",
    ]


def test_numbers_far_back():
    """The same answers by how far back the number is; a passage where nothing is far back counts nowhere."""
    correct = {
        "source": [[True, True], [True, True], [True, False], [True, True], [False, True]],
        "ours": [[True, True], [False, True], [True, True], [True, True], [True, False]],
    }
    found = {
        (name, "retrieval", size, 0): {"right": {"literal": answer}, "distances": {"literal": distance}}
        for name, answers in correct.items()
        for answer, (size, distance) in zip(
            answers, [(1024, 600), (2048, 1024), (4096, 2048), (6144, 1500), (8192, 4096)]
        )
    }
    rows = quality.summarize(list(correct), found)
    source, ours = ({n: row["far"][n]["literal"] for n in ("1024", "2048")} for row in rows)
    assert [source[n]["questions"] for n in source] == [4, 2]
    assert [source[n]["exact"] for n in source] == [0.5, 0.0]
    assert [ours[n]["exact"] for n in ours] == [0.5, 0.5]
    assert [ours[n]["ratio"] for n in ours] == [1.0, None]
    assert rows[1]["retrieval"]["2048"]["literal"]["exact"] == 0.0


def test_beside_other_methods(folder, tmp_path, monkeypatch, capsys):
    """Without kvpress: the conversion, the same bytes as whole layers, and another checkpoint."""
    monkeypatch.chdir(folder)
    monkeypatch.setitem(sys.modules, "kvpress", None)  # importing it fails, also where it is installed
    output, make_presses, shares = tmp_path / "methods.json", cache_methods.make_presses, []
    monkeypatch.setattr(cache_methods, "make_presses", lambda *args: shares.append(args) or make_presses(*args))
    sizes = "--length 1500 --passages 2 --cache-share 0.3 --max-blocks 1"
    texts = ["--calibrate", "text.txt", "--text", "text.txt", "--checkpoints", "ls"]
    cache_methods.main(["source", *texts, *sizes.split(), "--save-whole", "whole", "--output", str(output)])
    rows = {row["method"]: row for row in json.loads(output.read_text())["rows"]}
    assert list(rows) == ["source", "LSGPT ls", "LSGPT", "whole layers"]
    assert rows["source"]["perplexity_ratio"] == rows["source"]["cache_ratio"] == 1
    assert shares == [(pytest.approx((1500 + 3 * 546) / (4 * 1500)), ANY, 546)]  # the others get no more
    tokens = rows["source"]["bytes"] / (2 * 4 * 8 * 4)  # keys and values of 4 heads in all, of width 8, in float32
    assert rows["LSGPT"]["cache_ratio"] == pytest.approx((tokens + 3 * 546) / (4 * tokens), rel=0.01)
    assert all(row["passages"] == 2 and row["perplexity_ratio"] > 0.9 for row in rows.values())
    assert "| whole layers |" in capsys.readouterr().out
    saved = AutoModelForCausalLM.from_pretrained("whole").config
    assert saved.num_global_heads_per_layer == [0, 0] and saved.sliding_window == 546  # one head would be half a layer
    assert len(AutoTokenizer.from_pretrained("whole")) == 258

    cache_methods.main(["source", *texts[2:], *sizes.split(), "--output", str(output)])
    again = json.loads(output.read_text())["rows"]
    assert [row["method"] for row in again] == ["source", "LSGPT ls"]
    for row in again:
        assert {**rows[row["method"]], "prefill_ratio": None} == {**row, "prefill_ratio": None}


def test_kvpress_keeps_the_same_share(monkeypatch):
    """With stand-ins for its methods: real ones need an environment of their own."""

    class Press:
        def __init__(self, *args, **options):
            self.args = args

    names = ("StreamingLLM", "SnapKV", "ExpectedAttention", "AdaKV", "KeyDiff", "TOVA", "DuoAttention")
    monkeypatch.setitem(
        sys.modules, "kvpress", SimpleNamespace(**{f"{name}Press": type(name, (Press,), {}) for name in names})
    )
    presses = cache_methods.make_presses(0.2, [[1], []], 7)
    assert list(presses) == list(names)
    presses["AdaKV"] = presses["AdaKV"].args[0]
    duo = presses.pop("DuoAttention")
    assert [press.args for press in presses.values()] == [(pytest.approx(0.8),)] * 6
    duo.post_init_from_model(SimpleNamespace(config=SimpleNamespace(num_key_value_heads=2), device="cpu"))
    assert duo.streaming_mask.tolist() == [[True, False], [True, True]] and (duo.sink_size, duo.recent_size) == (4, 7)


@pytest.mark.parametrize("others", [[], ["--checkpoints", "ls", "--save-whole", "whole"]])
def test_other_methods_need_text_to_choose_heads_on(others, capsys):
    with pytest.raises(SystemExit):
        cache_methods.main(["source", "--text", "text.txt", *others])
    assert "--calibrate is missing; without it, there must be --checkpoints" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"--length": "500"}, "`length` must leave 546 tokens between a number and its question"),
        ({"--passages": "1000"}, "`--text` must have at least"),
    ],
)
def test_sizes_that_do_not_fit_are_found_at_once(folder, sizes, message, tmp_path, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.delattr(cache_methods, "calibrate")
    options = {"--length": "1500", "--passages": "2", "--cache-share": "0.3", **sizes, "--save-whole": str(tmp_path)}
    with pytest.raises(ValueError, match=message):
        cache_methods.main(
            ["source", "--calibrate", "text.txt", "--text", "text.txt", *(x for item in options.items() for x in item)]
        )
    assert not list(tmp_path.iterdir())


def test_whole_layers_are_saved_in_a_folder_of_their_own(tmp_path, capsys):
    (tmp_path / "config.json").write_text("{}")
    command = ["source", "--text", "text.txt", "--calibrate", "text.txt", "--save-whole", str(tmp_path)]
    with pytest.raises(SystemExit):
        cache_methods.main(command)
    assert f"--save-whole must be a new or empty folder; got '{tmp_path}', which is not" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["cache_methods", "cache_methods-10", "cache_methods-35", "cache_methods-50"])
def test_committed_figures_of_methods_follow_from_their_passages(name):
    result = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    for row in result["rows"]:
        items = (result["items"][method] for method in (row["method"], "source"))
        again = json.loads(json.dumps(cache_methods.summarize(*items)))
        times = row["prefill_ratio"], again.pop("prefill_ratio")
        assert times[0] in (None, times[1])  # not measured on a busy machine
        assert again == {key: row[key] for key in again}


def test_committed_scores_of_ruler_follow_from_their_texts():
    rows = json.loads((RESULTS / "ruler.json").read_text(encoding="utf-8"))["rows"]
    for row in rows:
        assert len(row["scores"]) == row["samples"] == 20
        assert row["score"] == pytest.approx(sum(row["scores"]) / 20)
    scores = {(row["task"], row["model"]): row["score"] for row in rows}
    tasks = ("niah_single_1", "niah_multikey_2", "niah_multikey_3", "ruler_vt", "ruler_cwe", "ruler_fwe")
    converted = {(task, model) for task in tasks for model in ("smollm2-ls", "smollm2-ls-healed")}
    assert scores.keys() & converted == {key for key in converted if scores[key[0], "smollm2.gguf"] >= 0.5}
    assert scores.keys() - converted == {(task, "smollm2.gguf") for task in tasks}


def test_whole_layers_have_the_highest_scores():
    scores = torch.tensor([[5.0, 0.0], [3.0, 3.0], [0.0, 0.0], [2.0, 2.0]])
    assert cache_methods.whole_layers(scores, 5) == [[0, 1], [0, 1], [], []]


@pytest.fixture
def model_and_passage():
    """Weights so large that tokens before matter."""
    (passage,) = make_passages(train_tokenizer([], 258), torch.arange(5000) % 256, 700, 1, 100)
    return LlamaForCausalLM(LlamaConfig(**SIZES, initializer_range=0.2)).eval(), passage


@torch.no_grad()
def test_what_a_method_finds_and_loses_is_what_the_whole_cache_does(model_and_passage):
    model, passage = model_and_passage
    for question in passage.questions[:2]:  # the model's own answers
        for i in range(question.answer_length, 1, -1):
            ids = torch.cat([passage.ids, question.ids[:-i]])
            question.ids[-i] = model(ids[None], use_cache=False).logits[0, -1].argmax()
    following = torch.randint(258, (40,))
    found = cache_methods.measure(model, passage, following)
    assert list(found["right"].values()) == ask(model, passage) and all(found["right"]["literal"][:4])
    logits = model(torch.cat([passage.ids, following])[None], use_cache=False).logits[0, len(passage.ids) : -1]
    assert found["loss"] == pytest.approx(F.cross_entropy(logits, following[1:]).item(), rel=1e-4)


@torch.no_grad()
def test_positions_go_on_after_tokens_that_a_method_has_dropped(model_and_passage):
    model, passage = model_and_passage
    length, following = len(passage.ids), torch.randint(258, (40,))

    @contextmanager
    def drop_the_last(model):
        handle = model.register_forward_hook(lambda module, args, output: output.past_key_values.crop(-100))
        yield
        handle.remove()

    found = cache_methods.measure(model, passage, following, drop_the_last)
    ids = torch.cat([passage.ids[: length - 100], following])[None]
    positions = torch.cat([torch.arange(length - 100), torch.arange(length, length + 40)])[None]
    mask = torch.ones(1, 1, ids.shape[1], ids.shape[1]).tril().bool()
    logits = model(ids, position_ids=positions, attention_mask=mask, use_cache=False).logits[0, length - 100 : -1]
    assert found["loss"] == pytest.approx(F.cross_entropy(logits, following[1:]).item(), rel=1e-4)


def test_checkpoints_are_measured_in_float32(tiny_model, tmp_path):
    tiny_model(torch.bfloat16).save_pretrained(tmp_path)
    assert quality.load(str(tmp_path)).dtype == torch.float32
    file = tmp_path / "model.safetensors"
    save_file({name: x for name, x in load_file(file).items() if "q_proj" not in name}, file, {"format": "pt"})
    with pytest.raises(ValueError, match="q_proj"):  # instead of random weights
        quality.load(str(tmp_path))
