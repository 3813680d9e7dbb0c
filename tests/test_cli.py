"""The `lsgpt` command as users run it, on real text and with a model of a few thousand weights."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from PIL import Image
from safetensors.torch import load_file, save_file
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel, set_seed

import lsgpt
import lsgpt_cli
from lsgpt import LSGPTConfig, LSGPTForCausalLM
from lsgpt.configuration import load_arms
from lsgpt.training.train import generate_sample
from lsgpt.utilities import encode_prompt, looks_like_a_path, refuse_tensors
from lsgpt.utilities.model_summary import slowest_share


TINY = (
    "{vocab_size: 1000, hidden_size: 16, num_hidden_layers: 1, num_attention_heads: 2, sliding_window: 8,"
    " max_position_embeddings: 64, position_embedding_type: learned}"
)
QUICK_RUN = (
    *("--config_overrides", TINY, "--block_size", "64", "--max_steps", "4", "--logging_steps", "2"),
    *("--warmup_steps", "1", "--eval_strategy", "no", "--per_device_eval_batch_size", "64"),
    *("--max_eval_blocks", "64"),
)


def read_metrics(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A working folder in which `lsgpt train` has run, in a process of its own, and that process."""
    cwd = tmp_path_factory.mktemp("work")
    command = [sys.executable, "-m", "lsgpt_cli", "train", *QUICK_RUN]
    process = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=300)
    assert process.returncode == 0, process.stderr
    return cwd, process


def test_train_leaves_everything_in_one_folder(trained):
    cwd, process = trained
    folder = cwd / "runs" / "demo"
    assert [path.name for path in cwd.iterdir()] == ["runs"]
    assert [path.name for path in folder.parent.iterdir()] == ["demo"]
    files = {path.name for path in folder.iterdir()}
    assert files >= {
        *("config.json", "generation_config.json", "model.safetensors", "modeling_lsgpt.py"),
        *("tokenizer.json", "tokenizer_config.json", "metrics.jsonl", "recipe.yaml", "report.md", "loss.png"),
    }

    metrics = read_metrics(folder)
    assert [line["step"] for line in metrics if "loss" in line] == [2, 4]
    (eval_loss,) = (line["eval_loss"] for line in metrics if "eval_loss" in line)
    (perplexity,) = (line["eval_perplexity"] for line in metrics if "eval_perplexity" in line)
    assert perplexity == pytest.approx(torch.tensor(eval_loss).exp().item(), rel=1e-4)

    recipe = yaml.safe_load((folder / "recipe.yaml").read_text())
    assert recipe["max_steps"] == 4
    assert recipe["config_overrides"]["hidden_size"] == 16
    report = (folder / "report.md").read_text()
    assert f"{perplexity:.2f}" in report
    assert Image.open(folder / "loss.png").format == "PNG"

    # Nothing but progress bars: no warning of a library that users know nothing about. (bitsandbytes, which `lsgpt`
    # does not install, names a missing kernel on some CPUs as soon as Transformers imports it.)
    lines = [line.strip() for line in re.split(r"[\r\n]", process.stderr)]
    assert [x for x in lines if x and not re.search(r"\d+%\||\d examples|gemm_4bit_forward", x)] == []
    assert "Training 36.1 k parameters on" in process.stdout
    next_steps = process.stdout.split("Next:")[1]
    prompt = json.loads((folder / "results.json").read_text())["prompt"]
    assert shlex.join(["lsgpt", "generate", "runs/demo", prompt]) in next_steps
    assert "lsgpt info runs/demo" in next_steps


def test_result_loads_through_the_auto_classes(trained, monkeypatch):
    folder = trained[0] / "runs" / "demo"
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert type(model) is LSGPTForCausalLM
    assert len(tokenizer) == model.config.vocab_size == 1000
    for token in ("bos_token_id", "eos_token_id", "pad_token_id"):
        assert getattr(model.config, token) == getattr(model.generation_config, token) == getattr(tokenizer, token)
    snippet = trained[1].stdout[trained[1].stdout.index("  import lsgpt") :]
    monkeypatch.chdir(trained[0])
    exec("\n".join(map(str.strip, snippet.splitlines())), {})


