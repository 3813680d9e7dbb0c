"""Cards, of runs and of presets, and their publication on a Hub of this machine."""

import json
import logging
import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import fresh
import pytest
import torch
import yaml
from huggingface_hub import ModelCard
from matplotlib.image import imread
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

import lsgpt_cli
from lsgpt import LSGPTConfig
from lsgpt.configuration import list_presets, load_preset
from lsgpt.model_cards import draw_heads, make_card, make_preset_card, publish, save_card
from lsgpt.training import parse_arguments, run, train_tokenizer


CARDS = Path(lsgpt_cli.__file__).parent / "model_cards"

RUN = (
    *("--config_overrides", "{vocab_size: 600, hidden_size: 24, num_global_heads: [2, 0]}"),
    *(
        "--block_size",
        "64",
        "--max_eval_blocks",
        "2",
        "--max_steps",
        "4",
        "--logging_steps",
        "2",
        "--warmup_steps",
        "1",
    ),
    *("--max_logit_every_n_steps", "2", "--eval_strategy", "no"),
)

# Everything that a published run has, and nothing else.
PUBLISHED = {
    *("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"),
    *("attention_lsgpt.py", "cache_lsgpt.py", "checks_lsgpt.py", "configuration_lsgpt.py"),
    *("linear_lsgpt.py", "local_lsgpt.py", "loss_lsgpt.py", "modeling_lsgpt.py", "visibility_lsgpt.py"),
    *("README.md", "heads.png", "loss.png", "loss_by_position.png", "max_logits.png", "max_logits_by_head.png"),
    *("recipe.yaml", "metrics.jsonl", "results.json"),
}


@pytest.fixture(scope="module")
def trainer(hub, tmp_path_factory):
    """A run of `lsgpt train` with `push_to_hub`, into `ada/pushed` on the Hub, of a small text."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "words.txt").write_text(" ".join(f"word{i % 97} and {i % 89};" for i in range(20_000)))
    options = ["--dataset_name", str(folder / "words.txt"), "--output_dir", str(folder / "tiny")]
    hub_options = ["--push_to_hub", "true", "--hub_model_id", "ada/pushed", "--hub_token", "hf_write"]
    arguments = parse_arguments("demo", [*RUN, *options, *hub_options, "--license", "mit"])
    return run(arguments, save_card)


@pytest.fixture
def folder(trainer, tmp_path):
    """A copy of the run's folder as `lsgpt train` leaves it without a push."""
    folder = tmp_path / "tiny"
    shutil.copytree(trainer.args.output_dir, folder)
    for name in ("README.md", "heads.png"):
        (folder / name).unlink()
    return folder


def snippets_of(card, model_id):
    """The card's snippets for Transformers, vLLM and fine-tuning."""
    snippets = re.findall(r"```python\n(.*?)```", card.text, re.DOTALL)
    transformers, vllm, fine_tuning = snippets
    assert "generate(" in transformers and "from vllm" in vllm and "Trainer(" in fine_tuning
    for snippet in snippets:
        assert f'"{model_id}"' in snippet
    return snippets


