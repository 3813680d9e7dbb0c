"""
Where heads look: the figures equal brute force on the weights that `output_attentions` returns, and the page holds
these weights.
"""

import copy
import json
import math
import re
import shlex
import weakref
from html.parser import HTMLParser

import pytest
import torch
from peft import LoraConfig, get_peft_model
from PIL import Image
from test_other_decoders import CONFIGS, WINDOW, build
from test_readme import ROOT, blocks
from tokenizers.processors import TemplateProcessing
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    FalconConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    T5Config,
)

import lsgpt_cli
from lsgpt import LSGPTConfig, LSGPTForCausalLM
from lsgpt.inspection import report as inspection_report
from lsgpt.inspection.report import FILES, PAGE_SCALE, format_kinds, format_report, plot_heads, read_blocks, write_page
from lsgpt.inspection.statistics import (
    FIGURES,
    AttentionStatistics,
    attention_statistics,
    head_figures,
    mean_entropy,
    visit_layers,
)
from lsgpt.training import train_tokenizer


LENGTH = 24
TEXT = "".join(f"def f{i}(x):\n    return x + {i}  # näher als </script> & <b>\n" for i in range(40))


def entropy(shares):
    return -sum(x * math.log(x) for x in shares if x > 0)


def brute_force(weights, sees, far, has_sink):
    """The figures of one head by their definitions, with loops over float64 numbers."""
    rows, length = weights.double().tolist(), len(weights)
    pairs = [(i, j) for i in range(length) for j in range(i + 1) if sees(i, j)]
    total = sum(rows[i][j] for i, j in pairs)

    def spread(keys_of):
        values = []
        for i in range(length):
            part = [rows[i][j] for j in keys_of(i)]
            if len(part) > 1:
                values.append(entropy([x / sum(part) for x in part]) / math.log(len(part)))
        return sum(values) / len(values) if values else math.nan

    # The eigenvalues of this symmetric matrix are the singular values of the weights, and their negatives.
    symmetric = torch.zeros(2 * length, 2 * length, dtype=torch.float64)
    symmetric[:length, length:], symmetric[length:, :length] = weights, weights.T
    singular = torch.linalg.eigvalsh(symmetric)[length:].clamp(min=0)
    late = range(far, length)
    figures = {
        "distance": sum(rows[i][j] * (i - j) for i, j in pairs) / total,
        "entropy": spread(lambda i: [j for j in range(i + 1) if sees(i, j)]),
        "effective_rank": math.exp(entropy((singular / singular.sum()).tolist())),
        "first_token": sum(row[0] for row in rows) / length,
        "learned_sink": 1 - total / length if has_sink else 0.0,
        "far_mass": sum(rows[i][j] for i in late for j in range(i - far + 1)) / len(late),
        "far_mass_without_first": sum(rows[i][j] for i in late for j in range(1, i - far + 1)) / len(late),
        "far_entropy": spread(lambda i: [j for j in range(1, i - far + 1) if sees(i, j)]),
    }
    assert list(figures) == list(FIGURES)
    return figures


def eager_weights(model, ids):
    """`(H, T, T)` of each layer, by Transformers' own way to get them."""
    model = copy.deepcopy(model)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        return [weights[0] for weights in model(ids[None], output_attentions=True).attentions]


def windows(name, layer, head):
    """The window of a head of `build_any`; `None` for a global one."""
    if name.startswith("lsgpt"):
        return None if head < 2 else 8
    return WINDOW if name in ("gemma2", "gemma3", "gpt-oss") and layer == 0 else None


@pytest.fixture
def build_any(tiny_model):
    def make(name):
        if name.startswith("lsgpt"):
            model = tiny_model(attention_sinks="sinks" in name, num_key_value_heads=3 if "gqa" in name else 6)
        else:
            model = build(name, engine="eager" if name in ("gemma2", "gpt-oss") else "sdpa")
        for module in model.modules():
            if getattr(module, "sinks", None) is not None:
                torch.nn.init.normal_(module.sinks, mean=1.0)
        return model

    return make


