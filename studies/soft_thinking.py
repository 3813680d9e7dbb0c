"""Does reinforcement learning work better with soft than with discrete thinking? SofT-GRPO against GRPO."""

import math
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from datasets import Dataset
from filelock import FileLock
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    TrainerCallback,
    set_seed,
)

from lsgpt import LSGPTForCausalLM
from lsgpt.configuration import load_preset
from lsgpt.training import find_end_of_thinking, generate_soft_thinking
from lsgpt.training.report import points_of

from .comparisons import Comparison, Metric, Runs
from .streams import Stream, train_small
from .study import NUM_POINTS, SEED_OF_EVALUATION, Study, mean, picture, tabulate


END_OF_THINKING = "</think>"

SYMBOLS = ["<pad>", "<eos>", *"0123456789+=,", END_OF_THINKING]

SAMPLING = {"temperature": 1.0, "top_k": 5, "top_p": 0.95}
"""Published sampling parameters, used for both kinds of thinking, in training and in evaluation."""

PUBLISHED = {
    **SAMPLING,
    "num_generations": 8,
    "beta": 0.001,
    "epsilon": 0.2,
    "delta": 3.0,
    "loss_type": "bnpo",
    "use_bias_correction_kl": False,
    "lr_scheduler_type": "constant",
    "weight_decay": 0.01,
}
"""The published settings of SofT-GRPO, also used for GRPO, so that only the kind of thinking differs."""

DISCRETE, SOFT = "discrete", "soft"

METHODS = {
    "no RL": ("none", DISCRETE),
    "soft thinking without RL": ("none", SOFT),
    "GRPO": ("grpo", DISCRETE),
    "SofT-GRPO": ("soft-grpo", SOFT),
}
"""The methods that the claims compare: an arm, and its kind of thinking in the evaluation."""

ATTEMPTS = (1, 2, 4, 8, 16, 32)
"""The values of k for which pass@k is measured."""

CLOSE = 0.01
"""The largest difference in pass@k that counts as none."""


def passed(k: int, mode: str) -> Metric:
    """pass@k with one kind of thinking."""
    return Metric(f"pass@{k} with {mode} thinking", f"{mode}.{k}")


def raises(source: str, k: int, first: str, second: str, **options) -> Comparison:
    """A claim that the second of `METHODS` has the higher pass@k than the first."""
    (one, mode), (other, other_mode) = METHODS[first], METHODS[second]
    options = {"margin": CLOSE, "second_metric": passed(k, other_mode), **options}
    return Comparison(source, passed(k, mode), one, other, **options)


class Problem(NamedTuple):
    """A question with one number as its answer."""

    prompt: str
    thinking: str
    """The thinking that a supervised model learns."""
    answer: str