def run_program(program, cwd, **environment):
    """Runs it in a process of its own, in which nobody has imported this package, and returns what it prints."""
    caches = {"HF_MODULES_CACHE": str(cwd / "modules"), "HF_HOME": str(cwd / "home")}
    process = subprocess.run(
        [sys.executable, "-c", program],
        cwd=cwd,
        env={**os.environ, **caches, **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr
    return process.stdout


def test_dry_run_writes_a_whole_model_whose_snippets_run(folder, tmp_path, capsys):
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert lsgpt_cli.main(["publish", str(folder), "ada/tiny", "--dry-run", "--license", "mit"]) == 0
    output = tmp_path / "tiny-card"
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == before
    assert {path.name for path in output.iterdir()} == PUBLISHED
    for name in PUBLISHED - {"README.md", "heads.png"}:
        assert (output / name).read_bytes() == (folder / name).read_bytes()
    assert str(output / "README.md") in capsys.readouterr().out

    snippets = snippets_of(ModelCard.load(output / "README.md"), "ada/tiny")
    snippets = [snippet.replace('"ada/tiny"', json.dumps(str(output))) for snippet in snippets]
    transformers, vllm, fine_tuning = snippets
    # The text begins with the prompt: nobody was asked anything.
    prompt = json.loads((folder / "results.json").read_text())["prompt"]
    assert "word" in prompt and fresh.run("-c", transformers, cwd=tmp_path).startswith(prompt)
    fresh.run("-c", fine_tuning, cwd=tmp_path)
    assert {path.name for path in (tmp_path / "finetuned").iterdir()} >= {"model.safetensors", "modeling_lsgpt.py"}
    if find_spec("vllm"):
        run_program(vllm, tmp_path, HF_HUB_OFFLINE="1", VLLM_CPU_KVCACHE_SPACE="1")


def rope(rope_type):
    parameters = {"rope_type": rope_type, "factor": 2.0, "rope_theta": 10_000.0}
    return {"position_embedding_type": "rope", "rope_parameters": parameters}


@pytest.mark.parametrize(
    ("values", "is_served"),
    [
        (rope("linear"), True),
        (rope("dynamic"), False),
        ({"norm_type": "rms_norm_after"}, False),
        ({"attention_sinks": True}, True),
        ({"attention_sinks": "full_window"}, False),
        ({"attention_sinks": "full_window", "num_global_heads": 6}, True),  # there are no sinks
    ],
)
def test_vllm_is_offered_only_to_models_that_it_can_serve(folder, values, is_served):
    config = json.loads((folder / "config.json").read_text()) | values
    (folder / "config.json").write_text(json.dumps(config))
    text = make_card(folder, "ada/tiny", "mit").text
    assert ("from vllm import" in text) == ("vllm serve" in text) == is_served
    assert "\n\n\n" not in text and "**Fine-tuning** with" in text


def test_all_chat_templates_are_published(folder, tmp_path, capsys):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = {"default": "{{ messages[0].content }}", "tool_use": "{{ tools }}"}
    tokenizer.save_pretrained(folder)
    command = ["publish", str(folder), "ada/tiny", "--dry-run", "--license", "mit", "--output", str(tmp_path / "out")]
    assert lsgpt_cli.main(command) == 0
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template == tokenizer.chat_template
    listed = {line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]}
    files = {path.relative_to(tmp_path / "out") for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert listed == set(map(str, files)) and "additional_chat_templates/tool_use.jinja" in listed


def test_the_card_tells_what_the_run_left(folder):
    card = make_card(folder, "ada/tiny")
    data = card.data.to_dict()
    results = json.loads((folder / "results.json").read_text())
    assert (data["license"], data["library_name"], data["pipeline_tag"]) == ("mit", "transformers", "text-generation")
    assert "datasets" not in data  # a file of this machine
    (index,) = data["model-index"]
    assert index["name"] == "tiny"
    (result,) = index["results"]
    assert result["dataset"] == {"type": "words.txt", "name": "words.txt (held-out text)", "split": "validation"}
    values = {metric["type"]: metric["value"] for metric in result["metrics"]}
    assert values == {
        "perplexity": pytest.approx(results["eval_perplexity"], abs=1e-4),
        "loss": pytest.approx(results["eval_loss"], abs=1e-4),
        "bits_per_byte": pytest.approx(results["eval_bits_per_byte"], abs=1e-4),
    }
    assert all(value == round(value, 4) for value in values.values())

    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    first, last = (log["max_logit_local"] for log in metrics if "max_logit_local" in log)
    largest = (last, 4) if last > first else (first, 2)
    expected = f"| local | {first:.3g} (2) | {largest[0]:.3g} ({largest[1]}) | {last:.3g} (4) |"
    recipe = yaml.safe_load(card.text.split("````yaml\n")[1].split("````")[0])
    assert recipe["learning_rate"] == 4e-3
    assert recipe["config_overrides"]["hidden_size"] == 24
    assert "hub_token" not in recipe
    for text in (
        "# tiny\n",
        "Of its 12 attention heads, 2 are *global*",
        "10 are *local* and attend to the last 50 tokens",
        "| heads per layer | 6, of them global by layer: 2 0, 4 dimensions each |",
        expected,
        "none was over 100",
        "`words.txt` (local), in blocks of 64 tokens",
        "max_length=64)",
        "was held out from the training; the first 2 blocks of it were used.",
        "It was not tuned to follow instructions.",
        "![Largest attention logits over the training](max_logits.png)",
        "@article{hajra2025shortrange",
        "undertrained",
        "The weights: mit.",
    ):
        assert text in card.text
    assert "None" not in card.text


def test_a_bare_checkpoint_claims_nothing(folder):
    for name in (
        "recipe.yaml",
        "metrics.jsonl",
        "results.json",
        "loss.png",
        "max_logits.png",
        "max_logits_by_head.png",
    ):
        (folder / name).unlink()
    (folder / "loss_by_position.png").unlink()
    card = make_card(folder, license="apache-2.0")
    assert "model-index" not in card.data.to_dict()
    assert card.text.count("](") == card.text.count("](http") + card.text.count("](heads.png)")
    assert "Not recorded" in card.text and "Not measured." in card.text and "It was not measured." in card.text
    assert str(folder) in card.text  # without a name on the Hub, the snippets load the folder
    assert "not tuned" not in card.text and "blocks of it" not in card.text
    config = json.loads((folder / "config.json").read_text()) | {"max_position_embeddings": 100}
    (folder / "config.json").write_text(json.dumps(config))
    assert "max_length=100)" in make_card(folder, license="apache-2.0").text


def test_limits_of_a_run(folder):
    results = json.loads((folder / "results.json").read_text())
    tokens = 20 * results["parameters"]
    results |= {"outcome": "stopped", "stopped_by": "a callback", "step": 3, "max_steps": 4}
    results |= {"tokens": tokens, "prompt": "word1 and 1; " * 300}
    (folder / "results.json").write_text(json.dumps(results))
    card = make_card(folder, "ada/tiny")
    assert "The run was stopped at step 3 by a callback; these are the last good weights." in card.text
    assert "undertrained" not in card.text
    assert "max_new_tokens=1," in card.text  # the prompt fills the model's positions
    results |= {"outcome": "finished", "stopped_by": None, "step": 4, "tokens": tokens - 1}
    (folder / "results.json").write_text(json.dumps(results))
    card = make_card(folder, "ada/tiny")
    assert "The run was" not in card.text and "It is undertrained: 20 tokens per parameter" in card.text


@pytest.mark.parametrize(
    ("num_global_heads", "sentence"),
    [
        (6, "All of its 12 attention heads are *global* and attend to the whole past.\n"),
        (0, "All of its 12 attention heads are *local* and attend to the last 50 tokens.\n"),
        (
            [1, 0],
            "1 is *global* and attends to the\nwhole past, and 11 are *local* and attend to the last 50 tokens.\n",
        ),
        (
            [5, 6],
            "11 are *global* and attend to the\nwhole past, and 1 is *local* and attends to the last 50 tokens.\n",
        ),
    ],
)
def test_the_card_counts_the_heads(folder, num_global_heads, sentence):
    config = json.loads((folder / "config.json").read_text()) | {"num_global_heads": num_global_heads}
    (folder / "config.json").write_text(json.dumps(config))
    assert sentence in make_card(folder, "ada/tiny").text


def test_numbers_that_are_lost_are_not_evaluations(folder):
    results = json.loads((folder / "results.json").read_text())
    results |= {"outcome": "diverged", "step": 3, "eval_loss": "NaN", "eval_perplexity": "NaN", "max_logit": None}
    (folder / "results.json").write_text(json.dumps(results))
    card = ModelCard(str(make_card(folder, "ada/tiny")))
    assert [result.metric_type for result in card.data.eval_results] == ["bits_per_byte"]
    assert "The run diverged at step 3" in card.text
    assert "averaged weights" not in card.text  # there are none


def test_logits_that_are_not_finite_are_told(folder):
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for log in metrics:
        log |= {key: "Infinity" for key in log if key in ("max_logit", "max_logit_local")}
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(log)}\n" for log in metrics))
    results = json.loads((folder / "results.json").read_text())
    results |= {"max_logit": "Infinity"}
    (folder / "results.json").write_text(json.dumps(results))
    text = str(make_card(folder, "ada/tiny"))
    number = sum("max_logit" in log for log in metrics)
    assert f"{number} of them had one over 100" in text and "none was over" not in text
    assert "| largest attention logit seen in training | inf |" in text


def test_a_logit_that_is_no_number_is_the_largest(folder):
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    last = next(log for log in reversed(metrics) if "max_logit_local" in log)
    last |= {"max_logit": "NaN", "max_logit_local": "NaN"}
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(log)}\n" for log in metrics))
    text = str(make_card(folder, "ada/tiny"))
    assert "| nan (4) | nan (4) |" in text and "1 of them had one over 100" in text


