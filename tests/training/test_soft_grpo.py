"""SofT-GRPO: what is scored and the loss against plain computations, and real training."""

import importlib.util
import math
import re
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from test_readme import blocks
from thinkers import END, WORDS, both, make_model, roll_out
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
)
from trl import GRPOConfig, GRPOTrainer

from lsgpt.training import AveragedWeightsCallback, soft_grpo, soft_thinking
from lsgpt.training.soft_grpo import STEP_FIELDS, SoftGRPOConfig, SoftGRPOTrainer, find_end_of_thinking


PROMPTS = Dataset.from_dict({"prompt": ["1 + 2 =", "3 =", "4 + 5 + 6 =", "7 ="]})


@pytest.fixture(scope="module")
def tokenizer():
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=words, **special)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tokenizer):
    """Holds `runs/lsgpt` and `runs/llama`, from where the reference models are loaded."""
    folder = tmp_path_factory.mktemp("soft-grpo")
    for name in ("lsgpt", "llama"):
        make_model(name).save_pretrained(folder / "runs" / name)
        tokenizer.save_pretrained(folder / "runs" / name)
    return folder


def sum_of_tokens(completion_ids, **columns):
    """A reward that differs for almost any two completions."""
    return [sum(ids) / 100 for ids in completion_ids]


@pytest.fixture
def build(folder, tokenizer, tmp_path):
    """Builds a trainer: `build(name, **options of SoftGRPOConfig)`."""

    def build(name, peft_config=None, **options):
        defaults = {
            "use_cpu": True,
            "bf16": False,
            "report_to": "none",
            "disable_tqdm": True,
            "save_strategy": "no",
            "logging_steps": 1,
            "learning_rate": 1e-2,
            "per_device_train_batch_size": 8,
            "per_device_eval_batch_size": 4,
            "num_generations": 4,
            "max_completion_length": 8,
            "gradient_checkpointing": False,
        }
        trainer = SoftGRPOTrainer(
            AutoModelForCausalLM.from_pretrained(folder / "runs" / name),
            sum_of_tokens,
            SoftGRPOConfig(str(tmp_path / "run"), **{**defaults, **options}),
            train_dataset=PROMPTS,
            eval_dataset=PROMPTS,
            processing_class=tokenizer,
            peft_config=peft_config,
        )
        trainer.current_gradient_accumulation_steps = 1  # what `train` sets
        trainer.model.train()
        return trainer

    return build


def rows_of(prompts=PROMPTS["prompt"], copies=4):
    return [{"prompt": prompt} for prompt in prompts for _ in range(copies)]


def score(trainer, inputs, scorer=SoftGRPOTrainer, rows=slice(None)):
    """Log-probabilities and entropies `(B, C)` of completions, by our trainer or by TRL's."""
    ids, mask = (
        torch.cat([inputs[f"prompt_{kind}"], inputs[f"completion_{kind}"]], dim=1)[rows] for kind in ("ids", "mask")
    )
    trainer._rollout = {name: value[rows] for name, value in inputs.items() if name in STEP_FIELDS}
    length = inputs["completion_ids"].shape[1]
    result = scorer._get_per_token_logps_and_entropies(trainer, trainer.model, ids, mask, length, compute_entropy=True)
    trainer._rollout = None
    return result[:2]


@both
def test_first_ratio_is_one(build, name):
    """Before any update, the model, the one that made the rollout and the reference are the same."""
    trainer = build(name, steps_per_generation=2, top_p=1.0)
    inputs = trainer._generate_and_score_completions(rows_of())
    assert inputs["is_soft"].any() and (inputs["prompt_mask"] == 0).any()
    (thinking,) = trainer._metrics["train"]["completions/mean_thinking_length"]
    assert thinking == pytest.approx(inputs["is_soft"].sum(-1).float().mean().item())
    log_probs, _ = score(trainer, inputs)
    assert log_probs.requires_grad
    ratio = (log_probs - inputs["old_per_token_logps"]).exp()
    torch.testing.assert_close(ratio, torch.ones_like(ratio))
    torch.testing.assert_close(log_probs.detach(), inputs["ref_per_token_logps"])


