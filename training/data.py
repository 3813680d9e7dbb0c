"""Text to blocks of tokens, one function per step: load documents, train a tokenizer, tokenize and pack.

Documents are `datasets.Dataset`s with a column `text`, so that every step also takes data from elsewhere.
"""

import hashlib
import sysconfig
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from datasets import Dataset, DatasetDict
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from lsgpt.configuration import suggest


END_OF_TEXT = "<|endoftext|>"
# Not the end-of-text token: a collator excludes padding from the loss, and the model has to learn where texts end.
PAD = "<|pad|>"

# Installed packages, tests, generated tables, and what differs from one operating system or distribution to the next.
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
_HELD_OUT_256THS = 13  # a twentieth


def load_documents(dataset_name: str) -> DatasetDict:
    """
    Loads the documents of a data set.

    Args:
        dataset_name: A key of `DATASETS`; `"stdlib"` is the source of Python's standard library.

    Returns:
        The splits `train` and `validation`, with the column `text`.

    Raises:
        ValueError: An unknown name.
    """
    if dataset_name not in DATASETS:
        raise ValueError(
            f"`dataset_name` must be one of {', '.join(DATASETS)}; got {dataset_name!r}"
            f"{suggest(dataset_name, DATASETS)}"
        )
    return DATASETS[dataset_name]()


def load_stdlib(folder: str | Path | None = None, max_characters: int = 6_000_000) -> DatasetDict:
    """
    The Python files of the standard library of the running interpreter: text that every machine has.

    Order and split follow from a digest of each file's path inside `folder`. They are the same on every machine, and
    a file keeps its side of the split from one Python version to the next.

    Args:
        folder: Where to look for `.py` files; the standard library's folder by default.
        max_characters: Training files are taken until they have this many characters.

    Returns:
        The splits `train` and `validation` (about a twentieth of the files) with the columns `text` and `path`.

    Raises:
        ValueError: No file for one of the splits, as in a Python that was installed without its source.
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
        raise ValueError(f"the data set stdlib needs Python's source files; found {len(files)} in {folder}")
    return DatasetDict({split: Dataset.from_list(documents) for split, documents in rows.items()})


DATASETS = {"stdlib": load_stdlib}


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """
    Trains a byte-level BPE tokenizer: every text has a tokenization, and decoding returns it unchanged.

    Args:
        texts: The training text.
        vocab_size: Number of tokens, the 256 bytes and two special tokens included.

    Returns:
        The tokenizer, with `<|endoftext|>` as beginning and end of a text, and a padding token.

    Raises:
        ValueError: A vocabulary too small for the bytes.
    """
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special_tokens = [END_OF_TEXT, PAD]
    smallest = len(alphabet) + len(special_tokens)
    if vocab_size < smallest:
        raise ValueError(f"`vocab_size` must be at least {smallest} (bytes and special tokens); got {vocab_size}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=special_tokens, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=END_OF_TEXT, eos_token=END_OF_TEXT, pad_token=PAD
    )


def tokenize(documents: Dataset, tokenizer: PreTrainedTokenizerBase) -> Dataset:
    """Maps the column `text` to `input_ids`, each document closed by the end-of-text token."""

    def tokenize_batch(batch):
        encoded = tokenizer(batch["text"], return_attention_mask=False, return_token_type_ids=False)
        return {"input_ids": [[*ids, tokenizer.eos_token_id] for ids in encoded["input_ids"]]}

    return documents.map(
        tokenize_batch, batched=True, batch_size=100, remove_columns=documents.column_names, desc="Tokenizing"
    )


def pack(tokens: Dataset, block_size: int) -> Dataset:
    """
    Concatenates tokenized documents and cuts them into blocks that may cross from one document into the next.

    Args:
        tokens: Documents as `tokenize` returns them.
        block_size: Number of tokens in a block.

    Returns:
        Rows with `input_ids` of exactly `block_size` tokens. The tokens after the last full block are left out.

    Raises:
        ValueError: Less than one block of tokens.
    """

    def pack_all(batch):
        ids = np.concatenate(batch["input_ids"])
        num_blocks = len(ids) // block_size
        if num_blocks == 0:
            raise ValueError(f"`block_size` must be at most the {len(ids)} tokens of the data; got {block_size}")
        return {"input_ids": ids[: num_blocks * block_size].reshape(num_blocks, block_size)}

    packed = tokens.with_format("numpy").map(pack_all, batched=True, batch_size=None, desc="Packing")
    return packed.with_format(None)