def test_publish_uploads_all_in_one_commit_and_it_loads_by_its_name(hub, folder, tmp_path, capsys):
    del hub.commits[:]
    assert lsgpt_cli.main(["publish", str(folder), "lovelace/tiny", "--private"]) == 0
    assert hub.commits == ["lovelace/tiny"]
    assert "lovelace/tiny" in hub.private
    files = hub.repos["lovelace/tiny"]
    assert set(files) == PUBLISHED
    for name in ("model.safetensors", "loss.png"):
        content = (folder / name).read_bytes()
        assert files[name] == content
        assert content in hub.large_files.values()
    assert f"{hub.url}/lovelace/tiny" in capsys.readouterr().out

    transformers, _, _ = snippets_of(ModelCard(files["README.md"].decode()), "lovelace/tiny")
    publish(folder, "ada/open")
    assert "ada/open" in hub.repos and "ada/open" not in hub.private
    prompt = json.loads(files["results.json"])["prompt"]
    assert run_program(transformers, tmp_path, HF_ENDPOINT=hub.url, HF_HUB_OFFLINE="0").startswith(prompt)


def test_push_to_hub_brings_the_same_card(hub, trainer, folder):
    files = hub.repos["ada/pushed"]
    assert files["README.md"].decode() == str(make_card(folder, "ada/pushed"))
    assert set(files) >= PUBLISHED
    assert "hub_token" not in files["recipe.yaml"].decode() + files["report.md"].decode()

    # All that `Trainer` takes, and `Trainer.push_to_hub` passes on.
    of_trainer = {"model_name": "toy", "tasks": "text-generation", "dataset": "Ada's texts", "dataset_args": "all"}
    trainer.create_model_card(
        license="apache-2.0",
        tags="toy",
        language="en",
        finetuned_from="ada/base",
        dataset_tags="ada/texts",
        **of_trainer,
    )
    card = ModelCard.load(Path(trainer.args.output_dir) / "README.md")
    assert (card.data.base_model, card.data.datasets) == ("ada/base", ["ada/texts"])
    assert (card.data.license, card.data.language) == ("apache-2.0", "en")
    assert "toy" in card.data.tags


