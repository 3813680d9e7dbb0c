import pytest

from lsgpt.training import encode_prompt, train_tokenizer


TEXTS = ["def name(self):\n    return self.name\n"] * 20


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(TEXTS, 300)


def test_prompt_without_a_space_at_the_end(tokenizer):
    encoded = encode_prompt(tokenizer, "def name")
    assert set(encoded) == {"input_ids", "attention_mask"}
    assert tokenizer.decode(encoded["input_ids"][0]) == "def name"


@pytest.mark.parametrize("prompt", ["def ", "def  "])
def test_continuation_of_a_space_begins_with_it(tokenizer, tiny_model, prompt):
    encoded = encode_prompt(tokenizer, prompt)
    assert tokenizer.decode(encoded["input_ids"][0]) == prompt[:-1]
    allowed = set(range(len(tokenizer))) - set(encoded["begin_suppress_tokens"])
    assert allowed
    assert all(tokenizer.decode([i]).startswith(" ") for i in allowed)
    generated = tiny_model(vocab_size=len(tokenizer)).generate(**encoded, max_new_tokens=8, do_sample=True)
    assert tokenizer.decode(generated[0]).startswith(prompt)
