"""Studies: runs at a small size that are interrupted and go on, reports from results alone."""

import json
import math
import shutil
from pathlib import Path

import fresh
import pytest
import torch

import lsgpt_cli
from lsgpt.modeling_lsgpt import GLOBAL
from lsgpt.studies import STUDIES, Runs, TrainingStudy, judge, load_study, read_lines, run_study, write_report
from lsgpt.studies import __main__ as one_run
from lsgpt.studies.learning_rates import arm_at, sensitivity
from lsgpt.studies.runner import read_runs, result_file
from lsgpt.studies.study import (
    NUM_POINTS,
    curves_over,
    format_values,
    is_below,
    is_no_lower,
    spike_score,
    thin,
)
from lsgpt.training.compare import join_arm
from lsgpt.training.train import largest


ROOT = Path(__file__).parents[2]
RESULTS = sorted((ROOT / "studies" / "results").glob("*/runs.jsonl"))
TRAININGS = [name for name in STUDIES if isinstance(load_study(name), TrainingStudy)]

SMALL = {
    "dataset_name": "text.txt",
    "streaming": "false",
    "tokenizer": "bpe",
    "preprocessing_num_workers": "1",
    "validation_split_percentage": "50",
    "max_eval_blocks": "2",
    "max_steps": "4",
    "warmup_steps": "1",
    "gradient_accumulation_steps": "1",
    "per_device_train_batch_size": "2",
    "logging_steps": "1",
    "max_logit_every_n_steps": "1",
    "save_steps": "1",
    "bf16": "false",
    "torch_compile": "false",
    "dataloader_num_workers": "0",
    "use_cpu": "true",
    "prompt": "line",
}
SHAPE = (
    "{vocab_size: 300, hidden_size: 24, num_hidden_layers: 1, num_attention_heads: 6, head_dim: 4, sliding_window: 4}"
)


def small_fields(**changes):
    fields = {**SMALL, "config_overrides": SHAPE, **changes}
    return [part for name, value in fields.items() for part in (f"--{name}", value)]


@pytest.fixture(autouse=True)
def in_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("".join(f"line {i} of {i * i}\n" for i in range(8000)))


def test_a_study_goes_on_where_it_was_and_repeats_itself(tmp_path):
    arm = "ls-lr0.01"
    fields = small_fields(max_steps="12", block_size="64")
    program = fresh.Program("-m", "lsgpt_cli", "study", "learning-rates", "--only", arm, "--seeds", "1", *fields)
    work = tmp_path / "runs" / "study-learning-rates-micro" / "work"
    program.wait_until(lambda: any((work / arm).glob("seed-42/checkpoint-*/trainer_state.json")))
    program.process.terminate()  # SIGTERM
    program.wait()
    assert "Run the same command again to continue" in program.errors

    report = run_study("learning-rates", num_seeds=1, only=[arm], fields=fields)
    (line,) = read_lines(report.parent)
    same = line["values"]
    assert line["arm"] == arm and same["step"] == 12 and line["environment"]["commit"]
    # It resumed: the run's log has the line of both starts.
    assert (work / arm / "seed-42.log").read_text().count("Training ") == 2

    again = load_study("learning-rates").run(arm, 42, "micro", tmp_path / "again", fields)
    assert again["eval_loss"] == pytest.approx(same["eval_loss"], rel=1e-6)
    assert [step for step, _ in again["curves"]["loss"]] == [step for step, _ in same["curves"]["loss"]]

    # One seed is no verdict; the report needs nothing but the lines.
    text = report.read_text()
    assert text.count("Verdict: **open**") == len(load_study("learning-rates").claims)
    copy = tmp_path / "copy"
    copy.mkdir()
    shutil.copy(report.parent / "runs.jsonl", copy)
    assert lsgpt_cli.main(["study", "learning-rates", "--report", str(copy)]) == 0
    assert (copy / "report.md").read_text() == text

    with pytest.raises(ValueError, match="`--output-dir` must be new, or hold runs with the same fields"):
        run_study("learning-rates", num_seeds=1, only=[arm], fields=small_fields(max_steps="13"))
    with pytest.raises(ValueError, match=r"hold runs of the scale paper; those in .* are of the scale micro"):
        run_study("learning-rates", "paper", output_dir=report.parent, fields=fields)

    # A crash while the line was written: the run's results are still there, and become a line again.
    runs_file = report.parent / "runs.jsonl"
    whole = runs_file.read_text()
    runs_file.write_text(whole + whole[:100])
    assert read_lines(report.parent) == [line]
    runs_file.write_text(whole[:100])
    run_study("learning-rates", num_seeds=1, only=[arm], fields=fields)
    assert [(line["arm"], line["values"]) for line in read_lines(report.parent)] == [(arm, same)]