def test_push_to_hub_needs_a_license_before_the_training():
    with pytest.raises(ValueError, match=r"`license` must be set with `push_to_hub`"):
        parse_arguments("demo", ["--push_to_hub", "true"])


def refused(message, *args, **kwargs):
    with pytest.raises(ValueError, match=message):
        publish(*args, **kwargs)


def test_nothing_is_made_without_a_right_to_it(hub, folder, monkeypatch):
    repos = set(hub.repos)
    del hub.requests[:]
    hub.repos["ada/taken"] = {}
    refused("'ada/taken' is taken", folder, "ada/taken")
    del hub.repos["ada/taken"]
    refused(r"your name or that of your organization \(ada, lovelace\)", folder, "babbage/tiny")
    monkeypatch.setenv("HF_TOKEN", "hf_read")
    refused("must have write access", folder, "ada/new")
    monkeypatch.setenv("HF_TOKEN", "hf_unknown")
    refused("Invalid user token", folder, "ada/new")
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(folder / "no-token"))
    refused("hf auth login", folder, "ada/new")
    assert {method for method, _ in hub.requests} == {"GET"}
    assert set(hub.repos) == repos


def test_a_repository_that_appears_meanwhile_stays(hub, folder, monkeypatch):
    """Between the check and the upload, somebody makes one of this name."""
    monkeypatch.setattr(sys.modules[publish.__module__], "_check_access", lambda repo_id: None)
    monkeypatch.setitem(hub.repos, "ada/busy", {"notes.txt": b"important"})
    monkeypatch.setattr(hub, "refused", "/commit/main")
    refused("nothing was created", folder, "ada/busy")
    assert hub.repos["ada/busy"] == {"notes.txt": b"important"}


