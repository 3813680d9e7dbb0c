"""
The front page stays short, the pages under docs/ hang together, and their code runs as printed.

The pages whose code takes more than a moment have tests of their own: `test_other_decoders.py`,
`test_other_libraries.py`, `training/test_fine_tuning.py`.
"""

import json
import re
import runpy
import shlex
import statistics
from pathlib import Path

import pytest

import lsgpt_cli
from lsgpt import LSGPTConfig, LSGPTForCausalLM
from lsgpt.benchmarks import quality
from lsgpt.configuration import load_preset
from lsgpt.training.data import load_documents, train_tokenizer


ROOT = Path(__file__).parents[1]
DOCS = sorted((ROOT / "docs").glob("*.md"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS]


def read(page):
    return (ROOT / page).read_text(encoding="utf-8")


def blocks(page, language):
    """The code blocks of a page in this language."""
    return re.findall(rf"```{language}\n(.*?)```", read(page), re.DOTALL)


def without_code(text):
    return re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.DOTALL)


def links(text):
    """Where the links and images of a page lead."""
    text = without_code(text)
    return re.findall(r"\]\(([^()\s]+)\)", text) + re.findall(r'(?:srcset|src|href)="([^"]+)"', text)


def anchors(text):
    """What GitHub makes of the headings of a page: `## The paper's code` is `#the-papers-code`."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(page):
    broken = []
    for link in links(page.read_text(encoding="utf-8")):
        if re.match(r"[a-z]+:", link):  # another site
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        known = anchors(target.read_text(encoding="utf-8")) if target.suffix == ".md" and target.is_file() else ()
        if not target.exists() or (anchor and anchor not in known):
            broken.append(link)
    return broken


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Holds `runs/demo`, with a small untrained model in place of the demo's."""
    folder = tmp_path_factory.mktemp("readme")
    tokenizer = train_tokenizer(load_documents("stdlib")["validation"]["text"][:50], vocab_size=400)
    config = LSGPTConfig(vocab_size=400, hidden_size=48, num_hidden_layers=2, num_attention_heads=6)
    LSGPTForCausalLM(config).save_pretrained(folder / "runs" / "demo")
    tokenizer.save_pretrained(folder / "runs" / "demo")
    paragraphs = [f"Paragraph {i} of the notes: {i * i} is the square of {i}." for i in range(20)]
    (folder / "notes.txt").write_text("\n\n".join(paragraphs), encoding="utf-8")
    return folder


def test_front_page_is_short():
    readme = read("README.md")
    assert len(prose(readme).split()) <= 700
    assert len(readme.splitlines()) <= 170
    assert all(block.count("\n") <= 6 for block in re.findall(r"```(?:bash|python)\n(.*?)```", readme, re.DOTALL))


def test_docs_are_short():
    words = [word for page in DOCS for word in prose(page.read_text(encoding="utf-8")).split()]
    assert sum(any(map(str.isalnum, word)) for word in words) <= 14_000


def prose(text):
    """What somebody wrote by hand: no code, no pictures, no tables that a script fills in."""
    return re.sub(r"<!-- table: .*?<!-- end -->|<picture>.*?</picture>|```.*?```", "", text, flags=re.DOTALL)


def perplexities():
    """The rows of the source, the conversion and the healed model on all tokens, made anew from every block."""
    result = json.loads(read("benchmarks/results/quality/perplexity.json"))
    names = [row["model"] for row in result["rows"]]
    lines = [json.loads(line) for line in read("benchmarks/results/quality/quality.jsonl").splitlines()]
    blocks = {(x["model"], x["kind"], x["size"], x["index"]): x for x in lines if x["kind"] == "perplexity"}
    rows = quality.summarize(names, blocks)
    assert [row["perplexity"] for row in rows] == [row["perplexity"] for row in result["rows"]]
    assert names == ["smollm2.gguf", "smollm2-ls", "smollm2-ls-healed"]
    return rows


