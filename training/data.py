"""From text to blocks of tokens, with one function per step: load documents, get a tokenizer, tokenize, pack, collate.

Documents are rows of a `datasets` dataset with a column `text`, so every step also accepts data from elsewhere.
"""

import hashlib
import re
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import torch
from datasets import (
    Dataset,
    DatasetDict,
    Features,
    IterableDataset,
    IterableDatasetDict,
    Sequence,
    Value,
    load_dataset,
)
from datasets.exceptions import DatasetGenerationError
from datasets.fingerprint import Hasher
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast, default_data_collator

from lsgpt.utilities import suggest

from .arguments import looks_like_a_path


END_OF_TEXT = "<|endoftext|>"
# Not the end-of-text token: collators exclude padding from the loss, but the model has to learn where texts end.
PAD = "<|pad|>"

# Installed packages, tests, generated tables, and files that differ between operating systems or distributions.
_NOT_LIBRARY_SOURCE = {
    "__phello__",
    "dist-packages",
    "encodings",
    "ensurepip",
    "idlelib",
    "pydoc_data",
    "site-packages",
    "test",
    "tests",
    "turtledemo",
}
_HELD_OUT_256THS = 13  # about a twentieth

STDLIB = "stdlib"
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
    Loads the documents of a dataset.

    A split `validation` (also called `valid`, `val` or `dev` in file names) is used as it is. If there is none, a
    share of the training documents is held out. For 5%, this is every 20th document or, if there are fewer than 20,
    the last 5% of the text of each document. A split or a file called `test` is not used.

    Args:
        dataset_name: `"stdlib"` for the source of Python's standard library; a file or a folder of files (`.txt`, one
            document each; `.jsonl` or `.json`; `.parquet`); or the name of a dataset on the Hub.
        config_name: Name of one of the dataset's configurations, if it has several.
        text_column: Column that holds the text.
        validation_percentage: Share of the training documents to hold out, 1 to 50.
        streaming: Whether to read the data during training instead of before, without storing it.

    Returns:
        The splits `train` and `validation`, with the column `text`.

    Raises:
        ValueError: If there is no such dataset or column, the column holds anything but strings, there are no
            documents, or there are files of several kinds.
    """
    if not 1 <= validation_percentage <= 50:
        raise ValueError(f"`validation_split_percentage` must be between 1 and 50; got {validation_percentage}")
    if dataset_name == STDLIB:
        return load_stdlib()
    is_local = Path(dataset_name).exists()
    if not is_local and (looks_like_a_path(dataset_name) or Path(dataset_name).suffix in _BUILDERS):
        siblings = [path.name for path in Path(dataset_name).parent.glob("*")]
        raise ValueError(
            f"`dataset_name` must be {STDLIB}, a file, a folder, or a dataset on the Hub; there is no file or folder "
            f"{dataset_name!r}{suggest(Path(dataset_name).name, siblings)}"
        )
    if not is_local and (hint := suggest(dataset_name, [STDLIB])):
        raise ValueError(f"`dataset_name` {dataset_name!r} is unknown{hint}")
    options = _local_files(Path(dataset_name)) if is_local else {"path": dataset_name}
    try:
        splits = load_dataset(**options, name=config_name, streaming=streaming)
    except StopIteration as error:  # from the JSON reader
        raise ValueError(f"`dataset_name` must have documents; {dataset_name!r} is empty") from error
    except (OSError, ValueError, RuntimeError, DatasetGenerationError) as error:
        choices = f"; it must be {STDLIB}, a file, a folder, or a dataset on the Hub, and no file has this name"
        hint = "" if is_local else choices
        raise ValueError(f"cannot load `dataset_name` {dataset_name!r}: {error.__cause__ or error}{hint}") from error
    if "train" not in splits:
        raise ValueError(f"`dataset_name` must have a `train` split; {dataset_name!r} has {', '.join(splits)}")
    splits = type(splits)({name: splits[name] for name in ("train", "validation") if name in splits})
    columns = splits["train"].column_names or list(next(iter(splits["train"]), {}))
    if not columns:
        raise ValueError(f"`dataset_name` must have documents; {dataset_name!r} is empty")
    if text_column not in columns:
        raise ValueError(
            f"`text_column` must be one of the columns of {dataset_name!r} ({', '.join(columns)}); "
            f"got {text_column!r}{suggest(text_column, columns)}"
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
    feature = (documents.features or {}).get("text")
    if feature is not None and not (isinstance(feature, Value) and "string" in feature.dtype):
        found = feature.dtype if isinstance(feature, Value) else type(feature).__name__.lower()
        raise ValueError(_not_text(place, f"values of the type {found}"))
    if isinstance(documents, IterableDataset):
        return documents.map(_check_row, fn_kwargs={"place": place}, features=documents.features)
    if nulls := documents.data.column("text").null_count:
        raise ValueError(_not_text(place, f"no text (null) in {nulls} of {len(documents)} rows"))
    return documents


def _check_row(row: dict, place: str) -> dict:
    if not isinstance(row["text"], str):
        raise ValueError(_not_text(place, repr(row["text"])[:60]))
    return row


def _not_text(place: str, found: str) -> str:
    return (
        f"`text_column` must hold one string in each row; {place} {found}. Remove such rows, or convert them to text "
        "first (chat messages: `tokenizer.apply_chat_template(messages, tokenize=False)`)"
    )


def _local_files(path: Path) -> dict:
    """
    Returns the arguments of `load_dataset` for a file or a folder. Files with other extensions are ignored, and so are
    those with the word `test` in their path; one of `_SPLIT_NAMES` makes a file part of the validation split.
    """
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
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
            splits.setdefault(split, []).append(str(file))
    builder = builders.pop()
    # A text file is one document; by default, `datasets` would make a document of every line.
    return {"path": builder, "data_files": splits, **({"sample_by": "document"} if builder == "text" else {})}


def _hold_out(documents: Dataset | IterableDataset, percentage: int) -> tuple:
    """Splits documents into training and validation documents, see `load_documents`."""
    if isinstance(documents, Dataset) and len(documents) * percentage < 100:
        cuts = [len(text) - max(len(text) * percentage // 100, 1) for text in documents["text"]]
        parts = ([text[:cut] for text, cut in zip(documents["text"], cuts)], [])
        parts[1].extend(text[cut:] for text, cut in zip(documents["text"], cuts))
        return tuple(Dataset.from_dict({"text": part}) for part in parts)
    return (
        documents.filter(_is_held_out, with_indices=True, fn_kwargs={"percentage": percentage, "wanted": False}),
        documents.filter(_is_held_out, with_indices=True, fn_kwargs={"percentage": percentage, "wanted": True}),
    )


def _is_held_out(row: dict, index: int, percentage: int, wanted: bool) -> bool:
    """At 5%, every 20th document; without a total, which a stream does not know."""
    return ((index + 1) * percentage // 100 > index * percentage // 100) == wanted


def load_stdlib(folder: str | Path | None = None, max_characters: int = 6_000_000) -> DatasetDict:
    """
    Loads the Python files of the running interpreter's standard library, a text that every machine has.

    Order and split depend only on a digest of each file's path inside `folder`. They are the same on every machine,
    and a file stays in the same split from one Python version to the next.

    Args:
        folder: Where to look for `.py` files; the standard library's folder by default.
        max_characters: Training files are added until they have this many characters.

    Returns:
        The splits `train` and `validation` (about a twentieth of the files) with the columns `text` and `path`.

    Raises:
        ValueError: If there is no file for one of the splits, as in a Python that was installed without its source.
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
    Loads a tokenizer, and checks that it fits the model.

    Args:
        name: A tokenizer's name on the Hub, or its folder.
        vocab_size: The model's number of tokens.

    Raises:
        ValueError: If there is no such tokenizer, or it has more tokens than the model or no end-of-text token.
    """
    if looks_like_a_path(name) and not Path(name).is_dir():
        raise ValueError(
            f"`tokenizer` must be {', '.join(ALGORITHMS)}, a folder, or one on the Hub; there is no {name!r}"
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        choices = f"; it must be {', '.join(ALGORITHMS)}, a folder, or a tokenizer on the Hub"
        raise ValueError(f"cannot load `tokenizer` {name!r}: {error}{suggest(name, ALGORITHMS) or choices}") from error
    if len(tokenizer) > vocab_size:
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
    Trains a byte-level tokenizer: it can tokenize every text, and decoding returns the text unchanged.

    Args:
        texts: The training text.
        vocab_size: Number of tokens, including the 256 bytes and two special tokens.
        algorithm: `"bpe"` (byte-pair encoding, as in GPT-2) or `"unigram"` (the default algorithm of SentencePiece,
            arXiv:1804.10959). With little text, Unigram may produce fewer tokens. Trained again on the same text, it
            may number them differently.

    Returns:
        The tokenizer, with `<|endoftext|>` as the beginning- and end-of-text token, and a padding token.

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
    tokenizer.train_from_iterator(
        texts,
        trainer(vocab_size=vocab_size, special_tokens=special_tokens, initial_alphabet=alphabet, show_progress=False),
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=END_OF_TEXT, eos_token=END_OF_TEXT, pad_token=PAD
    )


ALGORITHMS = {
    "bpe": (models.BPE, trainers.BpeTrainer),
    "unigram": (models.Unigram, trainers.UnigramTrainer),
}


def tokenize(
    documents: Dataset | IterableDataset, tokenizer: PreTrainedTokenizerBase, num_proc: int | None = None
) -> Dataset | IterableDataset:
    """Maps `text` to `input_ids`, with an end-of-text token after each document, in `num_proc` processes."""
    # A stream yields its first block only after a whole batch of documents, which may be books.
    batch_size = 100 if isinstance(documents, Dataset) else 4
    options = {"batched": True, "batch_size": batch_size, "remove_columns": documents.column_names}
    options["fn_kwargs"] = {"tokenizer": tokenizer}
    if isinstance(documents, Dataset):
        options |= {"num_proc": num_proc, "desc": "Tokenizing"}
        if getattr(tokenizer, "backend_tokenizer", None):
            # Cached by what the tokenizer does. By default, the folder that it was loaded from would count too.
            content = [documents._fingerprint, tokenizer.backend_tokenizer.to_str(), tokenizer.eos_token_id]
            options["new_fingerprint"] = Hasher.hash(content)
    return documents.map(_tokenize_batch, **options)


def _tokenize_batch(batch: dict, tokenizer: PreTrainedTokenizerBase) -> dict:
    # `verbose=False` avoids warnings about texts longer than the model's positions, which are cut by the packing.
    encoded = tokenizer(batch["text"], return_attention_mask=False, return_token_type_ids=False, verbose=False)
    return {"input_ids": [[*ids, tokenizer.eos_token_id] for ids in encoded["input_ids"]]}


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
        Rows with `input_ids` of exactly `block_size` tokens and, with `respect_boundaries`, `position_ids`. The tokens
        after the last full block are left out. The type is that of `tokens`.

    Raises:
        ValueError: If there is less than one block of tokens.
    """
    names = ["input_ids", "position_ids"] if respect_boundaries else ["input_ids"]
    options = {
        "features": Features({name: Sequence(Value("int32")) for name in names}),
        "gen_kwargs": {"tokens": tokens, "block_size": block_size, "respect_boundaries": respect_boundaries},
    }
    if isinstance(tokens, IterableDataset):
        return IterableDataset.from_generator(_generate_blocks, **options)
    num_tokens = 0
    for document in tokens:
        num_tokens += len(document["input_ids"])
        if num_tokens >= block_size:
            return Dataset.from_generator(_generate_blocks, **options)
    raise ValueError(f"`block_size` must be at most the {num_tokens} tokens of the data; got {block_size}")