@pytest.mark.parametrize(
    "endpoint", ["/validate-yaml", "/repos/create", "/preupload/main", "/objects/batch", "/commit/main"]
)
def test_a_failed_upload_leaves_no_repository(hub, folder, monkeypatch, endpoint):
    monkeypatch.setattr(hub, "refused", endpoint)
    refused(r"out of storage", folder, "ada/failed")
    assert "ada/failed" not in hub.repos


def test_what_could_not_be_deleted_is_told(hub, folder, monkeypatch):
    monkeypatch.setattr(hub, "refused", ("/commit/main", "/repos/delete"))
    refused("could not be deleted", folder, "ada/left")
    assert hub.repos.pop("ada/left") == {}


def break_nothing(folder):
    (folder / "recipe.yaml").unlink()  # it has the license


def break_config(folder):
    (folder / "config.json").unlink()


def break_model_type(folder):
    (folder / "config.json").write_text('{"model_type": "gpt2"}')


def break_weights(folder):
    (folder / "model.safetensors").unlink()


def cut_weights(folder):
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[:-100])


def forget_a_tensor(folder):
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def add_a_tensor(folder):
    tensors = load_file(folder / "model.safetensors")
    tensors["model.extra"] = torch.zeros(3)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def spoil_a_tensor(folder):
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][3] = torch.nan
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def break_tokenizer(folder):
    (folder / "tokenizer_config.json").unlink()


def lack_an_embedding(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens([f"word{i}" for i in range(700 - len(tokenizer))])
    tokenizer.save_pretrained(folder)


def swap_tokenizers(folder):
    train_tokenizer([f"word{i} " for i in range(1000)], 700).save_pretrained(folder)


def break_code(folder):
    (folder / "visibility_lsgpt.py").unlink()


def break_recipe(folder):
    (folder / "recipe.yaml").write_text("run_name: [")


def leave_a_token(folder):
    with (folder / "recipe.yaml").open("a") as file:
        file.write("hub_token: hf_secret\n")


def leave_a_license_without_a_name(folder):
    (folder / "README.md").write_text("---\nlicense: other\n---\n")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (break_nothing, "`license` must be given"),
        (break_config, "no config.json"),
        (break_model_type, "must be an LSGPT checkpoint"),
        (break_weights, "neither model.safetensors nor"),
        (cut_weights, "cannot be read"),
        (forget_a_tensor, r"missing: model\.norm\.weight"),
        (spoil_a_tensor, r"must be finite; model\.norm\.weight has NaN"),
        (break_tokenizer, r"no tokenizer_config\.json"),
        (swap_tokenizers, r"must be the model's: it has 700 tokens, and the model's `vocab_size` is 600"),
        (lack_an_embedding, r"must be the model's: it has 700 tokens, and the model's `vocab_size` is 600"),
        (add_a_tensor, r": model\.extra"),
        (break_code, r"lacks visibility_lsgpt\.py"),
        (break_recipe, r"recipe.yaml is not valid YAML"),
        (leave_a_token, "must not hold `hub_token`"),
        (leave_a_license_without_a_name, "`license_name` and `license_link`"),
    ],
)
def test_a_folder_that_cannot_be_published(folder, capsys, damage, message):
    damage(folder)
    assert lsgpt_cli.main(["publish", str(folder), "ada/tiny", "--dry-run"]) == 2
    (error,) = capsys.readouterr().err.strip().splitlines()[-1:]
    assert error.startswith("lsgpt: error: ")
    assert re.search(message, error)
    assert not folder.with_name("tiny-card").exists()