def test_repeating_a_recipe_goes_elsewhere_and_gives_the_same(trained, monkeypatch):
    cwd = trained[0]
    monkeypatch.chdir(cwd)
    before = {path: path.stat().st_mtime_ns for path in (cwd / "runs" / "demo").iterdir()}
    assert lsgpt_cli.main(["train", "runs/demo/recipe.yaml"]) == 0
    assert {path: path.stat().st_mtime_ns for path in before} == before

    first, second = (
        [{key: line[key] for key in line if "loss" in key} for line in read_metrics(cwd / "runs" / name)]
        for name in ("demo", "demo-2")
    )
    assert first == second
    recipes = [(cwd / "runs" / name / "recipe.yaml").read_text() for name in ("demo", "demo-2")]
    assert recipes[0] == recipes[1]
    weights = [(cwd / "runs" / name / "model.safetensors").read_bytes() for name in ("demo", "demo-2")]
    assert weights[0] == weights[1]


def test_generate_streams_what_the_model_generates(trained, capsys):
    """Greedily, and by sampling that leaves nothing but the most likely token."""
    folder = trained[0] / "runs" / "demo"
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    inputs = tokenizer("import", return_tensors="pt", return_token_type_ids=False)
    expected = model.generate(**inputs, max_new_tokens=12, do_sample=False)
    for options in (["--greedy"], ["--top-k", "1"], ["--temperature", "1e-6"]):
        assert lsgpt_cli.main(["generate", str(folder), "import", *options, "--max_new_tokens", "12"]) == 0
        assert capsys.readouterr().out == tokenizer.decode(expected[0], skip_special_tokens=True) + "\n"


@pytest.mark.parametrize(("prompt", "seed"), [("import", 3), ("def ", 0)])
def test_generate_samples_what_the_model_samples(trained, capsys, prompt, seed):
    folder = str(trained[0] / "runs" / "demo")
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
    set_seed(seed)
    expected = model.generate(**inputs, max_new_tokens=20, do_sample=True, temperature=0.8, top_k=50)
    for option in ("--max-new-tokens", "--max_new_tokens"):
        assert lsgpt_cli.main(["generate", folder, prompt, "--seed", str(seed), option, "20"]) == 0
        assert capsys.readouterr().out == tokenizer.decode(expected[0], skip_special_tokens=True) + "\n"


def test_a_tokenizer_that_ends_texts_does_not_end_the_prompt(trained, tmp_path, capsys):
    folder, options = tmp_path / "model", ["--greedy", "--max-new-tokens", "12"]
    shutil.copytree(trained[0] / "runs" / "demo", folder)
    assert lsgpt_cli.main(["generate", str(folder), "import", *options]) == 0
    expected = capsys.readouterr().out
    plain, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    tokenizer, end = AutoTokenizer.from_pretrained(folder), (plain.eos_token, plain.eos_token_id)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=f"$A {end[0]}", special_tokens=[end])
    tokenizer.save_pretrained(folder)
    assert AutoTokenizer.from_pretrained(folder)("import")["input_ids"][-1] == plain.eos_token_id
    assert lsgpt_cli.main(["generate", str(folder), "import", *options]) == 0
    assert capsys.readouterr().out == expected
    samples = []
    for one in (plain, tokenizer):
        set_seed(0)
        samples.append(generate_sample(model, one, "import"))
    assert samples[0] == samples[1]
    # What the user wrote stays, and so does the only token.
    for prompt in (f"import{end[0]}", ""):
        ids = encode_prompt(tokenizer, prompt)["input_ids"]
        assert ids.tolist() == [[*plain("import" if prompt else "")["input_ids"], *([end[1]] * (1 + bool(prompt)))]]


def test_generate_takes_the_last_position(trained, capsys):
    """The prompt has two tokens, and the model 64 positions."""
    folder = str(trained[0] / "runs" / "demo")
    assert lsgpt_cli.main(["generate", folder, "def ", "--greedy", "--max_new_tokens", "62"]) == 0
    assert capsys.readouterr().out.startswith("def ")


