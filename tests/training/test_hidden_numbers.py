"""Numbers that training blocks hide and repeat."""

import re

import pytest
import torch
from datasets import Dataset, IterableDataset

from lsgpt.training.data import pack, train_tokenizer
from lsgpt.training.hidden_numbers import COUNT, FORMATS, HideNumbers


LENGTH = 1000


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer([], vocab_size=258)


def rows(count):
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(97, 123, (count, LENGTH), generator=generator)  # letters, no digits
    return [{"input_ids": x.tolist(), "position_ids": [i % 50 for i in range(LENGTH)]} for x in ids]


def test_numbers_are_repeated_at_the_end(tokenizer):
    hide, formats = HideNumbers(tokenizer, 1.0), set()
    for row in rows(40):
        changed = hide(row)
        assert changed == hide(row)
        assert len(changed["input_ids"]) == LENGTH
        assert changed["position_ids"] == list(range(LENGTH))
        text = tokenizer.decode(changed["input_ids"])
        numbers = re.findall(r"\d+", text)
        assert len(numbers) == 2 * COUNT
        assert sorted(numbers[:COUNT]) == sorted(numbers[COUNT:])
        assert text.index(numbers[COUNT - 1]) < LENGTH // 2
        formats |= {
            form for form in FORMATS if form[0].split("{number}")[0].split("{name}")[-1] in text[: LENGTH // 2]
        }
    assert len(formats) == len(FORMATS)


@pytest.mark.parametrize("share", [(), (0.25,)])
def test_share_of_the_blocks(tokenizer, share):
    hide, expected = HideNumbers(tokenizer, *share), 400 * (share or (0.5,))[0]  # half by default, as the docs say
    changed = [hide(row) != row for row in rows(400)]
    assert expected - 40 < sum(changed) < expected + 40


def test_blocks_without_room_stay(tokenizer):
    row = {"input_ids": list(range(97, 123)) * 4}
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
