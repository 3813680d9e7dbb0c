"""Does reinforcement learning work better with soft than with discrete thinking? SofT-GRPO against GRPO."""

import math
import re
from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from datasets import Dataset, load_dataset
from filelock import FileLock
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    TrainerCallback,
    TrainingArguments,
    default_data_collator,
    set_seed,
)

from lsgpt import LSGPTForCausalLM
from lsgpt.configuration import load_preset
from lsgpt.training import LSGPTTrainer, find_end_of_thinking, generate_soft_thinking
from lsgpt.training.report import points_of
from lsgpt.utilities import table

from .comparisons import Comparison, Metric, format_values
from .plots import plot
from .streams import Stream
from .study import NUM_POINTS, SEED_OF_EVALUATION, Runs, Scale, Study, mean, points


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


def raises(claim: str, source: str, k: int, first: str, second: str, **options) -> Comparison:
    """A claim that the second of `METHODS` has the higher pass@k than the first."""
    (one, mode), (other, other_mode) = METHODS[first], METHODS[second]
    options = {"margin": CLOSE, "second_metric": passed(k, other_mode), **options}
    return Comparison(claim, source, passed(k, mode), one, other, **options)


class Problem(NamedTuple):
    """A question with one number as its answer."""

    prompt: str
    thinking: str
    """The thinking that a supervised model learns; empty if there is none."""
    answer: str


