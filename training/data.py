"""From text to blocks of tokens, with one function per step: load documents, get a tokenizer, tokenize, pack, collate.

Documents are rows of a `datasets` dataset with a column `text`, so every step also accepts data from elsewhere.
"""

import glob
import hashlib
import re
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from itertools import count, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import (
    Dataset,
    DatasetDict,
    Features,
    IterableDataset,
    IterableDatasetDict,
    List,
    Value,
    load_dataset,
)
from datasets.exceptions import DatasetGenerationError
from datasets.fingerprint import Hasher
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast, default_data_collator

from lsgpt import utilities
from lsgpt.utilities import looks_like_a_path, suggest

from .metrics import IGNORED_LABEL


END_OF_TEXT = "<|endoftext|>"
# Not the end-of-text token: collators exclude padding from the loss, but the model has to learn where texts end.
PAD = "<|pad|>"

# Installed packages, programs and tests; generated tables, and files that differ between systems or distributions.
_NOT_LIBRARY_SOURCE = {"dist-packages", "ensurepip", "idlelib", "site-packages", "test", "tests", "turtledemo"}
_NOT_LIBRARY_SOURCE |= {"__phello__", "encodings", "pydoc_data"}
_HELD_OUT_256THS = 13  # about a twentieth

STDLIB = "stdlib"
STDLIB_SHARDS = 16
"""Number of parts of a stream of `stdlib`, and so of the workers that can share it."""

_BUILDERS = {".txt": "text", ".jsonl": "json", ".json": "json", ".parquet": "parquet"}  # of `datasets`
_SPLIT_NAMES = {"validation": {"validation", "valid", "val", "dev"}, "test": {"test"}}


def load_documents(
    dataset_name: str,
    config_name: str | None = None,
    text_column: str = "text",
    validation_percentage: int = 5,
    streaming: bool = False,
) -> DatasetDict | IterableDatasetDict:
    """
    Loads the documents of a dataset, as the splits `train` and `validation` with the column `text`.

    A split `validation` (also called `valid`, `val` or `dev` in file names) is used as it is. If there is none, a
    share of the training documents is held out, by a hash of the text, so that files, their order and equal documents
    make no difference. Of too few documents, the end of each is held out. A split or a file called `test` is not used.

    Args:
        dataset_name: `"stdlib"` for the source of Python's standard library; a file or a folder of files (`.txt`, one
            document each; `.jsonl` or `.json`; `.parquet`); or the name of a dataset on the Hub.
        config_name: Name of one of the dataset's configurations, if it has several.
        text_column: Column that holds the text.
        validation_percentage: Share of the training documents to hold out, 1 to 50.
        streaming: Whether to read the data during training instead of before, without storing it.

    Raises:
        ValueError: If there is no such dataset, configuration or column, the column holds anything but strings, there
            are no documents, or there are files of several kinds.
    """
    if not 1 <= validation_percentage <= 50:
        raise ValueError(f"`validation_percentage` must be between 1 and 50; got {validation_percentage}")
    path, choices = Path(dataset_name), f"must be {STDLIB}, a file, a folder, or a dataset on the Hub"
    is_local = path.exists()
    if config_name is not None and (is_local or dataset_name == STDLIB):
        raise ValueError(
            f"`dataset_config_name` must be unset, because {dataset_name!r} has no configurations; got {config_name!r}"
        )
    if dataset_name == STDLIB:
        if text_column != "text":
            raise ValueError(f"`text_column` must be text, the only column of {STDLIB}; got {text_column!r}")
        splits = load_stdlib()
        if not streaming:
            return splits
        streams = {name: x.to_iterable_dataset(min(STDLIB_SHARDS, len(x))) for name, x in splits.items()}
        return IterableDatasetDict(streams)
    if not is_local and (looks_like_a_path(dataset_name) or path.suffix in _BUILDERS):
        hint = suggest(path.name, [sibling.name for sibling in path.parent.glob("*")])
        raise ValueError(f"`dataset_name` {choices}; there is no file or folder {dataset_name!r}{hint}")
    if not is_local and (hint := suggest(dataset_name, [STDLIB])):
        raise ValueError(f"`dataset_name` {dataset_name!r} is unknown{hint}")
    options: dict = _local_files(path) if is_local else {"path": dataset_name}
    try:
        splits = load_dataset(**options, name=config_name, streaming=streaming)
    except StopIteration as error:  # from the JSON reader
        raise ValueError(f"`dataset_name` must have documents; {dataset_name!r} is empty") from error
    except (OSError, ValueError, RuntimeError, DatasetGenerationError) as error:
        hint = "" if is_local else f"; it {choices}, and no file has this name"
        if is_local and isinstance(error.__cause__, UnicodeDecodeError):
            hint = f"; {_first_not_utf8(options['data_files'])} must be saved as UTF-8"
        raise ValueError(f"cannot load `dataset_name` {dataset_name!r}: {error.__cause__ or error}{hint}") from error
    if "train" not in splits:
        raise ValueError(f"`dataset_name` must have a `train` split; {dataset_name!r} has {', '.join(splits)}")
    splits = type(splits)({name: splits[name] for name in ("train", "validation") if name in splits})
    columns = splits["train"].column_names or list(next(iter(splits["train"]), {}))
    if not columns:
        raise ValueError(f"`dataset_name` must have documents; {dataset_name!r} is empty")
    if text_column not in columns:
        raise ValueError(
            f"the data must have a column {text_column!r} (recipes can name another as `text_column`); "
            f"{dataset_name!r} has {', '.join(columns)}{suggest(text_column, columns)}"
        )
    for name, documents in splits.items():
        documents = documents.select_columns(text_column)
        documents = documents if text_column == "text" else documents.rename_column(text_column, "text")
        splits[name] = _check_texts(documents, f"column {text_column!r} of {dataset_name!r}, split {name}, has")
        if not streaming and not any(splits[name]["text"]):
            raise ValueError(f"`dataset_name` must have text; split {name} of {dataset_name!r} has none")
    if "validation" not in splits:
        splits["train"], splits["validation"] = _hold_out(splits["train"], validation_percentage)
    return splits