@pytest.mark.parametrize("name", ["lsgpt", "lsgpt-sinks", "lsgpt-gqa", *CONFIGS])
def test_equals_brute_force_on_eager_weights(build_any, name):
    model, ids, far = build_any(name), torch.randint(3, 97, (2, LENGTH)), 5
    statistics = attention_statistics(model, ids, far)
    assert statistics.layers == [0, 1] and statistics.far == far
    for layer, (first, second) in enumerate(zip(*(eager_weights(model, block) for block in ids))):
        num_heads = len(first)
        for head in range(num_heads):
            window = windows(name, layer, head)
            assert statistics.is_local[layer, head] == (window is not None)
            has_sink = name == "gpt-oss" or (name == "lsgpt-sinks" and window is not None)

            def sees(i, j, window=window):
                return window is None or i - j < window

            expected = [brute_force(weights[head], sees, far, has_sink) for weights in (first, second)]
            for figure in FIGURES:
                mean = sum(block[figure] for block in expected) / 2
                actual = getattr(statistics, figure)[layer, head].item()
                assert actual == pytest.approx(mean, rel=1e-12, abs=1e-12, nan_ok=True), (figure, layer, head)
    sinks = statistics.learned_sink
    if name == "lsgpt-sinks":
        assert (sinks[:, 2:] > 0.05).all()
    assert ("learned_sink" in statistics.figures()) == (name in ("lsgpt-sinks", "gpt-oss"))


@pytest.mark.parametrize("name", ["lsgpt-sinks", "llama", "gpt2"])
def test_weights_are_those_of_the_eager_engine_and_the_model_stays_as_it_is(build_any, name):
    model, ids = build_any(name).train(), torch.randint(3, 97, (LENGTH,))
    shown = []
    visit_layers(model, ids, shown.append)
    assert model.training and model.config._attn_implementation == "sdpa"
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    for layer, expected in zip(shown, eager_weights(model.eval(), ids), strict=True):
        assert torch.equal(layer.weights, expected)
        assert layer.has_sink.tolist() == [name == "lsgpt-sinks" and head >= 2 for head in range(len(expected))]


def test_weights_of_a_layer_are_free_before_the_next(tiny_model):
    """What `visit` does not keep, nobody else keeps."""
    model, alive = tiny_model(num_hidden_layers=4), []

    def visit(layer):
        assert [weights() for weights in alive] == [None] * len(alive)
        alive.append(weakref.ref(layer.weights._base if layer.weights._is_view() else layer.weights))

    visit_layers(model, torch.randint(3, 97, (LENGTH,)), visit)
    assert len(alive) == 4


def causal(length, window=None):
    distances = torch.arange(length)[:, None] - torch.arange(length)
    return (distances >= 0) & (distances < (window or length))


def test_uniform_attention():
    visible, far = causal(64), 16
    weights = visible / visible.sum(-1, keepdim=True)
    figures = dict(zip(FIGURES, head_figures(weights, visible, far)))
    # A query at i sees distances 0 to i alike, i / 2 in the mean, and i runs from 0 to 63.
    assert figures["distance"].item() == pytest.approx(63 / 4)
    assert figures["entropy"].item() == pytest.approx(1.0)
    assert figures["far_entropy"].item() == pytest.approx(1.0)
    assert figures["first_token"].item() == pytest.approx(sum(1 / n for n in range(1, 65)) / 64)
    late = range(far, 64)
    assert figures["far_mass"].item() == pytest.approx(sum((i - far + 1) / (i + 1) for i in late) / len(late))
    assert figures["far_mass_without_first"].item() == pytest.approx(sum((i - far) / (i + 1) for i in late) / 48)
    window = causal(64, 16)
    assert mean_entropy(window / window.sum(-1, keepdim=True), window).item() == pytest.approx(1.0)
    half_empty = torch.tensor([[0.5, 0.5], [0.0, 0.0]]).double()  # the second query has no weight on these keys
    assert mean_entropy(half_empty, torch.ones(2, 2).bool()).item() == pytest.approx(1.0)


