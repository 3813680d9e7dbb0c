import copy
import hashlib
import json
import math
from collections import Counter

import pytest
import torch
from datasets import Dataset, DatasetDict, IterableDataset
from torch.utils.data import DataLoader
from transformers import TrainingArguments

from lsgpt.configuration import load_preset
from lsgpt.training import (
    LSGPTTrainer,
    collate_blocks,
    load_documents,
    load_tokenizer,
    pack,
    tokenize,
    train_tokenizer,
)
from lsgpt.training.arguments import DataArguments
from lsgpt.training.data import Passes, _is_held_out, first_characters, load_stdlib
from lsgpt.training.train import load_texts, make_tokenizer
from lsgpt.training.trainer import _ignore_sigterm


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


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
    (tmp_path / "b" / "one_more.py").write_bytes(b"name = '\xe9'\n")  # in another encoding
    third = load_stdlib(tmp_path / "b")
    for split in first:
        assert [path for path in third[split]["path"] if path != "one_more.py"] == first[split]["path"][:]


def test_a_twentieth_of_the_library_is_held_out(tmp_path):
    make_library(tmp_path, [f"module{i}.py" for i in range(2000)])
    assert len(load_stdlib(tmp_path)["validation"]) == pytest.approx(2000 / 20, abs=30)


def test_library_without_source_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="needs Python's source files; found 0 in"):
        load_stdlib(tmp_path)


def test_unknown_dataset_is_an_error():
    with pytest.raises(ValueError, match=r"`dataset_name` 'stdlb' is unknown; did you mean 'stdlib'\?"):
        load_documents("stdlb")


def test_a_mistyped_path_is_no_question_to_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("lsgpt.training.data.load_dataset", None)  # asks it
    (tmp_path / "books").mkdir()
    (tmp_path / "books" / "dune.txt").touch()
    for name in (
        "./nowhere",
        "dnue.txt",
        "books/dnue.txt",
        "books/nothing",
        "a/b/c",
        str(tmp_path / "x"),
        "~/no such",
    ):
        with pytest.raises(ValueError, match="there is no file or folder") as error:
            load_documents(name)
        assert ("did you mean 'dune.txt'" in str(error.value)) == (name == "books/dnue.txt")


def test_the_hub_is_asked_for_the_configuration_of_the_arguments(monkeypatch):
    calls = []

    def load_dataset(path, **options):
        calls.append((path, options))
        return DatasetDict({"train": Dataset.from_dict({"body": TEXTS})})

    monkeypatch.setattr("lsgpt.training.data.load_dataset", load_dataset)
    load_texts(DataArguments(dataset_name="a/b", dataset_config_name="en", text_column="body"))
    assert calls == [("a/b", {"name": "en", "streaming": False})]


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["a text", None], r"column 'body' of .*, split train, has (no text \(null\) in 1 of 2 rows|None)"),
        ([None, None], "has (values of the type null|None)"),
        ([7, 8], "has (values of the type int64|7)"),
        ([["two", "strings"], ["are", "no pair"]], r"has (values of the type list|\['two', 'strings'\])"),
        ([["a", "b", "c"]], r"has (values of the type list|\['a', 'b', 'c'\])"),
        ([[{"role": "user", "content": "Hello"}]], r"has (values of the type list|\[\{.*).*apply_chat_template"),
    ],
)
def test_a_column_that_holds_no_text(tmp_path, texts, message, streaming):
    write_json_lines(tmp_path / "a.jsonl", texts, column="body")
    with pytest.raises(ValueError, match=message):
        list(load_documents(str(tmp_path / "a.jsonl"), text_column="body", streaming=streaming)["train"])


@pytest.mark.parametrize("algorithm", ["bpe", "unigram"])
def test_tokenizer_is_lossless_and_repeatable(documents, algorithm):
    tokenizer = train_tokenizer(documents["train"]["text"], 500, algorithm)
    assert len(tokenizer) == 500
    for text in (documents["validation"]["text"][0], "  tabs\t and \r\n unusual: \x00 ümläut 数 🙂\n\n"):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    if algorithm == "bpe":  # `tokenizers` numbers the tokens of Unigram anew each time
        assert train_tokenizer(documents["train"]["text"], 500).get_vocab() == tokenizer.get_vocab()
    assert type(tokenizer.backend_tokenizer.model).__name__.lower() == algorithm