def _check_texts(documents: Dataset | IterableDataset, place: str) -> Dataset | IterableDataset:
    """
    Raises `ValueError`, with `place` in its message, if the column `text` holds anything but strings. A stream is
    checked row by row when it is read.
    """
    if isinstance(documents, IterableDataset):
        return documents.map(_check_row, fn_kwargs={"place": place}, features=documents.features)
    column = documents.data.column("text")
    if column.null_count or str(column.type) not in ("string", "large_string"):
        for row in documents:
            _check_row(row, place)
    return documents


def _check_row(row: dict, place: str) -> dict:
    if not isinstance(row["text"], str):
        raise ValueError(
            f"`text_column` must hold one string in each row; {place} {repr(row['text'])[:60]}. Remove such rows, or "
            "convert them to text first (chat messages: `tokenizer.apply_chat_template(messages, tokenize=False)`)"
        )
    return row


def _local_files(path: Path) -> dict:
    """
    Returns the arguments of `load_dataset` for a file or a folder. Hidden files and those with other extensions are
    ignored, and so are those with the word `test` in their path; a validation split's (see `_SPLIT_NAMES`) makes a
    file part of it. Raises `ValueError` for a folder without files of one type.
    """
    if (path / "state.json").exists() or (path / "dataset_dict.json").exists():
        raise ValueError(
            f"`dataset_name` must not be a folder of `save_to_disk`; got {str(path)!r}. Load it with "
            "`datasets.load_from_disk`, and write each split with its method `to_parquet`"
        )
    inside = sorted(path / name for name in glob.glob("**/*", root_dir=path, recursive=True))
    files = [path] if path.is_file() else [file for file in inside if file.is_file()]
    builders = {_BUILDERS[file.suffix] for file in files if file.suffix in _BUILDERS}
    if len(builders) != 1:
        found = f"files of several kinds ({', '.join(sorted(builders))})" if builders else "no such file"
        raise ValueError(
            f"`dataset_name` must be a file, or a folder of files, of one of the types {', '.join(_BUILDERS)}; {path} "
            f"has {found}"
        )
    splits = {}
    for file in files:
        if file.suffix in _BUILDERS:
            words = set(re.split(r"[^a-z]+", file.relative_to(path).as_posix().lower()))
            split = next((split for split, names in _SPLIT_NAMES.items() if names & words), "train")
            splits.setdefault(split, []).append(glob.escape(str(file)))  # or it would be a pattern
    builder = builders.pop()
    # A text file is one document; by default, `datasets` would make a document of every line.
    return {"path": builder, "data_files": splits, **({"sample_by": "document"} if builder == "text" else {})}