def test_each_query_at_itself():
    figures = dict(zip(FIGURES, head_figures(torch.eye(64), causal(64), far=2).tolist()))
    assert figures["effective_rank"] == pytest.approx(64)
    assert figures["distance"] == figures["entropy"] == figures["far_mass"] == 0
    assert math.isnan(figures["far_entropy"])


def test_each_query_at_the_token_ten_before():
    """... and the first ones at the first token."""
    weights = torch.eye(64)[(torch.arange(64) - 10).clamp(min=0)]
    figures = dict(zip(FIGURES, head_figures(weights, causal(64), far=10).tolist()))
    assert figures["distance"] == (sum(range(10)) + 10 * 54) / 64
    assert figures["first_token"] == 11 / 64
    assert figures["entropy"] == figures["far_entropy"] == 0
    assert figures["far_mass"] == 1
    assert figures["far_mass_without_first"] == 53 / 54


def test_all_on_the_first_token():
    weights = torch.zeros(64, 64)
    weights[:, 0] = 0.75  # and a learned sink has the rest
    figures = dict(zip(FIGURES, head_figures(weights, causal(64), far=16, has_sink=True).tolist()))
    assert figures["effective_rank"] == pytest.approx(1.0)
    assert figures["entropy"] == 0
    assert figures["distance"] == pytest.approx(63 / 2)
    assert figures["first_token"] == figures["far_mass"] == 0.75
    assert figures["learned_sink"] == 0.25
    assert figures["far_mass_without_first"] == 0
    assert math.isnan(figures["far_entropy"])


def test_layers_without_attention_leave_gaps():
    config = Qwen3NextConfig(
        vocab_size=97, hidden_size=48, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=12,
        num_experts=2, num_experts_per_tok=1, moe_intermediate_size=16, shared_expert_intermediate_size=16,
        linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=8, linear_value_head_dim=8,
    )  # fmt: skip
    statistics = attention_statistics(Qwen3NextForCausalLM(config), torch.randint(3, 97, (1, LENGTH)))
    assert statistics.layers == [3]
    assert statistics.distance.shape == (1, 4) and statistics.distance.isfinite().all()
    report = format_report(statistics, "model", "a text")
    assert "| 3 | all | 4 |" in report


def test_wrapped_models(build_any):
    model, ids = build_any("llama"), torch.randint(3, 97, (1, LENGTH))
    expected = attention_statistics(model, ids)
    wrapped = get_peft_model(model, LoraConfig(target_modules=["q_proj"]))
    torch.testing.assert_close(attention_statistics(wrapped, ids).distance, expected.distance, rtol=0, atol=0)


def test_far_is_the_window_by_default(build_any, tiny_model):
    ids = torch.randint(3, 97, (1, 40))
    assert attention_statistics(build_any("lsgpt"), ids).far == 8
    assert attention_statistics(tiny_model(sliding_window=30), ids).far == 20
    assert attention_statistics(tiny_model(num_global_heads=6), ids).far == 20
    ids = torch.randint(3, 97, (1, 300))
    assert attention_statistics(tiny_model(num_global_heads=6, max_position_embeddings=300), ids).far == 128


@pytest.mark.parametrize(
    ("shape", "far", "message"),
    [
        ((8,), None, r"`input_ids` must have shape \(blocks, tokens\).*got \(8,\)"),
        ((0, 8), None, r"got \(0, 8\)"),
        ((2, 1), None, r"of at least two tokens; got \(2, 1\)"),
        ((1, 8), 8, "`far` must be between 1 and 7, because blocks have 8 tokens; got 8"),
        ((1, 8), 0, "`far` must be between 1 and 7.*got 0"),
    ],
)
def test_wrong_arguments(build_any, shape, far, message):
    with pytest.raises(ValueError, match=message):
        attention_statistics(build_any("lsgpt"), torch.full(shape, 5), far)


