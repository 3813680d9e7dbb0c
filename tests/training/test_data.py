import pytest
from datasets import Dataset

from lsgpt.training import load_documents, pack, tokenize, train_tokenizer
from lsgpt.training.data import load_stdlib


@pytest.fixture(scope="module")
def documents():
    return load_stdlib(max_characters=300_000)


@pytest.fixture(scope="module")
def tokenizer(documents):
    return train_tokenizer(documents["train"]["text"], 500)


def make_library(folder, names):
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"name = {name!r}\n")


def test_stdlib_is_split_by_file(documents):
    train, validation = set(documents["train"]["path"]), set(documents["validation"]["path"])
    assert train.isdisjoint(validation)
    assert len(train) == len(documents["train"])
    assert sum(map(len, documents["train"]["text"][:-1])) < 300_000 <= sum(map(len, documents["train"]["text"]))
    assert not any("test" in path.split("/") or "site-packages" in path for path in train | validation)


def test_split_and_order_do_not_depend_on_the_machine(tmp_path):
    names = [f"package{i % 7}/module{i}.py" for i in range(200)]
    make_library(tmp_path / "a", names)
    make_library(
        tmp_path / "b", [*reversed(names), "test/test_it.py", "site-packages/other.py", "_sysconfigdata_x.py"]
    )
    first, second = load_stdlib(tmp_path / "a"), load_stdlib(tmp_path / "b")
    assert {split: rows.to_dict() for split, rows in first.items()} == {
        s: rows.to_dict() for s, rows in second.items()
    }
    assert len(first["train"]) + len(first["validation"]) == 200
    assert 2 <= len(first["validation"]) <= 30

    # Another file changes neither the order of the others nor their side.
    make_library(tmp_path / "b", ["one_more.py"])
    third = load_stdlib(tmp_path / "b")
    for split in first:
        assert [path for path in third[split]["path"] if path != "one_more.py"] == first[split]["path"][:]


def test_library_without_source_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="needs Python's source files; found 0 in"):
        load_stdlib(tmp_path)


def test_unknown_dataset_is_an_error():
    with pytest.raises(ValueError, match=r"cannot load `dataset_name` 'stdlb': .*; did you mean 'stdlib'\?"):
        load_documents("stdlb")
    with pytest.raises(ValueError, match="it must be stdlib, a file, a folder, or a data set on the Hub"):
        load_documents("./nowhere")


def test_tokenizer_is_lossless_and_repeatable(documents, tokenizer, tmp_path):
    assert len(tokenizer) == 500
    for text in (documents["validation"]["text"][0], "  tabs\t and \r\n unusual: \x00 ümläut 数 🙂\n\n"):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    again = train_tokenizer(documents["train"]["text"], 500)
    assert again.get_vocab() == tokenizer.get_vocab()


def test_padding_is_not_the_end_of_text(tokenizer):
    assert tokenizer.eos_token_id == tokenizer.bos_token_id != tokenizer.pad_token_id
    assert tokenizer.decode([tokenizer.eos_token_id], skip_special_tokens=True) == ""


def test_tokenizer_needs_room_for_bytes():
    with pytest.raises(ValueError, match=r"`vocab_size` must be at least 258 .* got 257"):
        train_tokenizer(["text"], 257)


@pytest.mark.parametrize("block_size", [2, 63, 512])
def test_packing_loses_the_tail_only(documents, tokenizer, block_size):
    texts = documents["validation"].select(range(5))
    blocks = pack(tokenize(texts, tokenizer), block_size)
    assert blocks.column_names == ["input_ids"]
    assert {len(block) for block in blocks["input_ids"]} == {block_size}
    packed = [token for block in blocks["input_ids"] for token in block]
    stream = []
    for text in texts["text"]:
        stream += [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]
    assert len(stream) - len(packed) < block_size
    assert packed == stream[: len(packed)]


def test_too_little_text_for_a_block(tokenizer):
    tokens = tokenize(Dataset.from_dict({"text": ["short", ""]}), tokenizer)
    with pytest.raises(ValueError, match=r"`block_size` must be at most the \d+ tokens of the data; got 512"):
        pack(tokens, 512)
