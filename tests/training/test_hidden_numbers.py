"""Numbers that training blocks hide and repeat."""

import re

import pytest
import torch
from datasets import Dataset, IterableDataset

from lsgpt.training.data import pack, train_tokenizer
from lsgpt.training.hidden_numbers import COUNT, FORMATS, NAMES, HideNumbers


LENGTH = 1000


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer([], vocab_size=258)


def rows(count):
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(97, 123, (count, LENGTH), generator=generator)  # letters, no digits
    return [{"input_ids": x.tolist(), "position_ids": [i % 50 for i in range(LENGTH)]} for x in ids]


def test_numbers_are_repeated_at_the_end(tokenizer):
    """With their names, in another order; hidden in the first quarter of the text, which goes on behind them."""
    hide, formats, orders = HideNumbers(tokenizer, 1.0), set(), set()
    for row in rows(40):
        changed = hide(row)
        assert changed == hide(row)
        assert len(changed["input_ids"]) == LENGTH
        assert changed["position_ids"] == list(range(LENGTH))
        text = tokenizer.decode(changed["input_ids"])
        numbers, names = list(re.finditer(r"\d+", text)), re.findall("|".join(NAMES), text)
        pairs = [(name, number[0]) for name, number in zip(names, numbers, strict=True)]
        assert len(pairs) == 2 * COUNT
        assert sorted(pairs[:COUNT]) == sorted(pairs[COUNT:])
        orders.add(pairs[:COUNT] == pairs[COUNT:])
        original, (_, rest) = tokenizer.decode(row["input_ids"]), text[numbers[COUNT - 1].end() :].split("\n", 1)
        assert original.index(rest[:50]) < LENGTH // 4
        formats |= {
            form for form in FORMATS if form[0].split("{number}")[0].split("{name}")[-1] in text[: LENGTH // 2]
        }
    assert len(formats) == len(FORMATS) and False in orders


@pytest.mark.parametrize("share", [(), (0.25,)])
def test_share_of_the_blocks(tokenizer, share):
    hide, expected = HideNumbers(tokenizer, *share), 400 * (share or (0.5,))[0]  # half by default, as the docs say
    changed = [hide(row) != row for row in rows(400)]
    assert expected - 40 < sum(changed) < expected + 40


def test_blocks_without_room_stay(tokenizer):
    """Also where the numbers would take more than half of the block."""
    for length in (104, 350):
        for start in range(26):
            row = {"input_ids": [97 + (start + i) % 26 for i in range(length)]}
            assert HideNumbers(tokenizer, 1.0)(row) == row


@pytest.mark.parametrize("kind", [Dataset, IterableDataset])
def test_in_blocks_of_either_kind(tokenizer, kind):
    tokens = Dataset.from_dict({"input_ids": [row["input_ids"] for row in rows(4)]})
    tokens = tokens if kind is Dataset else tokens.to_iterable_dataset()
    blocks = pack(tokens, LENGTH, True)
    changed = blocks.map(HideNumbers(tokenizer, 1.0), features=blocks.features)
    assert isinstance(changed, kind)
    for row in changed:
        assert list(row) == ["input_ids", "position_ids"]
        assert list(row["position_ids"]) == list(range(LENGTH))