def test_models_without_attention_weights(build_any):
    ids = torch.randint(3, 97, (1, LENGTH))
    small = {"vocab_size": 97, "hidden_size": 48, "num_hidden_layers": 2}
    encoder_decoder = T5Config(vocab_size=97, d_model=48, d_ff=48, d_kv=8, num_heads=2, num_layers=1)
    with pytest.raises(ValueError, match="must be a decoder alone; got T5ForConditionalGeneration"):
        attention_statistics(AutoModelForSeq2SeqLM.from_config(encoder_decoder), ids)
    with pytest.raises(ValueError, match=r"must have causal attention.*got MambaForCausalLM"):
        attention_statistics(MambaForCausalLM(MambaConfig(**small)), ids)
    model = build_any("llama")
    model.config.num_hidden_layers = 0
    with pytest.raises(ValueError, match="must have attention; LlamaForCausalLM never called its attention layers"):
        attention_statistics(model, ids)
    model.config.num_hidden_layers = 2
    attention = model.model.layers[1].self_attn
    compute = attention.forward
    attention.forward = lambda *args, **kwargs: (compute(*args, **kwargs)[0], None)
    with pytest.raises(ValueError, match=r"must have layers that return attention weights.*LlamaAttention does not"):
        attention_statistics(model, ids)
    assert model.config._attn_implementation == "sdpa"
    assert not any(module._forward_hooks for module in model.modules())


def test_weights_that_are_not_finite(build_any):
    model = build_any("lsgpt")
    torch.nn.init.constant_(model.model.layers[1].self_attn.q_proj.weight, math.nan)
    with pytest.raises(ValueError, match="must have finite attention weights; those of layer 1 are not"):
        attention_statistics(model, torch.randint(3, 97, (1, LENGTH)))


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """A folder with `lsgpt` and `llama`, small untrained models, and `text.txt`."""
    folder = tmp_path_factory.mktemp("inspect")
    (folder / "text.txt").write_text(TEXT, encoding="utf-8")
    tokenizer = train_tokenizer([TEXT], vocab_size=300)
    torch.manual_seed(0)
    shape = {"vocab_size": 300, "hidden_size": 32, "num_hidden_layers": 2, "max_position_embeddings": 160}
    models = {
        "lsgpt": LSGPTForCausalLM(
            LSGPTConfig(**shape, num_attention_heads=4, num_global_heads=1, sliding_window=8, attention_sinks=True)
        ),
        "llama": LlamaForCausalLM(LlamaConfig(**shape, num_attention_heads=4, intermediate_size=64)),
    }
    for name, model in models.items():
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return folder


@pytest.fixture
def workplace(checkpoints, tmp_path, monkeypatch):
    """An empty working folder with links to the checkpoints and the text."""
    for file in checkpoints.iterdir():
        (tmp_path / file.name).symlink_to(file)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*arguments):
    return lsgpt_cli.main(["inspect", *arguments])


def page_data(page):
    return json.loads(re.search(r'<script id="data" type="application/json">(.*?)</script>', page, re.DOTALL)[1])


