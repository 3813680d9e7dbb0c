"""
The front page stays short, the pages under docs/ hang together, and their code runs as printed.

The pages whose code takes more than a moment have tests of their own: `test_other_decoders.py`,
`test_other_libraries.py`, `training/test_fine_tuning.py`.
"""

import itertools
import json
import math
import re
import runpy
import shlex
import statistics
from pathlib import Path

import pytest
from scipy import stats

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


KINDS = ("literal", "paraphrased")  # of "one of several", a quarter of all guesses is right


def quality_rows():
    """The rows of the converted models by name, without the beginning that they share."""
    rows = json.loads(read("benchmarks/results/quality/quality.json"))["rows"]
    return {row["model"].removeprefix("smollm2").removeprefix("-ls"): row for row in rows}


def measured(*models, files=("quality.jsonl",)):
    """What was measured of some models, as `quality.summarize` takes it: the blocks and passages that all have."""
    lines = [json.loads(line) for file in files for line in read(f"benchmarks/results/quality/{file}").splitlines()]
    found = {(x["model"], x["kind"], x["size"], x["index"]): x for x in lines if x["model"] in models}
    common = set.intersection(*({key[1:] for key in found if key[0] == model} for model in models))
    return {key: item for key, item in found.items() if key[1:] in common}


def answered(found, model, distance):
    """How many numbers at least `distance` tokens back a model found, and how many there are, by kind of question."""
    items = [item for key, item in found.items() if key[:2] == (model, "retrieval")]
    far = [[all(x["right"][kind]) for x in items if x["distances"][kind] >= distance] for kind in KINDS]
    return [sum(answers) for answers in far], [len(answers) for answers in far]


def paired_p_value(found, one, other, distance):
    """The probability of answers that differ as much between two models if both are equally good (McNemar, exact)."""
    only_one = only_other = 0
    for key, item in found.items():
        if key[:2] == (one, "retrieval"):
            for kind in KINDS:
                if item["distances"][kind] >= distance:
                    rights = [all(x["right"][kind]) for x in (item, found[(other, *key[1:])])]
                    only_one += rights == [True, False]
                    only_other += rights == [False, True]
    return stats.binomtest(only_one, only_one + only_other).pvalue


def lead_in_perplexity(result):
    """The method with the lowest perplexity, and whether the 95% intervals of all paired differences exclude 0."""
    best = min(result["rows"][1:], key=lambda row: row["perplexity_ratio"])["method"]
    losses = {name: [item["loss"] for item in items] for name, items in result["items"].items() if name != "source"}
    intervals = [
        stats.ttest_rel(losses[best], of_method).confidence_interval()
        for name, of_method in losses.items()
        if name != best
    ]
    return best, all(high < 0 for _, high in intervals)


def ratios_of(row):
    """The perplexities as ratios to the source's, as the pages write them."""
    return [f"{row['perplexity'][size]['ratio']:.3f}" for size in ("2048", "8192")]


def test_the_qualities_follow_from_every_block_and_passage():
    result = json.loads(read("benchmarks/results/quality/quality.json"))
    lines = [json.loads(line) for line in read("benchmarks/results/quality/quality.jsonl").splitlines()]
    found = {(x["model"], x["kind"], x["size"], x["index"]): x for x in lines}
    assert len(found) == len(lines)
    rows = quality.summarize([row["model"] for row in result["rows"]], found)
    assert json.loads(json.dumps(rows)) == result["rows"]
    for row in rows:
        counts = {x["passages"] for x in row["retrieval"].values()}
        assert (counts == {100}) == (
            row["model"] in ("smollm2.gguf", "smollm2-ls", "smollm2-ls-35") or row["model"].endswith("-cpu")
        )