def test_a_tokenizer_is_trained_on_20_million_characters(monkeypatch):
    """The first ones: with more, training it would take longer than many a model."""
    seen = []
    monkeypatch.setattr("lsgpt.training.train.train_tokenizer", lambda texts, *others: seen.extend(map(len, texts)))
    documents = {"train": [{"text": "x" * 15_000_000}, {"text": "y" * 15_000_000}, {"text": "z"}]}
    make_tokenizer(DataArguments(dataset_name="texts"), load_preset("demo"), documents)
    assert seen == [15_000_000, 5_000_000]


def test_padding_is_not_the_end_of_text(tokenizer):
    assert tokenizer.eos_token_id == tokenizer.bos_token_id != tokenizer.pad_token_id
    assert tokenizer.decode([tokenizer.eos_token_id], skip_special_tokens=True) == ""


def test_tokenizer_from_a_folder(tokenizer, tmp_path, offline):
    tokenizer.save_pretrained(tmp_path / "folder")
    loaded = load_tokenizer(str(tmp_path / "folder"), vocab_size=500)
    assert loaded("def f(x):")["input_ids"] == tokenizer("def f(x):")["input_ids"]
    with pytest.raises(ValueError, match=r"`vocab_size` must be at least the 500 tokens of the tokenizer .*; got 499"):
        load_tokenizer(str(tmp_path / "folder"), vocab_size=499)
    with pytest.raises(ValueError, match=r"(?s)the tokenizer 'unigrm' cannot be loaded.*did you mean 'unigram'"):
        load_tokenizer("unigrm", vocab_size=500)
    (tmp_path / "broken").mkdir()
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "added_tokens_decoder": {}}
    (tmp_path / "broken" / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "broken" / "tokenizer.json").write_text('{"model": ')
    with pytest.raises(ValueError, match=r"the tokenizer .*broken' cannot be loaded"):
        load_tokenizer(str(tmp_path / "broken"), vocab_size=500)
    tokenizer_config = tmp_path / "folder" / "tokenizer_config.json"
    values = json.loads(tokenizer_config.read_text())
    tokenizer_config.write_text(json.dumps({name: v for name, v in values.items() if name != "eos_token"}))
    with pytest.raises(ValueError, match="`tokenizer` must have an end-of-text token"):
        load_tokenizer(str(tmp_path / "folder"), vocab_size=500)


def test_tokenizers_learn_from_the_first_characters():
    assert list(first_characters(iter(["abc", "defg", "hi"]), 5)) == ["abc", "de"]
    assert list(first_characters(["abc"], 5)) == ["abc"]


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


TEXTS = [f"text number {i}\nwith a second line\n" for i in range(45)]


def write_json_lines(path, texts, column="text"):
    path.write_text("".join(json.dumps({"id": i, column: text}) + "\n" for i, text in enumerate(texts)))


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("kind", ["txt", "jsonl", "parquet"])
def test_local_files_and_folders(tmp_path, kind, streaming):
    folder = tmp_path / "corpus"
    folder.mkdir()
    (folder / "README.md").write_text("not a document")
    if kind == "txt":
        for i, text in enumerate(TEXTS):
            (folder / f"{i:02}.txt").write_text(text)
    elif kind == "jsonl":
        write_json_lines(folder / "some.jsonl", TEXTS)
    else:
        Dataset.from_dict({"text": TEXTS, "title": TEXTS}).to_parquet(folder / "some.parquet")
    splits = load_documents(str(folder), streaming=streaming)
    found = {split: [document["text"] for document in documents] for split, documents in splits.items()}
    held_out = [text for text in TEXTS if int(hashlib.blake2b(text.encode(), digest_size=8).hexdigest(), 16) % 100 < 5]
    assert found["validation"] == held_out and 1 <= len(held_out) <= 5
    assert found["train"] == [text for text in TEXTS if text not in held_out]
    assert isinstance(splits["train"], IterableDataset) == streaming

    if kind == "jsonl":  # a file by itself, and one named for its split
        assert len(list(load_documents(str(folder / "some.jsonl"), streaming=streaming)["train"])) == 45 - len(
            held_out
        )
        write_json_lines(folder / "test.jsonl", [""])  # not used, and need not be of use
        for name in ("validation", "valid", "val", "dev"):
            write_json_lines(folder / f"{name}.jsonl", ["held out"])
            splits = load_documents(str(folder), streaming=streaming)
            assert [document["text"] for document in splits["validation"]] == ["held out"]
            assert len(list(splits["train"])) == 45
            (folder / f"{name}.jsonl").unlink()