@pytest.mark.parametrize("name", ["lsgpt", "llama"])
def test_command(workplace, capsys, name):
    assert run(name, "text.txt", "--length", "150", "--blocks", "2") == 0
    folder = workplace / "runs" / f"inspect-{name}"
    assert {file.name for file in folder.iterdir()} == set(FILES)
    output = capsys.readouterr().out
    assert f"runs/inspect-{name}/attention.html" in output.replace("\\", "/")

    model, tokenizer = AutoModelForCausalLM.from_pretrained(name), AutoTokenizer.from_pretrained(name)
    ids = torch.tensor(tokenizer(TEXT).input_ids)[:300].view(2, 150)
    statistics = attention_statistics(model, ids)
    results = json.loads((folder / "statistics.json").read_text())
    assert results["layers"] == [0, 1] and results["blocks"] == 2 and results["length"] == 150
    assert results["far"] == statistics.far == (8 if name == "lsgpt" else 75)
    assert results["kinds"] == [["global"] + ["local" if name == "lsgpt" else "global"] * 3] * 2
    for figure, values in results["figures"].items():
        expected = [[None if math.isnan(x) else x for x in row] for row in getattr(statistics, figure).tolist()]
        assert values == expected
    report = (folder / "report.md").read_text(encoding="utf-8")
    assert format_kinds(statistics) in report and format_kinds(statistics) in output
    assert "2 blocks of 150 tokens of text.txt" in report
    assert ("learned sink" in report) == (name == "lsgpt")
    mean = statistics.distance[0, 0] if name == "lsgpt" else statistics.distance[0].mean()
    row = re.search(rf"^\| 0 \| {'global' if name == 'lsgpt' else 'all'} \| (.*) \|$", report, re.MULTILINE)[1]
    assert row.split(" | ")[:2] == ["1" if name == "lsgpt" else "4", f"{mean:.1f}"]
    assert Image.open(folder / "heads.png").format == "PNG"

    page = (folder / "attention.html").read_text(encoding="utf-8")
    data = page_data(page)
    passage = ids[0, :128]
    assert data["tokens"] == [tokenizer.decode([token]) for token in passage.tolist()]
    for layer, (shown, weights) in enumerate(zip(data["layers"], eager_weights(model, passage), strict=True)):
        assert shown["number"] == layer
        for number, (head, expected) in enumerate(zip(shown["heads"], weights, strict=True)):
            lower = [x for i, row in enumerate(expected.tolist()) for x in row[: i + 1]]
            assert head["weights"] == pytest.approx([x * PAGE_SCALE for x in lower], abs=0.5)
            is_local = name == "lsgpt" and number > 0
            assert head["kind"] == ("" if name == "llama" else "local" if is_local else "global")
            assert head["reach"] == (8 if is_local else 128)
            assert ("sinks" in head) == is_local
            if is_local:
                taken = (1 - expected.double().sum(-1)) * PAGE_SCALE
                assert head["sinks"] == pytest.approx(taken.tolist(), abs=0.5)
            assert head["figures"][0] == f"{statistics.distance[layer, number]:,.1f}"
    assert [figure["label"] for figure in data["figures"]] == [FIGURES[x][0] for x in statistics.figures()]


def test_a_model_that_cannot_be_switched_to_eager_attention(workplace):
    """Falcon has to be loaded with it: it adds the mask for `sdpa` to its logits, so that they are not causal."""
    config = FalconConfig(vocab_size=300, hidden_size=32, num_hidden_layers=1, num_attention_heads=4)
    AutoModelForCausalLM.from_config(config).save_pretrained("falcon")
    AutoTokenizer.from_pretrained("llama").save_pretrained("falcon")
    assert run("falcon", "text.txt", "--length", "40", "--blocks", "1") == 0
    model = AutoModelForCausalLM.from_pretrained("falcon", attn_implementation="sdpa")
    with pytest.raises(ValueError, match=r'FalconAttention gives weight to tokens .* attn_implementation="eager"'):
        attention_statistics(model, torch.arange(40)[None])


@pytest.fixture
def known_statistics():
    """Of layers 0 and 3: the first head is global, two are local, and the last layer has only two heads."""
    gap = math.nan
    return AttentionStatistics(
        layers=[0, 3],
        is_local=torch.tensor([[False, True, True], [False, True, False]]),
        far=8,
        distance=torch.tensor([[1200.0, 2.0, 4.0], [800.0, 3.0, gap]]).double(),
        entropy=torch.tensor([[0.25, 0.75, gap], [0.75, 0.5, gap]]).double(),
        effective_rank=torch.tensor([[1.0, 2.0, 3.0], [2.0, 4.0, gap]]).double(),
        first_token=torch.tensor([[0.5, 0.25, 0.3125], [0.125, 0.375, gap]]).double(),
        learned_sink=torch.tensor([[0.0, 0.0, 0.0], [0.0, 0.0, gap]]).double(),
        far_mass=torch.tensor([[0.5, 0.0, 0.0], [0.25, 0.0, gap]]).double(),
        far_mass_without_first=torch.tensor([[0.25, 0.0, 0.0], [0.0, 0.0, gap]]).double(),
        far_entropy=torch.tensor([[0.5, gap, gap], [gap, gap, gap]]).double(),
    )