@both
def test_noise_that_was_drawn_is_what_is_scored(build, name, monkeypatch):
    """
    Where all noise is 1, every counted candidate has its log-density there. Mixed at the default temperature, the
    inputs would be others, and so would p.
    """
    monkeypatch.setattr(soft_thinking, "add_gumbel_noise", lambda p, factor, _: (p + 1e-6).log() + factor)
    trainer = build(name, noise_factor=0.5, top_p=1.0, gumbel_temperature=1.0)
    inputs = trainer._generate_and_score_completions(rows_of())
    log_probs, _ = score(trainer, inputs)
    soft = log_probs[inputs["is_soft"]].detach()
    torch.testing.assert_close(soft, torch.full_like(soft, -1 - math.exp(-1)))


@both
def test_scores_of_other_tokens_are_trls(build, name):
    """Of prompts without padding, because TRL counts positions from the padding on."""
    trainer = build(name, temperature=0.7)
    inputs = trainer._generate_and_score_completions(rows_of(["4 + 5 + 6 ="]))
    assert (inputs["prompt_mask"] == 1).all()
    inputs["is_soft"] = torch.zeros_like(inputs["is_soft"])
    ours, theirs = score(trainer, inputs), score(trainer, inputs, GRPOTrainer)
    for first, second in zip(ours, theirs):
        torch.testing.assert_close(first, second)


@both
def test_padding_does_not_change_scores(build, name):
    trainer = build(name)
    inputs = trainer._generate_and_score_completions(rows_of())
    log_probs, entropies = (x.detach() for x in score(trainer, inputs))
    for row in range(0, 16, 4):
        prompt, completion = (inputs[f"{part}_mask"][row].bool() for part in ("prompt", "completion"))
        alone = {
            **{f"prompt_{kind}": inputs[f"prompt_{kind}"][row, prompt][None] for kind in ("ids", "mask")},
            **{f"completion_{kind}": inputs[f"completion_{kind}"][row, completion][None] for kind in ("ids", "mask")},
            **{step: inputs[step][row, completion][None] for step in STEP_FIELDS},
        }
        for whole, single in zip((log_probs, entropies), score(trainer, alone)):
            torch.testing.assert_close(whole[row, completion], single[0].detach())
            assert not whole[row, ~completion].any()


@both
def test_loss_is_the_published_one(build, name):
    """The mean over all tokens of the dual clip and of the k3 estimate of the divergence."""
    trainer = build(name, beta=0.1)
    inputs = trainer._generate_and_score_completions(rows_of())
    new = score(trainer, inputs)[0].detach()
    inputs["old_per_token_logps"] = new - 1.5 * torch.randn_like(new)
    inputs["ref_per_token_logps"] = new + 0.5 * torch.randn_like(new)
    inputs["advantages"] = torch.randn(16)
    terms, cases = [], set()
    for row, column in inputs["completion_mask"].nonzero().tolist():
        advantage = inputs["advantages"][row].item()
        ratio = math.exp(new[row, column] - inputs["old_per_token_logps"][row, column])
        loss = max(-ratio * advantage, -min(max(ratio, 0.8), 1.2) * advantage)
        if advantage < 0:
            loss = min(loss, -3 * advantage)
        cases.add((advantage < 0, ratio < 0.8, ratio > 1.2, ratio > 3))
        difference = inputs["ref_per_token_logps"][row, column].item() - new[row, column].item()
        terms.append(loss + 0.1 * (math.exp(difference) - difference - 1))
    assert len(cases) == 8  # every region of the ratio, for both signs of the advantage
    loss = trainer._compute_loss(trainer.model, inputs)
    assert loss.item() == pytest.approx(sum(terms) / len(terms), rel=1e-5)


