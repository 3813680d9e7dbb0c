"""SofT-GRPO: every equation against a plain computation, rollouts against a forward pass, and real training."""

import importlib.util
import math
import re
import sys
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from test_readme import blocks
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
)
from trl import GRPOConfig, GRPOTrainer

from lsgpt import LSGPTConfig, LSGPTForCausalLM
from lsgpt.training import soft_grpo
from lsgpt.training.soft_grpo import (
    STEP_FIELDS,
    SoftGRPOConfig,
    SoftGRPOTrainer,
    add_gumbel_noise,
    check_hooks,
    completion_log_probs,
    embed_steps,
    find_end_of_thinking,
    generate_soft_thinking,
    select_candidates,
    soft_log_probs,
    soft_weights,
)


WORDS = ["<pad>", "<eos>", "<unk>", "</think>", *"0123456789+="]
PAD, EOS, _, END = range(4)
PROMPTS = Dataset.from_dict({"prompt": ["1 + 2 =", "3 =", "4 + 5 + 6 =", "7 ="]})


# The equations, one number at a time, in Python's float64


def plain_candidates(logits, top_k, top_p, temperature):
    """Ids and probabilities of the candidates of one step."""
    order = sorted(range(len(logits)), key=lambda i: -logits[i])[:top_k]
    weights = [math.exp(logits[i] / temperature) for i in order]
    probabilities, mass = [], 0.0
    for weight in weights:
        probabilities.append(weight / sum(weights) if mass < top_p else 0.0)
        mass += weight / sum(weights)
    return order, [p / sum(probabilities) for p in probabilities]


def plain_log_prob(logits, candidates, noisy, temperature):
    """The log-probability of one soft step."""
    partition = sum(math.exp(z / temperature) for z in logits)
    probabilities = [math.exp(logits[i] / temperature) / partition for i in candidates]
    densities = []
    for p, u in zip(probabilities, noisy):
        log_p = math.log(p / sum(probabilities) + 1e-6)
        gumbel = min(max(u - log_p, -1.5), 3.0)
        if log_p > -3:
            densities.append(-gumbel - math.exp(-gumbel))
    return sum(densities) / len(densities)


def plain_weights(noisy, tau):
    weights = [math.exp((u - max(noisy)) / tau) for u in noisy]
    return [weight / sum(weights) for weight in weights]


def argmax_marginals(log_probs, low, high, cells=20_000):
    """How often each candidate has the largest `log_p + g`, with g from the Gumbel distribution clamped to a range."""

    def share_below(x):  # of the clamped distribution
        return 0.0 if x < low else 1.0 if x >= high else math.exp(-math.exp(-x))

    def share_of_wins(i, g):
        return math.prod(share_below(log_probs[i] + g - x) for j, x in enumerate(log_probs) if j != i)

    width = (high - low) / cells
    middles = [low + (n + 0.5) * width for n in range(cells)]
    atoms = ((low, math.exp(-math.exp(-low))), (high, 1 - math.exp(-math.exp(-high))))
    return [
        sum(mass * share_of_wins(i, g) for g, mass in atoms)
        + sum(math.exp(-g - math.exp(-g)) * share_of_wins(i, g) for g in middles) * width
        for i in range(len(log_probs))
    ]


@pytest.mark.parametrize(("top_k", "top_p", "temperature"), [(5, 0.95, 1.0), (4, 0.5, 0.7), (1, 0.95, 1.0), (9, 1, 2)])
def test_candidates_are_the_most_likely_tokens(top_k, top_p, temperature):
    logits = torch.randn(3, 9, dtype=torch.float64) * 2
    ids, probabilities = select_candidates(logits, top_k, top_p, temperature)
    for row in range(3):
        expected_ids, expected = plain_candidates(logits[row].tolist(), top_k, top_p, temperature)
        assert ids[row].tolist() == expected_ids
        assert probabilities[row].tolist() == pytest.approx(expected, abs=1e-12)
    assert select_candidates(logits, 20)[0].shape == (3, 9)  # a small vocabulary has no more
    assert select_candidates(logits.bfloat16(), 3)[1].dtype == torch.float32