def test_tables_of_the_report(known_statistics):
    rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in format_kinds(known_statistics).splitlines()]
    assert rows[0] == ["", "global (2 heads)", "local (3 heads)"]
    assert rows[2:] == [
        ["distance", "1,000.0 (800.0 to 1,200.0)", "3.0 (2.0 to 4.0)"],
        ["entropy", "0.50 (0.25 to 0.75)", "0.62 (0.50 to 0.75)"],
        ["effective rank", "1.5 (1.0 to 2.0)", "3.0 (2.0 to 4.0)"],
        ["first token", "31.2% (12.5% to 50.0%)", "31.2% (25.0% to 37.5%)"],
        ["far", "37.5% (25.0% to 50.0%)", "0.0% (0.0% to 0.0%)"],
        ["far, not first", "12.5% (0.0% to 25.0%)", "0.0% (0.0% to 0.0%)"],
        ["far entropy", "0.50 (0.50 to 0.50)", "-"],
        ["sink heads", "1", "2"],
    ]
    report = format_report(known_statistics, "model", "a text")
    assert "*Far* keys are 8 tokens away or more: those that a window of 8\ntokens does not hold" in report
    for row in (
        "| 0 | global | 1 | 1,200.0 | 0.25 | 1.0 | 50.0% | 50.0% | 25.0% | 0.50 | 1 |",
        "| 0 | local | 2 | 3.0 | 0.75 | 2.5 | 28.1% | 0.0% | 0.0% | - | 1 |",
        "| 3 | global | 1 | 800.0 | 0.75 | 2.0 | 12.5% | 25.0% | 0.0% | - | 0 |",
        "| 3 | local | 1 | 3.0 | 0.50 | 4.0 | 37.5% | 0.0% | 0.0% | - | 1 |",
    ):
        assert row in report


def test_heads_that_a_layer_does_not_have(known_statistics, tmp_path):
    inspection_report._write_json(tmp_path / "statistics.json", known_statistics, "model", "text", torch.zeros(1, 9))
    kinds = json.loads((tmp_path / "statistics.json").read_text(encoding="utf-8"))["kinds"]
    assert kinds == [["global", "local", "local"], ["global", "local", None]]