class SoftThinking(Study):
    """Compares no reinforcement learning, GRPO and SofT-GRPO, all starting from the same model."""

    name = "soft-thinking"
    title = "Soft thinking"
    question = """\
A model that thinks softly feeds itself mixtures of tokens, and can follow several thoughts at once. SofT-GRPO
(arXiv:2511.06411) makes this trainable by reinforcement. Does it beat GRPO on discrete tokens, above all in what the
model can reach with several attempts?"""
    protocol = """\
All arms of a seed start from the same model. `none` stays as it is, `grpo` is trained by TRL's GRPO, `soft-grpo` by
SofT-GRPO, with the same problems, reward (1 for the right answer, else 0), number of updates, learning rate and other
settings. The rate is 3e-4 at `micro`, where no other was tried for either, and at `paper` 1e-6, with which SofT-GRPO
was published, as with the other settings. All sample at temperature 1 with top-k 5 and top-p 0.95.
pass@k, the probability that at least one of k attempts is right, is measured on problems that are in no training, by
the unbiased estimator (arXiv:2107.03374) from 64 samples of each problem at `micro` and 32 at `paper`, with discrete
and with soft thinking. The claims compare soft thinking of `soft-grpo` with discrete thinking of `grpo` and `none`.
Differences are taken seed by seed, since all arms of a seed share a model.

At `micro` problems are sums of three numbers of up to seven digits, as many of each length. A small LSGPT, whose
window covers all of a sum, first learns from examples to write down the sum of the first two and that of all three,
both with the last digit first, then `</think>`, then the answer, until 30% of its answers to other sums are right. At
`paper` the model is DeepSeek-R1-Distill-Qwen-1.5B, one of the published ones, and the problems are those of GSM8K. If
neither training raises pass@1, comparing the two says nothing, and stays open."""
    changes = """\
The number of seeds was reduced from five to three after a look at the first runs. Until all runs had been made,
criteria were two standard errors of the differences, or means alone; they were replaced by Student's t intervals."""
    gate = raises(
        "SofT-GRPO raises pass@1 above that of no training",
        "a condition for comparing the two trainings",
        1,
        "no RL",
        "SofT-GRPO",
    )
    comparisons = {
        "trained": gate,
        "pass-32": raises(
            "SofT-GRPO raises pass@32 above that of GRPO", "arXiv:2511.06411", 32, "GRPO", "SofT-GRPO", gate=gate
        ),
        "pass-1": raises(
            "SofT-GRPO raises pass@1 above that of GRPO", "arXiv:2511.06411", 1, "GRPO", "SofT-GRPO", gate=gate
        ),
        "untrained": raises(
            "soft thinking loses nothing without training",
            "arXiv:2505.15778",
            1,
            "soft thinking without RL",
            "no RL",
            equal=True,
        ),
        "grpo-1": raises("GRPO gains in pass@1", "arXiv:2504.13837", 1, "no RL", "GRPO"),
        "grpo-32": raises("GRPO does not gain in pass@32", "arXiv:2504.13837", 32, "no RL", "GRPO", equal=True),
    }
    scales = {
        "micro": Scale(
            None,
            {
                "num_terms": 3,
                "num_digits": 7,
                "preset": "demo",
                "config": {
                    "hidden_size": 72,
                    "num_global_heads": 2,
                    "sliding_window": 56,
                    "max_position_embeddings": 64,
                    "position_embedding_type": "learned",
                },
                "right_enough": 0.3,
                "check_every_n_steps": 10,
                "supervised_options": {
                    "max_steps": 4000,
                    "per_device_train_batch_size": 64,
                    "learning_rate": 3e-3,
                    "warmup_steps": 100,
                },
                "options": {
                    "max_steps": 200,
                    "per_device_train_batch_size": 256,
                    "steps_per_generation": 2,
                    "learning_rate": 3e-4,
                    "max_completion_length": 32,
                    "gradient_checkpointing": False,
                },
                "num_problems": 10_000,
                "eval_problems": 256,
                "eval_samples": 64,
                "eval_batch_size": 1024,
            },
            3,
            0.4,
        ),
        "paper": Scale(
            None,
            {
                "model": "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B",
                "dataset": ("openai/gsm8k", "main"),
                "options": {
                    "max_steps": 200,
                    "per_device_train_batch_size": 4,
                    "gradient_accumulation_steps": 64,
                    "steps_per_generation": 128,
                    "learning_rate": 1e-6,
                    "max_completion_length": 2048,
                },
                "eval_problems": 200,
                "eval_samples": 32,
                "eval_batch_size": 512,
            },
            3,
            40.0,
        ),
    }

    def arms(self, scale: str) -> Mapping[str, Any]:
        """The names of the arms, which need no settings."""
        return dict.fromkeys(("none", "grpo", "soft-grpo"))

    def prepare(self, scale: str, folder: Path, fields: Sequence[str]):
        """Checks that TRL is installed, before the first run. Raises `ImportError` if it is not."""
        import lsgpt.training.soft_grpo  # noqa: F401, PLC0415 (needs TRL)

    def run(self, arm: str, seed: int, scale: str, folder: Path, fields: Sequence[str]) -> dict:
        """Trains the model shared by all arms of a seed if that is still missing, then the arm's own, and tests it."""
        settings = self.scales[scale].fields
        name = settings.get("model") or str(train_supervised(settings, seed, folder / "supervised" / f"seed-{seed}"))
        tokenizer = AutoTokenizer.from_pretrained(name, padding_side="left")
        model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
        problems, held_out = make_problems(settings, seed, tokenizer)
        values: dict[str, Any] = {"curves": {}}
        if arm == "none":
            model.to("cuda" if torch.cuda.is_available() else "cpu")
        else:
            run_folder = folder / arm / f"seed-{seed}"
            values["curves"] = reinforce(arm, model, tokenizer, problems, seed, run_folder, settings["options"])
        model.eval()
        for mode in (DISCRETE, SOFT):
            set_seed(seed)
            with torch.autocast("cuda", torch.bfloat16, enabled=model.device.type == "cuda"):
                num_right = count_right(model, tokenizer, held_out, mode, settings)
            values[mode] = {
                str(k): mean(pass_at(k, settings["eval_samples"], right) for right in num_right) for k in ATTEMPTS
            }
        return values

    def report(self, runs: Runs, folder: Path) -> str:
        """pass@k for each arm and kind of thinking, and plots of pass@k over k and of the reward over time."""
        rows = [
            [f"`{arm}`", mode, *(format_values([run[mode][str(k)] for run in of_arm]) for k in ATTEMPTS)]
            for arm, of_arm in runs.items()
            for mode in (DISCRETE, SOFT)
        ]
        curves = {
            name: [[(k, run[mode][str(k)]) for k in ATTEMPTS] for run in runs[arm]]
            for name, (arm, mode) in METHODS.items()
            if arm in runs
        }
        plot(folder / "pass.png", curves, "attempts k", "pass@k", log_x=True)
        text = table(rows, ["arm", "thinking", *(f"pass@{k}" for k in ATTEMPTS)])
        text += "\n\n![Probability that one of k attempts is right, over k](pass.png)"
        rewards = {
            arm: [points(run["curves"]["reward"]) for run in of_arm] for arm, of_arm in runs.items() if arm != "none"
        }
        if rewards:
            plot(folder / "reward.png", rewards, "optimizer step", "share of right answers while training")
            text += "\n\n![Reward over the training](reward.png)"
        return text