def test_names_and_folders_that_cannot_be(folder, tmp_path):
    refused("there is no folder", tmp_path / "nothing", "ada/tiny", dry_run=True)
    refused("must be USER/NAME", folder, "tiny", dry_run=True)
    refused("ada/ti ny", folder, "ada/ti ny", dry_run=True)
    refused("new or an empty folder", folder, "ada/tiny", dry_run=True, output=folder)
    refused("can only be set with `dry_run`", folder, "ada/tiny", output=tmp_path / "card")


def test_sharded_weights_and_a_named_license(trainer, folder, tmp_path):
    (folder / "model.safetensors").unlink()
    trainer.model.save_pretrained(folder, max_shard_size="20KB")
    shards = {path.name for path in folder.glob("model-*.safetensors")}
    assert len(shards) > 1
    metadata = "license: other\nlicense_name: mine\nlicense_link: LICENSE\nbase_model: ada/base"
    (folder / "README.md").write_text(f"---\n{metadata}\n---\nMine.\n")
    refused("links to LICENSE, which is not among", folder, "ada/tiny", dry_run=True)
    (folder / "LICENSE").write_text("Do as you like.")
    (folder / "notes.txt").write_text("private")
    results = json.loads((folder / "results.json").read_text()) | {"prompt": 'see [a](b) "c"\n'}
    (folder / "results.json").write_text(json.dumps(results))  # code, and no link
    publish(folder, "ada/tiny", dry_run=True, output=tmp_path / "out")
    files = {path.name for path in (tmp_path / "out").iterdir()}
    new = {*shards, "model.safetensors.index.json", "LICENSE"}
    assert files == PUBLISHED - {"model.safetensors"} | new
    card = ModelCard.load(tmp_path / "out" / "README.md")
    assert (card.data.license_name, card.data.license_link) == ("mine", "LICENSE")
    assert card.data.base_model == "ada/base"
    assert "[mine](LICENSE)" in card.text


@pytest.mark.parametrize("name", ["LICENSE", "LICENSE.md"])
def test_the_license_file_of_the_start_is_published(folder, tmp_path, name):
    """Which a run does not copy."""
    base = tmp_path / "base"
    base.mkdir()
    (base / "README.md").write_text(f"---\nlicense: other\nlicense_name: mine\nlicense_link: {name}\n---\n")
    (base / name).write_text("Do as you like.")
    recipe = yaml.safe_load((folder / "recipe.yaml").read_text()) | {"model_name_or_path": str(base), "license": None}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    publish(folder, "ada/tiny", dry_run=True, output=tmp_path / "out")
    assert (tmp_path / "out" / name).read_text() == "Do as you like."