def test_generate_past_the_positions_of_gpt2(trained, tmp_path, capsys):
    """Which cannot read more, and would raise an error in the middle of the text."""
    tokenizer = AutoTokenizer.from_pretrained(trained[0] / "runs" / "demo")
    tokenizer.save_pretrained(tmp_path)
    config = GPT2Config(vocab_size=len(tokenizer), n_positions=16, n_embd=8, n_layer=1, n_head=1)
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    assert lsgpt_cli.main(["generate", str(tmp_path), "import", "--max-new-tokens", "20"]) == 2
    assert "because the model has 16 learned positions" in capsys.readouterr().err


def test_generate_past_the_positions_of_a_rotary_model(trained, tmp_path, capfd):
    config = LSGPTConfig(
        **{**yaml.safe_load(TINY), "position_embedding_type": "rope", "max_position_embeddings": 16}, eos_token_id=None
    )
    LSGPTForCausalLM(config).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(trained[0] / "runs" / "demo").save_pretrained(tmp_path)
    capfd.readouterr()
    assert lsgpt_cli.main(["generate", str(tmp_path), "import", "--greedy", "--max-new-tokens", "20"]) == 0
    errors = re.split(r"[\r\n]+", capfd.readouterr().err.strip())
    assert [line for line in errors if "%|" not in line] == [
        "lsgpt: note: the model was made for 16 tokens; text beyond them may be worse"
    ]


def cut_weights(folder):
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[:-100])


def forget_a_layer(folder):
    weights = load_file(folder / "model.safetensors")
    kept = {name: tensor for name, tensor in weights.items() if ".layers.0.mlp." not in name}
    save_file(kept, folder / "model.safetensors", {"format": "pt"})


def forget_the_tokenizer(folder):
    (folder / "tokenizer_config.json").unlink()


def change_config(**fields):
    def change(folder):
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **fields}))

    return change


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (cut_weights, "the weights in 'FOLDER' cannot be read: Error while deserializing header"),
        (forget_a_layer, "configuration; missing: model.layers.0.mlp.down_proj.weight, model.layers.0.mlp.up_proj"),
        (forget_the_tokenizer, "'FOLDER' has no tokenizer"),
        (change_config(hidden_size="big"), "Field 'hidden_size' expected int, got str (value: 'big')"),
        (change_config(vocab_size=1001), "cannot load a model and its tokenizer from 'FOLDER'"),
    ],
)
def test_generate_refuses_a_damaged_checkpoint(trained, tmp_path, capsys, damage, message):
    folder = tmp_path / "damaged"
    shutil.copytree(trained[0] / "runs" / "demo", folder)
    damage(folder)
    assert lsgpt_cli.main(["generate", str(folder), "import"]) == 2
    captured = capsys.readouterr()
    last_line = captured.err.splitlines()[-1]
    assert last_line.startswith("lsgpt: error: ") and message.replace("FOLDER", str(folder)) in last_line
    assert captured.out == ""


@pytest.mark.parametrize("role", ["model_name_or_path", "teacher"])
def test_train_names_the_folder_whose_weights_are_cut_off(trained, tmp_path, monkeypatch, capsys, role):
    monkeypatch.chdir(tmp_path)
    whole = trained[0] / "runs" / "demo"
    shutil.copytree(whole, "damaged")
    cut_weights(Path("damaged"))
    Path("text.txt").write_text("def f(x): return x\n" * 500)
    places = {"model_name_or_path": str(whole), role: "damaged"}
    options = [word for name, value in places.items() for word in (f"--{name}", value)]
    assert lsgpt_cli.main(["train", "finetune", *options, "--dataset_name", "text.txt", "--block_size", "64"]) == 2
    assert "the weights in 'damaged' cannot be read: Error while" in capsys.readouterr().err.splitlines()[-1]
    assert not Path("runs").exists()


def test_version(capsys):
    with pytest.raises(SystemExit) as done:
        lsgpt_cli.main(["--version"])
    assert done.value.code == 0
    assert capsys.readouterr().out == f"lsgpt {lsgpt.__version__}\n"
    citation = Path(lsgpt_cli.__file__).with_name("CITATION.cff").read_text(encoding="utf-8")
    assert f"\nversion: {lsgpt.__version__}\n" in citation