def test_plot_of_all_heads(known_statistics, tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(inspection_report.Figure, "savefig", lambda figure, *args, **kwargs: figures.append(figure))
    alike = known_statistics._replace(is_local=torch.zeros(2, 3).bool())
    for statistics, title in ((known_statistics, "left of the red line: global heads"), (alike, "")):
        plot_heads(tmp_path / "heads.png", statistics)
        figure = figures.pop()
        assert figure.get_suptitle().startswith(title) and bool(figure.get_suptitle()) == bool(title)
        maps = {axes.get_title(): axes for axes in figure.axes if axes.get_title()}
        assert list(maps) == [FIGURES[name][0] for name in statistics.figures()]
        limits = {name: axes.images[0].get_clim() for name, axes in maps.items()}
        assert limits["distance"] == (0, 1200) and limits["effective rank"] == (0, 4)
        assert {limits[name] for name in limits.keys() - {"distance", "effective rank"}} == {(0, 1)}
        lines = [list(line.get_xdata()) for line in maps["far"].lines]
        assert lines == ([[0.5, 0.5], [0.5, 0.5]] if title else [])
        assert [maps["far"].yaxis.get_major_formatter()(row, None) for row in (0, 1, 2)] == ["0", "3", ""]


class Addresses(HTMLParser):
    """Everything in a page that a browser would load from elsewhere."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.found = set(), []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.found += [(tag, name) for name, _ in attrs if name in ("src", "href", "srcset", "data", "action")]


def test_page_needs_no_network(workplace):
    run("lsgpt", "text.txt", "--length", "40")
    page = (workplace / "runs" / "inspect-lsgpt" / "attention.html").read_text(encoding="utf-8")
    addresses = Addresses(page)
    assert {"html", "style", "script", "canvas"} <= addresses.tags and "iframe" not in addresses.tags
    assert addresses.found == []
    code = page.replace(re.search(r'application/json">(.*?)</script>', page, re.DOTALL)[1], "")
    assert not re.search(r"https?:|//[a-z]|url\(|@import|fetch\(|XMLHttpRequest|import\(", code)
    assert "</script> & <b>" in "".join(page_data(page)["tokens"])  # text is data, and not part of the page


def test_page_stays_small_with_many_heads(build_any, tmp_path, monkeypatch):
    model, ids = build_any("lsgpt"), torch.randint(3, 97, (1, 100))
    tokenizer = train_tokenizer([TEXT], vocab_size=300)
    monkeypatch.setattr(inspection_report, "PAGE_WEIGHTS", 12 * 50 * 51 // 2)
    statistics, name = attention_statistics(model, ids), "</script>"
    write_page(tmp_path / "a.html", model, tokenizer, ids[0], statistics, name, "b", "c")
    data = page_data((tmp_path / "a.html").read_text(encoding="utf-8"))
    assert data["model"] == name  # it does not end the data
    weights = [head["weights"] for layer in data["layers"] for head in layer["heads"]]
    assert len(data["tokens"]) == 50 and {len(each) for each in weights} == {50 * 51 // 2}


def test_short_text_into_the_folder_of_an_earlier_inspection(workplace):
    (workplace / "short.txt").write_text("def f(x): return x")
    (workplace / "here").mkdir()
    for name in FILES:
        (workplace / "here" / name).write_text("{}")
    assert run("lsgpt", "short.txt", "--output", "here", "--far", "3") == 0
    results = json.loads((workplace / "here" / "statistics.json").read_text())
    assert "Measured on 1 block of" in (workplace / "here" / "report.md").read_text(encoding="utf-8")
    tokenizer = AutoTokenizer.from_pretrained("lsgpt")
    assert (results["blocks"], results["length"]) == (1, len(tokenizer("def f(x): return x").input_ids))
    assert results["far"] == 3


def test_data_sets_and_first_tokens(workplace, monkeypatch):
    """Of a dataset the held-out documents are read; a token that begins texts begins every block."""
    (workplace / "data").mkdir()
    (workplace / "data" / "train.txt").write_text("unwanted " * 50)
    (workplace / "data" / "validation.txt").write_text(TEXT, encoding="utf-8")
    tokenizer = AutoTokenizer.from_pretrained("llama")
    ids = tokenizer(TEXT).input_ids
    assert read_blocks("data", tokenizer, 10, 3).tolist() == [ids[:10], ids[10:20], ids[20:30]]
    with monkeypatch.context() as fewer:
        fewer.setattr("lsgpt.inspection.report.CHARACTERS", 2)  # no more of a document is tokenized
        assert read_blocks("data", tokenizer, 10, 3).flatten().tolist() == tokenizer(TEXT[:60]).input_ids[:20]
    begin = tokenizer.bos_token_id
    tokenizer._tokenizer.post_processor = TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", begin)]
    )
    assert tokenizer(TEXT).input_ids == [begin, *ids]
    assert read_blocks("data", tokenizer, 10, 2).tolist() == [[begin, *ids[:9]], [begin, *ids[9:18]]]


def test_an_end_of_text_is_between_documents(workplace):
    write = json.dumps
    (workplace / "two.jsonl").write_text("".join(write({"text": text}) + "\n" for text in ("def f", "return x")))
    (workplace / "data").mkdir()
    (workplace / "two.jsonl").rename(workplace / "data" / "validation.jsonl")
    (workplace / "data" / "train.jsonl").write_text(write({"text": "unwanted"}) + "\n")
    tokenizer = AutoTokenizer.from_pretrained("lsgpt")
    first, second = (tokenizer(text).input_ids for text in ("def f", "return x"))
    ids = [*first, tokenizer.eos_token_id, *second]
    assert read_blocks("data", tokenizer, 99, 1).tolist() == [ids]


def test_blocks_may_take_all_positions():
    config = LlamaConfig(max_position_embeddings=20)
    assert [inspection_report.check_length(length, config) for length in (None, 20, 2)] == [20, 20, 2]
    for config in (LlamaConfig(max_position_embeddings=2048), MambaConfig()):  # the second one has no such number
        assert inspection_report.check_length(None, config) == 512


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["lsgpt", "texd.txt"], "there is no file or folder 'texd.txt'; did you mean 'text.txt'?"),
        (["gone/model", "text.txt"], "gone/model"),
        (["lsgpt", "letter.txt"], "the text must have two tokens or more; 'letter.txt' has 1"),
        (["lsgpt", "latin.txt"], "'latin.txt' must be encoded in UTF-8: 'utf-8' codec can't decode byte 0xe9"),
        (
            ["lsgpt", "text.txt", "--length", "1"],
            "`length` must be at least 2, so that a token has another one to look at",
        ),
        (["lsgpt", "text.txt", "--length", "161"], "`length` must be at most 160, the number of positions of the"),
        (["lsgpt", "text.txt", "--length", "20", "--far", "20"], "`far` must be between 1 and 19"),
        (["lsgpt", "text.txt", "--output", "/proc/new"], "the output must be a writable folder; got '/proc/new'"),
        (["lsgpt", "text.txt", "--output", "data"], "must be new, empty, or that of an earlier inspection; got data"),
        (["lsgpt", "text.txt", "--output", "letter.txt"], "got letter.txt"),
    ],
)
def test_what_the_user_got_wrong(workplace, capsys, offline, arguments, message):
    (workplace / "letter.txt").write_text("x")
    (workplace / "latin.txt").write_bytes("café".encode("latin-1"))
    (workplace / "data").mkdir()
    (workplace / "data" / "precious.md").write_text("kept")
    assert run(*arguments) == 2
    assert message in capsys.readouterr().err
    files = {"lsgpt", "llama", "text.txt", "letter.txt", "latin.txt", "data"}
    assert {path.name for path in workplace.iterdir()} == files
    assert [path.name for path in (workplace / "data").iterdir()] == ["precious.md"]


def test_page_of_the_docs(workplace, capsys):
    """docs/inspect.md: its command and its code, as printed."""
    (workplace / "runs").mkdir()
    (workplace / "runs" / "demo").symlink_to(workplace / "lsgpt")
    (workplace / "notes.txt").write_text(TEXT, encoding="utf-8")
    (command,), (code,) = blocks("docs/inspect.md", "bash"), blocks("docs/inspect.md", "python")
    program, *arguments = shlex.split(command)
    assert program == "lsgpt" and lsgpt_cli.main(arguments) == 0
    page = (ROOT / "docs" / "inspect.md").read_text(encoding="utf-8")
    assert set(FILES) == {file.name for file in (workplace / "runs" / "inspect-demo").iterdir()}
    assert all(f"`{file}`" in page for file in FILES)
    names = [label for label, _ in FIGURES.values()]
    assert re.findall(r"^\| ([a-z, ]+) \|.*\|.*\|$", page, re.MULTILINE)[1:] == names
    capsys.readouterr()
    exec(code, {})
    assert "tensor([[" in capsys.readouterr().out


def test_dropout_does_not_count(tiny_model):
    model, ids = tiny_model(resid_dropout=0.5), torch.randint(97, (1, 24))
    expected = attention_statistics(model, ids).distance
    assert torch.equal(attention_statistics(model.train(), ids).distance, expected) and model.training