def test_numbers_at_the_top_are_those_of_the_results():
    top = " ".join(read("README.md").partition("\n## ")[0].split())
    report = read("benchmarks/results/quality/conversion.md")
    kept, total = map(int, re.search(r"(\d+) of (\d+) key/value heads stay global", report).groups())
    window = int(re.search(r"others see\s+(\d+) tokens", report)[1])
    cache = (kept + (total - kept) * window / 8192) / total
    assert f"**{cache:.0%} of the KV cache**" in top and "at 8,192 tokens" in top
    rows = quality_rows()
    source, converted, larger = (rows[name] for name in (".gguf", "", "-35"))
    of_source, perplexity, of_larger = (row["perplexity"]["8192"] for row in (source, converted, larger))
    assert perplexity["ratio"] == pytest.approx(perplexity["value"] / of_source["value"])
    assert perplexity["tokens"] == of_larger["tokens"] == 25 * 8192
    more, low, high = (ratio - 1 for ratio in (perplexity["ratio"], *perplexity["interval"]))
    assert re.search(rf"has {more:.1%} more perplexity \([^)]*25 blocks, 95% interval: {low:.1%} to {high:.1%}\)", top)
    names = ("smollm2.gguf", "smollm2-ls", "smollm2-ls-35", "smollm2-ls-35-healed-cpu", "smollm2-ls-healed-cpu")
    found = measured(*names)
    of_source, fewer, many, *healed = (sum(answered(found, name, 2048)[0]) for name in names)
    numbers = sum(answered(found, names[0], 2048)[1])
    of_longer_blocks = measured(
        names[0], "smollm2-ls-healed-8192-longer-cpu", files=("quality.jsonl", "quality-8192.jsonl")
    )
    longer = sum(answered(of_longer_blocks, "smollm2-ls-healed-8192-longer-cpu", 2048)[0])
    assert (
        f"With 35%, it has {of_larger['ratio'] - 1:.1%} more. Of {numbers} numbers at least 2,048 tokens back, "
        f"it finds {many} (with 20%, {fewer}; [healed](docs/healing.md), {healed[0]} and "
        f"{healed[1]}, or {longer} [on longer blocks](docs/measurements.md#what-a-conversion-keeps)), the original "
        f"{of_source}."
    ) in top
    assert larger["cache"]["ratio"] == pytest.approx(0.35, abs=0.005)
    decode = json.loads(read("benchmarks/results/bench/decode/bench-cpu.json"))["rows"]
    (ratio,) = (
        x["median"]
        for row in decode
        for x in row["ratios"]
        if row["length"] == 32768 and x["benchmark"] == "decode" and x["families"] == ["lsgpt", "mhsa"]
    )
    assert f"{ratio:.2f}" == "0.33" and "**A third of the time per generated token** after 32,768 tokens" in top
    before, after = (row["retrieval"]["8192"]["paraphrased"]["exact"] for row in (source, converted))
    page = " ".join(read("README.md").split())
    assert f"with paraphrased questions, SmolLM2 above finds {after:.0%} of the passkeys in 8,192 tokens" in page
    healed = rows["-healed-cpu"]["retrieval"]["8192"]["paraphrased"]["exact"]
    assert f"(healed, {healed:.0%}; unconverted, {before:.0%});" in page