def _generate_blocks(tokens: Iterable[dict], block_size: int, respect_boundaries: bool) -> Iterator[dict]:
    ids, is_start = np.empty(0, dtype=np.int32), np.empty(0, dtype=bool)
    index = np.arange(block_size, dtype=np.int32)
    for document in tokens:
        new = np.asarray(document["input_ids"], dtype=np.int32)
        ids = np.concatenate((ids, new))
        is_start = np.concatenate((is_start, np.arange(len(new)) == 0))
        for begin in range(0, len(ids) - block_size + 1, block_size):
            block = {"input_ids": ids[begin : begin + block_size]}
            if respect_boundaries:
                starts = np.where(is_start[begin : begin + block_size], index, 0)
                block["position_ids"] = index - np.maximum.accumulate(starts)
            yield block
        full = len(ids) // block_size * block_size
        ids, is_start = ids[full:], is_start[full:]


def collate_blocks(blocks: list[dict]) -> dict[str, torch.Tensor]:
    """
    The collator for rows of `pack`. It stacks them and adds `labels`: the `input_ids`, with -100 at the first token of
    every block and packed document, because there is nothing before it to predict it from.

    ```python
    >>> trainer = Trainer(model, args, train_dataset=pack(tokens, 512), data_collator=collate_blocks)
    ```
    """
    # Streams yield 32-bit arrays, stored blocks are lists.
    batch = {name: values.long() for name, values in default_data_collator(blocks).items()}
    labels = batch["input_ids"].clone()
    labels[:, 0] = -100
    if "position_ids" in batch:
        labels[batch["position_ids"] == 0] = -100
    return {**batch, "labels": labels}