def test_processes_of_a_launch_speak_once(monkeypatch, capsys):
    for rank, lines in (("0", 1), ("7", 0)):
        monkeypatch.setenv("LOCAL_RANK", rank)
        assert lsgpt_cli.main(["train", "dmeo"]) == 2
        assert len(capsys.readouterr().err.splitlines()) == lines


def test_a_launch_for_gpus_without_gpus_is_told_what_to_do(monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert lsgpt_cli.main(["train"]) == 2
    error = capsys.readouterr().err
    assert "8 processes were started" in error and "configuration/launch/cpu.yaml or --use_cpu true" in error


def test_info_of_a_preset(capsys):
    assert lsgpt_cli.main(["info", "paper-12l", "--length", "8192"]) == 0
    table = {line[2:36].strip(): line[36:].split() for line in capsys.readouterr().out.splitlines()[1:]}
    assert " ".join(table["heads per layer"]) == "1 global + 11 local, 64 dimensions each"
    assert table["window"] == ["100", "tokens"]
    assert table["parameters"] == ["107", "M"]
    assert table["KV cache in 16 bit, one sequence"] == ["28.5", "MB", "302", "MB", "9.5%"]


def test_info_of_sequences_that_are_split(capsys):
    assert lsgpt_cli.main(["info", "gpt2-small", "--length", "131072", "--processes", "8"]) == 0
    output = capsys.readouterr().out
    assert re.search(r"received per layer, forward, 16 bit +31\.7 MB +377 MB +8\.4%\n", output)
    # The last of the processes keeps its own 16,384 tokens of all 12 heads, 64 dimensions each.
    assert re.search(r"keys and values per layer, 16 bit +80 MB +403 MB +19\.9%\n", output)
    assert re.search(r"work of the slowest process / mean +1\.00 +1\.00 *\n", output)
    capsys.readouterr()
    assert lsgpt_cli.main(["info", "gpt2-small", "--length", "100", "--processes", "3"]) == 2
    output, errors = capsys.readouterr()
    assert not output  # the error comes first
    assert "`length` must be a multiple of `processes`, which is 3; got 100" in errors


def test_work_of_the_slowest_process(tiny_config):
    """The queries of the first tokens see fewer keys, which nobody makes up for in local heads."""
    config = tiny_config(num_global_heads=0)
    of_key = 4 * 12 * 6 * 2  # for each number in both layers' heads
    others = config.flops_per_token(1) - of_key
    work = [others + of_key * min(position + 1, 8) for position in range(24)]
    shares = [sum(work[a : a + 4] + work[b + 4 : b + 8]) for a, b in ((0, 16), (8, 8), (16, 0))]
    assert slowest_share(config, 24, 3) == pytest.approx(max(shares) / (sum(work) / 3))


def test_names_that_can_only_be_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("here").mkdir()
    paths, others = ("./x", "~/x", str(tmp_path / "x"), "a/b/c", "here/x"), ("x", "there/x")
    assert all(map(looks_like_a_path, paths)) and not any(map(looks_like_a_path, others))


def test_long_lists_of_tensors_are_cut_off():
    names = [f"layer.{i}" for i in range(6)]
    with pytest.raises(ValueError, match=r"unknown: layer\.0, .*, layer\.4$"):
        refuse_tensors([], names[:5], [])
    with pytest.raises(ValueError, match=r"missing: layer\.0, .*, layer\.4 and 1 more; of another shape: layer\.0$"):
        refuse_tensors(names, [], names[:1])


def test_info_of_a_folder(trained, tmp_path, capsys):
    assert lsgpt_cli.main(["info", str(trained[0] / "runs" / "demo")]) == 0
    output = capsys.readouterr().out
    assert "1 global + 1 local, 8 dimensions each" in output and "learned positions" not in output
    config = LSGPTConfig(num_hidden_layers=3, num_global_heads=[4, 0, 12], num_key_value_heads=3)
    config.save_pretrained(tmp_path)
    assert lsgpt_cli.main(["info", str(tmp_path), "--length", "4096"]) == 0
    output = capsys.readouterr().out
    assert "12, of them global by layer: 4 0 12, 64 dimensions each (3 key/value heads)" in output
    assert "has only 1,024 learned positions" in output


@pytest.mark.parametrize(
    ("values", "blocks", "window"),
    [
        ({}, None, "100 tokens"),
        (
            {"use_bias": True, "hidden_act": "relu", "tie_word_embeddings": True},
            "MLP with relu, biases, tied embeddings",
            "100 tokens",
        ),
        (
            {
                "norm_type": "rms_norm",
                "gated_mlp": True,
                "hidden_act": "silu",
                "use_bias": ["qkv_proj"],
                "qk_norm": True,
            },
            "RMSNorm, gated MLP (silu), biases of queries, keys and values, RMSNorm of queries and keys",
            "100 tokens",
        ),
        (
            {"norm_type": "rms_norm", "use_bias": ["qkv_proj", "o_proj", "mlp"], "attention_sinks": True},
            "RMSNorm, biases",
            "100 tokens, and a learned sink for each local head",
        ),
        ({"attention_sinks": True, "num_global_heads": 12}, None, None),
        ({"attn_logit_softcapping": 30.0}, "attention logits capped at 30.0", "100 tokens"),
        (
            {"norm_type": "rms_norm_after", "attention_sinks": "full_window"},
            "RMSNorm after attention and MLP",
            "100 tokens, and a learned sink for each local head (for queries with a full window)",
        ),
        (
            {
                "norm_type": "rms_norm_around",
                "position_embedding_type": "rope",
                "num_global_heads": [0, *[1] * 11],
                "rope_parameters": {kind: {"rope_theta": 1e4} for kind in ("full_attention", "sliding_attention")},
                "final_logit_softcapping": 30.0,
            },
            "RMSNorm before and after attention and MLP, other rotary embeddings in layers without global heads, "
            "logits capped at 30.0",
            "100 tokens",
        ),
    ],
)
def test_info_tells_what_differs_from_gpt2s_blocks(tmp_path, capsys, values, blocks, window):
    LSGPTConfig(**values).save_pretrained(tmp_path)
    assert lsgpt_cli.main(["info", str(tmp_path)]) == 0
    table = {line[2:36].strip(): line[36:] for line in capsys.readouterr().out.splitlines()[1:]}
    assert (table.get("blocks"), table.get("window")) == (blocks, window)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["info", "paper-v2"], "did you mean 'paper-v1'"),
        (["info", "EMPTY"], "has no config.json"),
        (["generate", ".", "x", "--greedy", "--top-k", "5"], "`--greedy` must not be given together with"),
        (["info", "GPT2"], "must be an LSGPT checkpoint; its model type is 'gpt2'"),
        (["generate", "EMPTY", "def "], "has no config.json"),
        (["generate", "EMPTY/missing", "def "], "there is no folder"),
        (["generate", "RUN/config.json", "def "], "config.json' is a file; give the folder of the checkpoint"),
        (["generate", "RUN", ""], "`prompt` must have at least one token"),
        (["generate", "RUN", "def ", "--max_new_tokens", "63"], "`--max-new-tokens` must be at most 62"),
        (["generate", "a/b/c", "def"], "there is no folder 'a/b/c'"),
        (["generate", "EMPTY/../emtpy", "def"], "/empty'?"),
        (["trian"], "got 'trian'; did you mean 'train'?"),
        (["study", "lerning-rates"], "did you mean 'learning-rates'?"),
        (["study", "learning-rates", "--only", "lss-lr0.01"], "got 'lss-lr0.01'; did you mean 'ls-lr0.01'?"),
        (["train", "my.yaml"], "there is no file 'my.yaml'; a recipe is a YAML file, or one of books, demo"),
        (["train", "--config_overrides", "{hidden_size: big}"], "`hidden_size` must be of type int; got 'big'"),
        (["train", "dmeo"], "did you mean 'demo'"),
        (["train", "--max_step", "3"], "unknown field '--max_step'; did you mean '--max_steps'"),
        (["train", "--output_dir", "RUN"], "`output_dir` must be a new or an empty folder"),
        (["train", "--output_dir", "EMPTY", "--dataset_name", "stdlb"], "did you mean 'stdlib'"),
        (
            ["train", "--output_dir", "EMPTY", "--dataset_name", "my_book.txt"],
            "there is no file or folder 'my_book.txt'",
        ),
        (["train", "--output_dir", "EMPTY", "--tokenizer", "EMPTY/x"], "there is no 'EMPTY/x'"),
        (["train", "finetune", "--model_name_or_path", "EMPTY/x"], "there is no folder 'EMPTY/x'"),
        (["train", "--resume_from_checkpoint", "EMPTY"], "`resume_from_checkpoint` must be or contain a complete"),
        (["train", "--resume_from_checkpoint", "EMPTY/x"], "there is no 'EMPTY/x'"),
        (["train", "finetune"], "`model_name_or_path` must be set if there is no `preset`"),
        (
            ["train", "finetune", "--model_name_or_path", "GPT2"],
            "must be an LSGPT checkpoint; its model type is 'gpt2'",
        ),
        (
            ["train", "--preset", "gpt2-small", "--model_name_or_path", "RUN"],
            "`preset` must not be given with `model_name_or_path`, whose shape the model has; got 'gpt2-small' and",
        ),
        (["compare", "--arms", ","], "`--arms` must name at least one arm"),
        (["compare", "--arms", "ls,msha"], "got 'msha'; did you mean 'mhsa'"),
        (["compare", "bokos", "--arms", "ls"], "got 'bokos'; did you mean 'books'"),
        (["compare", "--arms", "ls", "--max_step", "3"], "unknown field '--max_step'; did you mean '--max_steps'"),
    ],
)
def test_mistakes_get_one_line_and_status_2(trained, tmp_path, capsys, command, message):
    GPT2Config().save_pretrained(tmp_path / "gpt2")
    (tmp_path / "empty").mkdir()
    places = {"EMPTY": tmp_path / "empty", "GPT2": tmp_path / "gpt2", "RUN": trained[0] / "runs" / "demo"}
    for name, path in places.items():
        command = [argument.replace(name, str(path)) for argument in command]
        message = message.replace(name, str(path))
    assert lsgpt_cli.main(command) == 2
    last_line = capsys.readouterr().err.splitlines()[-1]
    assert last_line.startswith("lsgpt: error: ")
    assert message in last_line
    assert list((tmp_path / "empty").iterdir()) == []


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["info", "demo", "--length", "0"], "argument --length: must be an integer of 1 or more; got '0'"),
        (["compare", "books"], "the following arguments are required: --arms"),
        (["compare", "--arms", "ls", "--seeds", "0"], "argument --seeds: must be an integer of 1 or more; got '0'"),
        (["generate", ".", "x", "--temperature", "0"], "argument --temperature: must be a number above 0; got '0'"),
        (["generate", ".", "x", "--temperature", "inf"], "--temperature: must be a number above 0; got 'inf'"),
        (["generate", ".", "x", "--top_k", "many"], "--top_k: must be an integer of 1 or more; got 'many'"),
    ],
)
def test_wrong_usage_exits_with_2(capsys, command, message):
    with pytest.raises(SystemExit) as error:
        lsgpt_cli.main(command)
    assert error.value.code == 2
    assert message in capsys.readouterr().err