def test_numbers_at_the_top_are_those_of_the_results():
    top = " ".join(read("README.md").partition("\n## ")[0].split())
    report = read("benchmarks/results/quality/conversion.md")
    kept, total = map(int, re.search(r"(\d+) of (\d+) key/value heads stay global", report).groups())
    window = int(re.search(r"others see\s+(\d+) tokens", report)[1])
    cache = (kept + (total - kept) * window / 8192) / total
    assert f"**{cache:.0%} of the KV cache**" in top and "at 8,192 tokens" in top
    source, converted, _, _, larger, _ = json.loads(read("benchmarks/results/quality/quality.json"))["rows"]
    of_source, perplexity, _ = (row["perplexity"]["8192"] for row in perplexities())
    assert perplexity["ratio"] == pytest.approx(perplexity["value"] / of_source["value"])
    assert perplexity["tokens"] == 25 * 8192
    more, low, high = (ratio - 1 for ratio in (perplexity["ratio"], *perplexity["interval"]))
    assert re.search(rf"has {more:.1%} more perplexity \([^)]*25 texts, 95% interval: {low:.1%} to {high:.1%}\)", top)
    more = larger["perplexity"]["8192"]["ratio"] - 1
    assert larger["perplexity"]["8192"]["tokens"] == 5 * 8192
    assert f"With 35%, it has {more:.1%} more (five texts), and finds about as many hidden numbers; with 20%," in top
    assert larger["cache"]["ratio"] == pytest.approx(0.35, abs=0.005)
    decode = json.loads(read("benchmarks/results/bench/decode/bench-cpu.json"))["rows"]
    (ratio,) = (
        x["median"]
        for row in decode
        for x in row["ratios"]
        if row["length"] == 32768 and x["benchmark"] == "decode" and x["families"] == ["lsgpt", "mhsa"]
    )
    assert f"{ratio:.2f}" == "0.33" and "**A third of the time per generated token** after 32,768 tokens" in top
    before, after = (row["retrieval"]["4096"]["paraphrased"]["exact"] for row in (source, converted))
    page = " ".join(read("README.md").split())
    share = (kept + (total - kept) * window / 4096) / total
    assert f"SmolLM2 above ({share:.0%} of the cache at 4,096 tokens) finds {after:.0%} of the passkeys" in page
    assert f"({source['retrieval']['4096']['passages']} texts; before conversion, {before:.0%})" in page