def test_runs_flush_denormal_numbers(tmp_path, monkeypatch):
    class Products:
        def run(self, arm, seed, scale, folder, fields):
            return {"product": (torch.tensor([1e-30]) * 1e-10).item()}

    monkeypatch.setattr(one_run, "load_study", lambda name: Products())
    assert Products().run("arm", 42, "micro", tmp_path, ())["product"] > 0
    try:
        one_run.main("products", "micro", "arm", "42", str(tmp_path))
    finally:
        torch.set_flush_denormal(False)
    assert json.loads(result_file(tmp_path, "arm", 42).read_text())["values"] == {"product": 0}


AT_PAPER_SCALE = {
    "learning-rates": "ls-sinks-lr0.01",
    "stabilizers": "ls-adagc-lr0.003",
    "long-training": "ls",
    "heads-and-windows": "g2",
    "heads-or-layers": "half-spread",
    "positions": "ls-sinusoidal",
    "sparse-dependencies": "mhsa-hidden",
    "lengths": "ls-rope",
    "where-heads-look": "ls",
    "noisy-text": "corrupted-e0.7",
}


@pytest.mark.parametrize("name", TRAININGS)
def test_the_papers_scale_runs(tmp_path, monkeypatch, name):
    study, arm = load_study(name), AT_PAPER_SCALE[name]
    if name == "lengths":  # its arms say how long blocks are
        small = {"block_size": 64, "per_device_train_batch_size": 2}
        overrides = {"position_embedding_type": "rope", "max_position_embeddings": 64}
        monkeypatch.setattr(study, "arms", lambda scale: {arm: {**small, "config_overrides": overrides}})
    values = study.run(arm, 42, "paper", tmp_path, small_fields(stop_at_step="3", block_size="64"))
    assert values["step"] == 3 and math.isfinite(values["eval_loss"])
    assert values["curves"]["max_logit"]
    assert json.dumps(values)
    if name == "lengths":
        assert set(values["beyond"]) == {"1", "2", "4"}
    if name == "long-training":
        assert len(values["max_logits_by_head"]["3"]) == 1
    if name == "where-heads-look":
        assert values["is_local"] == [[False] + [True] * 5]
        assert len(values["entropy"][0]) == 6


@pytest.mark.parametrize("name", STUDIES)
def test_every_study_says_what_it_does_before_it_is_run(name, capsys):
    assert lsgpt_cli.main(["study"]) == 0
    assert name in capsys.readouterr().out
    study = load_study(name)
    assert study.name == name and study.title and study.question and study.protocol
    assert set(study.scales) == {"micro", "paper"}
    assert study.scales["micro"].num_seeds >= 2
    for scale in study.scales:
        arms = study.arms(scale)
        assert arms and all(Path(arm).name == arm for arm in arms)
    with pytest.raises(SystemExit):
        lsgpt_cli.main(["study", name, "--help"])
    text = capsys.readouterr().out
    assert f"about {study.scales['micro'].hours:g} hours of two CPU cores" in text
    assert "nobody has run it" in text
    assert all(claim.text in text for claim in study.claims.values())
    assert {finding.verdict for finding in judge(study, Runs()).values()} == {"open"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["learning-rate"], "did you mean 'learning-rates'"),
        (["learning-rates", "--scale", "huge"], "`--scale` must be one of micro, paper; got 'huge'"),
        (["learning-rates", "--only", "ls-lr7"], "`--only` must name arms of learning-rates.*got 'ls-lr7'"),
        (["learning-rates", "--report", "nowhere"], "`--report` must be a folder with the runs of a study"),
        (["learning-rates", "--max_stps", "3"], "unknown field '--max_stps'; did you mean '--max_steps'"),
    ],
)
def test_mistakes_are_found_before_the_first_run(arguments, message, capsys):
    assert lsgpt_cli.main(["study", *arguments]) == 2
    error = capsys.readouterr().err
    assert message.split(".*")[0] in error and message.split(".*")[-1] in error
    assert not list(Path().glob("runs/*/runs.jsonl"))