def test_oracle_of_the_marginals_is_right():
    """Without bounds, the largest `log p + g` is that of a token with probability p (Gumbel-max)."""
    probabilities = [0.5, 0.3, 0.15, 0.05]
    assert argmax_marginals([math.log(p) for p in probabilities], -5, 40) == pytest.approx(probabilities, abs=1e-4)


def test_visible_tokens_are_drawn_from_the_distribution():
    """The noise is clamped, so that the likely ones win a little more often than their probability says."""
    draws, probabilities = 200_000, [0.45, 0.3, 0.13, 0.08, 0.04]
    noisy = add_gumbel_noise(torch.tensor(probabilities).expand(draws, -1), generator=torch.Generator().manual_seed(0))
    counts = noisy.argmax(-1).bincount(minlength=5).tolist()
    expected = [draws * share for share in argmax_marginals([math.log(p + 1e-6) for p in probabilities], -1.5, 3)]
    assert sum(expected) == pytest.approx(draws, rel=1e-4)
    assert sum((count - x) ** 2 / x for count, x in zip(counts, expected)) < 18.5  # 0.1% of chi-square with 4 degrees
    assert sum((count - draws * p) ** 2 / (draws * p) for count, p in zip(counts, probabilities)) > 18.5


def test_noise_is_scaled_and_clamped():
    probabilities = torch.tensor([0.6, 0.4, 0.0]).expand(10_000, -1)
    log_probs = (probabilities + 1e-6).log()
    assert torch.equal(add_gumbel_noise(probabilities, noise_factor=0), log_probs)
    noise = [
        add_gumbel_noise(probabilities, factor, torch.Generator().manual_seed(0)) - log_probs for factor in (1, 0.5)
    ]
    assert noise[0].min().item() == pytest.approx(-1.5, abs=1e-5)
    assert noise[0].max().item() == pytest.approx(3, abs=1e-5)
    torch.testing.assert_close(noise[1], noise[0] / 2)


@pytest.mark.parametrize("tau", [0.1, 1.0])
def test_weights_are_a_softmax(tau):
    noisy = torch.randn(4, 5, dtype=torch.float64)
    for weights, row in zip(soft_weights(noisy, tau).tolist(), noisy.tolist()):
        assert weights == pytest.approx(plain_weights(row, tau), abs=1e-12)


def soft_steps(steps=6, size=8, k=5):
    """Logits, candidates and noisy log-probabilities, some of them too unlikely to count or clamped."""
    logits = torch.randn(steps, size, dtype=torch.float64) * 2
    candidate_ids, probabilities = select_candidates(logits, k)
    noisy = add_gumbel_noise(probabilities)
    other = logits + torch.randn_like(logits)  # of another model, so that the noise is not what was drawn
    return other, candidate_ids, noisy


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probability_of_a_soft_step(temperature):
    logits, candidate_ids, noisy = soft_steps()
    expected = [
        plain_log_prob(*step, temperature) for step in zip(*(x.tolist() for x in (logits, candidate_ids, noisy)))
    ]
    assert soft_log_probs(logits, candidate_ids, noisy, temperature).tolist() == pytest.approx(expected, abs=1e-10)


def test_gradient_of_a_soft_step_equals_finite_differences():
    logits, candidate_ids, noisy = soft_steps()
    temperature, h = 0.8, 1e-6
    logits.requires_grad_()
    soft_log_probs(logits, candidate_ids, noisy, temperature).sum().backward()
    assert logits.grad.abs().max() > 0.1
    for row, gradient in enumerate(logits.grad.tolist()):
        for token, derivative in enumerate(gradient):
            values = []
            for sign in (1, -1):
                moved = logits[row].tolist()
                moved[token] += sign * h
                values.append(plain_log_prob(moved, candidate_ids[row].tolist(), noisy[row].tolist(), temperature))
            assert derivative == pytest.approx((values[0] - values[1]) / (2 * h), abs=1e-7)


