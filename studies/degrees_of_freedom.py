"""How large must logits be for a low-rank product of queries and keys to express an attention pattern?"""

import math
from collections.abc import Sequence
from pathlib import Path

import torch

from lsgpt.utilities.plots import of_runs, plot_curves

from .comparisons import Comparison, Metric, Runs
from .measurements import visible_pairs
from .study import Study, tabulate


def _log_logit(where: str, index: int, key: str = "max_logit") -> Metric:
    words = f"the base-2 logarithm of the largest |logit| {where}"
    return Metric(words, lambda run: math.log2(run["fits"][index][key]), 2)


SHORTEST, LONGEST = _log_logit("at the smallest n / d", 0), _log_logit("at the largest n / d", -1)
SHORTEST_CLOSE = _log_logit("at the smallest n / d, at a divergence of 0.1 nats,", 0, "max_logit_at_close_fit")
LONGEST_CLOSE = _log_logit("at the largest n / d, at a divergence of 0.1 nats,", -1, "max_logit_at_close_fit")
DIVERGENCE = Metric("the Kullback-Leibler divergence at the largest n / d", "fits.-1.divergence", 4)
DENSE, WINDOWED = "dense-local-causal", "dense-local-windowed"


class DegreesOfFreedom(Study):
    name = "degrees-of-freedom"
    title = "Degrees of freedom"
    question = """\
The paper explains exploding logits by counting: an attention matrix with dense local structure has nearly full rank,
and queries and keys of width d offer O(n d) numbers for it. Where n is much larger than d, a causal softmax could
express it only with large logits, whereas a softmax over the window alone has no need to, and patterns that are
sparse cause no problem. Is this so when nothing but queries and keys is fitted?"""
    protocol = """\
Queries and keys, n vectors of width d each, are free parameters, which Adam (its rate falling to zero on a cosine)
fits to a target attention by the cross-entropy of its rows. Targets: `dense-local`, the softmax of standard normal
numbers over the window of each query; `sparse`, the same over a few keys drawn from the whole past; `mixed`, the mean
of the two. The softmax of the fit is `causal`, over the whole past, or `windowed`, over the window. Here d = 16,
windows have 32 keys, and sparse targets 4. Measured at the end: the largest |logit|, q k / sqrt(d), of all pairs in
the softmax, and the Kullback-Leibler divergence of the fit from the target, in nats per query. Both depend on the
number of steps, since an ever better fit may take ever larger logits. So the largest |logit| is also given for the
moment at which the divergence fell below 0.1 nats, and is not finite where it never did."""
    changes = """\
Until all runs had been made, the criteria were two standard errors of the difference between means; they were
replaced by paired intervals. "Through a windowed softmax, small logits suffice" meant half of the other logit in all
seeds, and is now a comparison. Whether it is the dense local part of a mixed pattern that requires large logits is
not tested here: dense local attention alone needs logits as large as sparse attention alone. The comparison at an
equally close fit was added after the runs."""
    comparisons = {
        "growth": Comparison("paper", SHORTEST, DENSE, DENSE, LONGEST),
        "growth-at-close-fit": Comparison("paper", SHORTEST_CLOSE, DENSE, DENSE, LONGEST_CLOSE),
        "window": Comparison("paper", LONGEST, WINDOWED, DENSE),
        "fit": Comparison("paper", DIVERGENCE, WINDOWED, DENSE),
        "sparse": Comparison("paper", LONGEST, "sparse-causal", DENSE),
        "mixed": Comparison("paper", LONGEST, "sparse-causal", "mixed-causal"),
    }
    hours = 0.3
    width, window, num_keys = 16, 32, 4
    lengths: Sequence[int] = (64, 128, 256, 512, 1024)
    num_steps = 2000
    arms = {  # the target, and whether the softmax is windowed
        "dense-local-causal": ("dense-local", False),
        "dense-local-windowed": ("dense-local", True),
        "sparse-causal": ("sparse", False),
        "mixed-causal": ("mixed", False),
    }

    def run(self, arm: str, seed: int, folder: Path, fields: Sequence[str]) -> dict:
        """Fits the arm's target at every length."""
        kind, is_windowed = self.arms[arm]
        generator = torch.Generator().manual_seed(seed)
        fits = []
        for length in self.lengths:
            target = make_target(kind, length, self.window, self.num_keys, generator)
            visible = visible_pairs(length, self.window if is_windowed else None)
            figures = fit(target, visible, self.width, self.num_steps, generator)
            fits.append({"length": length, "length_over_width": length / self.width, **figures})
            print(fits[-1], flush=True)
        return {"fits": fits}

    def report(self, runs: Runs, folder: Path) -> str:
        def show(key: str, title: str, digits: int) -> str:
            ratios = enumerate(length / self.width for length in self.lengths)
            columns = {f"n / d = {ratio:g}": Metric("", f"fits.{i}.{key}", digits) for i, ratio in ratios}
            curves = of_runs(runs, lambda run: [(x["length_over_width"], x[key]) for x in run["fits"]])
            shown = plot_curves(folder / f"{key}.png", curves, "n / d, sequence length over width", title, log_x=True)
            return f"### {title}\n\n{tabulate(runs, columns)}\n\n{shown}"

        sections = [
            show("max_logit", "Largest |logit|", 1),
            show("max_logit_at_close_fit", "Largest |logit| at a divergence of 0.1 nats", 1),
            show("divergence", "Kullback-Leibler divergence (nats per query)", 4),
        ]
        return "\n\n".join(sections)