STUDY = SoftThinking()


# Problems


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


def held_out_sums(settings: Mapping[str, Any]) -> list[Problem]:
    """The sums that models are tested on, the same for all seeds."""
    generator = np.random.default_rng(SEED_OF_EVALUATION)
    return [
        make_sum(generator, settings["num_terms"], settings["num_digits"]) for _ in range(settings["eval_problems"])
    ]


def training_sum(generator: np.random.Generator, settings: Mapping[str, Any], held_out: Container[str]) -> Problem:
    """A random sum that models are not tested on."""
    while True:
        problem = make_sum(generator, settings["num_terms"], settings["num_digits"])
        if problem.prompt not in held_out:
            return problem


def make_problems(
    settings: Mapping[str, Any], seed: int, tokenizer: PreTrainedTokenizerBase
) -> tuple[list[Problem], list[Problem]]:
    """The problems for reinforcement learning, and those for the evaluation."""
    if "dataset" not in settings:
        evaluation, generator = held_out_sums(settings), np.random.default_rng([seed, 1])
        held_out = {problem.prompt for problem in evaluation}
        return [training_sum(generator, settings, held_out) for _ in range(settings["num_problems"])], evaluation
    parts = load_dataset(*settings["dataset"])
    test = parts["test"].shuffle(seed=SEED_OF_EVALUATION)
    rows = test.select(range(min(settings["eval_problems"], len(test))))
    return [as_chat(row, tokenizer) for row in parts["train"]], [as_chat(row, tokenizer) for row in rows]


def as_chat(row: Mapping[str, str], tokenizer: PreTrainedTokenizerBase) -> Problem:
    """Converts a row of GSM8K, whose answer follows `####`, to a problem with the model's chat template."""
    messages = [{"role": "user", "content": row["question"]}]
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    prompt = prompt.removeprefix(tokenizer.bos_token or "")  # the tokenizer adds it again
    return Problem(prompt, "", row["answer"].rpartition("####")[2].strip().replace(",", ""))


def is_right(completion: str, answer: str) -> bool:
    """Whether the last number after the thinking is the answer; False if the thinking does not end."""
    _, is_over, given = completion.rpartition(END_OF_THINKING)
    numbers = re.findall(r"-?\d[\d,]*(?:\.\d+)?", given)
    return bool(is_over and numbers) and float(numbers[-1].replace(",", "")) == float(answer)