class SoftThinking(Study):
    """Compares no reinforcement learning, GRPO and SofT-GRPO, all starting from the same model."""

    name = "soft-thinking"
    title = "Soft thinking"
    question = """\
A model that thinks softly feeds itself mixtures of tokens, and can follow several thoughts at once. SofT-GRPO
(arXiv:2511.06411) makes this trainable by reinforcement learning. Does it beat GRPO on discrete tokens, above all in
what the model can reach with several attempts?"""
    protocol = """\
Problems are sums of three numbers of up to seven digits, each length equally often. A small LSGPT, whose window
covers the whole sum, first learns from examples to write down the sum of the first two and that of all three, both
with the last digit first, then `</think>`, then the answer, until 30% of its answers to other sums are right. All
arms of a seed start from this model. `none` stays as it is, `grpo` is trained by TRL's GRPO, `soft-grpo` by
SofT-GRPO, with the same problems, reward (1 for the right answer, otherwise 0), number of updates, learning rate
(3e-4; no other was tried) and other settings, which are those with which SofT-GRPO was published. All sample at
temperature 1 with top-k 5 and top-p 0.95. pass@k, the probability that at least one of k attempts is right, is
measured on problems that occur in no training, by the unbiased estimator (arXiv:2107.03374) from 64 samples of each
problem, with discrete and with soft thinking. The claims compare soft thinking of `soft-grpo` with discrete thinking
of `grpo` and `none`. If SofT-GRPO does not raise pass@1, nothing is said about the two trainings."""
    changes = """\
The number of seeds was reduced from five to three after a look at the first runs. Until all runs had been made, the
criteria were two standard errors of the differences, or means alone; they were replaced by Student's t intervals."""
    arms = dict.fromkeys(("none", "grpo", "soft-grpo"))
    gate = raises(
        "a condition for comparing the two",
        1,
        "no RL",
        "SofT-GRPO",
        claim="SofT-GRPO raises pass@1 above that of no training",
    )
    comparisons = {
        "trained": gate,
        "pass-32": raises("arXiv:2511.06411", 32, "GRPO", "SofT-GRPO", gate=gate),
        "pass-1": raises("arXiv:2511.06411", 1, "GRPO", "SofT-GRPO", gate=gate),
        "untrained": raises("arXiv:2505.15778", 1, "soft thinking without RL", "no RL", equal=True),
        "grpo-1": raises("arXiv:2504.13837", 1, "no RL", "GRPO"),
        "grpo-32": raises("arXiv:2504.13837", 32, "no RL", "GRPO", equal=True),
    }
    hours = 0.4
    num_terms, num_digits = 3, 7
    model: Mapping[str, Any] = {
        "hidden_size": 72,
        "num_global_heads": 2,
        "sliding_window": 56,
        "max_position_embeddings": 64,
        "position_embedding_type": "learned",
    }
    right_enough = 0.3
    check_every_n_steps = 10
    supervised_options: Mapping[str, Any] = {
        "max_steps": 4000,
        "per_device_train_batch_size": 64,
        "learning_rate": 3e-3,
        "warmup_steps": 100,
        "lr_scheduler_type": "constant_with_warmup",
        "lr_scheduler_kwargs": {},
        "bf16": False,
    }
    options: Mapping[str, Any] = {
        "max_steps": 200,
        "per_device_train_batch_size": 256,
        "steps_per_generation": 2,
        "learning_rate": 3e-4,
        "max_completion_length": 32,
        "gradient_checkpointing": False,
    }
    num_problems = 10_000
    eval_problems, eval_samples, eval_batch_size = 256, 64, 1024

    def prepare(self, folder: Path, fields: Sequence[str]):
        """Checks that TRL is installed, before the first run. Raises `ImportError` if it is not."""
        import lsgpt.training.soft_grpo  # noqa: F401, PLC0415 (needs TRL)

    def run(self, arm: str, seed: int, folder: Path, fields: Sequence[str]) -> dict:
        """Trains the model shared by all arms of a seed if that is still missing, then the arm's own, and tests it."""
        path = self.train_supervised(seed, folder / "supervised" / f"seed-{seed}")
        tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left")
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        values: dict[str, Any] = {"curves": {}}
        if arm == "none":
            model.to("cuda" if torch.cuda.is_available() else "cpu")
        else:
            problems = self.training_sums(np.random.default_rng([seed, 1]), self.num_problems)
            run_folder = folder / arm / f"seed-{seed}"
            values["curves"] = reinforce(arm, model, tokenizer, problems, seed, run_folder, self.options)
        model.eval()
        for mode in (DISCRETE, SOFT):
            set_seed(seed)
            with torch.autocast("cuda", torch.bfloat16, enabled=model.device.type == "cuda"):
                num_right = self.count_right(model, tokenizer, self.held_out_sums(), mode, self.eval_samples)
            values[mode] = {
                str(k): mean(pass_at(k, self.eval_samples, right) for right in num_right) for k in ATTEMPTS
            }
        return values

    def held_out_sums(self) -> list[Problem]:
        """The sums that models are tested on, the same for all seeds."""
        generator = np.random.default_rng(SEED_OF_EVALUATION)
        return [make_sum(generator, self.num_terms, self.num_digits) for _ in range(self.eval_problems)]

    def training_sums(self, generator: np.random.Generator, count: int) -> list[Problem]:
        """Random sums that models are not tested on."""
        held_out = {problem.prompt for problem in self.held_out_sums()}
        return [self.training_sum(generator, held_out) for _ in range(count)]

    def training_sum(self, generator: np.random.Generator, held_out: Collection[str]) -> Problem:
        """A random sum whose prompt is not held out."""
        while (problem := make_sum(generator, self.num_terms, self.num_digits)).prompt in held_out:
            pass
        return problem

    def train_supervised(self, seed: int, path: Path) -> Path:
        """
        Trains a model on examples and saves it with its tokenizer in `path`, unless it is already there.

        If several processes need the model, one of them trains it and the others wait.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{path}.lock"):
            if path.exists():
                return path
            set_seed(seed)
            tokenizer = make_tokenizer()
            held_out = {problem.prompt for problem in self.held_out_sums()}

            def make_row(generator: np.random.Generator) -> dict[str, np.ndarray]:
                prompt, thinking, answer = self.training_sum(generator, held_out)
                ids = np.array(tokenizer.encode(f"{prompt}{thinking}{END_OF_THINKING}{answer}<eos>"))
                return {"input_ids": ids, "labels": np.where(np.arange(len(ids)) < len(prompt), -100, ids)}

            ids = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
            model = LSGPTForCausalLM(load_preset("demo", **self.model, vocab_size=len(SYMBOLS), **ids))
            partial = path.with_name(f"{path.name}-partial")
            checks = self.training_sums(np.random.default_rng([seed, 2]), self.eval_problems)
            stop = StopWhenPartlyRight(self, checks, tokenizer)
            train_small(model, Stream(make_row, seed), seed, partial, self.supervised_options, [stop])
            model.save_pretrained(partial)
            tokenizer.save_pretrained(partial)
            partial.rename(path)
        return path

    def count_right(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        problems: Sequence[Problem],
        mode: str,
        num_samples: int,
    ) -> list[int]:
        """Counts the right samples of each problem, with discrete or soft thinking."""
        common = {
            "max_new_tokens": self.options["max_completion_length"],
            "pad_token_id": tokenizer.pad_token_id,
            "eos_token_id": tokenizer.eos_token_id,
            **SAMPLING,
        }
        samples = [problem for problem in problems for _ in range(num_samples)]
        right = []
        for begin in range(0, len(samples), self.eval_batch_size):
            batch = samples[begin : begin + self.eval_batch_size]
            inputs = tokenizer([problem.prompt for problem in batch], padding=True, return_tensors="pt")
            ids, mask = inputs.input_ids.to(model.device), inputs.attention_mask.to(model.device)
            if mode == SOFT:
                end = find_end_of_thinking(tokenizer)
                ids = generate_soft_thinking(model, ids, mask, end_of_thinking_id=end, **common).token_ids
            else:
                ids = model.generate(ids, attention_mask=mask, do_sample=True, **common)[:, ids.shape[1] :]
            texts = tokenizer.batch_decode(ids, skip_special_tokens=True)
            right += [is_right(text, problem.answer) for text, problem in zip(texts, batch)]
        return np.array(right).reshape(-1, num_samples).sum(1).tolist()

    def report(self, runs: Runs, folder: Path) -> str:
        """pass@k for each arm and kind of thinking, and plots of pass@k over k and of the reward over time."""

        def over_attempts(passes: dict) -> list[tuple[int, float]]:
            return [(k, passes[str(k)]) for k in ATTEMPTS]

        passes = {
            (arm, mode): [run[mode] for run in of_arm] for arm, of_arm in runs.items() for mode in (DISCRETE, SOFT)
        }
        columns = {f"pass@{k}": Metric("", str(k)) for k in ATTEMPTS}
        methods = {name: passes[method] for name, method in METHODS.items() if method in passes}
        trained = {arm: of_arm for arm, of_arm in runs.items() if arm != "none"}
        sections = [
            tabulate({f"{arm}, {mode}": of_arm for (arm, mode), of_arm in passes.items()}, columns, "arm, thinking"),
            picture(
                folder / "pass.png",
                "Probability that one of k attempts is right, over k",
                methods,
                over_attempts,
                "attempts k",
                "pass@k",
                log_x=True,
            ),
        ]
        if trained:
            title, share = "Reward over the training", "fraction of right answers in training"
            file = folder / "reward.png"
            sections.append(
                picture(file, title, trained, lambda run: run["curves"]["reward"], "optimizer step", share)
            )
        return "\n\n".join(sections)


def make_sum(generator: np.random.Generator, num_terms: int, num_digits: int) -> Problem:
    """
    Makes an addition problem. The thinking is the sum of the first two numbers, that of the first three, and so on,
    each with the last digit first, which is easier than the usual order. The answer has the usual order.

    Sums of numbers below 10, below 100, and so on up to `num_digits` digits are equally frequent, so some problems are
    easy and others hard. All numbers are padded with leading zeros, so all problems have the same length.
    """
    terms = generator.integers(10 ** generator.integers(1, num_digits + 1), size=num_terms)
    width = len(str(num_terms * (10**num_digits - 1)))
    sums = [f"{x:0{width}}" for x in terms.cumsum()[1:]]
    prompt = "+".join(f"{x:0{num_digits}}" for x in terms) + "="
    return Problem(prompt, ",".join(x[::-1] for x in sums), sums[-1])


def is_right(completion: str, answer: str) -> bool:
    """Whether the last number after the thinking is the answer; False if the thinking does not end."""
    _, is_over, given = completion.rpartition(END_OF_THINKING)
    numbers = re.findall(r"\d+", given)
    return bool(is_over and numbers) and int(numbers[-1]) == int(answer)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of characters, in which `</think>` is an ordinary token, so that rewards see it."""
    symbols = Tokenizer(models.WordLevel({symbol: i for i, symbol in enumerate(SYMBOLS)}))
    symbols.pre_tokenizer = pre_tokenizers.Split(Regex(f"{END_OF_THINKING}|."), "isolated")
    symbols.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=symbols, pad_token="<pad>", eos_token="<eos>")