def test_the_demo_that_nobody_trained_yet(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for command in ("generate", "inspect"):
        assert lsgpt_cli.main([command, "runs/demo", "def"]) == 2
        error = capsys.readouterr().err
        assert error == (
            "lsgpt: error: there is no folder 'runs/demo'; `lsgpt train` trains the demo and saves it there\n"
        )


def test_without_a_network_a_missing_source_is_a_missing_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert lsgpt_cli.main(["convert", "nope", "new"]) == 2
    assert "there is no folder 'nope' here, and no model of that name could be read from the Hub" in (
        capsys.readouterr().err
    )


@pytest.mark.parametrize(("positions", "more"), [(4095, " --block_size 4095"), (4096, "")])
def test_convert_says_how_to_heal(monkeypatch, capsys, positions, more):
    """In blocks of the recipe's length, if the model has so many positions."""
    model = SimpleNamespace(config=LSGPTConfig(max_position_embeddings=positions))
    calibration = SimpleNamespace(perplexities={}, retrieval={})
    monkeypatch.setattr("lsgpt.conversion.convert", lambda *arguments: (model, calibration))
    assert lsgpt_cli.main(["convert", "a/b", "new", "--calibrate", "text.txt"]) == 0
    heal = "lsgpt train heal --model_name_or_path new --teacher a/b --dataset_name text.txt"
    assert f"  {heal}{more}\n" in capsys.readouterr().out


@pytest.mark.parametrize("folder", ["runs", "mine"])
def test_a_start_that_fails_leaves_no_folder_behind(tmp_path, monkeypatch, capsys, folder):
    monkeypatch.chdir(tmp_path)
    output = [] if folder == "runs" else ["--output_dir", folder]
    assert lsgpt_cli.main(["train", "--dataset_name", "notes.txt", *output]) == 2
    assert "there is no file or folder 'notes.txt'" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_an_interrupt_is_no_traceback(tmp_path, monkeypatch, capsys):
    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("lsgpt_cli._check_checkpoint", interrupt)
    monkeypatch.setattr("lsgpt.training.train.load_texts", interrupt)
    assert lsgpt_cli.main(["generate", "runs/demo", "def"]) == 130
    assert capsys.readouterr().err == "\nInterrupted\n"
    assert lsgpt_cli.main(["train", "--dataset_name", "notes.txt"]) == 130
    monkeypatch.setattr("lsgpt.training.arguments.parse_arguments", interrupt)
    assert lsgpt_cli.main(["train"]) == 130
    assert list(tmp_path.iterdir()) == []


def test_the_bare_command_says_what_to_do_first(capsys):
    assert lsgpt_cli.main([]) == 0
    alone = capsys.readouterr().out
    with pytest.raises(SystemExit) as done:
        lsgpt_cli.main(["--help"])
    assert done.value.code == 0 and capsys.readouterr().out == alone
    steps = re.findall(r"^  (lsgpt .*?)  ", alone, re.MULTILINE)
    assert steps[0] == "lsgpt train" and {step.split()[1] for step in steps} <= set(lsgpt_cli.COMMANDS)


def test_the_list_of_studies_is_a_table(capsys):
    assert lsgpt_cli.main(["study"]) == 0
    lines = capsys.readouterr().out.splitlines()[2:]
    assert len(lines) > 10 and all(re.search(r"\S  +[\d.]+ h on two CPU cores$", line) for line in lines)
    assert len({re.search(r"[\d.]+ h on", line).start() for line in lines}) == 1


def test_the_help_of_compare_names_arms_that_exist():
    assert set(lsgpt_cli.ARMS) <= set(load_arms())


def test_help_explains_every_command_without_torch():
    program = (
        "import sys, lsgpt_cli\n"
        "for command in [], ['info'], ['generate'], ['compare'], ['convert'], ['publish']:\n"
        "    try: lsgpt_cli.main([*command, '--help'])\n"
        "    except SystemExit as done: assert done.code == 0\n"
        "assert not {'torch', 'transformers', 'lsgpt'} & sys.modules.keys()\n"
    )
    process = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert process.returncode == 0, process.stderr
    for words in (
        "train a model from a recipe",
        "Train every arm",
        "continue a text",
        "show a model's shape",
        "convert a Llama, Mistral, Qwen, OLMo, Gemma, Phi-3, GPT-2",
        "put a trained model on the Hub",
    ):
        assert words in " ".join(process.stdout.split())


def test_train_help_lists_the_fields(capsys):
    with pytest.raises(SystemExit) as done:
        lsgpt_cli.main(["train", "--help"])
    assert done.value.code == 0
    output = capsys.readouterr().out
    for field in ("RECIPE", "--preset", "--block_size", "--learning_rate"):
        assert field in output


def test_installed_command_is_this_one():
    script = Path(sys.executable).with_name("lsgpt")
    process = subprocess.run([script, "--help"], capture_output=True, text=True, timeout=60)
    assert process.stdout.startswith("usage: lsgpt ")
