"""Passages that hide numbers: what they contain, and that a model is asked as greedy generation would be."""

import copy
import re

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from lsgpt.conversion import ask, cache_bytes, make_passages
from lsgpt.conversion.retrieval import KINDS, exact_matches, read
from lsgpt.training import train_tokenizer


LENGTH, DISTANCE = 700, 100


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer([], vocab_size=258)


@pytest.fixture(scope="module")
def passages(tokenizer):
    return make_passages(tokenizer, torch.arange(5000) % 256, LENGTH, 20, DISTANCE)


def test_numbers_are_far_from_their_questions(tokenizer, passages):
    for passage in passages:
        text = tokenizer.decode(passage.ids)
        assert len(passage.with_questions()[0]) == LENGTH
        assert [question.kind for question in passage.questions] == list(KINDS)
        for question in passage.questions:
            asked = tokenizer.decode(question.ids)
            key = asked[-5:]
            assert key.isdigit() and question.answer_length == 5
            assert asked[-6] == " "  # which could be guessed
            assert question.distance >= DISTANCE
            assert key in tokenizer.decode(passage.ids[: -question.distance])[-30:]
        assert text.endswith(tokenizer.decode([(passage.end - 1) % 256]))
        door = tokenizer.decode(passage.questions[2].ids).split(" door")[0].split()[-1]
        assert f"The number of the {door} door is {key}." in text
        assert text.count(" door is ") == 4


def test_neither_distance_nor_text_goes_along_with_anything(tokenizer, passages):
    distances = torch.tensor([[question.distance for question in passage.questions] for passage in passages])
    assert (distances.amin(0) < 0.4 * LENGTH).all() and (distances.amax(0) > 0.6 * LENGTH).all()
    ends = [passage.end for passage in passages]
    assert max(ends) - min(ends) > 2000
    fewer = make_passages(tokenizer, torch.arange(5000) % 256, LENGTH, 3, DISTANCE)
    assert all(torch.equal(*pair) for pair in zip([p.ids for p in fewer], [p.ids for p in passages]))
    others = [
        make_passages(tokenizer, torch.arange(5000) % 256, *options)[0].questions[0].ids[-5:]
        for options in ((LENGTH, 1, DISTANCE, 1), (LENGTH + 1, 1, DISTANCE), (LENGTH, 1, DISTANCE))
    ]
    assert not torch.equal(others[0], others[2]) and not torch.equal(others[1], others[2])


def test_labels_are_the_digits_of_the_answers(tokenizer, passages):
    ids, labels = passages[0].with_questions()
    assert torch.equal(ids, torch.cat([passages[0].ids, *(question.ids for question in passages[0].questions)]))
    assert torch.equal(labels[labels != -100], ids[labels != -100])
    digits = tokenizer.decode(labels[labels != -100])
    assert digits == "".join(tokenizer.decode(question.ids[-5:]) for question in passages[0].questions)


@torch.no_grad()
def test_questions_are_asked_one_by_one(tiny_model, tokenizer, passages):
    """With the answers of some changed to what the model says."""
    model = tiny_model(vocab_size=258, position_embedding_type="rope", attention_sinks="full_window")
    llama = LlamaForCausalLM(
        LlamaConfig(vocab_size=258, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4)
    ).eval()
    for each in (model, llama):
        for passage in copy.deepcopy(passages[:2]):
            for question in passage.questions[:2]:
                for i in range(question.answer_length, 1, -1):
                    ids = torch.cat([passage.ids, question.ids[:-i]])
                    question.ids[-i] = each(ids[None], use_cache=False).logits[0, -1].argmax()
            expected = []
            for question in passage.questions:
                logits = each(torch.cat([passage.ids, question.ids])[None], use_cache=False).logits[0]
                expected.append((logits[-6:-1].argmax(-1) == question.ids[-5:]).tolist())
            assert ask(each, passage) == expected
            assert all(expected[0][:4]) and all(expected[1][:4])


def test_share_of_numbers_that_are_right_in_every_digit(passages):
    answers = [[[True] * 5, [True] * 4 + [False], [True] * 5], [[True] * 5, [False] * 5, [False] + [True] * 4]]
    shares = exact_matches(answers, [passage.questions for passage in passages[:2]])
    assert shares == {"literal": 1.0, "paraphrased": 0.0, "one of several": 0.5}


@torch.no_grad()
def test_bytes_of_a_cache(tiny_model):
    """Each memory once, and with what a view does not show."""
    model = tiny_model(num_global_heads=2, num_key_value_heads=3)
    cache = read(model, torch.randint(97, (100,)))
    model(torch.randint(97, (1, 1)), past_key_values=cache)
    expected = model.config.kv_cache_bytes(101, bytes_per_value=4)
    assert expected <= cache_bytes(cache) <= 1.02 * expected
    plain = DynamicCache()
    plain.update(torch.zeros(1, 2, 10, 4), torch.zeros(1, 2, 10, 4), 0)
    plain.layers[0].values = plain.layers[0].keys[:, :, :3]
    assert cache_bytes(plain) == 2 * 10 * 4 * 4


def test_passages_without_room(tokenizer):
    with pytest.raises(ValueError, match="`length` must leave 100 tokens between a number and its question; got 400"):
        make_passages(tokenizer, torch.zeros(5000), 400, 1, 100)
    with pytest.raises(ValueError, match=r"the text must have at least \d+ tokens for a passage; it has 90"):
        make_passages(tokenizer, torch.zeros(90), LENGTH, 1, 100)


def test_answers_need_tokens_with_digits(tokenizer, monkeypatch):
    monkeypatch.setattr(type(tokenizer), "decode", lambda *_: "?")
    with pytest.raises(ValueError, match="the tokenizer must have tokens with digits"):
        make_passages(tokenizer, torch.zeros(5000, dtype=torch.long), LENGTH, 1, 100)


def test_the_shortest_text_is_enough(tokenizer):
    for seed in range(20):
        with pytest.raises(ValueError, match="the text must have at least") as error:
            make_passages(tokenizer, torch.zeros(1, dtype=torch.long), 800, 1, 64, seed)
        room = int(re.search(r"at least (\d+) tokens", str(error.value))[1])
        (passage,) = make_passages(tokenizer, torch.zeros(room, dtype=torch.long), 800, 1, 64, seed)
        assert len(passage.ids) + sum(len(question.ids) for question in passage.questions) == 800
        assert passage.end == room
