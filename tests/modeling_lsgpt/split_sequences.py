"""
Compares sequences that are split over processes with the same sequences in one process, in random configurations.

    python tests/modeling_lsgpt/split_sequences.py --configurations 200

Four gloo processes are started once. In each configuration, the first 2, 3 or 4 of them share the rows, and the first
one also computes them alone. The loss must agree to 1e-6 of itself, every gradient to 1e-6 of the largest, and every
largest logit to 1e-6 of itself (with `triton`, which has no float64, to 1e-5). Models compute in float64, because in
float32 the order of a sum alone makes some gradients differ by 1.5e-6 of the largest. The most bytes that a process
receives in the forward pass must be those of the formula in `split_bytes`.

`--engine` replaces the drawn engine, `flex_attention` without gradients, which it has none of on the CPU. `--compiled`
compiles the layers. With `--autocast`, models compute in float32 and bfloat16; loss and gradients may then be twice as
far from float64 as those of one process.
"""

import argparse
import json
import random
import sys
import tempfile
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path

import torch
from torch import distributed as dist
from torch import multiprocessing

from lsgpt import LSGPTConfig, LSGPTForCausalLM
from lsgpt.benchmarks.split import ByteCounter
from lsgpt.modeling_lsgpt import attention_lsgpt
from lsgpt.modeling_lsgpt.context_parallel_lsgpt import split_sequences
from lsgpt.telemetry import MaxLogits
from lsgpt.utilities import split_bytes


PROCESSES = 4
TOLERANCE = 1e-6


def draw(seed: int, engine: str | None = None, is_compiled: bool = False, is_autocast: bool = False) -> dict:
    """A random configuration: the model's, the rows' and how they are computed."""
    r = random.Random(seed)
    size, groups = r.choice([2, 2, 3, 4]), r.choice([1, 1, 2])
    num_kv_heads = r.choice([2, 3, 4])
    num_layers = r.choice([1, 2, 3])
    counts = [groups * r.randint(0, num_kv_heads) for _ in range(num_layers)]
    kind = r.choice(["global", "local", "mixed", "mixed", "mixed", "layers"])
    counts = {"global": groups * num_kv_heads, "local": 0, "mixed": groups, "layers": counts}[kind]
    part = r.randint(3, 70)
    rows = r.choice(["plain", "plain", "packed", "packed", "left", "right", "packed and padded", "lengths"])
    engine = r.choice(["sdpa", "sdpa", "eager"]) if engine is None else engine
    drawn = {
        "seed": seed,
        "size": size,
        "length": part * size,
        "batch": 1 if rows == "lengths" else r.choice([1, 2]),
        "first_position": r.choice([0, 0, 3]),
        "rows": rows,
        "engine": engine,
        "compiled": is_compiled,
        "autocast": is_autocast,
        "checkpointing": r.choice([None, None, False, True]),
        "skip_logits": r.choice([True, False, True]),
        "z_loss": r.choice([0.0, 1e-2]),
        "counted": r.choice([True, False, True]),
        "model": {
            "vocab_size": 61,
            "hidden_size": 24,
            "num_hidden_layers": num_layers,
            "num_attention_heads": groups * num_kv_heads,
            "num_key_value_heads": num_kv_heads,
            "head_dim": 8,
            "num_global_heads": counts,
            "sliding_window": r.choice([2, 5, 8, 16, 2 * part, part + 1, part * size + 3]),
            "attention_sinks": kind != "global" and r.choice([True, False, "full_window"]),
            "max_position_embeddings": part * size + 3,
            "position_embedding_type": r.choice(["learned", "rope", "sinusoidal", "none"]),
            "attn_logit_softcapping": 5.0 if engine == "eager" and r.random() < 0.3 else None,
            "qk_norm": r.random() < 0.3,
            "initializer_range": 0.3,
        },
    }
    rope = r.choice(["default", "dynamic", "longrope"])
    if drawn["model"]["position_embedding_type"] == "rope" and rope != "default":  # frequencies change after a part
        parameters = {"rope_type": rope, "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": part}
        if rope == "longrope":
            parameters |= {"short_factor": [1.0] * 4, "long_factor": [1.0, 2.0, 4.0, 8.0]}
        drawn["model"] |= {"rope_parameters": parameters, "max_position_embeddings": part}
    return drawn