def make_target(
    kind: str, length: int, window: int, num_keys: int, generator: torch.Generator | None = None
) -> torch.Tensor:
    """
    A random target attention, `(n, n)` weights each row of which sums to 1: `dense-local` over the last `window` keys,
    the query's own included, `sparse` over `num_keys` keys (fewer where the past is shorter), or `mixed`.
    """
    if kind == "mixed":
        parts = [make_target(part, length, window, num_keys, generator) for part in ("dense-local", "sparse")]
        return (parts[0] + parts[1]) / 2
    visible = visible_pairs(length, window)
    if kind == "sparse":
        causal = visible_pairs(length)
        order = torch.rand(length, length, generator=generator).masked_fill(~causal, -1.0)
        chosen = order.topk(num_keys, dim=-1).indices
        visible = torch.zeros_like(causal).scatter(-1, chosen, True) & causal
    scores = torch.randn(length, length, generator=generator)
    return scores.masked_fill(~visible, -torch.inf).softmax(-1)


def fit(
    target: torch.Tensor, visible: torch.Tensor, width: int, num_steps: int, generator: torch.Generator | None = None
) -> dict[str, float]:
    """
    Fits random queries and keys of some width to a target, `(n, n)` weights that are zero unless `visible`, the
    `(n, n)` booleans of the pairs in the softmax; by Adam, at a rate of 0.05 that decays to zero on a cosine.

    Returns:
        `max_logit`, the largest |logit| of visible pairs at the end; `divergence`, the final divergence of the fit
        from the target in nats per query; and `max_logit_at_close_fit`, the largest |logit| when the divergence was
        first seen below 0.1, looking at every tenth step, or NaN if it never was.
    """
    query, key = ((0.3 * torch.randn(len(target), width, generator=generator)).requires_grad_() for _ in range(2))
    optimizer = torch.optim.Adam([query, key], lr=0.05)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, num_steps)
    mask = torch.zeros_like(target).masked_fill(~visible, -torch.inf)
    entropy = torch.special.entr(target).sum(-1).mean()

    def divergence():
        logits = query @ key.T / width**0.5
        # The product takes the logits without the mask: where the mask is infinite, the target is zero.
        cross_entropy = (logits + mask).logsumexp(-1) - (target * logits).sum(-1)
        return cross_entropy.mean() - entropy, logits

    at_close_fit = math.nan
    for step in range(num_steps):
        optimizer.zero_grad()
        loss, logits = divergence()
        if step % 10 == 0 and math.isnan(at_close_fit) and loss.item() < 0.1:
            at_close_fit = logits[visible].abs().max().item()
        loss.backward()
        optimizer.step()
        schedule.step()
    final, logits = divergence()
    return {
        "max_logit": logits[visible].abs().max().item(),
        "divergence": final.item(),
        "max_logit_at_close_fit": at_close_fit,
    }