def test_words_in_the_path_of_a_file_name_its_split(tmp_path):
    """Also those of folders, whatever their case; `latest` and `contest` are other words."""
    texts = {"Val/a.jsonl": "held out", "test/b.jsonl": "", "latest/contest.jsonl": "one", "c.jsonl": "two"}
    for name, text in texts.items():
        (tmp_path / "data" / name).parent.mkdir(parents=True, exist_ok=True)
        write_json_lines(tmp_path / "data" / name, [text])
    splits = load_documents(str(tmp_path / "data"))
    assert sorted(splits["train"]["text"]) == ["one", "two"] and splits["validation"]["text"][:] == ["held out"]


@pytest.mark.parametrize("streaming", [False, True])
def test_names_of_files_are_no_patterns(tmp_path, streaming):
    folder = tmp_path / "old [1-2]"
    folder.mkdir()
    texts = {"notes [1].txt": "one", "notes 1.txt": "two", "what?.txt": "three", "whatX.txt": "four", "*.txt": "five"}
    for name, text in texts.items():
        (folder / name).write_text(text * 20)
    documents = load_documents(str(folder), streaming=streaming)
    found = "".join(row["text"] for split in documents.values() for row in split)  # perhaps with held-out ends
    assert Counter(found) == Counter(20 * "".join(texts.values()))
    (only,) = load_documents(str(folder / "notes [1].txt"))["train"]["text"]
    assert only.startswith("one")


