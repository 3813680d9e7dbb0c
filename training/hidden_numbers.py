"""Numbers that are hidden in a training text and repeated much later, so that a model keeps looking far back."""

import random

from transformers import PreTrainedTokenizerBase


FORMATS = (
    ("\n- {name}: {number}\n", "\nFrom the list above, {name}: {number}\n"),
    ("\nMemo: {name} got the code {number} today.\n", "\nWhich code did {name} get? It was {number}.\n"),
    ("\n{name} = {number}\n", "\n>>> print({name})\n{number}\n"),
    ("\nThe house of {name} was built in lot {number}.\n", "\n{name} lives in the house on lot {number}.\n"),
)
"""How a number is hidden, and how it is repeated. `lsgpt bench quality` words its questions differently."""

NAMES = ("Alice", "Boris", "Clara", "David", "Elena", "Frank", "Greta", "Henry", "Irene", "Jonas", "Karen", "Louis")

COUNT = 5
"""How many numbers are hidden in a block."""


class HideNumbers:
    """
    Hides numbers in some rows of `pack`: in the first quarter of the block, to be repeated at its end. The text gives
    way, so that the block keeps its length, and becomes a single document. Equal rows are changed in the same way.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, share: float = 0.5):
        """Takes the tokenizer of the rows, and the share of them that get numbers."""
        self.tokenizer, self.share = tokenizer, share

    def __call__(self, row: dict) -> dict:
        """Returns a row with `input_ids` and, if it had any, `position_ids`; unchanged if there is no room."""
        ids = list(row["input_ids"])
        chance = random.Random(str(ids))
        if chance.random() >= self.share:
            return row
        hide, repeat = chance.choice(FORMATS)
        pairs = [(name, chance.randrange(100, 1_000_000)) for name in chance.sample(NAMES, COUNT)]
        hidden = [self._encode(hide.format(name=name, number=number)) for name, number in pairs]
        chance.shuffle(pairs)
        end = [x for name, number in pairs for x in self._encode(repeat.format(name=name, number=number))]
        room = len(ids) - len(end) - sum(map(len, hidden))
        if room < len(ids) // 2:
            return row
        result, begin = [], 0
        for place, sentence in zip(sorted(chance.randrange(len(ids) // 4) for _ in hidden), hidden):
            result += [*ids[begin:place], *sentence]
            begin = place
        result += [*ids[begin:room], *end]
        positions = {"position_ids": list(range(len(ids)))} if "position_ids" in row else {}
        return {**row, "input_ids": result, **positions}

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]