@pytest.mark.parametrize("file", RESULTS, ids=lambda file: file.parent.name)
def test_committed_reports_are_made_of_committed_results(tmp_path, file):
    shutil.copy(file, tmp_path)
    study = load_study(file.parent.name)
    report = write_report(study, tmp_path)
    assert report.read_text() == (file.parent / "report.md").read_text()
    assert {plot.name for plot in tmp_path.glob("*.png")} == {plot.name for plot in file.parent.glob("*.png")}
    assert all("/" not in line["environment"]["commit"] for line in read_lines(file.parent))


def made_up(losses, key="eval_loss", **values):
    return [{key: loss, "first_loss": 7.0, "diverged": False, **values} for loss in losses]


def test_learning_rates_are_judged_by_their_criteria():
    study = load_study("learning-rates")
    base = {"mhsa": 4.5, "ls": 4.3, "ls-sinks": 4.3, "local-only": 4.1}
    logits = {1e-3: 10.0, 3e-3: 20.0, 1e-2: 40.0, 3e-2: 150.0, 1e-1: 4000.0}
    runs = Runs()
    for name, loss in base.items():
        for rate, logit in logits.items():
            of_arm = made_up([loss + abs(math.log10(rate) + 2) + 0.001 * seed for seed in range(3)])
            runs[arm_at(name, rate)] = [{**run, "max_logit": logit * (0.5 if name == "ls" else 1)} for run in of_arm]
    findings = judge(study, runs)
    assert {name: finding.verdict for name, finding in findings.items()} == {
        "lower-loss": "seen",
        "smaller-logits": "seen",  # 75 where those of mhsa are 150
        "less-sensitive": "not seen",
        "global-head": "opposite",
        "sinks": "not seen",
    }
    assert "rate 0.01" in findings["lower-loss"].figure and "4.301 ± 0.001" in findings["lower-loss"].figure
    # A run that diverged counts as its loss before training, and at its rate no arm is best.
    for run in runs[arm_at("ls", 1e-2)]:
        run.update(eval_loss=None, diverged=True)
    assert judge(study, runs)["less-sensitive"].verdict == "opposite"
    assert "(rate 0.01)" not in judge(study, runs)["lower-loss"].figure.split(",")[0]
    assert sensitivity(runs, "ls", [1e-2, 3e-2])[0] == pytest.approx((7.0 - runs["ls-lr0.03"][0]["eval_loss"]) / 2)
    # One seed alone is no verdict.
    runs[arm_at("ls", 1e-2)] = runs[arm_at("ls", 1e-2)][:1]
    assert {finding.verdict for finding in judge(study, runs).values()} == {"open"}