# Training


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of characters, in which `</think>` is an ordinary token, so that rewards see it."""
    symbols = Tokenizer(models.WordLevel({symbol: i for i, symbol in enumerate(SYMBOLS)}))
    symbols.pre_tokenizer = pre_tokenizers.Split(Regex(f"{END_OF_THINKING}|."), "isolated")
    symbols.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=symbols, pad_token="<pad>", eos_token="<eos>")


class StopWhenPartlyRight(TrainerCallback):
    """Ends training once a given share of new problems is answered right, so that something is left to reinforce."""

    def __init__(self, problems: Sequence[Problem], tokenizer: PreTrainedTokenizerBase, settings: Mapping[str, Any]):
        self.problems, self.tokenizer = problems, tokenizer
        self.settings = {**settings, "eval_samples": 1}

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if state.global_step % self.settings["check_every_n_steps"] == 0:
            num_right = sum(count_right(model.eval(), self.tokenizer, self.problems, DISCRETE, self.settings))
            control.should_training_stop = num_right >= self.settings["right_enough"] * len(self.problems)
            print(f"{num_right} of {len(self.problems)} right after {state.global_step} steps", flush=True)


def train_supervised(settings: Mapping[str, Any], seed: int, path: Path) -> Path:
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
        held_out = {problem.prompt for problem in held_out_sums(settings)}

        def make_row(generator: np.random.Generator) -> dict[str, np.ndarray]:
            prompt, thinking, answer = training_sum(generator, settings, held_out)
            ids = np.array(tokenizer.encode(f"{prompt}{thinking}{END_OF_THINKING}{answer}<eos>"))
            return {"input_ids": ids, "labels": np.where(np.arange(len(ids)) < len(prompt), -100, ids)}

        config = load_preset(
            settings["preset"],
            **settings["config"],
            vocab_size=len(SYMBOLS),
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
        partial = path.with_name(f"{path.name}-partial")
        args = TrainingArguments(
            output_dir=str(partial),
            seed=seed,
            lr_scheduler_type="constant_with_warmup",
            weight_decay=0.1,
            adam_beta2=0.95,
            logging_steps=settings["check_every_n_steps"],
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            dataloader_pin_memory=False,
            **settings["supervised_options"],
        )
        generator = np.random.default_rng([seed, 2])
        checks = [training_sum(generator, settings, held_out) for _ in range(settings["eval_problems"])]
        trainer = LSGPTTrainer(
            model=LSGPTForCausalLM(config),
            args=args,
            train_dataset=Stream(make_row, seed),
            data_collator=default_data_collator,
            callbacks=[StopWhenPartlyRight(checks, tokenizer, settings)],
        )
        trainer.train()
        trainer.model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        partial.rename(path)
    return path


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


# Evaluation


def count_right(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    problems: Sequence[Problem],
    mode: str,
    settings: Mapping[str, Any],
) -> list[int]:
    """Counts the right samples of each problem, with discrete or soft thinking."""
    num_samples, batch_size = settings["eval_samples"], settings["eval_batch_size"]
    common = {
        "max_new_tokens": settings["options"]["max_completion_length"],
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        **SAMPLING,
    }
    samples = [problem for problem in problems for _ in range(num_samples)]
    right = []
    for begin in range(0, len(samples), batch_size):
        batch = samples[begin : begin + batch_size]
        inputs = tokenizer([problem.prompt for problem in batch], padding=True, return_tensors="pt").to(model.device)
        ids, mask = inputs.input_ids, inputs.attention_mask
        if mode == SOFT:
            end = find_end_of_thinking(tokenizer)
            ids = generate_soft_thinking(model, ids, mask, end_of_thinking_id=end, **common).token_ids
        else:
            ids = model.generate(ids, attention_mask=mask, do_sample=True, **common)[:, ids.shape[1] :]
        texts = tokenizer.batch_decode(ids, skip_special_tokens=True)
        right += [is_right(text, problem.answer) for text, problem in zip(texts, batch)]
    return np.array(right).reshape(-1, num_samples).sum(1).tolist()


def pass_at(k: int, num_samples: int, num_right: int) -> float:
    """The probability that of k samples, drawn from `num_samples` of which `num_right` are right, at least one is."""
    return 1 - math.comb(num_samples - num_right, k) / math.comb(num_samples, k)