def test_inputs_have_no_gradient(build):
    trainer = build("llama")
    inputs = trainer._generate_and_score_completions(rows_of())
    trainer._compute_loss(trainer.model, inputs).backward()
    assert trainer.model.get_input_embeddings().weight.grad is None  # not tied
    assert trainer.model.lm_head.weight.grad.any()
    assert trainer.args.ddp_find_unused_parameters is True  # or DDP would wait for the gradient
    assert build("llama", ddp_find_unused_parameters=False).args.ddp_find_unused_parameters is False


def test_tokens_that_were_put_in_are_not_trained_on(build, monkeypatch):
    trainer = build("llama", max_thinking_tokens=1)
    inputs = trainer._generate_and_score_completions(rows_of())
    forced = inputs["tool_mask"] == 0
    assert forced.any() and (inputs["completion_ids"][forced] == END).all() and forced[:, 1].sum() == forced.sum()
    assert inputs["num_items_in_batch"] == (inputs["completion_mask"] * inputs["tool_mask"]).sum()
    gather = trainer.accelerator.gather  # of two processes, for numbers
    monkeypatch.setattr(trainer.accelerator, "gather", lambda x: gather(x) if x.ndim else x.repeat(2))
    inputs = trainer._generate_and_score_completions(rows_of())
    assert inputs["num_items_in_batch"] == 2 * (inputs["completion_mask"] * inputs["tool_mask"]).sum()


@pytest.mark.parametrize(
    ("name", "options"),
    [("lsgpt", {"gradient_checkpointing": True}), ("llama", {"generation_batch_size": 16, "pad_to_multiple_of": 16})],
)
def test_training(build, name, options, tmp_path):
    trainer = build(name, max_steps=4, **options)
    before = {key: value.clone() for key, value in trainer.model.state_dict().items()}
    trainer.train()
    logs = [log for log in trainer.state.log_history if "loss" in log]
    assert len(logs) == 4
    assert all(math.isfinite(log["loss"]) and log["grad_norm"] > 0 for log in logs)
    assert logs[0]["kl"] == pytest.approx(0, abs=1e-6) and logs[-1]["kl"] > 1e-4
    assert logs[0]["completions/mean_thinking_length"] > 0

    after = trainer.model.state_dict()
    same = {key for key in before if torch.equal(before[key], after[key])}
    assert same == (set() if name == "lsgpt" else {"model.embed_tokens.weight"})
    trainer.save_model()
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "run").state_dict()
    assert all(torch.equal(saved[key], after[key]) for key in after)
    assert math.isfinite(trainer.evaluate()["eval_loss"])
    assert trainer.state.log_history[-1]["eval_completions/mean_thinking_length"] > 0


def test_evaluating_averages_leaves_evaluations_alone(build):
    """The sampler of these has random numbers of its own."""
    logs = []
    for attached in (False, True):
        trainer = build("lsgpt", max_steps=2, eval_strategy="steps", eval_steps=1)
        if attached:
            AveragedWeightsCallback("ema", decay=0.9).attach(trainer)
        trainer.train()
        logs.append(
            [(log["eval_loss"], log["eval_reward"]) for log in trainer.state.log_history if "eval_loss" in log]
        )
    assert len(logs[0]) == 2 and logs[0] == logs[1]


def test_adapters_are_trained_against_the_model_without_them(build):
    trainer = build("llama", LoraConfig(r=2, target_modules=["q_proj", "v_proj"]), max_steps=3)
    before = {key: value.clone() for key, value in trainer.model.state_dict().items()}
    trainer.train()
    changed = {key for key, value in trainer.model.state_dict().items() if not torch.equal(before[key], value)}
    assert changed == {key for key in before if "lora_" in key}
    kl = [log["kl"] for log in trainer.state.log_history if "kl" in log]
    assert kl[0] == pytest.approx(0, abs=1e-6) and kl[-1] > 1e-6


@pytest.mark.parametrize("entropy_coef", [0.0, 0.1])
def test_entropies_have_a_gradient_where_the_loss_has_them(build, entropy_coef):
    trainer = build("llama", beta=0.0, entropy_coef=entropy_coef)
    inputs = trainer._generate_and_score_completions(rows_of())
    log_probs, entropies = score(trainer, inputs)
    assert log_probs.requires_grad and entropies.requires_grad == (entropy_coef > 0)
    trainer.args.use_adaptive_entropy = True  # a weight that may begin at 0 and grow
    assert score(trainer, inputs)[1].requires_grad


