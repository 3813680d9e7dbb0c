"""Healing: the loss with a teacher, what is trained, whole runs, and docs/healing.md as printed."""

import json
import shutil
import sys

import pytest
import torch
from reference import autograd_functions
from safetensors.torch import load_file
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import lsgpt_cli
from lsgpt import LSGPTConfig, LSGPTForCausalLM
from lsgpt.modeling_lsgpt.loss_lsgpt import CHUNK_LENGTH, LinearCrossEntropy
from lsgpt.training import build_trainer, parse_arguments
from lsgpt.training.callbacks import read_metrics
from lsgpt.training.data import collate_blocks, train_tokenizer
from lsgpt.training.healing import load_teacher, measure_perplexity, next_token_logits


TEXT = "".join(f"line {i} of {i * i}\n" for i in range(400))
DOCUMENTS = [f"document {i} has {i * i} in it.\n" * 3 for i in range(60)]
STUDENT = {
    "vocab_size": 300,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "num_global_heads": 1,
    "sliding_window": 8,
    "max_position_embeddings": 64,
    "position_embedding_type": "rope",
    "initializer_range": 0.2,
    "use_bias": True,
}
FIELDS = {
    "use_cpu": True,
    "block_size": 32,
    "max_steps": 6,
    "per_device_train_batch_size": 2,
    "per_device_eval_batch_size": 16,
    "learning_rate": 1e-2,
    "logging_steps": 1,
    "eval_strategy": "no",
    "save_steps": 3,
    "save_total_limit": 3,
    "max_logit_every_n_steps": 2,
    "prompt": "line",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Holds a `student`, a Llama as its `teacher`, with one tokenizer, and `text.jsonl`."""
    folder = tmp_path_factory.mktemp("healing")
    tokenizer = train_tokenizer([TEXT, *DOCUMENTS], STUDENT["vocab_size"])
    torch.manual_seed(0)
    LSGPTForCausalLM(LSGPTConfig(**STUDENT)).save_pretrained(folder / "student")
    LlamaForCausalLM(
        LlamaConfig(
            vocab_size=300,
            hidden_size=24,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=3,
            max_position_embeddings=64,
            initializer_range=0.2,
        )
    ).save_pretrained(folder / "teacher")
    for name in ("student", "teacher"):
        tokenizer.save_pretrained(folder / name)
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in [TEXT, *DOCUMENTS]))
    return folder


@pytest.fixture
def arguments(folder, monkeypatch):
    """The command line of a healing run in `folder`: `arguments(field=value)`; a value of `None` leaves a field out."""
    monkeypatch.chdir(folder)

    def build(**fields):
        fields = {
            "model_name_or_path": "student",
            "teacher": "teacher",
            "dataset_name": "text.jsonl",
            **FIELDS,
            **fields,
        }
        return [f"--{name}={value}" for name, value in fields.items() if value is not None]

    return build


@pytest.fixture
def heal(arguments, capsys):
    """Runs `lsgpt train heal` in this process, and returns what it prints."""

    def run(**fields):
        capsys.readouterr()
        status = lsgpt_cli.main(["train", "heal", *arguments(**fields)])
        output = capsys.readouterr()
        assert status == 0, output.err
        return output.out

    return run


def weights_of(folder):
    return load_file(folder / "model.safetensors")


# The loss


@pytest.mark.parametrize("num_tokens", [1, 63, CHUNK_LENGTH + 87])
def test_divergence_and_its_gradients_are_those_of_the_dense_one(num_tokens):
    """In float64 only rounding is left; the gradient that comes from above is not 1, and asked for twice."""
    states = torch.randn(num_tokens, 19, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(37, 19, dtype=torch.float64, requires_grad=True)
    teacher = 3 * torch.randn(num_tokens, 37)
    targets = torch.randint(37, (num_tokens,))
    targets[2::5] = -100
    log_p = teacher.double().log_softmax(-1)
    dense = (log_p.exp() * (log_p - (states @ weight.T).log_softmax(-1))).sum(-1)[targets != -100].sum()
    loss = LinearCrossEntropy.apply(states, weight, targets, -100, teacher)
    torch.testing.assert_close(loss, dense)
    expected = torch.autograd.grad(0.3 * dense, (states, weight))
    for retain_graph in (True, False):
        gradients = torch.autograd.grad(0.3 * loss, (states, weight), retain_graph=retain_graph)
        torch.testing.assert_close(gradients, expected)


@pytest.mark.parametrize("is_plain", [True, False])
@pytest.mark.parametrize("num_items_in_batch", [None, 70])
def test_loss_of_the_model(tiny_model, is_plain, num_items_in_batch):
    """Also where the output projection must be called, in chunks that are computed again in the backward pass."""
    model = tiny_model(tie_word_embeddings=True, max_position_embeddings=600).train()
    if not is_plain:
        model.lm_head.register_forward_hook(lambda *args: None)
    input_ids, teacher = torch.randint(97, (2, 600)), torch.randn(2, 600, 97)
    labels = input_ids.clone()
    labels[0, :50] = -100
    inputs = {"input_ids": input_ids, "labels": labels, "num_items_in_batch": num_items_in_batch}
    loss = model(**inputs, skip_logits=True, teacher_logits=teacher).loss
    assert ("LinearCrossEntropyBackward" in autograd_functions(loss)) == is_plain
    counted = labels[:, 1:] != -100
    logits = model(input_ids).logits[:, :-1][counted]
    divergence = F.kl_div(logits.log_softmax(-1), teacher[:, :-1][counted].softmax(-1), reduction="sum")
    expected = divergence / (num_items_in_batch or counted.sum())
    torch.testing.assert_close(loss, expected)
    gradients, expected_gradients = (torch.autograd.grad(x, list(model.parameters())) for x in (loss, expected))
    torch.testing.assert_close(gradients, expected_gradients)
    with torch.no_grad():
        torch.testing.assert_close(model(**inputs, skip_logits=True, teacher_logits=teacher).loss, expected)


def test_a_step_is_that_of_the_plain_divergence(arguments):
    """
    The gradients of a step of two micro-batches with packed documents, of which they have different numbers, by a loop
    over single documents.
    """
    fields = {"gradient_accumulation_steps": 2, "max_steps": 1, "optim": "sgd", "learning_rate": 1.0}
    options = arguments(**fields, max_grad_norm=0.0, warmup_steps=0, sink_learning_rate=1.0, output_dir="step")
    trainer = build_trainer(parse_arguments("heal", options))
    student = AutoModelForCausalLM.from_pretrained("student")
    batches = []
    trainer.data_collator = lambda blocks: batches.append(collate_blocks(blocks)) or batches[-1]
    trainer.args.eval_on_start = False
    trainer.train()
    total = count = 0
    for batch in batches[:2]:
        for ids, positions in zip(batch["input_ids"], batch["position_ids"]):
            for document in torch.tensor_split(ids, (positions == 0).nonzero().flatten()[1:].tolist()):
                log_p = trainer.teacher(document[None]).logits[0, :-1].log_softmax(-1)
                log_q = student(document[None]).logits[0, :-1].log_softmax(-1)
                total = total + F.kl_div(log_q, log_p, log_target=True, reduction="sum")
                count += len(log_p)
    assert sum((batch["position_ids"] == 0).sum() for batch in batches[:2]) > 4
    (total / count).backward()
    assert trainer.state.log_history[0]["loss"] == pytest.approx((total / count).item(), rel=1e-4)
    for (name, before), after in zip(student.named_parameters(), trainer.model.parameters()):
        torch.testing.assert_close(after, before - before.grad, rtol=1e-4, atol=1e-5, msg=name)


def test_a_model_that_is_its_own_teacher_has_nothing_to_learn(heal, folder):
    heal(teacher="student", optim="sgd", learning_rate=1.0, output_dir="same")
    losses = [log["loss"] for log in read_metrics(folder / "same" / "metrics.jsonl") if "loss" in log]
    assert len(losses) == 6 and max(map(abs, losses)) < 1e-6
    before = weights_of(folder / "student")
    for name, after in weights_of(folder / "same").items():
        torch.testing.assert_close(after, before[name], rtol=0, atol=1e-5)


# Teachers


def test_teacher_of_another_kind(folder):
    """GPT-2; what it makes of packed documents is what it makes of each alone. It is frozen, in evaluation mode."""
    config = GPT2Config(vocab_size=300, n_embd=24, n_layer=2, n_head=3, n_positions=64, initializer_range=0.2)
    GPT2LMHeadModel(config).save_pretrained(folder / "gpt2")
    args = parse_arguments(overrides=["--use_cpu", "true"]).training
    teacher = load_teacher(str(folder / "gpt2"), args)
    assert not teacher.training and not any(p.requires_grad for p in teacher.parameters())
    ids = torch.randint(300, (2, 20))
    positions = torch.cat((torch.arange(7), torch.arange(13))).expand(2, -1)
    logits = next_token_logits(teacher, {"input_ids": ids, "position_ids": positions, "labels": ids})
    assert not logits.requires_grad
    alone = torch.cat([teacher(part).logits for part in ids.split((7, 13), dim=1)], dim=1)
    torch.testing.assert_close(logits, alone)
    assert load_teacher(str(folder / "gpt2"), parse_arguments(overrides=["--use_cpu=1", "--bf16=1"]).training).dtype


def test_perplexity_is_over_tokens(tiny_model):
    rows = [{"input_ids": row.tolist()} for row in torch.randint(97, (5, 12))]
    from datasets import Dataset  # noqa: PLC0415

    model = tiny_model()
    args = parse_arguments(overrides=["--use_cpu", "true", "--per_device_eval_batch_size", "2"]).training
    ids = torch.tensor([row["input_ids"] for row in rows])
    expected = F.cross_entropy(model(ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).exp()
    assert measure_perplexity(model, Dataset.from_list(rows), args) == pytest.approx(expected.item(), rel=1e-5)


def other_teacher(folder, name, change):
    """A copy of the teacher with something about it changed."""
    shutil.copytree(folder / "teacher", folder / name)
    change(folder / name)
    return name


def with_config(**values):
    def change(folder):
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **values}))

    return change


def with_other_tokenizer(folder):
    train_tokenizer(DOCUMENTS, 300).save_pretrained(folder)


def with_other_vocabulary(folder):
    LlamaForCausalLM(
        LlamaConfig(vocab_size=301, hidden_size=24, intermediate_size=8, num_hidden_layers=1, num_attention_heads=3)
    ).save_pretrained(folder)


@pytest.mark.parametrize(
    ("fields", "change", "message"),
    [
        ({"teacher": "./gone"}, None, "`teacher` must be a folder, a name on the Hub or a GGUF file; there is no"),
        ({"teacher": "gone.gguf"}, None, "there is no 'gone.gguf'"),
        ({"teacher": "no-such-model"}, None, "cannot load `teacher` 'no-such-model'"),
        ({}, with_other_vocabulary, r"as many tokens as the model \(`vocab_size` 300\).* has 301"),
        ({}, with_other_tokenizer, "`teacher` must have the tokenizer of the model, .* has the id"),
        ({}, with_config(num_hidden_layers=3), r"lacks model.layers.2.* and \d+ more"),
        ({}, with_config(max_position_embeddings=16), r"must be at most the positions of `teacher` .* \(16\); got 32"),
        ({"trainable": "lihgt"}, None, r"`trainable` must be one of all, light, lora; .* did you mean 'light'\?"),
        ({"trainable": "lora", "model_name_or_path": None, "preset": "demo"}, None, "`trainable` must be all without"),
        ({"lora_rank": 0}, None, "`lora_rank` must be at least 1; got 0"),
        ({"sink_learning_rate": -1}, None, "`sink_learning_rate` must be at least 0; got -1.0"),
        ({"stabilizers": "z-loss"}, None, "`teacher` must not be combined with z-loss"),
        ({"label_smoothing_factor": 0.1}, None, "`label_smoothing_factor` must be 0 with a `teacher`"),
        ({"trainable": "light", "on_explosion": "clip"}, None, "QK-clip must not be combined with `trainable: light`"),
    ],
)
def test_what_cannot_be(arguments, folder, tmp_path, fields, change, message, offline):
    if change is not None:
        fields = {"teacher": other_teacher(folder, tmp_path.name, change)}
    with pytest.raises(ValueError, match=message):
        build_trainer(parse_arguments("heal", arguments(output_dir=tmp_path / "run", **fields)))


def test_teachers_that_mix_packed_documents_are_refused(arguments, folder, tmp_path, monkeypatch):
    """A model that takes no notice of positions, such as a recurrent one, sees the document before."""
    forward = LlamaForCausalLM.forward

    def without_positions(self, position_ids=None, **inputs):
        return forward(self, **inputs)

    monkeypatch.setattr(LlamaForCausalLM, "forward", without_positions)
    with pytest.raises(ValueError, match="`respect_boundaries` must be false with `teacher` 'teacher'"):
        build_trainer(parse_arguments("heal", arguments(output_dir=tmp_path / "run")))
    build_trainer(parse_arguments("heal", arguments(output_dir=tmp_path / "run", respect_boundaries=False)))


@pytest.mark.parametrize("sharding", ["teacher", "trainable: lora"])
def test_sharded_models_are_refused(arguments, monkeypatch, tmp_path, sharding):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    fields = {"teacher": None, "trainable": "lora"} if "lora" in sharding else {}
    with pytest.raises(ValueError, match=f"`{sharding}` must not be combined with FSDP or DeepSpeed"):
        parse_arguments("heal", arguments(output_dir=tmp_path / "run", **fields))


def test_missing_peft_is_named(arguments, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ImportError, match="`trainable: lora` needs the package peft: pip install peft"):
        build_trainer(parse_arguments("heal", arguments(output_dir=tmp_path / "run", trainable="lora")))


# What is trained


def test_light_trains_vectors_only(heal, folder):
    output = heal(trainable="light", output_dir="light")
    assert "Training 672 of " in output
    before, after = weights_of(folder / "student"), weights_of(folder / "light")
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if before[name].ndim == 1}


def test_lora_is_merged_into_plain_weights(heal, arguments, folder, monkeypatch):
    output = heal(trainable="lora", lora_rank=4, output_dir="lora")
    assert "perplexity" in output
    before, after = weights_of(folder / "student"), weights_of(folder / "lora")
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if "embed" not in name and "lm_head" not in name}
    for name in changed:
        if before[name].ndim == 2:
            assert torch.linalg.matrix_rank(after[name] - before[name], rtol=1e-3) <= 4

    # The last checkpoint has the adapters apart: the same model.
    trainer = build_trainer(parse_arguments("heal", arguments(trainable="lora", lora_rank=4, output_dir="again")))
    trainer._load_from_checkpoint(str(folder / "lora" / "checkpoint-6"))
    ids = torch.randint(300, (2, 30))
    with torch.no_grad():
        adapted = trainer.model.eval()(ids).logits
    monkeypatch.setitem(sys.modules, "peft", None)
    merged = AutoModelForCausalLM.from_pretrained(folder / "lora").eval()
    assert type(merged) is LSGPTForCausalLM
    with torch.no_grad():
        torch.testing.assert_close(merged(ids).logits, adapted, rtol=1e-4, atol=1e-4)
        assert (adapted - AutoModelForCausalLM.from_pretrained(folder / "student")(ids).logits).abs().max() > 0.1


# Runs


@pytest.mark.parametrize("fields", [{}, {"trainable": "lora"}], ids=["all", "lora"])
def test_a_killed_run_goes_on_as_if_nothing_had_been(heal, folder, fields, tmp_path):
    """From what a kill after step 3 leaves; weights and losses to the bit."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    heal(**fields, output_dir=whole, config_overrides="{resid_dropout: 0.1}")
    shutil.copytree(whole / "checkpoint-3", killed / "checkpoint-3")
    shutil.copy(whole / "recipe.yaml", killed)
    shutil.copy(whole / "metrics.jsonl", killed)
    assert lsgpt_cli.main(["train", "--resume_from_checkpoint", str(killed)]) == 0
    assert all(torch.equal(weight, weights_of(killed)[name]) for name, weight in weights_of(whole).items())
    losses = [[log["loss"] for log in read_metrics(x / "metrics.jsonl") if "loss" in log] for x in (whole, killed)]
    assert losses[0] == losses[1] and len(losses[0]) == 6
    reports = [
        (x / "report.md").read_text().partition("## Before and after")[2].partition("!")[0] for x in (whole, killed)
    ]
    assert reports[0] == reports[1] != ""


def test_report_has_the_figures_before_and_after(heal, folder):
    output = heal(max_steps=30, learning_rate=3e-3, max_eval_blocks=20, output_dir="report")
    results = json.loads((folder / "report" / "results.json").read_text())
    before, teacher, after = (
        results[name] for name in ("perplexity_before_training", "teacher_perplexity", "eval_perplexity")
    )
    assert f"Perplexity of the teacher on the validation text: {teacher:.2f}" in output
    assert "The teacher teacher takes " in output
    losses = [log["loss"] for log in read_metrics(folder / "report" / "metrics.jsonl") if "loss" in log]
    assert losses[-1] < 0.8 * losses[0]
    trainer = build_trainer(
        parse_arguments(
            "heal",
            [
                f"--{k}={v}"
                for k, v in {
                    **FIELDS,
                    "model_name_or_path": "student",
                    "dataset_name": "text.jsonl",
                    "max_eval_blocks": 20,
                    "output_dir": "check",
                }.items()
            ],
        )
    )
    for name, figure in (("student", before), ("teacher", teacher), ("report", after)):
        model = AutoModelForCausalLM.from_pretrained(folder / name)
        assert measure_perplexity(model, trainer.eval_dataset, trainer.args) == pytest.approx(figure, rel=1e-4)
    report = (folder / "report" / "report.md").read_text(encoding="utf-8")
    for row in (
        f"| teacher, `teacher` | {teacher:.2f} (1.000 of the teacher's) |",
        f"| before the training, `student` | {before:.2f} ({before / teacher:.3f} of the teacher's) |",
        f"| after the training | {after:.2f} ({after / teacher:.3f} of the teacher's) |",
    ):
        assert row in report
    assert "had no teacher" not in report


def test_a_run_without_a_teacher_says_what_its_report_cannot_show(heal, folder):
    heal(teacher=None, output_dir="alone")
    report = (folder / "alone" / "report.md").read_text(encoding="utf-8")
    assert "| before the training, `student` |" in report
    assert "This run had no teacher. What it gained may come from learning this text" in report