def test_a_step_in_which_no_candidate_is_likely_enough_has_no_log_probability():
    logits = torch.zeros(1, 30, requires_grad=True)
    log_prob = soft_log_probs(logits, torch.arange(30)[None], torch.zeros(1, 30))
    log_prob.sum().backward()
    assert log_prob.item() == 0 and not logits.grad.any()


def test_log_probabilities_of_completions_are_those_of_each_step():
    logits, candidate_ids, noisy = (x[None] for x in soft_steps())
    token_ids = torch.randint(8, (1, 6))
    is_soft = torch.tensor([[True, True, False, True, False, False]])
    log_probs = completion_log_probs(logits, token_ids, candidate_ids, noisy, is_soft, 0.9)
    soft = soft_log_probs(logits, candidate_ids, noisy, 0.9)
    usual = torch.distributions.Categorical(logits=logits / 0.9).log_prob(token_ids)
    torch.testing.assert_close(log_probs, torch.where(is_soft, soft, usual))


# Rollouts


def make_model(name, **options):
    """A tiny decoder with random weights: an LSGPT with learned positions and tied embeddings, or a Llama."""
    torch.manual_seed(0)
    sizes = {"vocab_size": len(WORDS), "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"initializer_range": 0.2, "pad_token_id": PAD, "eos_token_id": EOS, "bos_token_id": None, **options}
    if name == "lsgpt":
        return LSGPTForCausalLM(LSGPTConfig(**sizes, sliding_window=4, tie_word_embeddings=True)).eval()
    return LlamaForCausalLM(LlamaConfig(**sizes, intermediate_size=48, num_key_value_heads=2)).eval()


both = pytest.mark.parametrize("name", ["lsgpt", "llama"])

PADDED = torch.tensor([[PAD, PAD, 6, 15], [5, 14, 6, 15], [PAD, 9, 14, 8], [4, 4, 4, 4]])


def roll_out(model, input_ids=PADDED, seed=0, **options):
    options = {"end_of_thinking_id": END, "max_new_tokens": 12, "pad_token_id": PAD, **options}
    return generate_soft_thinking(
        model, input_ids, (input_ids != PAD).long(), generator=torch.Generator().manual_seed(seed), **options
    )


def logits_of(model, prompt, rollout, row, tau=0.1):
    """The logits `(C, V)` of a row by one forward pass without a cache, over embeddings mixed one at a time."""
    table = model.get_input_embeddings().weight
    inputs = [table[token] for token in prompt]
    for step in range(int(rollout.mask[row].sum())):
        if rollout.is_soft[row, step]:
            weights = plain_weights(rollout.noisy_log_probs[row, step].tolist(), tau)
            inputs.append(sum(w * table[i] for w, i in zip(weights, rollout.candidate_ids[row, step].tolist())))
        else:
            inputs.append(table[rollout.token_ids[row, step]])
    with torch.no_grad():
        return model(inputs_embeds=torch.stack(inputs)[None], use_cache=False).logits[0, len(prompt) - 1 : -1]


@both
def test_rollout_follows_the_equations(name):
    model = make_model(name).double()
    rollout = roll_out(model, PADDED.repeat(4, 1), temperature=0.9, top_k=4)
    assert rollout.is_soft.any() and (rollout.mask & ~rollout.is_soft).any()
    for row, prompt in enumerate(PADDED.repeat(4, 1)):
        logits = logits_of(model, prompt[prompt != PAD].tolist(), rollout, row)
        is_thinking = True
        for step, step_logits in enumerate(logits.tolist()):
            token = rollout.token_ids[row, step].item()
            candidates, probabilities = plain_candidates(step_logits, 4, 0.95, 0.9)
            assert token in [i for i, p in zip(candidates, probabilities) if p > 0]
            assert rollout.is_soft[row, step] == (is_thinking and token != END)
            if rollout.is_soft[row, step]:
                noisy = rollout.noisy_log_probs[row, step].tolist()
                assert rollout.candidate_ids[row, step].tolist() == candidates
                assert token == candidates[noisy.index(max(noisy))]
                for u, p in zip(noisy, probabilities):
                    assert -1.5 - 1e-9 < u - math.log(p + 1e-6) < 3 + 1e-9
            is_thinking = is_thinking and token != END
        ended = (rollout.token_ids[row] == EOS) & rollout.mask[row]
        assert ended.sum() <= 1 and len(logits) == (ended.int().argmax() + 1 if ended.any() else 12)
        assert (rollout.token_ids[row, len(logits) :] == PAD).all()
    outside = ~rollout.is_soft
    assert not rollout.candidate_ids[outside].any() and not rollout.noisy_log_probs[outside].any()
    assert not rollout.is_forced.any()


@both
def test_cache_changes_nothing(name):
    model = make_model(name).double()
    cached, plain = (roll_out(model, use_cache=use_cache) for use_cache in (True, False))
    for first, second in zip(cached, plain):
        torch.testing.assert_close(first, second)


@both
def test_padding_changes_nothing(name):
    model = make_model(name).double()
    padded, more = (roll_out(model, nn.functional.pad(PADDED, (extra, 0), value=PAD)) for extra in (0, 3))
    for first, second in zip(padded, more):
        torch.testing.assert_close(first, second)


@both
def test_without_noise_and_with_one_candidate_thinking_is_greedy(name):
    model = make_model(name)
    prompt = PADDED[1:2]
    expected = model.generate(prompt, do_sample=False, max_new_tokens=12)[:, 4:]
    for options in ({"top_k": 1}, {"noise_factor": 0, "gumbel_temperature": 1e-4}):
        rollout = roll_out(model, prompt, end_of_thinking_id=2 if END in expected else END, **options)
        assert rollout.is_soft.any() and rollout.token_ids.tolist() == expected.tolist()


@both
def test_thinking_is_cut_off(name):
    rollout = roll_out(make_model(name), eos_token_id=[], max_thinking_tokens=3)
    forced = rollout.is_forced.any(-1)
    assert forced.any() and rollout.is_forced[forced].int().argmax(-1).eq(3).all()
    assert (rollout.token_ids[rollout.is_forced] == END).all()
    assert not rollout.is_soft[:, 3:].any() and (rollout.is_soft.sum(-1)[forced] == 3).all()
    assert rollout.mask.all() and rollout.mask.shape == (4, 12)
    assert not roll_out(make_model(name), max_thinking_tokens=0).is_soft.any()


def test_every_end_token_ends_a_completion():
    model = make_model("llama")
    whole = roll_out(model, eos_token_id=[])
    last = whole.token_ids[:, 5].tolist()
    for row, tokens in enumerate(roll_out(model, eos_token_id=last).token_ids.tolist()):
        end = next(i for i, token in enumerate(whole.token_ids[row].tolist()) if token in last)
        assert end <= 5 and tokens[end] == whole.token_ids[row, end]
        assert set(tokens[end + 1 :]) <= {PAD}


def test_embeddings_have_no_gradient():
    embeddings = nn.Embedding(8, 4)
    _, candidate_ids, noisy = (x[None] for x in soft_steps())
    token_ids, is_soft = torch.randint(8, (1, 6)), torch.tensor([[True, False] * 3])
    mixed = embed_steps(embeddings, token_ids, candidate_ids, noisy.float(), is_soft, 0.5)
    assert not mixed.requires_grad
    for step in range(6):
        expected = embeddings.weight[token_ids[0, step]]
        if is_soft[0, step]:
            weights = plain_weights(noisy[0, step].tolist(), 0.5)
            expected = sum(w * embeddings.weight[i] for w, i in zip(weights, candidate_ids[0, step].tolist()))
        torch.testing.assert_close(mixed[0, step], expected.detach())


# Training


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
    log_probs, _ = score(trainer, inputs)
    assert log_probs.requires_grad
    ratio = (log_probs - inputs["old_per_token_logps"]).exp()
    torch.testing.assert_close(ratio, torch.ones_like(ratio))
    torch.testing.assert_close(log_probs.detach(), inputs["ref_per_token_logps"])


@both
def test_noise_that_was_drawn_is_what_is_scored(build, name):
    """Without noise, u is log(p + 1e-6): every counted candidate has the density exp(-1) at 0."""
    trainer = build(name, noise_factor=0, top_p=1.0)
    inputs = trainer._generate_and_score_completions(rows_of())
    log_probs, _ = score(trainer, inputs)
    soft = log_probs[inputs["is_soft"]].detach()
    torch.testing.assert_close(soft, torch.full_like(soft, -1))


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


def test_tokens_that_were_put_in_are_not_trained_on(build):
    trainer = build("llama", max_thinking_tokens=1)
    inputs = trainer._generate_and_score_completions(rows_of())
    forced = inputs["tool_mask"] == 0
    assert forced.any() and (inputs["completion_ids"][forced] == END).all() and forced[:, 1].sum() == forced.sum()
    assert inputs["num_items_in_batch"] == (inputs["completion_mask"] * inputs["tool_mask"]).sum()


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


@pytest.mark.parametrize(
    "options",
    [
        {"use_vllm": True},
        {"use_transformers_continuous_batching": True},
        {"min_p": 0.1},
        {"repetition_penalty": 1.1},
        {"generation_kwargs": {"num_beams": 2}},
        {"cache_implementation": "static"},
    ],
)
def test_options_of_other_generations_are_refused(options, tmp_path):
    with pytest.raises(ValueError, match=f"`{next(iter(options))}` must be .* does not support it"):
        SoftGRPOConfig(str(tmp_path), **options)


def test_published_values_are_the_defaults(tmp_path):
    config = SoftGRPOConfig(str(tmp_path), use_cpu=True)
    assert (config.top_k, config.top_p, config.temperature) == (5, 0.95, 1.0)
    assert (config.gumbel_temperature, config.noise_factor) == (0.1, 1.0)
    assert (config.learning_rate, config.beta, config.num_generations) == (1e-6, 0.001, 8)
    assert (config.epsilon, config.epsilon_high, config.delta, config.entropy_coef) == (0.2, None, 3.0, 0.0)
    assert (config.loss_type, config.use_bias_correction_kl, config.max_grad_norm) == ("bnpo", False, 1.0)


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


def test_prompts_that_are_not_padded_on_the_left_are_refused():
    with pytest.raises(ValueError, match="padded on the left"):
        roll_out(make_model("llama"), PADDED.flip(1))
    with pytest.raises(ValueError, match="`max_new_tokens` must be at least 1"):
        roll_out(make_model("llama"), max_new_tokens=0)


def test_a_model_without_a_cache_is_refused_unless_it_is_told_so():
    model = make_model("llama").train()
    model.gradient_checkpointing_enable()
    with pytest.raises(ValueError, match="`use_cache` must be False"):
        roll_out(model)
    assert roll_out(model, use_cache=False).is_soft.any()


def test_another_trl_is_refused():
    class Other(GRPOTrainer):
        def _compute_loss(self, model, inputs_of_another_kind):
            pass

    check_hooks(GRPOTrainer)
    for trainer_class, method in ((Other, "Other._compute_loss"), (object, "object._generate_single_turn")):
        with pytest.raises(ImportError, match=rf"`{method}`.* trl 1\..*pip install 'lsgpt\[rl\]'"):
            check_hooks(trainer_class)


def test_trl_is_named_when_it_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "trl", None)
    specification = importlib.util.spec_from_file_location("without_trl", soft_grpo.__file__)
    with pytest.raises(ImportError, match=r"needs the package trl: pip install 'lsgpt\[rl\]'"):
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