def test_a_run_that_diverged_has_no_loss(tmp_path):
    """Whatever the last good weights have: the arm is not the best one, and the table tells."""
    study = load_study("positions")
    lines = []
    for arm in study.arms("micro"):
        for i, run in enumerate(made_up([4.3, 4.31, 4.32], max_logit=9.0, spike_score=0.0)):
            values = run | ({"diverged": True, "eval_loss": 4.0} if (arm, i) == ("ls-rope", 1) else {})
            lines.append({"arm": arm, "seed": 42 + i, "scale": "micro", "values": values})
    (tmp_path / "runs.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    runs = read_runs(study, tmp_path)
    assert runs.column("ls-rope", "eval_loss") == [4.3, math.inf, 4.32]
    assert "4.310 ± 0.014 (1 not finite)" in study.report(runs, tmp_path)
    assert judge(study, runs)["any-positions"].verdict == "not seen"


def test_seeds_are_compared_only_if_all_arms_have_them():
    study = load_study("lengths")

    def judged(seeds):
        """`ls` is always better by 0.1 with the same seed; losses differ much between the seeds."""
        runs = Runs()
        for arm in study.arms("micro"):
            base = 4.2 if arm.startswith("ls") else 4.3
            of_arm = [made_up([base + 0.5 * seed], max_logit=9.0, seed=seed)[0] for seed in seeds.get(arm, (1, 2, 3))]
            runs[arm] = [run | {"beyond": {"1": 4.3, "4": 4.3}} for run in of_arm]
        return judge(study, runs)["grows-with-length"]

    assert "advantage 0.100 ± 0.000 nats at 64 tokens, 0.100 ± 0.000 at 2,048" in judged({}).figure
    assert judged({"ls-n64": (2, 3)}) == judged({})
    assert judged({"ls-n64": (2, 3), "mhsa-rope": (1, 2)}).verdict == "open"


@pytest.mark.parametrize("name", ["lengths", "heads-and-windows", "long-range"])
def test_claims_are_judged_at_the_papers_scale(name):
    """By its own arms, whose names have other numbers."""
    study, runs = load_study(name), Runs()
    runs.scale = "paper"
    values = {"beyond": {"1": 4.3, "4": 4.3}, "far_accuracy": 0.9, "max_logit": 9.0, "spike_score": 0.0}
    for arm in study.arms("paper"):
        runs[arm] = made_up([4.3, 4.31], **values)
    findings = judge(study, runs)
    assert "open" not in {finding.verdict for finding in findings.values()}
    if name == "lengths":
        assert "at 256 tokens" in findings["grows-with-length"].figure and "at 8,192" in findings["logits-grow"].figure
    if name == "heads-and-windows":
        assert "of 2,048 tokens" in findings["window-follows-length"].figure


@pytest.mark.parametrize("name", ["lengths", "heads-and-windows"])
def test_blocks_of_all_lengths_are_evaluated_on_the_same_text(name):
    study = load_study(name)
    base = study.base("micro", [])
    parts = [join_arm(base.recipe, arm, changes) for arm, changes in study.arms("micro").items()]
    assert {part.data.block_size * part.data.max_eval_blocks for part in parts} == {51_200}
    assert len({part.data.block_size for part in parts}) > 1


def test_what_stabilizers_add_is_judged_by_all_of_them():
    study = load_study("stabilizers")

    def judged(spread, **losses):
        """The verdict if all arms have a loss of 4.3 but those named, with this spread over three seeds."""
        runs = Runs()
        for arm in study.arms("micro"):
            loss = losses.get(arm.split("-lr")[0].replace("-", "_"), 4.3)
            runs[arm] = made_up([loss, loss + spread, loss - spread], max_logit=9.0)
        return judge(study, runs)["on-top"].verdict

    assert judged(0.01) == "seen"
    assert judged(0.1) == "not seen"  # the spread may hide a difference
    assert judged(0.01, ls_zloss=4.2, ls_adagc=4.29) == "opposite"
    assert judged(0.01, ls_qknorm=4.4, mhsa=4.0) == "seen"  # a stabilizer that does harm adds nothing, either
    assert judged(math.inf) == "not seen"


def test_numbers_of_heads_and_windows_are_judged_by_all_of_them():
    study = load_study("heads-and-windows")

    def judged(spread=0.01, **losses):
        runs = {}
        for arm in study.arms("micro"):
            loss = losses.get(arm.replace("-", "_"), 4.3)
            runs[arm] = made_up([loss, loss + spread, loss - spread])
        return [finding.verdict for finding in judge(study, Runs(runs)).values()]

    assert judged(w24=4.29, n128_w8=4.29) == ["seen", "seen", "not seen"]
    assert judged(spread=0.1, w24=4.29, n128_w8=4.29) == ["not seen", "not seen", "not seen"]
    assert judged(g3=4.2, w4=4.2, w256=4.1, n128_w8=4.2) == ["opposite", "opposite", "seen"]
    assert judged(g0=4.2, w24=4.2, n128_w48=4.2) == ["not seen", "not seen", "opposite"]
    # A window at which a run diverged is not the best one, however well the others did.
    runs = Runs({arm: made_up([4.3, 4.3]) for arm in study.arms("micro")})
    runs["w4"], runs["w48"] = made_up([3.0, None]), made_up([4.1, 4.1])
    assert "best window 48 of 512 tokens" in judge(study, runs)["window-follows-length"].figure


@pytest.mark.parametrize("scale", ["micro", "paper"])
def test_split_heads_and_split_layers_have_equally_large_caches(scale):
    study = load_study("heads-or-layers")
    base = study.base(scale, ["--bf16", "false"])  # no GPU here
    sizes = {}
    for arm, changes in study.arms(scale).items():
        config = join_arm(base.recipe, arm, changes).build_config()
        num_global = [groups.get(GLOBAL, 0) for groups in config.head_groups]
        if arm.endswith(("layer", "layers")):
            assert set(num_global) == {0, config.num_attention_heads}
        sizes.setdefault(arm.split("-")[0], set()).add((sum(num_global), config.kv_cache_bytes(512)))
    num_heads = config.num_hidden_layers * config.num_attention_heads
    assert {name: [number for number, _ in each] for name, each in sizes.items()} == {
        "mhsa": [num_heads],
        "ls": [config.num_hidden_layers],
        "one": [config.num_attention_heads],
        "half": [num_heads // 2],
    }


def test_split_heads_are_compared_with_the_best_split_of_layers():
    study = load_study("heads-or-layers")

    def judged(**losses):
        runs = Runs()
        for arm in study.arms("micro"):
            loss = losses.get(arm.replace("-", "_"), 4.3)
            runs[arm] = made_up([loss, loss + 0.01, loss - 0.01])
            for run in runs[arm]:
                run["max_logit"] = 10 * run["eval_loss"]
        return {finding.verdict for finding in judge(study, runs).values()}

    assert judged(one_spread=4.2, half_spread=4.2) == {"seen"}
    assert judged(one_spread=4.2) == {"not seen"}
    assert judged(one_spread=4.2, half_spread=4.2, one_last_layer=4.2) == {"not seen"}
    assert judged(one_middle_layer=4.2, half_odd_layers=4.2) == {"opposite"}
    assert judged(one_spread=4.2, half_spread=4.2, one_first_layer=math.inf, half_even_layers=math.inf) == {"seen"}


def test_lengths_are_judged_by_their_criteria():
    study = load_study("lengths")

    def judged(short, long, spread=0.01):
        """The verdicts if `ls` has these advantages, in nats, at the shortest and at the longest length."""
        runs = {}
        for arm in study.arms("micro"):
            gain = {"ls-n64": short, "ls-n2048": long}.get(arm, 0.0)
            of_arm = made_up([4.3 - gain + seed * spread for seed in range(3)], max_logit=9.0)
            beyond = {"1": 4.3, "4": 4.4 if arm.startswith("ls") else 4.6}
            runs[arm] = [{**run, "beyond": beyond} for run in of_arm]
        return {claim: finding.verdict for claim, finding in judge(study, Runs(runs)).items()}

    assert judged(0.0, 0.2) == {
        "grows-with-length": "seen",
        "none-when-short": "seen",
        "logits-grow": "not seen",
        "beyond": "seen",
    }
    assert judged(0.0, 0.2, spread=0.2)["none-when-short"] == "not seen"
    assert judged(0.2, 0.1)["none-when-short"] == judged(0.2, 0.1)["grows-with-length"] == "opposite"
    assert judged(0.1, 0.2)["none-when-short"] == "not seen"


def test_summaries():
    assert is_no_lower([2.0, 2.01], [2.0, 2.01]) and is_no_lower([3.0, 3.01], [2.0, 2.01])
    assert not is_no_lower([1.9, 1.91], [2.0, 2.01]) and not is_no_lower([2.0, 2.2], [2.0, 2.2])
    assert not is_no_lower([math.inf, math.inf], [math.inf, math.inf])
    assert is_below([1.0, 1.1, 0.9], [2.0, 2.1, 1.9])
    assert not is_below([1.0, 3.0, 2.0], [2.0, 4.0, 3.0])
    assert not is_below([2.0, 2.1], [1.0, 1.1])
    # One diverged run decides nothing, and neither does what is not a number.
    assert is_below([1.0, 1.1], [math.inf, math.inf]) and not is_below([math.inf, math.inf], [1.0, 1.1])
    assert not is_below([1.0, 1.1], [0.5, math.inf]) and not is_below([0.5, math.inf], [1.0, 1.1])
    assert not is_below([math.inf, 1.0], [math.inf, math.inf])
    assert is_below([-math.inf, -math.inf], [0.0, 0.1]) and not is_below([0.0, 0.1], [-math.inf, -math.inf])
    assert not is_below([-math.inf, 0.0], [0.0, 0.1])
    assert not is_below([1.0, math.nan], [2.0, 2.1]) and not is_below([2.0, 2.1], [1.0, math.nan])
    assert curves_over(Runs(a=made_up([1.0, None])), [(1, "a"), (2, "b")], "eval_loss")[0] == [(1, 1.0)]
    assert format_values([1.0, 2.0, None]) == "1.500 ± 0.707 (1 not finite)"
    assert format_values([None]) == "not finite" and format_values([]) == "-"
    curve = [(step, float(step % 7)) for step in range(1, 1001)]
    assert math.isnan(thin([(1, 3.0), (2, math.nan), (3, 1.0)], largest, num_points=1)[0][1])
    assert len(thin(curve, max)) <= NUM_POINTS and thin(curve, max)[-1][0] == 1000
    assert max(value for _, value in thin(curve, max)) == 6.0
    noise = [math.sin(i) for i in range(400)]
    assert spike_score(noise) == 0
    assert spike_score([*noise[:200], 50.0, *noise[201:]]) == pytest.approx(1 / 272)
    assert spike_score([*noise[:200], math.nan, *noise[201:]]) == pytest.approx(1 / 272)