def make_inputs(drawn: dict) -> dict:
    """Rows of random tokens, some of them packed or padded, with labels that are ignored here and there."""
    r = random.Random(drawn["seed"])
    shape = drawn["batch"], drawn["length"]
    ids = torch.randint(61, shape)
    inputs = {"input_ids": ids, "labels": ids.masked_fill(torch.rand(shape) < 0.2, -100)}
    if drawn["rows"] in ("left", "right", "packed and padded"):
        mask = torch.ones(shape, dtype=torch.long)
        for row in mask:
            count = r.randint(0, drawn["length"] - 2)
            row[slice(0, count) if drawn["rows"] == "left" else slice(drawn["length"] - count, None)] = 0
        inputs["attention_mask"] = mask
        inputs["labels"] = inputs["labels"].masked_fill(mask == 0, -100)
    if drawn["rows"].startswith("packed"):
        starts = torch.rand(shape) < 3 / drawn["length"]
        starts[:, 0] = True
        index = torch.arange(drawn["length"]).expand(shape)
        inputs["position_ids"] = index - index.where(starts, 0).cummax(-1).values + drawn["first_position"]
    if drawn["rows"] == "lengths":
        middle = r.randint(1, drawn["length"] - 1)
        inputs["cu_seq_lens_q"] = torch.tensor([0, middle, drawn["length"]])
    if drawn["counted"]:
        inputs["num_items_in_batch"] = torch.tensor(37)
    if drawn["skip_logits"]:
        inputs["skip_logits"] = True
        if drawn["z_loss"]:
            inputs["z_loss"] = drawn["z_loss"]
    return inputs


def make_model(drawn: dict) -> LSGPTForCausalLM:
    """The model with its random weights, the same on every process."""
    torch.manual_seed(drawn["seed"])
    config = LSGPTConfig(**drawn["model"])
    config._attn_implementation = drawn["engine"]
    model = LSGPTForCausalLM(config).to(torch.float32 if drawn["engine"] == "triton" else torch.float64).train()
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            torch.nn.init.normal_(parameter)
    if drawn["checkpointing"] is not None and drawn["engine"] != "flex_attention":
        model.gradient_checkpointing_enable({"use_reentrant": drawn["checkpointing"]})
    if drawn["compiled"]:
        for layer in model.model.layers:
            layer.compile(backend="aot_eager")
    return model


def run_step(
    model, inputs: dict, drawn: dict, is_autocast: bool = False, counter: ByteCounter | None = None
) -> tuple[torch.Tensor, dict, torch.Tensor]:
    """Loss, gradients and largest logits of a training step."""
    max_logits = MaxLogits(model)
    max_logits.start()
    has_gradients = drawn["engine"] != "flex_attention"
    with counter or nullcontext(), torch.set_grad_enabled(has_gradients), torch.autocast("cpu", enabled=is_autocast):
        loss = model(**inputs).loss
    maxima = max_logits.read()
    if has_gradients:
        loss.backward()
    max_logits.stop()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}, maxima