def test_training_raises_the_reward(build):
    trainer = build("llama", max_steps=20, per_device_train_batch_size=32, num_generations=8)
    trainer.train()
    rewards = [log["reward"] for log in trainer.state.log_history if "reward" in log]
    assert sum(rewards[-5:]) > 1.2 * sum(rewards[:5])


# What is refused


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gumbel_temperature": 0}, "`gumbel_temperature` must be positive; got 0"),
        ({"noise_factor": -1}, "`noise_factor` must be 0 (no noise) or more; got -1"),
        ({"top_k": 0}, "`top_k` must be at least 1; got 0"),
        ({"top_p": 0}, "`top_p` must be in (0, 1]; got 0"),
        ({"temperature": 0}, "`temperature` must be positive; got 0"),
        ({"max_thinking_tokens": -1}, "`max_thinking_tokens` must be 0 or more"),
    ],
)
def test_values_out_of_range_are_refused(options, message, tmp_path):
    with pytest.raises(ValueError, match=re.escape(message)):
        SoftGRPOConfig(str(tmp_path), **options)
    with pytest.raises(ValueError, match=re.escape(message)):
        roll_out(make_model("llama"), **options)


def test_a_training_needs_noise(tmp_path):
    """Unlike a rollout on its own, which is deterministic without any."""
    with pytest.raises(ValueError, match="`noise_factor` must be positive: without noise, soft steps have no density"):
        SoftGRPOConfig(str(tmp_path), noise_factor=0)


@pytest.mark.parametrize(
    "options",
    [
        {"use_vllm": True},
        {"use_transformers_continuous_batching": True},
        {"use_transformers_paged": True},
        {"min_p": 0.1},
        {"repetition_penalty": 1.1},
        {"generation_kwargs": {"num_beams": 2}},
        {"cache_implementation": "static"},
    ],
)
def test_options_of_other_generations_are_refused(options, tmp_path):
    with pytest.raises(ValueError, match=f"`{next(iter(options))}` must be .* does not support it"):
        SoftGRPOConfig(str(tmp_path), **options)


def test_options_that_would_fail_or_train_nothing_are_refused(tmp_path):
    with pytest.raises(ValueError, match="`max_completion_length` must be set"):
        SoftGRPOConfig(str(tmp_path), max_completion_length=None)
    with pytest.raises(ValueError, match="`use_reentrant` of `gradient_checkpointing_kwargs` must be false"):
        SoftGRPOConfig(str(tmp_path), gradient_checkpointing_kwargs={"use_reentrant": True})


def test_published_values_are_the_defaults(tmp_path):
    config = SoftGRPOConfig(str(tmp_path), use_cpu=True)
    assert (config.top_k, config.top_p, config.temperature) == (5, 0.95, 1.0)
    assert (config.gumbel_temperature, config.noise_factor) == (0.1, 1.0)
    assert (config.learning_rate, config.beta, config.num_generations) == (1e-6, 0.001, 8)
    assert (config.epsilon, config.epsilon_high, config.delta, config.entropy_coef) == (0.2, None, 3.0, 0.0)
    assert (config.loss_type, config.use_bias_correction_kl, config.max_grad_norm) == ("bnpo", False, 1.0)
    assert (config.lr_scheduler_type, config.weight_decay) == ("constant", 0.01)


@pytest.mark.parametrize("token", ["</thought>", "1 +"])
def test_a_tokenizer_without_the_end_of_thinking_token_is_refused(token, tokenizer, build):
    assert find_end_of_thinking(tokenizer) == END
    with pytest.raises(
        ValueError, match=re.escape(f"`end_of_thinking` must be one token that the tokenizer knows; got {token!r}")
    ):
        build("llama", end_of_thinking=token, beta=0.0)