def _first_not_utf8(data_files: dict[str, list[str]]) -> str:
    """The first of the files, given by their patterns, that cannot be read as text."""
    files = [file for patterns in data_files.values() for pattern in patterns for file in glob.glob(pattern)]
    for file in files:
        try:
            Path(file).read_text(encoding="utf-8")
        except UnicodeDecodeError:
            return repr(file)
    return "a file"


def _hold_out(documents: Dataset | IterableDataset, percentage: int) -> tuple:
    """Splits documents into training and validation documents, see `load_documents`."""
    parts = tuple(
        documents.filter(_is_held_out, fn_kwargs={"percentage": percentage, "wanted": wanted}, input_columns="text")
        for wanted in (False, True)
    )
    if isinstance(documents, IterableDataset) or (len(documents) * percentage >= 100 and all(map(len, parts))):
        return parts
    cuts = [len(text) - max(len(text) * percentage // 100, 1) for text in documents["text"]]
    pairs = [(text[:cut], text[cut:]) for text, cut in zip(documents["text"], cuts)]
    return tuple(Dataset.from_dict({"text": list(texts)}) for texts in zip(*pairs))


def _is_held_out(text: str, percentage: int, wanted: bool) -> bool:
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return (int.from_bytes(digest, "big") % 100 < percentage) == wanted


def load_stdlib(folder: str | Path | None = None, max_characters: int = 6_000_000) -> DatasetDict:
    """
    Loads the Python files of a folder, by default of the standard library, a text that every machine has. The split
    `train` has files until they have `max_characters`, `validation` about a twentieth of all files.

    Order and split depend only on a digest of each file's path inside the folder. They are the same on every machine,
    and a file stays in the same split from one Python version to the next. Raises `ValueError` if there is no file for
    one of the splits, as in a Python that was installed without its source.
    """
    folder = Path(folder or sysconfig.get_path("stdlib"))
    files = {}
    for file in folder.rglob("*.py"):
        path = file.relative_to(folder)
        if _NOT_LIBRARY_SOURCE.isdisjoint(path.parts) and not path.name.startswith("_sysconfigdata"):
            files[hashlib.sha256(path.as_posix().encode()).digest()] = path
    rows, characters = {"train": [], "validation": []}, 0
    for digest, path in sorted(files.items()):
        split = "validation" if digest[-1] < _HELD_OUT_256THS else "train"
        if split == "train" and characters >= max_characters:
            continue
        text = (folder / path).read_text(encoding="utf-8", errors="replace")
        characters += len(text) if split == "train" else 0
        rows[split].append({"text": text, "path": path.as_posix()})
    if not all(rows.values()):
        raise ValueError(f"the dataset stdlib needs Python's source files; found {len(files)} in {folder}")
    return DatasetDict({split: Dataset.from_list(documents) for split, documents in rows.items()})


def load_tokenizer(name: str, vocab_size: int) -> PreTrainedTokenizerBase:
    """
    Loads a tokenizer by its name on the Hub or its folder. Raises `ValueError` if there is no such tokenizer, or it
    has more than `vocab_size` tokens or no end-of-text token.
    """
    choices = f"must be {', '.join(ALGORITHMS)}, a folder, or one on the Hub"
    if looks_like_a_path(name) and not Path(name).is_dir():
        raise ValueError(f"`tokenizer` {choices}; there is no {name!r}")
    try:
        tokenizer = utilities.load_tokenizer(name)
    except ValueError as error:
        raise ValueError(f"`tokenizer`: {error}{suggest(name, ALGORITHMS) or f'; it {choices}'}") from error
    if not utilities.fits_vocabulary(tokenizer, vocab_size):
        raise ValueError(
            f"`vocab_size` must be at least the {len(tokenizer)} tokens of the tokenizer {name!r}; got {vocab_size}"
        )
    if tokenizer.eos_token_id is None:
        raise ValueError(f"`tokenizer` must have an end-of-text token (`eos_token`); {name!r} has none")
    return tokenizer


def first_characters(texts: Iterable[str], number: int) -> Iterator[str]:
    """Yields texts until they have `number` characters in total; the last one is cut."""
    for text in texts:
        yield text[:number]
        number -= len(text)
        if number <= 0:
            return


def train_tokenizer(texts: Iterable[str], vocab_size: int, algorithm: str = "bpe") -> PreTrainedTokenizerFast:
    """
    Trains a byte-level tokenizer: it can tokenize every text, and decoding returns the text unchanged. It has
    `<|endoftext|>` as the beginning- and end-of-text token, and a padding token.

    Args:
        texts: The training text.
        vocab_size: Number of tokens, including the 256 bytes and two special tokens.
        algorithm: `"bpe"` (byte-pair encoding, as in GPT-2) or `"unigram"` (the default algorithm of SentencePiece,
            arXiv:1804.10959). With little text, Unigram may produce fewer tokens. Trained again on the same text, it
            may number them differently.

    Raises:
        ValueError: If the vocabulary is too small for the bytes, or there is no such algorithm.
    """
    if algorithm not in ALGORITHMS:
        raise ValueError(f"`algorithm` must be one of {', '.join(ALGORITHMS)}; got {algorithm!r}")
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special_tokens = [END_OF_TEXT, PAD]
    smallest = len(alphabet) + len(special_tokens)
    if vocab_size < smallest:
        raise ValueError(f"`vocab_size` must be at least {smallest} (bytes and special tokens); got {vocab_size}")
    model, trainer = ALGORITHMS[algorithm]
    tokenizer = Tokenizer(model())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    options = {"special_tokens": special_tokens, "initial_alphabet": alphabet, "show_progress": False}
    tokenizer.train_from_iterator(texts, trainer(vocab_size=vocab_size, **options))
    special = {"bos_token": END_OF_TEXT, "eos_token": END_OF_TEXT, "pad_token": PAD}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


ALGORITHMS = {"bpe": (models.BPE, trainers.BpeTrainer), "unigram": (models.Unigram, trainers.UnigramTrainer)}


def tokenize(documents: Dataset | IterableDataset, tokenizer: PreTrainedTokenizerBase) -> Dataset | IterableDataset:
    """
    Maps `text` to `input_ids`, with an end-of-text token after each document. What looks like a special token in a
    document is text, unless the tokenizer has a chat template.
    """
    options = {"fn_kwargs": {"tokenizer": tokenizer}, **_in_batches(documents, "text")}
    if isinstance(documents, Dataset):
        options["desc"] = "Tokenizing"
        if getattr(tokenizer, "backend_tokenizer", None):
            # Cached by what the tokenizer does. By default, the folder that it was loaded from would count too.
            rules = tokenizer.backend_tokenizer.to_str(), tokenizer.eos_token_id, tokenizer.chat_template is None
            options["new_fingerprint"] = Hasher.hash([documents._fingerprint, *rules])
    return documents.map(_tokenize_batch, **options)


def _tokenize_batch(batch: dict, tokenizer: PreTrainedTokenizerBase) -> dict:
    encoded = tokenizer(
        batch["text"],
        return_attention_mask=False,
        return_token_type_ids=False,
        verbose=False,  # no warnings about texts longer than the model's positions, which are cut by the packing
        split_special_tokens=tokenizer.chat_template is None,  # chat templates write special tokens into the text
    )
    end = tokenizer.eos_token_id  # some tokenizers add it themselves
    return {"input_ids": [ids if ids and ids[-1] == end else [*ids, end] for ids in encoded["input_ids"]]}


def pack(
    tokens: Dataset | IterableDataset, block_size: int, respect_boundaries: bool = False
) -> Dataset | IterableDataset:
    """
    Concatenates tokenized documents and cuts them into blocks.

    Args:
        tokens: Documents as `tokenize` returns them.
        block_size: Number of tokens in a block.
        respect_boundaries: Whether attention and loss stay inside a document. The model sees the boundaries in the
            positions, which restart at each document, and at each block in a document that was cut.

    Returns:
        Rows with `input_ids` of exactly `block_size` tokens and, with `respect_boundaries`, `position_ids`, of the
        type of `tokens`. The tokens after the last full block are left out; if workers share a stream, after the last
        one of each.

    Raises:
        ValueError: If there is less than one block of tokens.
    """
    names = ["input_ids", "position_ids"] if respect_boundaries else ["input_ids"]
    features = Features({name: List(Value("int32")) for name in names})
    options = {"features": features, "with_indices": True, **_in_batches(tokens, "input_ids")}
    blocks = tokens.map(_Packer(block_size, respect_boundaries), **options)
    if isinstance(blocks, Dataset) and len(blocks) == 0:
        num_tokens = sum(map(len, tokens["input_ids"]))
        raise ValueError(f"`block_size` must be at most the {num_tokens} tokens of the data; got {block_size}")
    return blocks


def _in_batches(documents: Dataset | IterableDataset, column: str) -> dict[str, Any]:
    """Returns options of `map` for functions of several documents, which replace all columns (at least `column`)."""
    # A stream yields its first row only after a whole batch of documents, which may be books.
    batch_size = 100 if isinstance(documents, Dataset) else 4
    return {"batched": True, "batch_size": batch_size, "remove_columns": documents.column_names or [column]}


def first_blocks(
    documents: Dataset | IterableDataset, tokenizer: PreTrainedTokenizerBase, block_size: int, count: int | None = None
) -> torch.Tensor:
    """Returns the first `count` blocks of documents, or all, as ids `(blocks, block_size)`; tokenizes no more."""
    stream = documents.to_iterable_dataset() if isinstance(documents, Dataset) else documents
    rows = [row["input_ids"] for row in islice(pack(tokenize(stream, tokenizer), block_size), count)]
    return torch.tensor(np.array(rows, dtype=np.int64).reshape(-1, block_size))


def shuffle_blocks(blocks: IterableDataset, seed: int, buffer_size: int) -> IterableDataset:
    """Shuffles the files of a stream, and its blocks in a buffer. Unlike `shuffle`, it reads one file at a time."""
    return blocks.shuffle(seed=seed, buffer_size=buffer_size, max_buffer_input_shards=1)


class _Packer:
    """Maps batches of documents to the blocks that they complete, and keeps the rest for the next batch."""

    def __init__(self, block_size: int, respect_boundaries: bool):
        self.block_size, self.respect_boundaries, self._next = block_size, respect_boundaries, 0

    def __call__(self, batch: dict, indices: list[int]) -> dict[str, list]:
        if indices[0] == 0:  # of a pass, in each worker
            self._rest = np.empty((2, 0), dtype=np.int32)  # token ids, and their positions in the documents
        elif indices[0] != self._next:
            raise RuntimeError(
                "a stream of blocks must be read by one iterator at a time, from its beginning; to shuffle it, use "
                "`shuffle_blocks`"
            )
        self._next = indices[-1] + 1
        new = [np.stack([ids, np.arange(len(ids))]).astype(np.int32) for ids in batch["input_ids"]]
        tokens = np.concatenate([self._rest, *new], axis=1)
        full = tokens.shape[1] // self.block_size * self.block_size
        self._rest = tokens[:, full:]
        ids, positions = tokens[:, :full].reshape(2, -1, self.block_size)
        blocks = {"input_ids": ids.tolist()}
        if self.respect_boundaries:  # in a document that began in an earlier block, positions begin with the block
            blocks["position_ids"] = np.minimum(positions, np.arange(self.block_size)).tolist()
        return blocks


class Passes(torch.utils.data.IterableDataset):
    """
    Batches of passes over a stream, one after the other and without end, for a `DataLoader` with `batch_size=None`.

    All batches are full: the last one of a pass takes its other rows from the next pass, so that the end of a pass
    changes neither the size of a step nor where a resumed training continues. With several processes, each reads the
    whole stream and takes its share of every `world_size` batches: together, they see what one would see.
    """

    def __init__(self, rows: DataLoader, batch_size: int, collate: Callable, process_index: int, world_size: int):
        """Takes `rows` one at a time, and calls `set_epoch` of their `dataset`, if any, before every pass."""
        self.rows, self.batch_size, self.collate = rows, batch_size, collate
        self.process_index, self.world_size = process_index, world_size

    def __iter__(self) -> Iterator[Any]:
        """Yields batches. Raises `ValueError` if a pass has no rows."""
        rows = self._read()
        while True:
            together = list(islice(rows, self.batch_size * self.world_size))
            begin = self.process_index * self.batch_size
            yield self.collate(together[begin : begin + self.batch_size])

    def _read(self) -> Iterator[dict]:
        for number in count():
            if hasattr(self.rows.dataset, "set_epoch"):
                self.rows.dataset.set_epoch(number)
            row = None
            for row in self.rows:
                yield row
            if row is None:
                raise ValueError("`train_dataset` must have rows; the stream has none")


def collate_blocks(blocks: list[dict]) -> dict[str, torch.Tensor]:
    """
    Stacks rows of `pack`, as the `data_collator` of a `Trainer`, and adds `labels`: the `input_ids`, with -100 at the
    first token of every block and packed document, because there is nothing before it to predict it from.
    """
    # Streams yield 32-bit arrays, stored blocks are lists.
    batch = {name: values.long() for name, values in default_data_collator(blocks).items()}
    labels = batch["input_ids"].clone()
    labels[:, 0] = IGNORED_LABEL
    if "position_ids" in batch:
        labels[batch["position_ids"] == 0] = IGNORED_LABEL
    return {**batch, "labels": labels}
