"""Soft thinking: every equation against a plain computation, and rollouts against a forward pass."""

import math

import pytest
import torch
from thinkers import END, EOS, PAD, PADDED, both, make_model, roll_out
from torch import nn

from lsgpt.training.soft_thinking import (
    add_gumbel_noise,
    completion_log_probs,
    embed_steps,
    select_candidates,
    soft_log_probs,
    soft_weights,
)


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


def plain_log_prob(logits, candidates, noisy, temperature, noise_factor=1.0):
    """The log-probability of one soft step."""
    partition = sum(math.exp(z / temperature) for z in logits)
    probabilities = [math.exp(logits[i] / temperature) / partition for i in candidates]
    densities = []
    for p, u in zip(probabilities, noisy):
        log_p = math.log(p / sum(probabilities) + 1e-6)
        gumbel = min(max((u - log_p) / noise_factor, -1.5), 3.0)
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


@pytest.mark.parametrize("options", [(1.0,), (0.6,), (1.0, 0.5), (0.6, 2.0)])
def test_log_probability_of_a_soft_step(options):
    """With a temperature, and a factor of the noise."""
    steps = soft_steps()
    expected = [plain_log_prob(*step, *options) for step in zip(*(x.tolist() for x in steps))]
    assert soft_log_probs(*steps, *options).tolist() == pytest.approx(expected, abs=1e-10)


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
    half, steps = logits.bfloat16(), (token_ids, candidate_ids, noisy.float(), is_soft)
    torch.testing.assert_close(completion_log_probs(half, *steps), completion_log_probs(half.float(), *steps))


# Rollouts


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


def test_a_model_that_was_trained_with_gradient_checkpointing():
    model = make_model("llama").train()
    model.gradient_checkpointing_enable()
    assert roll_out(model.eval()).is_soft.any()


def test_tokens_after_the_thinking_are_drawn_from_the_candidates():
    model, draws = make_model("llama"), 4000
    rollout = roll_out(model, PADDED[1:2].repeat(draws, 1), max_new_tokens=2, max_thinking_tokens=0)
    assert (rollout.token_ids[:, 0] == END).all()
    with torch.no_grad():
        logits = model(torch.cat([PADDED[1], torch.tensor([END])])[None]).logits[0, -1]
    ids, probabilities = select_candidates(logits)
    counts = rollout.token_ids[:, 1].bincount(minlength=len(logits))[ids]
    expected = draws * probabilities[probabilities > 0]
    assert counts.sum() == draws and len(expected) > 2
    # 0.1% of chi-square with 4 degrees, of which there are at most so many.
    assert ((counts[: len(expected)] - expected) ** 2 / expected).sum() < 18.5


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


# What is refused


def test_prompts_that_are_not_padded_on_the_left_are_refused():
    with pytest.raises(ValueError, match="padded on the left"):
        roll_out(make_model("llama"), PADDED.flip(1))
    with pytest.raises(ValueError, match="`max_new_tokens` must be at least 1"):
        roll_out(make_model("llama"), max_new_tokens=0)


@pytest.mark.filterwarnings("error::FutureWarning")
def test_a_model_without_a_cache_is_refused_unless_it_is_told_so():
    """By nothing that Transformers 6 will lack."""
    model = make_model("llama").train()
    model.activation_checkpointing_enable()
    with pytest.raises(ValueError, match="`use_cache` must be False"):
        roll_out(model)
    assert roll_out(model, use_cache=False).is_soft.any()