def test_the_timed_model_is_the_converted_one():
    measurements = " ".join(read("docs/measurements.md").split())
    report = read("benchmarks/results/quality/conversion.md")
    result = json.loads(read("benchmarks/results/bench/smollm2/bench-cpu.json"))
    layers = re.findall(r"^\| \d+ \|.*\|$", report[report.index("## Which heads change") :], re.MULTILINE)
    query_heads = [3 * (layer.count("**") // 2) for layer in layers]  # a bold head serves three
    assert sum(query_heads) == 27 and result["model"]["num_global_heads"] == query_heads
    assert f"the others see\n{result['model']['sliding_window']} tokens" in report
    _, decode = result["rows"]
    in_8_bits = json.loads(read("benchmarks/results/bench/smollm2-int8/bench-cpu.json"))["rows"]
    before, after = (1000 * statistics.median(row["seconds"]["lsgpt sdpa"]) for row in (decode, *in_8_bits))
    assert f"8-bit weights are slower, {after:.0f} ms per token instead of {before:.0f}" in measurements
    flops = re.search(r"\| 8,192 \| forward FLOPs per token \|.*\| ([\d.]+%) \|", report)[1]
    assert f"The prefill has {flops} of the source's FLOPs" in measurements
    ours, theirs = (decode["cache_bytes"][family] / 1e6 for family in ("lsgpt", "llama"))
    assert f"and {theirs:.0f} MB of cache in Llama, {ours:.0f} MB here" in measurements


def test_figures_of_conversions_in_prose_are_those_of_the_results():
    measurements, related, choosing = (
        " ".join(read(f"docs/{page}.md").split()) for page in ("measurements", "related-work", "choosing-heads")
    )
    rows = json.loads(read("benchmarks/results/quality/quality.json"))["rows"]
    larger, larger_long = (f"{rows[4]['perplexity'][n]['ratio']:.3f}" for n in ("2048", "8192"))
    _, *of_models = perplexities()
    assert all(x["tokens"] >= 200_000 for row in of_models for x in row["perplexity"].values())
    (ours, ours_long), (healed, healed_long) = (
        [f"{row['perplexity'][n]['ratio']:.3f}" for n in ("2048", "8192")] for row in of_models
    )
    healing = json.loads(read("benchmarks/results/quality/healing.json"))
    assert round(healing["train_seconds"] / 3600, 1) == 1.2 and healing["step"] == 110
    kinds = ("literal", "paraphrased", "one of several")
    at_8192 = [f"{statistics.fmean(row['retrieval']['8192'][kind]['exact'] for kind in kinds):.2f}" for row in rows]
    near, far = (
        [[round(row["far"][n][kind]["questions"] * row["far"][n][kind]["exact"]) for kind in kinds] for row in rows]
        for n in ("1024", "2048")
    )
    total_near, total_far = (sum(rows[0]["far"][n][kind]["questions"] for kind in kinds) for n in ("1024", "2048"))
    assert f"perplexity is {ours} of the source's in blocks of 2,048 tokens, {healed} healed (" in measurements
    assert f"healed ({ours_long} and {healed_long} in blocks of 8,192)" in measurements
    assert (
        f"of {total_near} numbers at least 1,024 tokens back, the source finds {sum(near[0])} and the conversion "
        f"{sum(near[1])}, fewer literal ({near[1][0]} instead of {near[0][0]}) and paraphrased ({near[1][1]} instead "
        f"of {near[0][1]}), more of several ({near[1][2]} instead of {near[0][2]})"
    ) in measurements
    by_kind = "{}, {} and {}".format(*near[3])
    assert f"Healed, it finds {sum(near[3])} ({by_kind}): the intervals overlap" in measurements
    for i, j in ((1, 2), (1, 3)):
        for kind in kinds:
            one, other = (rows[k]["far"]["1024"][kind]["interval"] for k in (i, j))
            assert max(one[0], other[0]) <= min(one[1], other[1])
    lines = [json.loads(line) for line in read("benchmarks/results/quality/quality.jsonl").splitlines()]
    earlier = sum(
        all(line["right"][kind])
        for line in lines
        if line["model"] == "smollm2-ls-by-outputs-healed" and line["kind"] == "retrieval"
        for kind in kinds
        if line["distances"][kind] >= 1024
    )
    assert f"choice of heads, {sum(near[2])} were found untrained, {earlier} healed." in measurements
    for n in ("4096", "8192"):
        for kind in kinds:
            ours_now, ours_before = (rows[i]["retrieval"][n][kind]["interval"] for i in (1, 2))
            assert max(ours_now[0], ours_before[0]) <= min(ours_now[1], ours_before[1])
    assert f"perplexity is {larger} of the source's ({larger_long} in blocks of 8,192)" in measurements
    found = (
        f"Of {total_far} numbers at least 2,048 tokens back, beyond its windows, it finds {sum(far[4])}, the source"
    )
    assert f"{found} {sum(far[0])}." in measurements
    # On the front page: "about as many" with 35%, "fewer" with 20%.
    assert sum(far[4]) == pytest.approx(sum(far[0]), rel=0.1) and sum(far[1]) < sum(far[0])
    assert (
        f"perplexity {ours_long} times the source's; of numbers hidden in 8,192 tokens, {at_8192[1]} found" in choosing
    )
    assert f"(0.35 of the cache), {larger_long} (fewer texts) and {at_8192[4]} |" in choosing
    assert f"20% of the cache at 8,192 tokens, {float(ours_long) - 1:.1%} more perplexity without training" in choosing
    methods = json.loads(read("benchmarks/results/quality/cache_methods.json"))
    perplexity = {row["method"]: row["perplexity_ratio"] for row in methods["rows"] if row["method"] != "source"}
    found = {row["method"]: row["exact"] for row in methods["rows"]}
    intervals = {row["method"]: row["interval"] for row in methods["rows"]}
    ours, tuned, layers, duo, source = (
        f"{found.pop(name):.2f}" for name in ("LSGPT", "LSGPT healed", "whole layers", "DuoAttention", "source")
    )
    assert f"the source finds {source}, the conversion {ours} (healed {tuned}), DuoAttention with the same" in related
    assert f"heads {duo}, whole local layers {layers}, compression at most {max(found.values()):.2f}" in related
    assert f"find {layers}, LSGPT {ours}, and healed {tuned}, with the lowest perplexity." in measurements
    assert min(perplexity, key=perplexity.get) == "LSGPT healed"
    assert f"of this conversion, finds {duo}: the intervals overlap" in measurements
    one, *others = (intervals[name] for name in ("DuoAttention", "LSGPT", "LSGPT healed"))
    assert all(max(one[0], other[0]) <= min(one[1], other[1]) for other in others)
    highest = [max(found.values())]
    for share, best, text in (
        (
            10,
            "LSGPT",
            "finds {LSGPT}, DuoAttention {DuoAttention}, whole layers {whole layers} (the first",
        ),
        (35, "DuoAttention", "finds {DuoAttention}, LSGPT {LSGPT}, whole layers {whole layers}."),
        (50, "DuoAttention", "finds {DuoAttention}, LSGPT {LSGPT}, whole layers {whole layers}."),
    ):
        source, *rows = json.loads(read(f"benchmarks/results/quality/cache_methods-{share}.json"))["rows"]
        assert source["method"] == "source"
        assert min(rows, key=lambda row: row["perplexity_ratio"])["method"] == best
        figures = {row["method"]: f"{row['exact']:.2f}" for row in rows}
        assert f"With {share}%, {best} has the lowest perplexity and {text.format(**figures)}" in measurements
        one, other = (row["interval"] for row in rows if row["method"] in ("LSGPT", "DuoAttention"))
        assert max(one[0], other[0]) <= min(one[1], other[1])
        others = {row["method"]: row["exact"] for row in rows}
        key_diff = [others.pop(name) for name in ("LSGPT", "whole layers", "DuoAttention", "KeyDiff")][-1]
        highest += [*others.values(), *([] if share == 50 else [key_diff])]
    most = f"kvpress's methods find at most {max(highest):.2f} of the numbers (KeyDiff with 50%: {key_diff:.2f})"
    assert f"Except DuoAttention, {most}" in measurements


def test_figures_of_longer_healing_are_those_of_the_run():
    measurements = " ".join(read("docs/measurements.md").split())
    lines = [json.loads(line) for line in read("benchmarks/results/quality/quality.jsonl").splitlines()]
    found = {(line["model"], line["kind"], line["size"], line["index"]): line for line in lines}
    _, shorter, longer = quality.summarize(["smollm2.gguf", "smollm2-ls-healed", "smollm2-ls-healed-longer"], found)
    runs = [json.loads(read(f"benchmarks/results/quality/{x}.json")) for x in ("healing", "healing-longer")]
    hours = sum(run["train_seconds"] for run in runs) / 3600
    assert f"Longer healing ([{hours:.1f} hours](" in measurements
    assert f"--max_steps {runs[1]['step']} --max_eval_blocks 4" in measurements
    before, after = (f"{runs[1][x]:.1f}" for x in ("perplexity_before_training", "eval_perplexity"))
    assert {x["tokens"] for row in (shorter, longer) for x in row["perplexity"].values()} == {40_960}
    ratios = " to ".join(
        "{:.3f} ({:.3f})".format(*(row["perplexity"][n]["ratio"] for n in ("2048", "8192")))
        for row in (shorter, longer)
    )
    own = f"though not on the run's own four blocks ({after} before and after)"
    assert (
        f"lowers the perplexity on the first 40,960 tokens from {ratios}, {own}, and" in measurements
        and before == after
    )
    of_shorter, of_longer = (
        [round(x["questions"] * x["exact"]) for x in row["far"]["1024"].values()] for row in (shorter, longer)
    )
    by_kind = "{}, {} and {}".format(*of_longer)
    assert f"and finds no more numbers: {sum(of_longer)} ({by_kind})." in measurements
    assert sum(of_longer) <= sum(of_shorter)


def test_figures_of_healing_for_vllm_are_those_of_the_run():
    page = " ".join(read("docs/healing.md").split())
    *_, healed, _, for_vllm = json.loads(read("benchmarks/results/quality/quality.json"))["rows"]
    ratios = [[f"{row['perplexity'][n]['ratio']:.3f}" for n in ("2048", "8192")] for row in (healed, for_vllm)]
    assert f"is {ratios[1][0]} of the source's in blocks of 2,048 tokens and {ratios[1][1]} in blocks of" in page
    assert f"8,192 (healed: {ratios[0][0]} and {ratios[0][1]})" in page
    found = [
        sum(round(x["questions"] * x["exact"]) for x in row["far"]["1024"].values()) for row in (healed, for_vllm)
    ]
    total = sum(x["questions"] for x in healed["far"]["1024"].values())
    assert f"{found[1]} of {total} numbers at least 1,024 tokens back (healed: {found[0]})" in page
    before, run = (json.loads(read(f"benchmarks/results/quality/{x}.json")) for x in ("healing", "healing-for-vllm"))
    ratio = run["eval_perplexity"] / before["eval_perplexity"]
    assert f"is {run['perplexity_before_training']:.1f} at first and {run['eval_perplexity']:.1f} after these" in page
    assert (
        f"{run['step']} steps, {ratio - 1:.1%} above that of the healed model ({before['eval_perplexity']:.1f};"
        in page
    )
    assert run["teacher_perplexity"] == before["teacher_perplexity"]
    assert f"teacher: {run['teacher_perplexity']:.1f}, on four blocks" in page
    served, whole = (row for row in json.loads(read("benchmarks/results/serving-smollm2.json"))["rows"])
    assert served["equal_tokens"] == [60] * 6
    assert "vLLM continued six passages of 20 to 2,000 tokens with the same 60 tokens as Transformers." in page
    serving = " ".join(read("docs/serving.md").split())
    assert f"holds [{served['requests']:.2f} requests](" in serving
    assert f"in float32, and {whole['requests']:.2f} with all heads global." in serving
    readme = " ".join(read("README.md").split())
    assert f"with SmolLM2, {served['requests'] / whole['requests']:.1f} times." in readme
    requests = {
        row["model"]: row["requests"]
        for row in json.loads(read("benchmarks/results/serving.json"))["rows"]
        if (row["block_size"], row["max_num_batched_tokens"]) == (128, 512)
    }
    assert f"**{requests['lsgpt'] / requests['gpt2']:.1f} times as many requests** of 8,192 tokens" in readme


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name if page.parent == ROOT else f"docs/{page.name}")
def test_links_lead_somewhere(page):
    assert broken_links(page) == []


def test_broken_links_are_found(tmp_path):
    (tmp_path / "other.md").write_text("# A title: `x`, and more\n```bash\n# no title\n```\n")
    page = tmp_path / "page.md"
    page.write_text(
        "# Here\n[a](other.md#a-title-x-and-more) [b](#here) [c](https://example.org/#x) `[d](code.md)`\n"
        '[two\nlines](gone.md) ![e](gone.png) [f](other.md#no-title) [g](#there) <img src="gone.svg">\n'
    )
    assert broken_links(page) == ["gone.md", "gone.png", "other.md#no-title", "#there", "gone.svg"]


def test_index_lists_every_page():
    index = ROOT / "docs" / "README.md"
    listed = {link.partition("#")[0] for link in links(read(index))}
    assert {page.name for page in DOCS if page != index} <= listed


def test_front_page_runs_from_top_to_bottom(tmp_path, monkeypatch, capsys):
    """It needs nothing but the installed package, and what `run_readme.py` puts in place of a pretrained model."""
    script = runpy.run_path(str(ROOT / "docs" / "run_readme.py"))
    monkeypatch.chdir(tmp_path)
    script["make_source"](tmp_path)
    programs = []

    def execute(words):
        programs.append(words[:2])
        capsys.readouterr()
        if words[0] == "python":
            exec(words[2], {})
        else:
            assert lsgpt_cli.main(words[1:]) == 0
        return capsys.readouterr().out

    demo = f"--max_steps 2 --warmup_steps 0 --eval_strategy no --max_eval_blocks 8 --tokenizer {script['SOURCE']}"
    # `train heal` starts with `train`, too.
    script["run"](read("README.md"), execute, {**script["SMALLER"], "train": demo})
    assert [name for _, name in programs] == ["train", "generate", "-c", "convert", "train", "generate"]


def test_the_quickstart_shows_what_info_prints(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    load_preset("demo").save_pretrained("runs/demo")
    assert "lsgpt info runs/demo --length 8192" in read("docs/quickstart.md")
    assert lsgpt_cli.main(["info", "runs/demo", "--length", "8192"]) == 0
    assert capsys.readouterr().out in blocks("docs/quickstart.md", "text")


def test_the_table_of_costs_follows_from_the_configuration():
    rows = re.findall(r"^\| 1/(\d+) \| (\d+)% \| (\d+)% \| (\d+)% \|$", read("docs/choosing-heads.md"), re.MULTILINE)
    assert len(rows) == 4
    for parts, *shown in rows:
        config = load_preset("gpt2-small", num_global_heads=12 // int(parts), sliding_window=128)
        ratios = [config.kv_cache_bytes(n) / config.equal_mhsa().kv_cache_bytes(n) for n in (2048, 8192, 32768)]
        assert [f"{ratio:.0%}" for ratio in ratios] == [f"{number}%" for number in shown]


def test_a_front_page_that_shows_something_else_is_found():
    script = runpy.run_path(str(ROOT / "docs" / "run_readme.py"))
    page = "```bash\npip install x\nlsgpt info  # shown\n```\n```text\nyes\n```\n"
    assert script["commands"](page) == [(["lsgpt", "info"], "yes\n")]
    script["run"](page, lambda words: "yes\n")
    with pytest.raises(AssertionError, match="prints 'no"):
        script["run"](page, lambda words: "no\n")


@pytest.mark.parametrize(
    ("page", "numbers", "expected"),
    [("docs/training.md", (0, 1), "tensor([["), ("docs/publishing.md", (1,), "library_name: transformers")],
)
def test_code_in_docs(folder, page, numbers, expected, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    for number in numbers:
        exec(blocks(page, "python")[number], {})
    assert expected in capsys.readouterr().out


def test_code_of_averaging_and_losses(folder, monkeypatch, capsys):
    """One block goes on with what another has made."""
    monkeypatch.chdir(folder)
    namespace = {"__name__": "__main__"}
    for code in blocks("docs/averaging-and-losses.md", "python"):
        exec(code, namespace)
    output = capsys.readouterr().out
    assert len(re.findall(r"^\d+ eval_loss [\d.]+ eval_averaged_loss [\d.]+$", output, re.MULTILINE)) == 3
    assert "\nParagraph" in output
    for name, average in namespace["averaging"].averages.items():
        assert average.equal(namespace["averaged"].get_parameter(name))
    assert (folder / "runs" / "notes" / "averaged-so-far" / "tokenizer.json").is_file()


@pytest.mark.parametrize(
    ("page", "command", "printed"),
    [
        ("docs/attention-implementations.md", "lsgpt info gpt2-small --length 8192", r"at 8,192 tokens .*all global"),
        ("docs/quickstart.md", 'lsgpt generate runs/demo "def" --seed 0', r"\Adef"),
        (
            "docs/publishing.md",
            "lsgpt publish runs/demo your-name/your-lsgpt --license apache-2.0 --dry-run",
            r"uploaded to your-name/your-lsgpt.*\n  README\.md +[\d,]+ bytes",
        ),
    ],
)
def test_commands(folder, page, command, printed, monkeypatch, capsys):
    assert command in read(page)
    monkeypatch.chdir(folder)
    assert lsgpt_cli.main(shlex.split(command)[1:]) == 0
    assert re.search(printed, capsys.readouterr().out, re.DOTALL)


def test_make_commands_exist():
    targets = set(re.findall(r"^([\w-]+):", read("Makefile"), re.MULTILINE))
    for page in PAGES:
        named = re.findall(r"`make ([\w-]+)`|^make ([\w-]+)", page.read_text(encoding="utf-8"), re.MULTILINE)
        assert {first or second for first, second in named} <= targets, page