def test_a_start_that_is_not_here_is_named(folder, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    recipe = yaml.safe_load((folder / "recipe.yaml").read_text()) | {"model_name_or_path": "./runs/base"}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    assert make_card(folder, "ada/tiny", "mit").data.license == "mit"
    assert "'./runs/base', which the training started from, is not here" in caplog.text


def test_a_run_in_the_folder_of_its_start(folder):
    """As after the start was deleted and the run took its name."""
    recipe = yaml.safe_load((folder / "recipe.yaml").read_text()) | {"model_name_or_path": str(folder)}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    assert make_card(folder, "ada/tiny", "mit").data.license == "mit"


def test_special_tokens_for_other_inputs_need_no_embedding(folder, tmp_path, caplog, monkeypatch):
    """As Gemma 3's for images, which is in the tokenizer of models without images, too."""
    monkeypatch.setattr(logging.getLogger("lsgpt"), "propagate", True)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    count = 600 - len(tokenizer)
    tokenizer.add_tokens([f"<image{i}>" for i in range(count + 1)], special_tokens=True)
    tokenizer.save_pretrained(folder)
    publish(folder, "ada/tiny", dry_run=True, output=tmp_path / "out")
    assert f"no embedding for special tokens of its tokenizer: <image{count}>" in caplog.text


def test_data_and_base_models_of_the_hub_are_named(folder, tmp_path, monkeypatch):
    recipe = yaml.safe_load((folder / "recipe.yaml").read_text())
    recipe |= {"dataset_name": "emozilla/pg19", "dataset_config_name": "some", "model_name_or_path": "ada/base"}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    card = make_card(folder, "ada/tiny")
    assert (card.data.datasets, card.data.base_model) == (["emozilla/pg19"], "ada/base")
    assert "[emozilla/pg19](https://huggingface.co/datasets/emozilla/pg19)" in card.text
    assert "started from the weights of [ada/base](https://huggingface.co/ada/base)" in card.text
    assert "undertrained" not in card.text  # the base model may have seen enough
    assert "not tuned" not in card.text  # nor is it known how it was trained
    assert {result.dataset_config for result in card.data.eval_results} == {"some"}
    (folder / "recipe.yaml").write_text(yaml.safe_dump({**recipe, "dataset_name": "wikitext"}))
    card = make_card(folder, "ada/tiny")
    assert card.data.datasets is None and "`wikitext`, configuration some" in card.text
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    monkeypatch.chdir(tmp_path)
    Path("emozilla", "pg19").mkdir(parents=True)  # then it is this folder that was read
    card = make_card(folder, "ada/tiny")
    assert card.data.datasets is None and "`pg19` (local), configuration some" in card.text


def test_the_license_of_a_run_comes_before_that_of_its_start(folder, tmp_path):
    """And before that of the checkpoint from which its start was trained, in turn."""
    for name in ("first", "base"):
        (tmp_path / name).mkdir()
    (tmp_path / "first" / "README.md").write_text("---\nlicense: gpl-3.0\n---\n")
    (tmp_path / "base" / "recipe.yaml").write_text(f"model_name_or_path: {tmp_path / 'first'}\n")
    recipe = yaml.safe_load((folder / "recipe.yaml").read_text()) | {"model_name_or_path": str(tmp_path / "base")}
    for own, expected in (("mit", "mit"), (None, "gpl-3.0")):
        (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe | {"license": own}))
        data = make_card(folder, "ada/tiny").data
        assert (data.license, data.base_model) == (expected, None)  # a folder of this machine is no model of the Hub


@pytest.mark.parametrize("preset", list_presets())
def test_cards_of_presets_are_up_to_date_and_true(preset, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where no runs are
    card = make_preset_card(preset)
    assert (CARDS / f"{preset}.md").read_text(encoding="utf-8") == str(card), "run python -m lsgpt.model_cards"
    assert card.data.license == "apache-2.0"
    assert "**No weights of this preset are published.**" in card.text
    assert ("tokens or, through a learned *sink*\n" in card.text) == load_preset(preset).attention_sinks
    assert "model-index" not in card.data.to_dict()
    assert (
        f"![Left: which heads of each layer are global. Right: the keys that a query of each kind sees]({preset}.png)"
        in card.text
    )
    assert imread(CARDS / f"{preset}.png").ndim == 3
    command = re.search(r"```bash\nlsgpt train (.*)\n```", card.text)[1].split()
    arguments = parse_arguments(command[0], [*command[1:], "--bf16", "false"])
    assert arguments.build_config().to_dict() == load_preset(preset).to_dict()
    assert f'from_pretrained("{arguments.training.output_dir}", ' in card.text


@pytest.mark.parametrize(
    ("num_global_heads", "blue", "orange"), [([4, 0], True, True), (4, True, False), (0, False, True)]
)
def test_the_picture_shows_the_kinds_of_heads(tmp_path, num_global_heads, blue, orange):
    config = LSGPTConfig(num_hidden_layers=2, num_attention_heads=4, hidden_size=16, num_global_heads=num_global_heads)
    draw_heads(config, tmp_path / "heads.png")
    pixels = imread(tmp_path / "heads.png")[..., :3]
    for color, expected in (((0x00, 0x60, 0xA8), blue), ((0xD5, 0x5E, 0x00), orange)):
        difference = abs(pixels - torch.tensor(color).numpy() / 255).max(axis=-1)
        assert bool((difference < 0.01).mean() > 0.02) == expected


def test_the_picture_of_a_local_head_shows_its_window(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr("matplotlib.axes.Axes.fill", lambda axes, x, y, **_: drawn.append(list(zip(x, y))))
    config = LSGPTConfig(num_global_heads=0, sliding_window=100, max_position_embeddings=1000)
    draw_heads(config, tmp_path / "heads.png")
    assert drawn == [[(0, 0), (1000, 1000), (900, 1000), (0, 100)]]