def test_which_files_of_a_folder_are_read(tmp_path):
    """As in `datasets`: no hidden ones, but those in linked folders."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "a.txt").write_text("linked")
    folder = tmp_path / "data"
    (folder / ".ipynb_checkpoints").mkdir(parents=True)
    (folder / ".ipynb_checkpoints" / "b.txt").write_text("hidden")
    (folder / "._c.txt").write_bytes(b"\xff\x00")
    (folder / "c.txt").write_text("plain")
    (folder / "more").symlink_to(tmp_path / "elsewhere")
    found = load_documents(str(folder))["train"]["text"]
    assert [text[:4] for text in found] == ["plai", "link"]
    documents = Dataset.from_dict({"text": TEXTS})
    for number, saved in enumerate((documents, DatasetDict(train=documents))):
        saved.save_to_disk(tmp_path / f"saved-{number}")
        with pytest.raises(ValueError, match=r"must not be a folder of `save_to_disk`; got .*saved.*\. Load it with"):
            load_documents(str(tmp_path / f"saved-{number}"))


def test_which_documents_are_held_out(tmp_path):
    """That does not depend on order, files, or on whether the data are streamed."""
    texts, folder = [f"text {i}" for i in range(1000)], tmp_path / "data"
    folder.mkdir()
    write_json_lines(folder / "some.jsonl", texts)
    splits = load_documents(str(folder), validation_percentage=15)
    train, validation = (set(splits[name]["text"]) for name in ("train", "validation"))
    assert train.isdisjoint(validation) and train | validation == set(texts)
    write_json_lines(folder / "some.jsonl", texts[700:])
    write_json_lines(folder / "another.jsonl", texts[:700] * 2)
    streams = load_documents(str(folder), validation_percentage=15, streaming=True)
    assert {row["text"] for row in streams["train"]} == train
    assert {row["text"] for row in streams["validation"]} == validation


@pytest.mark.parametrize("num_workers", [0, 1, 2, 4])
def test_workers_share_a_stream(tmp_path, tokenizer, num_workers):
    """Four files of documents: each is in one pass once, and none of those held out; only ends of streams are lost."""
    texts, folder = [f"document {i}" for i in range(480)], tmp_path / "data"
    folder.mkdir()
    for number in range(4):
        write_json_lines(folder / f"{number}.jsonl", texts[number::4])
    stored = load_documents(str(folder))
    tokens = tokenize(load_documents(str(folder), streaming=True)["train"], tokenizer)
    loader = DataLoader(pack(tokens, 16), batch_size=None, num_workers=num_workers)
    for _ in range(2):
        ids = [block["input_ids"] for block in loader]
        total = sum(len(row["input_ids"]) for row in tokenize(stored["train"], tokenizer))
        assert total - 16 * max(num_workers, 1) < 16 * len(ids) <= total
        # The blocks of the workers take turns; from the last one of a worker on, the others' follow each other.
        readers = max(num_workers, 1)
        lengths = [sum(len(row["input_ids"]) for row in worker) // 16 for worker in split_by_worker(tokens, readers)]
        read = [[] for _ in range(readers)]
        order = sorted((turn, worker) for worker in range(readers) for turn in range(lengths[worker]))
        for (_, worker), row in zip(order, ids, strict=True):
            read[worker] += row
        found = [text for row in read for text in tokenizer.decode(row).split("<|endoftext|>")[:-1]]
        assert len(found) == len(set(found)) and set(found) <= set(stored["train"]["text"])
        assert len(found) >= len(stored["train"]) - 4 * readers  # the ends that fill no block


def split_by_worker(tokens, num_workers):
    return [tokens.shard(num_workers, worker, contiguous=False) for worker in range(num_workers)]


@pytest.mark.parametrize(("num_workers", "num_processes"), [(0, 1), (2, 1), (2, 2)])
def test_passes_over_a_stream_have_full_batches_and_each_row_once(num_workers, num_processes):
    rows = Dataset.from_dict({"x": list(range(21))}).to_iterable_dataset(num_shards=4).shuffle(seed=1, buffer_size=9)
    read = [
        iter(Passes(DataLoader(rows, batch_size=None, num_workers=num_workers), 4, list, rank, num_processes))
        for rank in range(num_processes)
    ]
    batches = [[[row["x"] for row in next(process)] for process in read] for _ in range(21 // num_processes)]
    together = [x for step in batches for batch in step for x in batch]
    assert {len(batch) for step in batches for batch in step} == {4}
    passes = [together[begin : begin + 21] for begin in range(0, 63, 21)]
    assert all(sorted(one) == list(range(21)) for one in passes)
    assert passes[0] != passes[1] != passes[2]
    with pytest.raises(ValueError, match="the stream has none"):
        next(iter(Passes(DataLoader(rows.filter(lambda row: False), batch_size=None), 4, list, 0, 1)))


def test_options_of_the_data_loader_are_those_of_a_stream(tiny_model, tmp_path):
    stream = Dataset.from_dict({"input_ids": [[1, 2]]}).to_iterable_dataset()
    options = {"dataloader_num_workers": 1, "dataloader_prefetch_factor": 5, "dataloader_persistent_workers": True}
    args = TrainingArguments(tmp_path, use_cpu=True, report_to="none", max_steps=1, **options)
    rows = LSGPTTrainer(tiny_model(), args, train_dataset=stream).get_train_dataloader().dataset.rows
    assert (rows.num_workers, rows.prefetch_factor, rows.persistent_workers) == (1, 5, True)
    assert rows.worker_init_fn.func is _ignore_sigterm


def test_two_readers_of_one_packed_stream_are_refused(tmp_path, tokenizer):
    write_json_lines(tmp_path / "a.jsonl", TEXTS)
    blocks = pack(tokenize(load_documents(str(tmp_path / "a.jsonl"), streaming=True)["train"], tokenizer), 16)
    first, second = iter(blocks), iter(blocks)
    next(second)
    with pytest.raises(RuntimeError, match="one iterator at a time"):
        list(first), list(second)


def test_the_standard_library_can_be_streamed():
    stored, stream = load_documents("stdlib"), load_documents("stdlib", streaming=True)
    assert isinstance(stream["train"], IterableDataset) and stream["train"].num_shards > 4
    assert [row["path"] for row in stream["validation"]] == stored["validation"]["path"][:]


def test_special_tokens_in_the_text_are_text(tokenizer):
    """Unless the tokenizer has a chat template, whose tokens are in the text on purpose. One end, not two."""
    text = "a <|endoftext|> b"
    (ids,) = tokenize(Dataset.from_dict({"text": [text]}), tokenizer)["input_ids"]
    assert ids.count(tokenizer.eos_token_id) == 1 and tokenizer.decode(ids[:-1]) == text
    chat = copy.deepcopy(tokenizer)
    chat.chat_template = "{{ messages }}"
    end = tokenizer.eos_token_id
    (ids,) = tokenize(Dataset.from_dict({"text": [text + "<|endoftext|>"]}), chat)["input_ids"]
    assert ids.count(end) == 2 and ids[-1] == end != ids[-2]


def test_few_documents_lose_their_ends(tmp_path):
    (tmp_path / "book.txt").write_text("a" * 90 + "b" * 10)
    splits = load_documents(str(tmp_path / "book.txt"), validation_percentage=10)
    assert splits["train"]["text"][:] == ["a" * 90]
    assert splits["validation"]["text"][:] == ["b" * 10]
    (tmp_path / "word.txt").write_text("abc")  # of which 5% are no character
    splits = load_documents(str(tmp_path / "word.txt"))
    assert [splits[name]["text"][:] for name in ("train", "validation")] == [["ab"], ["c"]]


def test_one_of_few_documents_is_no_validation_text(tmp_path):
    """Below a hundred percent of a document, all of them lose their ends, also if one would be held out."""
    texts = [f"document number {i}" for i in range(1000)]
    texts = [next(text for text in texts if _is_held_out(text, 5, True)), *texts[:10]]
    write_json_lines(tmp_path / "a.jsonl", texts)
    splits = load_documents(str(tmp_path / "a.jsonl"))
    assert len(splits["train"]) == len(splits["validation"]) == len(texts)
    texts = [texts[0], *[f"document {i}" for i in range(100) if not _is_held_out(f"document {i}", 5, True)][:19]]
    write_json_lines(tmp_path / "a.jsonl", texts)  # of which one is 5%
    splits = load_documents(str(tmp_path / "a.jsonl"))
    assert [splits[name]["text"][:] for name in ("train", "validation")] == [texts[1:], texts[:1]]


@pytest.mark.parametrize("streaming", [False, True])
def test_what_is_wrong_with_data_is_said(tmp_path, streaming):
    def check(message, name="corpus", **arguments):
        with pytest.raises(ValueError, match=message):
            load_documents(str(tmp_path / name), streaming=streaming, **arguments)

    (tmp_path / "corpus").mkdir()
    check("a folder of files, of one of the types .txt, .jsonl, .json, .parquet; .* has no such file")
    write_json_lines(tmp_path / "corpus" / "a.jsonl", TEXTS, column="body")
    check("must have a column 'text' .recipes can name another as `text_column`.; .* has id, body")
    check("must have a column 'bdy' .* has id, body; did you mean 'body'", text_column="bdy")
    assert "text" in next(iter(load_documents(str(tmp_path / "corpus"), text_column="body")["train"]))
    check("between 1 and 50; got 51", validation_percentage=51)
    check("`dataset_config_name` must be unset, .* has no configurations; got 'en'", config_name="en")
    for options, message in (({"config_name": "en"}, "got 'en'"), ({"text_column": "body"}, "only column of stdlib")):
        with pytest.raises(ValueError, match=message):
            load_documents("stdlib", streaming=streaming, **options)
    check("between 1 and 50; got 0", validation_percentage=0)
    (tmp_path / "corpus" / "b.txt").touch()
    check("files of several kinds")
    (tmp_path / "empty.jsonl").touch()
    check("`dataset_name` must have documents; .* is empty", "empty.jsonl")
    if not streaming:
        write_json_lines(tmp_path / "blank.jsonl", ["", ""])
        check("`dataset_name` must have text; split train of .* has none", "blank.jsonl")
        (tmp_path / "broken.jsonl").write_text('{"text": "a"}\n{"te')
        check("cannot load `dataset_name` .*broken.jsonl", "broken.jsonl")
        (tmp_path / "latin").mkdir()
        (tmp_path / "latin" / "a.txt").write_text("some words", encoding="utf-8")
        (tmp_path / "latin" / "b [1].txt").write_text("caf\xe9", encoding="latin-1")
        check(r"codec can't decode byte 0xe9 .*; '.*b \[1\].txt' must be saved as UTF-8", "latin")


def test_tokenizing_is_cached(tmp_path, tokenizer):
    write_json_lines(tmp_path / "a.jsonl", TEXTS)
    documents = load_documents(str(tmp_path / "a.jsonl"))["train"]
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    again = load_tokenizer(str(tmp_path / "tokenizer"), 500)
    tokens = tokenize(documents, tokenizer)
    assert tokenize(documents, again).cache_files == tokens.cache_files != []  # read again, not made again
    other = train_tokenizer(TEXTS, 280)
    assert tokenize(documents, other).cache_files != tokens.cache_files
    again.eos_token = again.pad_token
    assert tokenize(documents, again)["input_ids"][0][-1] == again.pad_token_id != tokenizer.eos_token_id
    again.eos_token = tokenizer.eos_token
    blocks = pack(tokens, 16)
    assert pack(tokenize(documents, again), 16).cache_files == blocks.cache_files != pack(tokens, 17).cache_files


def test_the_cache_knows_whether_there_is_a_chat_template(tmp_path, tokenizer):
    """It decides whether special tokens in the text are text, see above."""
    write_json_lines(tmp_path / "a.jsonl", [f"{text}<|endoftext|>{text}" for text in TEXTS])
    documents = load_documents(str(tmp_path / "a.jsonl"))["train"]
    chat = copy.deepcopy(tokenizer)
    chat.chat_template = "{{ messages }}"
    for each, ends in ((tokenizer, 1), (chat, 2), (tokenizer, 1)):
        assert {ids.count(each.eos_token_id) for ids in tokenize(documents, each)["input_ids"]} == {ends}


def test_the_share_that_is_held_out_is_the_percentage():
    texts = [f"document {i}" for i in range(20_000)]
    for percentage in (1, 5, 50):
        held_out = sum(_is_held_out(text, percentage, True) for text in texts)
        assert held_out == pytest.approx(200 * percentage, abs=4 * math.sqrt(200 * percentage))
        assert held_out + sum(_is_held_out(text, percentage, False) for text in texts) == len(texts)


@pytest.mark.parametrize("respect_boundaries", [False, True])
def test_a_stream_is_packed_like_stored_data(tmp_path, tokenizer, respect_boundaries):
    write_json_lines(tmp_path / "a.jsonl", TEXTS)
    blocks = []
    for streaming in (False, True):
        documents = load_documents(str(tmp_path / "a.jsonl"), streaming=streaming)["train"]
        blocks.append(list(pack(tokenize(documents, tokenizer), 24, respect_boundaries)))
        assert all(values.dtype == torch.int64 for values in collate_blocks(blocks[-1][:2]).values())
    assert blocks[0] == blocks[1] and len(blocks[0]) > 10


def test_boundaries_restart_positions_and_are_not_predicted(tokenizer):
    documents = [[1, 2, 3], [4, 5, 6, 7, 8, 9], [10], [11, 12]]
    blocks = pack(Dataset.from_dict({"input_ids": documents}), 4, respect_boundaries=True)
    assert blocks["input_ids"][:] == [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]]
    assert blocks["position_ids"][:] == [[0, 1, 2, 0], [0, 1, 2, 3], [0, 0, 0, 1]]
    batch = collate_blocks(list(blocks))
    assert batch["labels"].tolist() == [[-100, 2, 3, -100], [-100, 6, 7, 8], [-100, -100, -100, 12]]
    assert all(values.dtype == torch.int64 for values in batch.values())
    crossing = collate_blocks(list(pack(Dataset.from_dict({"input_ids": documents}), 4)))
    assert crossing["labels"].tolist() == [[-100, 2, 3, 4], [-100, 6, 7, 8], [-100, 10, 11, 12]]
    assert set(crossing) == {"input_ids", "labels"}


@pytest.mark.parametrize("engine", ["eager", "sdpa", "flex_attention"])
def test_loss_of_packed_documents_is_that_of_the_documents_alone(tiny_model, fresh_compiler, engine):
    """From documents to the loss, as a `Trainer` computes it: packed blocks against one document at a time."""
    model = tiny_model(engine=engine, head_dim=16, num_key_value_heads=3).requires_grad_(False)
    documents = [torch.randint(97, (length,)).tolist() for length in (30, 9, 1, 24)]
    (block,) = pack(Dataset.from_dict({"input_ids": documents}), 64, respect_boundaries=True)
    packed, with_cache = (model(**collate_blocks([block]), use_cache=use_cache).loss for use_cache in (False, True))
    alone = [collate_blocks([{"input_ids": ids}]) for ids in documents if len(ids) > 1]
    model.set_attn_implementation("eager")
    losses = [model(**batch).loss * (batch["labels"] != -100).sum() for batch in alone]
    expected = (sum(losses) / (64 - 4)).item()
    assert [packed.item(), with_cache.item()] == pytest.approx([expected] * 2, rel=1e-5)
    (block,) = pack(Dataset.from_dict({"input_ids": documents}), 64)
    assert model(**collate_blocks([block])).loss.item() != pytest.approx(packed.item(), rel=1e-3)


def test_a_stream_that_ends_amid_an_accumulation_has_no_smaller_steps(tiny_model, tmp_path):
    """The stock Trainer divides the sum over fewer rows by the number of all."""

    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            for _ in range(10):
                yield {"input_ids": list(range(20)), "labels": list(range(20))}

    settings = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4, "max_steps": 6, "logging_steps": 1}
    args = TrainingArguments(tmp_path, use_cpu=True, report_to="none", learning_rate=0.0, **settings)
    trainer = LSGPTTrainer(tiny_model().train(), args, train_dataset=Stream())
    trainer.train()
    losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    assert losses == pytest.approx([losses[0]] * 6, rel=1e-4)
