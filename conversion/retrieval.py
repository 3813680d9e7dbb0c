"""Passages that hide numbers in a text and then ask for them: does a model still find what it read far back?

Perplexity hardly shows it, because few tokens of ordinary text depend on a detail far back.
"""

import random
from collections.abc import Sequence
from typing import NamedTuple

import torch
from transformers import Cache, DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from lsgpt.modeling_lsgpt import CACHE
from lsgpt.training.metrics import IGNORED_LABEL


KINDS = {
    "literal": (
        "\nThe pass key is {key}. Remember it: {key} is the pass key.\n",
        "\nWhat is the pass key? The pass key is ",
    ),
    "paraphrased": (
        "\nThe ticket that won the lottery had the number {key}.\n",
        "\nThe winning lottery ticket was number ",
    ),
    "one of several": (
        "\nThe number of the {name} door is {key}.\n",
        "\nWhat is the number of the {name} door? The number of the {name} door is ",
    ),
}
"""
By kind of question: the sentence that hides its number, and the question. For the last kind, a passage hides a number
for each door in `DOORS` and asks for one of them.
"""

DOORS = ("red", "blue", "green", "white")


class Question(NamedTuple):
    """A question about a passage."""

    kind: str
    """One of `KINDS`."""
    ids: torch.Tensor
    """`(m,)` token ids of the question and the number that answers it."""
    answer_length: int
    """How many tokens at the end hold the digits of the number."""
    distance: int
    """How many tokens are between the sentence with the number and the question."""


class Passage(NamedTuple):
    """A text that hides numbers, and questions about them."""

    ids: torch.Tensor
    """`(n,)` token ids of the text."""
    questions: list[Question]
    """One of each kind."""
    end: int
    """Where the text that was used ends: what comes next in the text would continue the passage."""

    def with_questions(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Joins the text and all questions. Returns token ids and labels, -100 except at the digits of the answers."""
        ids = torch.cat([self.ids, *(question.ids for question in self.questions)])
        digits = [torch.arange(len(q.ids)) >= len(q.ids) - q.answer_length for q in self.questions]
        is_answer = torch.cat([torch.zeros(len(self.ids), dtype=torch.bool), *digits])
        return ids, ids.masked_fill(~is_answer, IGNORED_LABEL)


def make_passages(
    tokenizer: PreTrainedTokenizerBase,
    text: torch.Tensor,
    length: int,
    count: int,
    distance: int,
    seed: int = 0,
) -> list[Passage]:
    """
    Makes passages of text that hide a number for a question of each kind, at random places.

    The seed, the length and the index determine the text and the numbers of a passage. Passages that differ only in
    `distance` have the same ones, in other places.

    Args:
        tokenizer: The model's tokenizer.
        text: `(N,)` token ids of the text around the numbers.
        length: Number of tokens of a passage with all of its questions.
        count: Number of passages.
        distance: Least number of tokens between a number and the question for it.
        seed: Passages with different seeds have different numbers and texts.

    Raises:
        ValueError: If a passage has no room, the text is shorter than a passage, or no token stands for a digit.
    """

    def encode(words: str) -> torch.Tensor:
        return torch.tensor(tokenizer(words, add_special_tokens=False)["input_ids"])

    passages = []
    for i in range(count):
        chance = random.Random(f"{seed} {length} {i}")
        keys = [str(key) for key in chance.sample(range(10_000, 100_000), 2 + len(DOORS))]
        asked = chance.randrange(len(DOORS))
        names = dict(zip(["literal", "paraphrased", *DOORS], keys))
        hidden = [("literal", ""), ("paraphrased", ""), *(("one of several", door) for door in DOORS)]
        needles = [encode(KINDS[kind][0].format(key=names[name or kind], name=name)) for kind, name in hidden]
        asks = [(kind, name) for kind, name in hidden if name in ("", DOORS[asked])]
        ends = [encode(KINDS[kind][1].format(name=name) + names[name or kind]) for kind, name in asks]
        room = length - sum(map(len, [*needles, *ends]))
        if room < distance:
            raise ValueError(
                f"`length` must leave {distance} tokens between a number and its question; got {length}, of which "
                f"{length - room} are numbers and questions"
            )
        if len(text) < room:
            raise ValueError(f"the text must have at least {room} tokens for a passage; it has {len(text)}")
        start = chance.randrange(len(text) - room + 1)
        filler = text[start : start + room]
        places = sorted(chance.randrange(room - distance + 1) for _ in needles)
        order = chance.sample(range(len(needles)), len(needles))
        parts, begin, positions = [], 0, {}
        for place, which in zip(places, order):
            parts += [filler[begin:place], needles[which]]
            begin, positions[hidden[which]] = place, sum(map(len, parts))
        ids = torch.cat([*parts, filler[begin:]])
        questions = [
            Question(kind, end, _count_digit_tokens(tokenizer, end), len(ids) - positions[kind, name])
            for (kind, name), end in zip(asks, ends)
        ]
        if not all(question.answer_length for question in questions):
            raise ValueError("the tokenizer must have tokens with digits, of which the answers are made; it has none")
        passages.append(Passage(ids, questions, start + room))
    return passages


def _count_digit_tokens(tokenizer: PreTrainedTokenizerBase, ids: torch.Tensor) -> int:
    """How many tokens at the end have a digit. A space before the number, which could be guessed, does not count."""
    count = 0
    while count < len(ids) and any(map(str.isdigit, tokenizer.decode(ids[len(ids) - count - 1].item()))):
        count += 1
    return count


@torch.no_grad()
def ask(model: PreTrainedModel, passage: Passage) -> list[list[bool]]:
    """
    Reads a passage once, and asks each of its questions separately.

    Returns:
        For each question, whether each token with digits of the answer is the most likely one, given those before. All
        are if and only if greedy decoding would begin with the correct number.
    """
    cache, questions = read(model, passage.ids), passage.questions
    cache.batch_repeat_interleave(len(questions))
    # Shorter questions are filled up at the end, which no token before sees.
    rows = torch.nn.utils.rnn.pad_sequence([question.ids for question in questions], batch_first=True)
    predicted = model(input_ids=rows.to(model.device), **{CACHE: cache}).logits.argmax(-1).cpu()
    right = []
    for question, row in zip(questions, predicted):
        end = len(question.ids)
        begin = end - question.answer_length
        right.append((row[begin - 1 : end - 1] == question.ids[begin:end]).tolist())
    return right


def read(model: PreTrainedModel, ids: torch.Tensor) -> Cache:
    """Reads token ids `(n,)` and returns the cache."""
    cache = DynamicCache(config=model.config)
    model(input_ids=ids[None].to(model.device), **{CACHE: cache}, logits_to_keep=1)
    return cache


def cache_bytes(cache: Cache) -> int:
    """Counts the bytes of memory that the keys and values of a cache hold."""
    storages = [x.untyped_storage() for layer in cache.layers for x in (layer.keys, layer.values)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def exact_matches(answers: Sequence[list[list[bool]]], questions: Sequence[list[Question]]) -> dict[str, float]:
    """The share of questions of each kind whose number is right in every digit."""
    found: dict[str, list[bool]] = {}
    for right, asked in zip(answers, questions):
        for each, question in zip(right, asked):
            found.setdefault(question.kind, []).append(all(each))
    return {kind: sum(values) / len(values) for kind, values in found.items()}