class StopWhenPartlyRight(TrainerCallback):
    """Ends training once a given share of new problems is answered right, so that something is left to reinforce."""

    def __init__(self, study: SoftThinking, problems: Sequence[Problem], tokenizer: PreTrainedTokenizerBase):
        self.study, self.problems, self.tokenizer = study, problems, tokenizer

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if state.global_step % self.study.check_every_n_steps == 0:
            num_right = sum(self.study.count_right(model.eval(), self.tokenizer, self.problems, DISCRETE, 1))
            control.should_training_stop = num_right >= self.study.right_enough * len(self.problems)
            print(f"{num_right} of {len(self.problems)} right after {state.global_step} steps", flush=True)


def reinforce(
    arm: str,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    problems: Sequence[Problem],
    seed: int,
    folder: Path,
    options: Mapping[str, Any],
) -> dict[str, list[tuple[int, float]]]:
    """
    Trains a model by GRPO or SofT-GRPO, in place.

    Args:
        arm: `grpo` or `soft-grpo`.
        model: A freshly loaded model; the reference model is loaded from the same place.
        tokenizer: A tokenizer that pads on the left.
        problems: Training problems.
        seed: Seed for the order of the problems and for the samples.
        folder: Output folder of the Trainer, which stays empty.
        options: Fields of `GRPOConfig`.

    Returns:
        Curves: the mean reward, and the mean length of completions in tokens.
    """
    from lsgpt.training import soft_grpo  # noqa: PLC0415 (needs TRL)

    config_class, trainer_class = {
        "grpo": (soft_grpo.GRPOConfig, soft_grpo.GRPOTrainer),
        "soft-grpo": (soft_grpo.SoftGRPOConfig, soft_grpo.SoftGRPOTrainer),
    }[arm]

    def reward(completions: list[str], answer: list[str], **columns) -> list[float]:
        return [float(is_right(*pair)) for pair in zip(completions, answer)]

    args = config_class(
        output_dir=str(folder),
        seed=seed,
        bf16=torch.cuda.is_available(),
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        logging_steps=max(1, options["max_steps"] // NUM_POINTS),
        **PUBLISHED,
        **options,
    )
    data = Dataset.from_list([{"prompt": problem.prompt, "answer": problem.answer} for problem in problems])
    trainer = trainer_class(model, reward, args, train_dataset=data, processing_class=tokenizer)
    trainer.train()
    keys = {"reward": "reward", "length": "completions/mean_length"}
    return {name: points_of(trainer.state.log_history, key) for name, key in keys.items()}


def pass_at(k: int, num_samples: int, num_right: int) -> float:
    """The probability that of k samples, drawn from `num_samples` of which `num_right` are right, at least one is."""
    return 1 - math.comb(num_samples - num_right, k) / math.comb(num_samples, k)
