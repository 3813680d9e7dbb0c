"""Healing: the loss with a teacher, what is trained, and whole runs, those of docs/healing.md as printed."""

import contextlib
import io
import json
import re
import shlex
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from datasets import Dataset
from gguf_file import write_gguf
from reference import autograd_functions
from safetensors.torch import load_file
from torch.nn import functional as F
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
)

import lsgpt_cli
from lsgpt import LSGPTConfig, LSGPTForCausalLM
from lsgpt.modeling_lsgpt.loss_lsgpt import CHUNK_LENGTH, LinearCrossEntropy
from lsgpt.studies.compare import resolve_arm
from lsgpt.training import LSGPTTrainer, build_trainer, parse_arguments
from lsgpt.training.callbacks import read_metrics
from lsgpt.training.data import collate_blocks, train_tokenizer
from lsgpt.training.healing import load_teacher, measure_perplexity, next_token_logits
from lsgpt.training.report import _before_and_after
from lsgpt.training.results import RunResult
from lsgpt.training.train import load_texts, make_blocks, train
from lsgpt.utilities import load_complete


DOC = (Path(__file__).parents[2] / "docs" / "healing.md").read_text(encoding="utf-8")
COMMANDS = [shlex.split(block)[1:] for block in re.findall(r"```bash\n(.*?)```", DOC, re.DOTALL)]
TEXT = "".join(f"line {i} of {i * i}\n" for i in range(400))
DOCUMENTS = [f"document {i} has {i * i} in it.\n" * 3 for i in range(60)]
SIZES = {
    "vocab_size": 300,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "initializer_range": 0.2,
}
SIZES |= {"intermediate_size": 48, "max_position_embeddings": 64}
STUDENT = {
    **SIZES,
    "num_global_heads": 1,
    "sliding_window": 8,
    "position_embedding_type": "rope",
    "norm_type": "rms_norm",
    "gated_mlp": True,
    "attention_sinks": True,
    "use_bias": ["qkv_proj", "o_proj"],
}
TEACHER = {**SIZES, "num_key_value_heads": 3}
FIELDS = {
    "use_cpu": True,
    "block_size": 32,
    "max_steps": 6,
    "per_device_train_batch_size": 2,
    "per_device_eval_batch_size": 16,
    "learning_rate": 1e-2,
    "warmup_steps": 0,
    "logging_steps": 1,
    "eval_strategy": "no",
    "save_steps": 3,
    "save_total_limit": 3,
    "max_logit_every_n_steps": 2,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Holds the folders that docs/healing.md speaks of: a student, a Llama as its teacher, and text."""
    folder = tmp_path_factory.mktemp("healing")
    tokenizer = train_tokenizer([TEXT, *DOCUMENTS], SIZES["vocab_size"])
    torch.manual_seed(0)
    teacher = LlamaForCausalLM(LlamaConfig(**TEACHER))
    students = {"smollm2-ls": STUDENT, "smollm2-global": {**STUDENT, "num_global_heads": 3}}
    models = {"smollm2": teacher, **{name: LSGPTForCausalLM(LSGPTConfig(**x)) for name, x in students.items()}}
    for name, model in models.items():
        model.save_pretrained(folder / "runs" / name)
        tokenizer.save_pretrained(folder / "runs" / name)
    (folder / "books").mkdir()
    rows = [json.dumps({"text": text}) + "\n" for text in [TEXT, *DOCUMENTS]]
    (folder / "books" / "train.jsonl").write_text("".join(rows), encoding="utf-8")
    return folder


@pytest.fixture(autouse=True)
def inside(folder, monkeypatch):
    monkeypatch.chdir(folder)


@pytest.fixture(scope="module")
def printed_runs(folder):
    """What the commands of the page that train print, on less text. They leave `runs/heal` and `runs/heal-lora`."""
    fields = {**FIELDS, "config_overrides": "{resid_dropout: 0.1}", "max_steps": 20, "max_eval_blocks": 20}
    fields["save_steps"] = 10
    del fields["learning_rate"]
    outputs = []
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.chdir(folder)
        for command in COMMANDS:
            if command[0] == "train":
                with contextlib.redirect_stdout(io.StringIO()) as output:
                    assert lsgpt_cli.main([*command, *as_options(fields)]) == 0
                outputs.append(output.getvalue())
    return outputs


def as_options(fields):
    return [f"--{name}={value}" for name, value in fields.items() if value is not None]


def arguments_of(**fields):
    """The arguments of a healing run; a value of `None` leaves a field out."""
    defaults = {"model_name_or_path": "runs/smollm2-ls", "teacher": "runs/smollm2", "dataset_name": "books", **FIELDS}
    return parse_arguments("heal", as_options({**defaults, "eval_on_start": False, **fields}))


def weights_of(folder):
    return load_file(Path(folder) / "model.safetensors")


def losses_of(folder):
    return [log["loss"] for log in read_metrics(Path(folder) / "metrics.jsonl") if "loss" in log]


# The loss


@pytest.mark.parametrize("num_tokens", [1, 63, CHUNK_LENGTH + 87])
def test_divergence_and_its_gradients_are_those_of_the_dense_one(num_tokens):
    """In float64 only rounding is left; the gradient that comes from above is not 1, and asked for twice."""
    states = torch.randn(num_tokens, 19, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(37, 19, dtype=torch.float64, requires_grad=True)
    teacher = (3 * torch.randn(num_tokens, 37)).bfloat16()  # computed with in the precision of the others
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
    inputs |= {"skip_logits": True, "teacher_logits": teacher}
    with torch.no_grad():
        torch.testing.assert_close(model(**inputs).loss, expected)
    z_loss = 0.1 * logits.logsumexp(-1).square().sum() / (num_items_in_batch or counted.sum())
    torch.testing.assert_close(model(**inputs, z_loss=0.1).loss, expected + z_loss)


def test_a_step_is_that_of_the_plain_divergence(tmp_path):
    """
    The gradients of a step of two micro-batches with packed documents, of which they have different numbers, by a loop
    over single documents.
    """
    plain = {"optim": "sgd", "learning_rate": 1.0, "sink_learning_rate": 1.0, "max_grad_norm": 0.0}
    trainer = build_trainer(arguments_of(**plain, gradient_accumulation_steps=2, max_steps=1, output_dir=tmp_path))
    student = AutoModelForCausalLM.from_pretrained("runs/smollm2-ls")
    batches = []
    trainer.data_collator = lambda blocks: batches.append(collate_blocks(blocks)) or batches[-1]
    trainer.train()
    total = count = 0
    for batch in batches[:2]:
        for ids, positions in zip(batch["input_ids"], batch["position_ids"]):
            for document in torch.tensor_split(ids, (positions == 0).nonzero().flatten()[1:].tolist()):
                log_p = trainer.teacher(document[None]).logits[0, :-1].log_softmax(-1)
                log_q = student(document[None]).logits[0, :-1].log_softmax(-1)
                total = total + F.kl_div(log_q, log_p, log_target=True, reduction="sum")
                count += len(log_p)
    numbers = [int((batch["position_ids"] == 0).sum()) for batch in batches[:2]]
    assert min(numbers) > 2 and numbers[0] != numbers[1]
    (total / count).backward()
    assert trainer.state.log_history[0]["loss"] == pytest.approx((total / count).item(), rel=1e-4)
    for (name, before), after in zip(student.named_parameters(), trainer.model.parameters()):
        assert before.grad.abs().max() > 1e-4, name
        torch.testing.assert_close(after, before - before.grad, rtol=1e-4, atol=1e-5, msg=name)


def test_a_model_that_is_its_own_teacher_has_nothing_to_learn(tmp_path):
    fields = {"teacher": "runs/smollm2-ls", "optim": "sgd", "learning_rate": 1.0, "output_dir": tmp_path}
    trainer = build_trainer(arguments_of(**fields))
    before = {name: weight.clone() for name, weight in trainer.model.state_dict().items()}
    trainer.train()
    losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    assert len(losses) == 6 and max(map(abs, losses)) < 1e-6
    for name, after in trainer.model.state_dict().items():
        torch.testing.assert_close(after, before[name], rtol=0, atol=1e-5)


# Teachers


def test_teacher_of_another_kind(folder, tmp_path):
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
    of_lengths = next_token_logits(teacher, {"input_ids": ids[:1], "cu_seq_lens_q": torch.tensor([0, 7, 20])})
    torch.testing.assert_close(of_lengths, alone[:1])
    torch.testing.assert_close(logits, alone)
    in_bfloat16 = parse_arguments(overrides=["--use_cpu=true", "--bf16=true"]).training
    in_float16 = SimpleNamespace(mixed_precision="fp16", device="cpu")  # which trains on GPUs only
    half = [load_teacher(str(folder / "gpt2"), args).dtype for args in (in_bfloat16, in_float16)]
    assert [teacher.dtype, *half] == [torch.float32, torch.bfloat16, torch.float16]
    # It has as many positions as a block, and no tokenizer: Transformers makes one up that has only special tokens.
    build_trainer(arguments_of(teacher="gpt2", block_size=64, output_dir=tmp_path))


@pytest.mark.parametrize("field", ["attention_sinks", "use_bias", "qk_norm"])
def test_weights_that_a_checkpoint_may_lack(folder, tmp_path, field):
    """They begin as those of a new model: sinks and biases are zeros, and the scales of norms are ones."""
    config = LSGPTConfig(**{**STUDENT, "attention_sinks": False, "use_bias": False})
    LSGPTForCausalLM(config).save_pretrained(tmp_path / "bare")
    AutoTokenizer.from_pretrained("runs/smollm2").save_pretrained(tmp_path / "bare")
    fields = {"model_name_or_path": tmp_path / "bare", "output_dir": tmp_path / "run"}
    model = build_trainer(arguments_of(**fields, config_overrides=f"{{{field}: true}}")).model
    before = load_file(tmp_path / "bare" / "model.safetensors").keys()
    new = {name: x for name, x in model.state_dict().items() if name not in before and "lm_head" not in name}
    assert new and all((x == float(field == "qk_norm")).all() for x in new.values())


def test_teacher_in_a_gguf_file(folder, tmp_path):
    """Its weights are read as those of the folder that it was made from are, and its tokenizer is compared."""
    source, tokenizer = (auto.from_pretrained("runs/smollm2") for auto in (AutoModelForCausalLM, AutoTokenizer))
    write_gguf(tmp_path / "tiny.gguf", source, tokenizer)
    trainer = build_trainer(arguments_of(teacher=tmp_path / "tiny.gguf", output_dir=tmp_path / "run"))
    ids = torch.randint(300, (2, 20))
    torch.testing.assert_close(next_token_logits(trainer.teacher, {"input_ids": ids}), source(ids).logits)
    write_gguf(tmp_path / "scaled.gguf", source, tokenizer, llama__rope__scaling__type="yarn")
    with pytest.raises(ValueError, match=r"cannot load `teacher` .*`llama.rope.scaling.type` .* must be unset"):
        build_trainer(arguments_of(teacher=tmp_path / "scaled.gguf", output_dir=tmp_path / "run"))
    write_gguf(tmp_path / "other.gguf", source, train_tokenizer(DOCUMENTS, 300))
    with pytest.raises(ValueError, match=r"`teacher` must have the tokenizer of the model, .* has the id"):
        build_trainer(arguments_of(teacher=tmp_path / "other.gguf", output_dir=tmp_path / "run"))


def test_perplexity_is_over_tokens(tiny_model):
    ids = torch.randint(97, (5, 12))
    model = tiny_model()
    args = parse_arguments(overrides=["--use_cpu", "true", "--per_device_eval_batch_size", "2"]).training
    expected = F.cross_entropy(model(ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).exp()
    blocks = Dataset.from_dict({"input_ids": ids.tolist()})
    assert measure_perplexity(model, blocks, args) == pytest.approx(expected.item(), rel=1e-5)


def other_teacher(folder, name, change):
    """A copy of the teacher with something about it changed."""
    shutil.copytree(folder / "runs" / "smollm2", folder / name)
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


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_teacher_sees_the_mask_of_its_student(tiny_model, tmp_path, side):
    """A model that is its own teacher has nothing to learn, whatever the padding."""
    model = tiny_model(position_embedding_type="rope").train()
    trainer = LSGPTTrainer(model, TrainingArguments(tmp_path, use_cpu=True, report_to="none"), teacher=model)
    model.train()
    ids, mask = torch.randint(97, (2, 20)), torch.ones(2, 20, dtype=torch.int64)
    mask[0, : 7 if side == "left" else 20] = 0
    if side == "right":
        mask[0] = 1
        mask[0, 13:] = 0
    inputs = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
    assert trainer.compute_loss(model, inputs).item() == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize(
    ("fields", "change", "message"),
    [
        ({"teacher": "./gone"}, None, "cannot load `teacher` './gone'"),
        ({"teacher": "gone.gguf"}, None, "cannot load `teacher` 'gone.gguf'"),
        ({"teacher": "no-such-model"}, None, "cannot load `teacher` 'no-such-model'"),
        ({}, with_other_vocabulary, r"the model's `vocab_size` \(300\).* has 301"),
        ({}, with_other_tokenizer, "`teacher` must have the tokenizer of the model, .* has the id"),
        ({}, with_config(num_hidden_layers=3), r"`teacher` .* missing: model.layers.2.* and \d+ more"),
        ({}, with_config(max_position_embeddings=16), r"must be at most the positions of `teacher` .* \(16\); got 32"),
        ({"trainable": "lihgt"}, None, r"`trainable` must be one of all, light, lora; .* did you mean 'light'\?"),
        ({"trainable": "lora", "model_name_or_path": None, "preset": "demo"}, None, "`trainable` must be all without"),
        ({"sink_learning_rate": -1}, None, "`sink_learning_rate` must be at least 0 and finite; got -1.0"),
        ({"label_smoothing_factor": 0.1}, None, "`label_smoothing_factor` must be 0 with a `teacher`"),
        ({"trainable": "light", "on_explosion": "clip"}, None, "with frozen query or key weights"),
    ],
)
def test_what_cannot_be(folder, tmp_path, fields, change, message, offline):
    if change is not None:
        fields = {"teacher": other_teacher(folder, tmp_path.name, change)}
    with pytest.raises(ValueError, match=message):
        build_trainer(arguments_of(output_dir=tmp_path / "run", **fields))


def test_teachers_that_mix_packed_documents_are_refused(tmp_path, monkeypatch):
    """A model that takes no notice of positions, such as a recurrent one, sees the document before."""
    forward = LlamaForCausalLM.forward
    monkeypatch.setattr(LlamaForCausalLM, "forward", lambda self, position_ids=None, **inputs: forward(self, **inputs))
    with pytest.raises(ValueError, match="`respect_boundaries` must be false with `teacher` 'runs/smollm2'"):
        build_trainer(arguments_of(output_dir=tmp_path))
    build_trainer(arguments_of(output_dir=tmp_path, respect_boundaries=False))


@pytest.mark.parametrize("how", ["launcher", "field"])
@pytest.mark.parametrize("field", ["teacher", "trainable: lora"])
def test_sharded_models_are_refused(monkeypatch, tmp_path, field, how):
    fields = {"teacher": None, "trainable": "lora"} if "lora" in field else {}
    if how == "launcher":
        monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    else:
        fields["fsdp"] = "full_shard"
    with pytest.raises(ValueError, match=f"`{field}` must not be combined with FSDP or DeepSpeed"):
        arguments_of(output_dir=tmp_path, **fields)


def test_sinks_become_those_of_every_query(folder, tmp_path):
    """As docs/healing.md says for vLLM: the weights are the same, and only the rule changes."""
    (command,) = [command for command in COMMANDS if "{attention_sinks: true}" in command]
    fields = {"config_overrides": command[command.index("--config_overrides") + 1]}
    waiting = LSGPTForCausalLM(LSGPTConfig(**{**STUDENT, "attention_sinks": "full_window"}))
    torch.nn.init.normal_(waiting.model.layers[0].self_attn.sinks)
    waiting.save_pretrained(tmp_path / "waiting")
    AutoTokenizer.from_pretrained("runs/smollm2").save_pretrained(tmp_path / "waiting")
    fields |= {"model_name_or_path": tmp_path / "waiting", "output_dir": tmp_path / "run", "max_steps": 1}
    arguments = arguments_of(**fields)
    trainer = build_trainer(arguments)
    for name, weight in waiting.state_dict().items():
        assert torch.equal(trainer.model.state_dict()[name], weight), name
    train(trainer, arguments)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "run").config.attention_sinks is True


@pytest.mark.parametrize("has_teacher", [True, False])
def test_numbers_are_hidden_in_training_blocks_if_there_is_a_teacher(tmp_path, monkeypatch, has_teacher):
    monkeypatch.setattr(
        "lsgpt.training.train.HideNumbers",
        lambda tokenizer: lambda row: {**row, "input_ids": [7] * len(row["input_ids"])},
    )
    arguments = arguments_of(output_dir=tmp_path / "run", **({} if has_teacher else {"teacher": None}))
    tokenizer = AutoTokenizer.from_pretrained("runs/smollm2")
    blocks = make_blocks(arguments, load_texts(arguments.data), tokenizer)
    hidden = {split: all(set(row["input_ids"]) == {7} for row in rows) for split, rows in blocks.items()}
    assert hidden == {"train": has_teacher, "validation": False}


def test_missing_peft_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ImportError, match="`trainable: lora` needs the package peft: pip install peft"):
        build_trainer(arguments_of(output_dir=tmp_path, trainable="lora"))


# What is trained


def test_light_trains_vectors_only(tmp_path, capsys):
    trainer = build_trainer(arguments_of(trainable="light", output_dir=tmp_path))
    before = {name: weight.clone() for name, weight in trainer.model.state_dict().items()}
    trainer.train()
    changed = {name for name, weight in trainer.model.state_dict().items() if not torch.equal(weight, before[name])}
    assert changed == {name for name, weight in before.items() if weight.ndim == 1}
    assert sum("sinks" in name for name in changed) == 2
    assert f"Training {sum(before[name].numel() for name in changed)} of " in capsys.readouterr().out


def test_sinks_may_have_a_learning_rate_of_0(tmp_path):
    optimizer = build_trainer(arguments_of(sink_learning_rate=0, output_dir=tmp_path)).create_optimizer()
    assert [group["lr"] for group in optimizer.param_groups for _ in group["params"]].count(0) == 4


@pytest.mark.parametrize("optim", ["galore_adamw_layerwise", "lomo"])
def test_a_learning_rate_of_sinks_needs_an_optimizer_with_groups(tiny_model, tmp_path, monkeypatch, optim):
    """Without the optional packages: what the optimizer is does not matter."""
    monkeypatch.setattr(Trainer, "get_optimizer_cls_and_kwargs", staticmethod(lambda *_: (torch.optim.SGD, {})))
    args = TrainingArguments(str(tmp_path), report_to="none", optim=optim)
    trainer = LSGPTTrainer(tiny_model(attention_sinks=True), args, sink_learning_rate=0.5)
    with pytest.raises(ValueError, match=f"`sink_learning_rate` must be unset with `optim: {optim}`.*; got 0.5"):
        trainer.create_optimizer()


def test_a_learning_rate_of_sinks_needs_an_optimizer_of_the_trainer(tiny_model, tmp_path):
    model, args = tiny_model(attention_sinks=True), TrainingArguments(str(tmp_path), report_to="none")
    with pytest.raises(ValueError, match=r"`sink_learning_rate` must be unset with an optimizer in .*; got 0.5"):
        LSGPTTrainer(model, args, sink_learning_rate=0.5, optimizers=(torch.optim.SGD(model.parameters()), None))


@pytest.mark.parametrize("trainable", ["all", "lora"])
def test_sinks_and_their_biases_learn_at_a_rate_of_their_own_and_vectors_do_not_decay(tmp_path, trainable):
    fields = {"sink_learning_rate": 0.5, "learning_rate": 0.25, "weight_decay": 0.125, "lr_scheduler_type": "linear"}
    trainer = build_trainer(arguments_of(**fields, trainable=trainable, max_steps=2, output_dir=tmp_path))
    trainer.create_optimizer_and_scheduler(num_training_steps=2)
    names = {id(parameter): name for name, parameter in trainer.model.named_parameters()}
    trained = {name for name, parameter in trainer.model.named_parameters() if parameter.requires_grad}
    groups = {
        names.pop(id(parameter)): (group["lr"], group["weight_decay"])
        for group in trainer.optimizer.param_groups
        for parameter in group["params"]
    }
    assert groups.keys() == trained
    for name, values in groups.items():
        is_sink = name.endswith((".sinks", "o_proj.bias", "o_proj.base_layer.bias"))
        is_vector = trainer.model.get_parameter(name).ndim == 1
        assert values == (0.5 if is_sink else 0.25, 0.0 if is_vector else 0.125), name
    assert sum(values[0] == 0.5 for values in groups.values()) == 4
    trainer.optimizer.step()
    trainer.lr_scheduler.step()
    assert {group["lr"] for group in trainer.optimizer.param_groups} == {0.25, 0.125}


def test_lora_is_merged_into_plain_weights(printed_runs, tmp_path, monkeypatch):
    before, after = weights_of("runs/smollm2-ls"), weights_of("runs/heal-lora")
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if "embed" not in name and "lm_head" not in name}
    for name in changed:
        if before[name].ndim == 2:
            assert torch.linalg.matrix_rank(after[name] - before[name], rtol=1e-3) <= 16

    # The last checkpoint has the adapters apart: the same model.
    trainer = build_trainer(arguments_of(trainable="lora", output_dir=tmp_path))
    assert trainer.model.model.layers[0].self_attn.q_proj.scaling == {"default": 2.0}
    trainer._load_from_checkpoint("runs/heal-lora/checkpoint-20")
    monkeypatch.setitem(sys.modules, "peft", None)
    models = [AutoModelForCausalLM.from_pretrained(f"runs/{name}").eval() for name in ("heal-lora", "smollm2-ls")]
    assert type(models[0]) is LSGPTForCausalLM
    ids = torch.randint(300, (2, 30))
    with torch.no_grad():
        adapted, merged, plain = (model(ids).logits for model in (trainer.model.eval(), *models))
    torch.testing.assert_close(merged, adapted, rtol=1e-4, atol=1e-4)
    assert (adapted - plain).abs().max() > 0.01


# Runs


@pytest.mark.parametrize("name", ["heal", "heal-lora"])
def test_a_killed_run_goes_on_as_if_nothing_had_been(printed_runs, tmp_path, name):
    """From what a kill after the first checkpoint leaves: weights, losses and figures to the bit."""
    whole, killed = Path("runs", name), tmp_path / "killed"
    shutil.copytree(whole / "checkpoint-10", killed / "checkpoint-10")
    for file in ("recipe.yaml", "metrics.jsonl"):
        shutil.copy(whole / file, killed)
    assert lsgpt_cli.main(["train", "--resume_from_checkpoint", str(killed)]) == 0
    assert all(torch.equal(weight, weights_of(killed)[name]) for name, weight in weights_of(whole).items())
    assert losses_of(killed) == losses_of(whole) and len(losses_of(whole)) == 20
    evaluated = [
        [(log["step"], log["eval_loss"]) for log in read_metrics(folder / "metrics.jsonl") if "eval_loss" in log]
        for folder in (whole, killed)
    ]
    assert evaluated[0] == evaluated[1] and evaluated[0][0][0] == 0  # before the training, but not before going on
    results = [json.loads((folder / "results.json").read_text(encoding="utf-8")) for folder in (whole, killed)]
    for field in ("perplexity_before_training", "teacher_perplexity", "eval_perplexity"):
        assert results[0][field] == results[1][field] > 1


@pytest.mark.parametrize("name", ["heal", "heal-lora"])
@pytest.mark.parametrize("change", [["--weight_decay", "0.5"], ["--config_overrides", "{resid_dropout: 0.3}"]])
def test_what_a_refusal_to_resume_proposes_can_be_done(printed_runs, name, change):
    with pytest.raises(ValueError, match=r"must be as before .* To change it") as error:
        build_trainer(parse_arguments(None, ["--resume_from_checkpoint", f"runs/{name}", *change]))
    load_complete(str(error.value).split("--model_name_or_path ")[1], ())


def test_report_has_the_figures_before_and_after(printed_runs, tmp_path):
    results = json.loads(Path("runs/heal/results.json").read_text(encoding="utf-8"))
    names = ("perplexity_before_training", "teacher_perplexity", "eval_perplexity")
    before, teacher, after = (results[name] for name in names)
    assert f"Perplexity of the teacher on the validation text: {teacher:.2f}" in printed_runs[0]
    assert "The teacher runs/smollm2 takes " in printed_runs[0]
    trainer = build_trainer(arguments_of(max_eval_blocks=20, output_dir=tmp_path))
    for name, figure in (("smollm2-ls", before), ("smollm2", teacher), ("heal", after)):
        model = AutoModelForCausalLM.from_pretrained(f"runs/{name}").eval()
        assert measure_perplexity(model, trainer.eval_dataset, trainer.args) == pytest.approx(figure, rel=1e-4)
    report = Path("runs/heal/report.md").read_text(encoding="utf-8")
    for row in (
        f"| teacher, `./runs/smollm2` | {teacher:.2f} (1.000 of the teacher's) |",
        f"| before the training, `./runs/smollm2-ls` | {before:.2f} ({before / teacher:.3f} of the teacher's) |",
        f"| after the training | {after:.2f} ({after / teacher:.3f} of the teacher's) |",
    ):
        assert row in report
    assert "had no teacher" not in report


def test_a_report_without_a_teacher_says_what_it_cannot_show():
    recipe = {"model_name_or_path": "runs/smollm2-ls", "teacher": None}
    section = _before_and_after(recipe, RunResult(perplexity_before_training=3.0, eval_perplexity=2.0))
    assert "| before the training, `runs/smollm2-ls` | 3.00 |\n| after the training | 2.00 |" in section
    assert "This run had no teacher. What it gained may come from learning this text" in section
    # Nothing to compare with: no evaluation at the start, or no checkpoint.
    assert _before_and_after(recipe, RunResult(eval_perplexity=2.0)) == ""
    assert _before_and_after({}, RunResult(perplexity_before_training=3.0, eval_perplexity=2.0)) == ""


def test_the_comparison_of_the_page(folder, tmp_path):
    """Its arms as `lsgpt compare` reads them: runs that differ in nothing but the checkpoint."""
    (yaml_block,) = re.findall(r"```yaml\n(.*?)```", DOC, re.DOTALL)
    (folder / "arms.yaml").write_text(yaml_block, encoding="utf-8")
    (command,) = (command for command in COMMANDS if command[0] == "compare")
    options = dict(zip(command[2::2], command[3::2]))
    base = parse_arguments(command[1], [*command[8:], *as_options(FIELDS)])
    arms = {arm: resolve_arm(base.recipe, arm, options["--arms-file"]) for arm in options["--arms"].split(",")}
    names = {arm: arguments.model.model_name_or_path for arm, arguments in arms.items()}
    assert names == {arm: fields["model_name_or_path"] for arm, fields in yaml.safe_load(yaml_block).items()}
    recipes = [{**arm.recipe, "run_name": None, "model_name_or_path": None} for arm in arms.values()]
    assert recipes[0] == recipes[1] and recipes[0]["teacher"] is None and recipes[0]["dataset_name"] == "books"
    for name, arguments in arms.items():
        arguments.training.output_dir = str(tmp_path / name)
        assert build_trainer(arguments).teacher is None