def compare(drawn: dict, group) -> str | None:
    """What differs from one process, or `None`."""
    is_autocast = drawn["autocast"]
    model, inputs = make_model(drawn), make_inputs(drawn)
    model = model.float() if is_autocast else model
    split_sequences(model, group)
    counter = None if drawn["compiled"] else ByteCounter()  # which could not be compiled
    loss, gradients, maxima = run_step(model, inputs, drawn, is_autocast, counter)
    received = torch.tensor(counter.received if counter else 0)
    dist.all_reduce(received, op=dist.ReduceOp.MAX, group=group)
    share = 1 if drawn["counted"] else drawn["size"]
    dist.all_reduce(loss, group=group)
    dist.all_reduce(maxima, op=dist.ReduceOp.MAX, group=group)
    for name in sorted(gradients):
        dist.all_reduce(gradients[name], group=group)
    if dist.get_rank(group):
        return None
    bytes_per_value = next(model.parameters()).element_size()
    per_layer = drawn["batch"] * sum(split_bytes(model.config, drawn["length"], drawn["size"], bytes_per_value))
    formula = round(per_layer * model.config.num_hidden_layers)
    if counter and not is_autocast and received != formula:
        return f"{received} bytes received, not {formula}"
    found = {"loss": loss / share, **{name: gradient / share for name, gradient in gradients.items()}}
    alone, expected, wanted = run_step(make_model({**drawn, "compiled": False}), inputs, drawn)
    expected = {"loss": alone, **expected}
    if set(found) != set(expected):
        return f"gradients of {set(found) ^ set(expected)}"
    if is_autocast:
        plain, gradients, _ = run_step(make_model(drawn).float(), inputs, drawn, is_autocast)
        plain = {"loss": plain, **gradients}
        ours, theirs = (
            sum((each[name].double() - expected[name]).square().sum() for name in expected) for each in (found, plain)
        )
        return None if ours <= 4 * theirs else f"all by {(ours / theirs).sqrt():.1f} times the error of one process"
    largest = max(expected[name].abs().max().item() for name in expected if name != "loss") if len(expected) > 1 else 1
    scales = {name: alone.abs().item() if name == "loss" else largest for name in expected}
    differences = {name: (found[name] - expected[name]).abs().max().item() / scales[name] for name in expected}
    differences["largest logits"] = ((maxima - wanted).abs() / wanted.clamp(min=1e-9)).max().item()
    worst = max(differences, key=differences.get)
    tolerance = 10 * TOLERANCE if drawn["engine"] == "triton" else TOLERANCE
    return None if differences[worst] <= tolerance else f"{worst} by {differences[worst]:.1e}"


def work(rank: int, folder: str, seeds: list[int], options: dict):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=PROCESSES)
    groups = {size: dist.new_group(list(range(size))) for size in (2, 3, 4)}
    failures, masks, create = {}, set(), attention_lsgpt.sdpa_mask
    functions = attention_lsgpt.ALL_MASK_ATTENTION_FUNCTIONS._local_mapping

    def create_and_note(**options):
        mask = create(**options)
        masks.add(type(mask).__name__)
        return mask

    functions["sdpa"] = create_and_note
    for seed in seeds:
        drawn = draw(seed, **options)
        attention_lsgpt.MASKED_PAIRS = 0 if seed % 2 else 1 << 18  # half of them with the past in a call of its own
        if rank < drawn["size"] and (problem := compare(drawn, groups[drawn["size"]])):
            failures[seed] = f"{problem}: {drawn}"
    of_all = [set() for _ in range(PROCESSES)]
    dist.all_gather_object(of_all, masks)
    if rank == 0:
        result = failures, sorted(set().union(*of_all))
        Path(folder, "result.json").write_text(json.dumps(result), encoding="utf-8")
    dist.destroy_process_group()


def run(seeds: list[int], **options) -> tuple[dict[str, str], list[str]]:
    """
    The failures of these configurations by their seeds, and the kinds of masks that `sdpa` had. Processes are forked:
    imports take longer than the rest.
    """
    if options.get("is_compiled") or options.get("engine") == "flex_attention":
        import_module("torch._inductor.compile_fx")  # once, or else every process does it
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.start_processes(work, (folder, seeds, options), nprocs=PROCESSES, start_method="fork")
        return json.loads(Path(folder, "result.json").read_text(encoding="utf-8"))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--configurations", type=int, default=200, help="how many configurations")
    parser.add_argument("--first", type=int, default=0, help="seed of the first one")
    parser.add_argument("--engine", help="instead of the drawn ones")
    parser.add_argument("--compiled", action="store_true", help="compile the layers")
    parser.add_argument("--autocast", action="store_true", help="compute in bfloat16")
    args = parser.parse_args()
    seeds = list(range(args.first, args.first + args.configurations))
    failed, masks = run(seeds, engine=args.engine, is_compiled=args.compiled, is_autocast=args.autocast)
    print("\n".join(f"{seed}: {problem}" for seed, problem in failed.items()))
    print(f"{args.configurations - len(failed)} of {args.configurations} configurations agree; masks: {masks}")
    sys.exit(bool(failed))