def test_the_timed_model_is_the_converted_one():
    measurements = " ".join(read("docs/measurements.md").split())
    report = read("benchmarks/results/quality/conversion.md")
    result = json.loads(read("benchmarks/results/bench/smollm2/bench-cpu.json"))
    layers = re.findall(r"^\| \d+ \|.*\|$", report[report.index("## Which heads change") :], re.MULTILINE)
    query_heads = [3 * (layer.count("**") // 2) for layer in layers]  # a bold head serves three
    assert sum(query_heads) == 27 and result["model"]["num_global_heads"] == query_heads
    assert f"the others see\n{result['model']['sliding_window']} tokens" in report
    minutes = float(re.search(r"\| time \| ([\d.]+) min \|\n\| hardware \| .*, 2 of 2 cores used", report)[1])
    assert f"Converting takes [{minutes:.0f} minutes](" in " ".join(read("README.md").split())
    in_bfloat16, in_8_bits = (
        json.loads(read(f"benchmarks/results/bench/smollm2-{name}/bench-cpu.json")) for name in ("bfloat16", "int8")
    )
    assert in_bfloat16["model"] == in_8_bits["model"] == result["model"]
    rows = [row["seconds"] for each in (result, in_bfloat16, in_8_bits) for row in each["rows"]]
    prefill, decoded, faster, slower, converted = (
        [statistics.median(seconds[f"{family} sdpa"]) for family in ("lsgpt", "llama")] for seconds in rows
    )
    assert f"prefill is faster ({faster[0]:.0f} s instead of {prefill[0]:.0f})" in measurements
    ours, theirs = (f"{1000 * after:.0f} instead of {1000 * before:.0f}" for after, before in zip(slower, decoded))
    assert f"slower: {ours} ms per token, in Llama {theirs}." in measurements
    assert f"8-bit weights ({1000 * converted[0]:.0f} ms) are converted" in measurements
    _, decode = result["rows"]
    flops = re.search(r"\| 8,192 \| forward FLOPs per token \|.*\| ([\d.]+%) \|", report)[1]
    assert f"The prefill has {flops} of the source's FLOPs" in measurements
    ours, theirs = (decode["cache_bytes"][family] / 1e6 for family in ("lsgpt", "llama"))
    assert f"and {theirs:.0f} MB of cache in Llama, {ours:.0f} MB here" in measurements


def test_figures_of_conversions_in_prose_are_those_of_the_results():
    measurements, choosing = (" ".join(read(f"docs/{page}.md").split()) for page in ("measurements", "choosing-heads"))
    rows = quality_rows()
    models = ("", "-healed-cpu", "-35", "-35-healed-cpu")
    ours, healed, larger, larger_healed = (ratios_of(rows[name]) for name in models)
    for name in models:
        assert all(x["tokens"] >= 200_000 for x in rows[name]["perplexity"].values())
    assert f"perplexity is {ours[0]} of the source's in blocks of 2,048 tokens, {healed[0]} healed (" in measurements
    assert f"healed ({ours[1]} and {healed[1]} in blocks of 8,192)" in measurements
    names = [f"smollm2{name}" for name in (".gguf", "-ls", "-ls-healed-cpu", "-ls-35", "-ls-35-healed-cpu")]
    found = measured(*names)
    (source, counts), (converted, _), (of_healed, _) = (answered(found, name, 1024) for name in names[:3])
    assert (
        f"of {sum(counts)} numbers at least 1,024 tokens back, the source finds {sum(source)}, the conversion "
        f"{sum(converted)} (literal: {converted[0]} instead of {source[0]}; paraphrased: {converted[1]} instead of "
        f"{source[1]}), and healed {sum(of_healed)} ({of_healed[0]} and {of_healed[1]})."
    ) in measurements
    of_several = rows[".gguf"]["far"]["1024"]["one of several"]
    right = round(of_several["exact"] * of_several["questions"])
    assert f"the source does no better ({right} of {of_several['questions']})" in measurements
    assert of_several["interval"][0] < 1 / 4 < of_several["interval"][1]
    sentence = f"perplexity is {larger[0]} of the source's, {larger_healed[0]} healed ({larger[1]} and"
    assert f"{sentence} {larger_healed[1]} in blocks of 8,192)." in measurements
    (source, counts), *of_larger = (answered(found, names[i], 2048) for i in (0, 3, 4))
    untrained, healed_35 = (sum(right) for right, _ in of_larger)
    chances = [paired_p_value(found, name, names[0], 2048) for name in names[3:]]
    assert (
        f"Of {sum(counts)} numbers at least 2,048 tokens back, beyond its windows, it finds {untrained}, healed "
        f"{healed_35}, the source {sum(source)} (paired: p = {chances[0]:.2f}, and {chances[1]:.2f} when healed)."
    ) in measurements
    names = ("smollm2-ls-healed", "smollm2-ls-healed-cpu", "smollm2.gguf")
    (on_gpu, counts), (on_cpu, _) = (answered(measured(*names), name, 1024) for name in names[:2])
    sentence = f"the model finds {sum(on_gpu)} of {sum(counts)}, six fewer than when healed on CPUs."
    assert sentence in measurements and sum(on_cpu) - sum(on_gpu) == 6
    names = [f"smollm2-ls-35{name}" for name in ("-healed", "", "-healed-cpu")]
    (on_gpu, counts), (untrained, _), (on_cpu, _) = (answered(measured(*names), name, 1024) for name in names)
    assert (
        f"it finds fewer at least 1,024 tokens back ({sum(on_gpu)} of {sum(counts)}, unhealed {sum(untrained)}, "
        f"healed on CPUs {sum(on_cpu)})."
    ) in measurements
    names = ("healing", "healing-20-two-cores", "healing-two-cores")
    runs = [json.loads(read(f"benchmarks/results/quality/{name}.json")) for name in names]
    assert {run["step"] for run in runs} == {110}
    minutes = [f"{run['train_seconds'] / 60:.0f}" for run in runs[1:]]
    assert f"Healing took {minutes[0]} minutes on two CPU cores ([{minutes[1]}](" in measurements
    assert f"[{runs[0]['train_seconds']:.0f} seconds](" in measurements
    healing = " ".join(read("docs/healing.md").split())
    assert f"took {minutes[0]} to {minutes[1]} minutes on two CPU cores." in healing
    assert "healing an hour (with" in " ".join(read("README.md").split())
    names = ("smollm2-ls-by-outputs", "smollm2-ls-by-outputs-healed", "smollm2-ls", "smollm2-ls-healed")
    earlier = measured(*names, files=("quality-earlier.jsonl",))
    before, tuned, now, tuned_now = (sum(answered(earlier, name, 1024)[0]) for name in names)
    total = sum(answered(earlier, names[0], 1024)[1])
    sentence = (
        f"{before} of {total} numbers were found ({tuned} when healed); with today's choice, {now} ({tuned_now}),"
    )
    assert f"{sentence} no clear difference." in measurements
    assert all(paired_p_value(earlier, names[i + 2], names[i], 1024) > 0.05 for i in range(2))
    at_8192 = [
        f"{statistics.fmean(rows[name]['retrieval']['8192'][kind]['exact'] for kind in KINDS):.2f}"
        for name in (".gguf", "", "-35")
    ]
    assert f"perplexity {ours[1]} times the source's; of literal and paraphrased numbers in 8,192" in choosing
    assert f"in 8,192 tokens, {at_8192[1]} found, by the source {at_8192[0]}." in choosing
    assert f"(0.35 of the cache), {larger[1]} and {at_8192[2]} |" in choosing
    assert f"20% of the cache at 8,192 tokens, {float(ours[1]) - 1:.1%} more perplexity without training" in choosing
    methods = json.loads(read("benchmarks/results/quality/cache_methods.json"))
    found = {row["method"]: row["exact"] for row in methods["rows"]}
    intervals = {row["method"]: row["interval"] for row in methods["rows"]}
    names = ("LSGPT", "LSGPT healed", "whole layers", "whole layers healed", "DuoAttention")
    del found["source"]
    ours, tuned, layers, tuned_layers, duo = (f"{found.pop(name):.2f}" for name in names)
    del found["StreamingLLM"]
    assert f"of their heads, find {layers}, LSGPT {ours}. Healing nearly closes" in measurements
    assert f"find {tuned_layers}, healed LSGPT {tuned} (intervals overlap)" in measurements
    healings = ("", "-whole", "-10", "-whole-10", "-35", "-whole-35", "-50", "-whole-50")
    runs = [json.loads(read(f"benchmarks/results/quality/healing{name}-two-cores.json")) for name in healings]
    assert {run["step"] for run in runs} == {110}  # what is compared
    one, other = intervals["LSGPT healed"], intervals["whole layers healed"]
    assert max(one[0], other[0]) <= min(one[1], other[1])
    models = ("smollm2-whole-healed", "smollm2-ls", "smollm2-ls-healed-cpu", "smollm2.gguf")
    window = int(re.search(r"others see\s+(\d+) tokens", read("benchmarks/results/quality/conversion.md"))[1])
    same = measured(*models, files=("quality.jsonl", "quality-whole.jsonl"))
    (of_layers, total), *others = (map(sum, answered(same, name, window)) for name in models)
    of_heads, of_healed, of_source = (right for right, _ in others)
    assert f"Of {total} literal and paraphrased numbers outside the windows in" in measurements
    assert len(same) == 4 * 100
    chance = paired_p_value(same, models[2], models[0], window)
    assert (
        f"they find {of_layers}, unhealed LSGPT {of_heads}, healed {of_healed} (paired with {of_layers}: p = "
        f"{chance:.2f}), the source {of_source}."
    ) in measurements
    assert f"with our heads and window, finds {duo} (intervals overlap)" in measurements
    one, *others = (intervals[name] for name in ("DuoAttention", "LSGPT", "LSGPT healed"))
    assert all(max(one[0], other[0]) <= min(one[1], other[1]) for other in others)
    highest, figures, results = [max(found.values())], {}, {20: methods}
    for share in (10, 35, 50):
        results[share] = json.loads(read(f"benchmarks/results/quality/cache_methods-{share}.json"))
        source, *rows = results[share]["rows"]
        assert source["method"] == "source"
        untrained = [row for row in rows if not row["method"].endswith("healed")]
        figures[share] = {row["method"]: f"{row['exact']:.2f}" for row in rows}
        one, other = (row["interval"] for row in rows if row["method"] in ("LSGPT", "DuoAttention"))
        assert max(one[0], other[0]) <= min(one[1], other[1])
        others = {row["method"]: row["exact"] for row in untrained}
        key_diff = [others.pop(name) for name in ("LSGPT", "whole layers", "DuoAttention", "KeyDiff")][-1]
        highest += [*others.values(), *([] if share == 50 else [key_diff])]
    ours, tuned, layers, tuned_layers, duo = map(figures[10].get, names)
    untrained = f"LSGPT finds {ours}, DuoAttention {duo} (intervals overlap), whole layers {layers}"
    assert f"With 10%, {untrained}; healed, [LSGPT](" in measurements
    assert f"healing-10-two-cores.json) {tuned}, and [whole layers](" in measurements
    assert f"healing-whole-10-two-cores.json) {tuned_layers}. With 35%" in measurements
    close = [float(figures[share][name]) for share in (35, 50) for name in names]
    sentence = f"LSGPT, whole layers and DuoAttention find {min(close):.2f} to {max(close):.2f}, also healed ([LSGPT]("
    assert f"With 35% and 50%, {sentence}" in measurements
    for name, share in itertools.product(("", "whole-"), (35, 50)):
        assert f"(../benchmarks/results/quality/healing-{name}{share}-two-cores.json)" in measurements
    leads = {share: lead_in_perplexity(result) for share, result in results.items()}
    assert {best for best, _ in leads.values()} == {"LSGPT healed"}
    assert [share for share, (_, is_clear) in leads.items() if is_clear] == [10]
    assert "Healed LSGPT has the lowest perplexity with every size, but a clear lead only with 10%" in measurements
    for share, result in results.items():
        lowest = min(
            (x for x in result["rows"][1:] if "healed" not in x["method"]), key=lambda x: x["perplexity_ratio"]
        )
        duo, ours = ([item["loss"] for item in result["items"][name]] for name in ("DuoAttention", "LSGPT"))
        assert (lowest["method"] == "DuoAttention") == (share in (35, 50)), share
        assert share == 10 or stats.ttest_rel(duo, ours).pvalue > 0.05
    assert "Untrained, DuoAttention's is lower than LSGPT's with 35% and 50%, though not clearly." in measurements
    texts = [[item["loss"] for item in result["items"]["source"]] for result in results.values()]
    assert all(values == pytest.approx(texts[0], abs=0.05) for values in texts)
    assert "All sizes use the same 20 texts, with the numbers in other places." in measurements
    seconds = [results[share]["times"]["seconds"] for share in (35, 50)]
    ours, layers = (
        [f"{statistics.median(a / b for a, b in zip(of_run[name], of_run['source'])):.2f}" for of_run in seconds]
        for name in ("LSGPT", "whole layers")
    )
    sentence = f"prefill takes {ours[0]} and {ours[1]} times as long as the source's (whole layers: {layers[0]} and"
    assert f"{sentence} {layers[1]})." in measurements
    most = f"kvpress's methods find at most {max(highest):.2f} of the numbers (KeyDiff with 50%: {key_diff:.2f})"
    assert f"Except DuoAttention, {most}" in measurements


def test_the_ratio_of_split_steps_is_that_of_the_results():
    rows = json.loads(read("benchmarks/results/split.json"))["rows"]
    ours, theirs = (row["seconds"] for row in rows if row["processes"] == 1)
    sentence = f"LSGPT's step takes {ours / theirs:.2f} of the time with all heads global ({ours:.1f} s instead of"
    assert f"{sentence} {theirs:.1f})." in " ".join(read("docs/measurements.md").split())


def test_figures_of_longer_healing_are_those_of_the_run():
    measurements = " ".join(read("docs/measurements.md").split())
    names = ("smollm2.gguf", "smollm2-ls-healed", "smollm2-ls-healed-longer")
    found = measured(*names)
    _, *rows = quality.summarize(list(names), found)
    ratios = " to ".join("{} ({})".format(*ratios_of(row)) for row in rows)
    run = json.loads(read("benchmarks/results/quality/healing-longer.json"))
    assert f"--max_steps {run['step']} --max_eval_blocks 4" in measurements
    before, after = (f"{run[x]:.2f}" for x in ("perplexity_before_training", "eval_perplexity"))
    own = f"though not on the run's own ({before} before, {after} after)"
    assert f"lowers the perplexity on the same blocks from {ratios}, {own}, and" in measurements
    (shorter, counts), (longer, _) = (answered(found, name, 1024) for name in names[1:])
    assert sum(longer) == sum(shorter)
    sentence = f"finds no more numbers: {sum(longer)} instead of {sum(shorter)} of {sum(counts)}."
    assert sentence in measurements


def test_figures_of_healing_on_longer_blocks_are_those_of_the_run():
    healed = ("smollm2-ls-healed-cpu", "smollm2-ls-healed-8192-cpu", "smollm2-ls-healed-8192-longer-cpu")
    names = ("smollm2.gguf", *healed)
    files = ("quality.jsonl", "quality-8192.jsonl")
    *rows, of_longer = json.loads(read("benchmarks/results/quality/quality-8192.json"))["rows"]
    for name, expected in ((names[2], [rows[1]]), (names[3], [rows[0], of_longer])):
        found = quality.summarize([names[0], name], measured(names[0], name, files=files))
        assert json.loads(json.dumps(found))[-len(expected) :] == expected
    assert all(
        row["retrieval"][length]["passages"] == 100 for row in (*rows, of_longer) for length in ("4096", "8192")
    )
    found = measured(*names, files=files)
    (source, counts), (healed, _), (shorter, _), (longer, _) = (answered(found, name, 2048) for name in names)
    to_source, to_healed = (paired_p_value(found, names[3], other, 2048) for other in names[:2])
    run, other = (
        json.loads(read(f"benchmarks/results/quality/healing-8192{name}-two-cores.json")) for name in ("-longer", "")
    )
    assert (run["tokens"], other["tokens"]) == (run["step"] * 8192, other["step"] * 8192)
    assert to_healed < 0.001
    measurements = " ".join(re.sub(r"\]\([^)]*\)|\[", "", read("docs/measurements.md")).split())
    ratios, blocks = ([of_longer["perplexity"][size][x] for size in ("2048", "8192")] for x in ("ratio", "blocks"))
    for sentence in (
        f"after {run['step']} steps of 8,192 tokens ({run['train_seconds'] / 60:.0f} minutes on two CPU cores, "
        f"with MKL's AVX-512 kernels, {run['peak_memory_bytes'] / 1e9:.0f} GB), the model finds {sum(longer)} of "
        f"{sum(counts)} numbers at least 2,048 tokens back ({longer[0]} literal, {longer[1]} paraphrased); healed as "
        f"above, {sum(healed)} (paired: p < 0.001); the source, {sum(source)} ({source[0]} and {source[1]}; "
        f"p = {to_source:.2f}).",
        f"After {other['step']} steps, it finds {sum(shorter)}.",
        f"Its perplexity is {ratios[0]:.3f} of the source's in {blocks[0]} blocks of 2,048 tokens, {ratios[1]:.3f} in "
        f"{blocks[1]} of 8,192.",
    ):
        assert sentence in measurements


def test_figures_of_healing_for_vllm_are_those_of_the_run():
    page = " ".join(read("docs/healing.md").split())
    names = ("smollm2.gguf", "smollm2-ls-healed", "smollm2-ls-for-vllm")
    found = measured(*names)
    ratios = [ratios_of(row) for row in quality.summarize(list(names), found)[1:]]
    short, long = (sum(key[:3] == (names[2], "perplexity", size) for key in found) for size in (2048, 8192))
    assert f"is {ratios[1][0]} of the source's in {short} blocks of 2,048 tokens (" in page
    assert f") and {ratios[1][1]} in {long} of 8,192 (healed: {ratios[0][0]} and {ratios[0][1]})" in page
    loss = {(key[0], key[-1]): row["loss"] for key, row in found.items() if key[1:3] == ("perplexity", 2048)}
    by_block = sorted(math.exp((loss[names[2], i] - loss[names[0], i]) / 2047) for name, i in loss if name == names[2])
    *others, lowest, _, _, _, _, _, _, highest = by_block
    mean = math.exp(statistics.fmean(map(math.log, others)))
    assert max(others) < 1.02  # far from the 8
    assert f"tokens (8 blocks: {lowest:.2f} to {highest:.2f}; the others: {mean:.3f}) and" in page
    (source, counts), (healed, _), (for_vllm, _) = (answered(found, name, 1024) for name in names)
    sentence = f"{sum(for_vllm)} of {sum(counts)} numbers at least 1,024 tokens back (healed: {sum(healed)}; source:"
    assert f"{sentence} {sum(source)})" in page
    before, run = (json.loads(read(f"benchmarks/results/quality/{x}.json")) for x in ("healing", "healing-for-vllm"))
    ratio = run["eval_perplexity"] / before["eval_perplexity"]
    assert f"falls from {run['perplexity_before_training']:.1f} to {run['eval_perplexity']:.1f} in these" in page
    assert (
        f"{run['step']} steps, {ratio - 1:.1%} above that of the healed model ({before['eval_perplexity']:.1f};"
        in page
    )
    assert run["teacher_perplexity"] == before["teacher_perplexity"]
    assert f"teacher: {run['teacher_perplexity']:.1f}, on four blocks" in page
    served, whole = (row for row in json.loads(read("benchmarks/results/serving-smollm2.json"))["rows"])
    assert served["equal_tokens"] == [60] * 6
    sentence = "vLLM continued six passages of 20 to 2,000 tokens with the same 60 tokens as Transformers, from a"
    assert sentence in page
    serving = " ".join(read("docs/serving.md").split())
    assert f"holds [{served['requests']:.2f} requests](" in serving
    assert f"in float32, and {whole['requests']:.2f} with all heads global." in serving
    readme = " ".join(read("README.md").split())
    assert (
        f"#sinks-for-vllm), {served['requests'] / whole['requests']:.1f} times as many as the original, but it"
        in readme
    )
    assert f"but it finds {sum(for_vllm)} of {sum(counts)} numbers (original: {sum(source)})." in readme
    requests = {
        row["model"]: row["requests"]
        for row in json.loads(read("benchmarks/results/serving.json"))["rows"]
        if (row["block_size"], row["max_num_batched_tokens"]) == (128, 512)
    }
    assert f"**{requests['lsgpt'] / requests['gpt2']:.1f} times as many requests** of 8,192 tokens" in readme
    requests = {
        row["model"]: row["requests"]
        for row in json.loads(read("benchmarks/results/serving.json"))["rows"]
        if (row["block_size"], row["max_num_batched_tokens"]) == (128, 2048)
    }
    assert f"with 2,048, {requests['lsgpt'] / requests['gpt2']:.1f} times)" in readme
    rows = json.loads(read("benchmarks/results/serving-heads.json"))["rows"]
    *counts, whole = (row["requests"] for row in rows if row["block_size"] == 128)
    one, two, three = (f"{count / whole:.1f}" for count in counts)
    assert f"With 1, 2 or 3 of 9 heads global, it holds [{one}, {two} or {three} times](" in serving


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