class WithoutEmbeddings(PreTrainedModel):
    """A model that takes token ids only."""

    config_class = PreTrainedConfig

    def forward(self, input_ids, attention_mask=None):
        """Not called."""


def test_models_that_cannot_think_softly_are_refused(tmp_path):
    t5 = T5Config(vocab_size=8, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, decoder_start_token_id=0)
    for model in (WithoutEmbeddings(PreTrainedConfig()), T5ForConditionalGeneration(t5)):
        with pytest.raises(ValueError, match=f"takes `inputs_embeds`.*got {type(model).__name__}"):
            SoftGRPOTrainer(model, sum_of_tokens, SoftGRPOConfig(str(tmp_path), use_cpu=True, bf16=False))
        with pytest.raises(ValueError, match=f"takes `inputs_embeds`.*got {type(model).__name__}"):
            roll_out(model)


def test_other_arguments_are_refused(tmp_path, tokenizer):
    model = make_model("llama")
    args = {"use_cpu": True, "bf16": False}
    with pytest.raises(ValueError, match="`args` must be a SoftGRPOConfig; got GRPOConfig"):
        SoftGRPOTrainer(model, sum_of_tokens, GRPOConfig(str(tmp_path), **args))
    with pytest.raises(ValueError, match="`rollout_func` is not supported"):
        SoftGRPOTrainer(
            model,
            sum_of_tokens,
            SoftGRPOConfig(str(tmp_path), beta=0.0, **args),
            train_dataset=PROMPTS,
            processing_class=tokenizer,
            rollout_func=print,
        )


@pytest.mark.parametrize(
    ("attribute", "name"),
    [
        ("tools", "tools"),
        ("environment_factories", "environment_factory"),
        ("_is_vlm", "processing_class with images"),
        ("aux_loss_enabled", "router_aux_loss_coef"),
    ],
)
def test_what_only_grpo_can_do_is_refused(build, monkeypatch, attribute, name):
    init = GRPOTrainer.__init__

    def with_more(self, *args, **kwargs):
        init(self, *args, **kwargs)
        setattr(self, attribute, True)

    monkeypatch.setattr(GRPOTrainer, "__init__", with_more)
    with pytest.raises(ValueError, match=f"`{name}` is not supported by SofT-GRPO"):
        build("lsgpt")


@pytest.mark.parametrize(("how", "is_refused"), [("fsdp", True), ("zero 3", True), ("zero 2", False)])
def test_sharded_embeddings_are_refused(build, monkeypatch, how, is_refused):
    """The trainer only believes that it shards: a single process does not."""
    init = GRPOTrainer.__init__

    def sharded(self, *args, **kwargs):
        init(self, *args, **kwargs)
        if how == "fsdp":
            self.is_fsdp_enabled = True
        else:
            self.args.deepspeed_plugin = SimpleNamespace(zero_stage=int(how[-1]))

    monkeypatch.setattr(GRPOTrainer, "__init__", sharded)
    with pytest.raises(ValueError, match="weights cannot be sharded") if is_refused else nullcontext():
        build("lsgpt")


def test_trl_is_named_when_it_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "trl", None)
    specification = importlib.util.spec_from_file_location("lsgpt.training.without_trl", soft_grpo.__file__)
    with pytest.raises(ImportError, match=r"needs the package trl: in a clone of lsgpt, pip install '\.\[rl\]'"):
        specification.loader.exec_module(importlib.util.module_from_spec(specification))
    assert "soft_grpo" not in (Path(soft_grpo.__file__).parent / "__init__.py").read_text(encoding="utf-8")


def test_code_in_docs(folder, tokenizer, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    for part in (make_model("lsgpt"), tokenizer):
        part.save_pretrained("runs/thinker")
    names = {}
    for code in blocks("docs/soft-grpo.md", "python"):
        exec(code, names)
    assert names["trainer"].state.global_step == 2
    assert len(capsys.readouterr().out.splitlines()) >= 2
    assert (folder / "runs" / "soft-grpo" / "model.safetensors").exists()
