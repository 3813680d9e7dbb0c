"""Healing a converted checkpoint: loads a teacher to learn from, and selects which weights to train."""

import math
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, IterableDataset
from datasets.distributed import split_dataset_by_node
from torch import nn
from torch.utils.data import DataLoader
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase, TrainingArguments

from lsgpt.modeling_lsgpt.visibility_lsgpt import positions_in_documents
from lsgpt.utilities import load_complete

from .data import collate_blocks
from .metrics import perplexity_of, total_loss


def load_teacher(name: str, args: TrainingArguments) -> PreTrainedModel:
    """
    Loads a causal language model to learn from: frozen, in evaluation mode, on the device of the run and in the
    precision in which the run computes. `name` is its folder, its name on the Hub, or a GGUF file. Raises `ValueError`
    if there is no such model or its files lack weights, and `ImportError` for a GGUF file without the package `gguf`.
    """
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(args.mixed_precision, torch.float32)
    try:
        teacher = load_complete(name, dtype=dtype)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise ValueError(f"cannot load `teacher` {name!r}: {error}") from error
    return teacher.requires_grad_(False).eval().to(args.device)


def check_teacher(
    teacher: PreTrainedModel,
    name: str,
    tokenizer: PreTrainedTokenizerBase,
    vocab_size: int,
    block_size: int,
    respect_boundaries: bool,
):
    """
    Raises `ValueError` if the teacher does not fit the student: it must have the same tokenizer (unless there is none
    in the place `name`) and `vocab_size`, at least `block_size` positions, and, with `respect_boundaries`, keep packed
    documents apart.
    """
    config = teacher.config.get_text_config()
    if config.vocab_size != vocab_size:
        raise ValueError(
            f"`teacher` must have the model's `vocab_size` ({vocab_size}); {name!r} has {config.vocab_size}"
        )
    _check_tokenizer(name, tokenizer)
    positions = getattr(config, "max_position_embeddings", None)
    if positions is not None and block_size > positions:
        raise ValueError(
            f"`block_size` must be at most the positions of `teacher` {name!r} ({positions}); got {block_size}"
        )
    if respect_boundaries and not _keeps_documents_apart(teacher, vocab_size):
        raise ValueError(
            f"`respect_boundaries` must be false with `teacher` {name!r}, which does not keep packed documents apart: "
            "its predictions would use text that the student cannot see"
        )


def _check_tokenizer(name: str, tokenizer: PreTrainedTokenizerBase):
    path = Path(name)
    place = (path.parent, {"gguf_file": path.name}) if path.suffix == ".gguf" else (name, {})
    try:
        theirs = AutoTokenizer.from_pretrained(place[0], **place[1])
    except (OSError, ValueError):
        return  # only weights, no tokenizer
    own, other = tokenizer.get_vocab(), theirs.get_vocab()
    # For a folder without tokenizer files, Transformers may make up a tokenizer that has only special tokens.
    if own == other or not set(other) - set(theirs.all_special_tokens):
        return
    token = min({token for token, _ in own.items() ^ other.items()}, key=lambda token: own.get(token, math.inf))
    raise ValueError(
        f"`teacher` must have the tokenizer of the model, in which {token!r} has the id {own.get(token)}; in that of "
        f"{name!r}, it has {other.get(token)}"
    )


def _keeps_documents_apart(teacher: PreTrainedModel, vocab_size: int) -> bool:
    """Returns whether the second of two identical packed documents gets the same logits as the first."""
    document = torch.arange(8, device=teacher.device)
    inputs = {"input_ids": document.repeat(2)[None] % vocab_size, "position_ids": document.repeat(2)[None]}
    first, second = next_token_logits(teacher, inputs)[0].float().chunk(2)
    return bool((first - second).abs().max() <= 0.01 * first.std())


@torch.no_grad()
def next_token_logits(teacher: PreTrainedModel, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """
    Returns the teacher's logits `(B, T, V)` for `input_ids` `(B, T)` and, if given, their mask, and their positions or
    the lengths of packed documents.
    """
    lengths = inputs.get("cu_seq_lens_q")
    inputs = {key: inputs[key] for key in ("input_ids", "attention_mask", "position_ids") if key in inputs}
    if lengths is not None and inputs.get("position_ids") is None:
        inputs["position_ids"] = positions_in_documents(lengths, inputs["input_ids"])
    # With a cache, the models of Transformers do not detect packed documents.
    return teacher(**inputs, use_cache=False).logits


def measure_perplexity(model: PreTrainedModel, blocks: Dataset | IterableDataset, args: TrainingArguments) -> float:
    """
    Returns the perplexity of a causal language model in evaluation mode over the predicted tokens of rows of `pack`.
    The processes share the work in batches of `per_device_eval_batch_size`, so all of them must call it.
    """
    blocks = split_dataset_by_node(blocks, args.process_index, args.world_size)
    batches = DataLoader(blocks, batch_size=args.per_device_eval_batch_size, collate_fn=collate_blocks)
    total, count = total_loss(model, batches)
    if args.world_size > 1:
        sums = torch.tensor([total, count], dtype=torch.float64, device=args.device)
        torch.distributed.all_reduce(sums)
        total, count = sums.tolist()
    return perplexity_of(total, count)


def choose_trainable(model: PreTrainedModel, trainable: str) -> Any:
    """
    Makes an LSGPT model train `all` of its weights; `light`, only the vectors, which are sinks, biases and norms; or
    `lora`, the vectors and an adapter of rank 16 for every matrix of the blocks. Returns the adapters, a
    `peft.LoraModel`, whose `merge_and_unload` merges them into the weights, or `None`. Raises `ImportError` if they
    need the package `peft`, and it is not installed.
    """
    if trainable == "all":
        return None
    adapters = None
    if trainable == "lora":
        try:
            from peft import LoraConfig, LoraModel  # noqa: PLC0415 (optional)
        except ImportError as error:
            raise ImportError("`trainable: lora` needs the package peft: pip install peft") from error
        # Inside the model, which stays a Transformers model: a run can resume from its checkpoints as from others.
        config = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear")
        adapters = LoraModel(model, config, "default")
    else:
        model.requires_grad_(False)
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.requires_grad_(True)
    return adapters


def sink_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Returns the sinks, and the biases of the output projections in the same layers, which carry their values."""
    parameters = {name.replace(".base_layer.", "."): parameter for name, parameter in model.named_parameters()}
    sinks = [name for name in parameters if name.endswith(".sinks")]
    names = [*sinks, *(name.removesuffix("sinks") + "o_proj.bias" for name in sinks)]
    return [parameters[name] for name in names if name in parameters]
