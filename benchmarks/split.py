"""Training steps on sequences that are split over processes: `lsgpt bench split`.

Each step runs in R processes of one thread each (gloo), or of one GPU each (NCCL). It measures the bytes that the
last process receives in the forward pass, the peak memory that a step adds in the process where it is highest, and the
time, for LSGPT and for the same model with all heads global. Weights and their gradients are not part of the peak, and
there is no optimizer. On Linux, the processes return the memory of freed tensors to the system at once, so that the
peak is what tensors need and not how the C library keeps what was freed.
"""

import argparse
import json
import os
import tempfile
import time
from pathlib import Path

import torch
from torch import distributed as dist
from torch import multiprocessing
from transformers import AutoModelForCausalLM

from lsgpt.modeling_lsgpt.context_parallel_lsgpt import split_sequences
from lsgpt.utilities import split_bytes
from lsgpt.utilities.environment import peak_memory, reset_peak_memory

from .memory import start_method
from .peers import load_shape
from .record import OUTPUT, at_least, begin_result, result_file, write_result


MODELS = {"lsgpt": {}, "mhsa": {"num_global_heads": "all"}}
"""The models that are compared, as overrides of the preset."""


class ByteCounter:
    """As a context, counts what `all_to_all_single`, through which all tensors go, brings from other processes."""

    def __init__(self):
        self.received, self._exchange = 0, dist.all_to_all_single

    def __enter__(self):
        dist.all_to_all_single = self

    def __exit__(self, *_):
        dist.all_to_all_single = self._exchange

    def __call__(self, output: torch.Tensor, *args, **kwargs):
        self.received += output.numel() * output.element_size()
        return self._exchange(output, *args, **kwargs)


def measure(rank: int, folder: str, processes: int, preset: str, fields: dict, length: int, steps: int):
    """Runs training steps in one of the processes and writes its figures to a file in `folder`."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    is_gpu = torch.cuda.is_available()
    device = torch.device("cuda", rank) if is_gpu else torch.device("cpu")
    if is_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if is_gpu else "gloo", f"file://{folder}/store", rank=rank, world_size=processes)
    config = load_shape(preset, max_position_embeddings=length, **fields)
    model = AutoModelForCausalLM.from_config(config).to(device).train()
    if processes > 1:
        split_sequences(model, dist.group.WORLD)

    def step(input_ids):
        with counter:
            loss = model(input_ids=input_ids, labels=input_ids, skip_logits=True, use_cache=False).loss
        loss.backward()

    input_ids, counter = torch.randint(config.vocab_size, (1, length), device=device), ByteCounter()
    step(input_ids[:, : 2 * processes])  # allocates the gradients of the weights
    counter.received = 0
    reset_peak_memory()
    before, seconds = peak_memory(), []
    for _ in range(steps):
        dist.barrier()
        begin = time.perf_counter()
        step(input_ids)
        if is_gpu:
            torch.cuda.synchronize()
        dist.barrier()
        seconds.append(time.perf_counter() - begin)
    received = counter.received / steps
    figures = {"peak_bytes": peak_memory() - before, "received_bytes": received, "seconds": min(seconds)}
    Path(folder, f"{rank}.json").write_text(json.dumps(figures), encoding="utf-8")
    dist.destroy_process_group()


def run(processes: int, *arguments) -> dict[str, float]:
    """Returns the highest peak memory, the bytes that the last process receives, and the longest time."""
    os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", str(2**20))  # bytes; glibc reads it when a process starts
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.start_processes(
            measure, (folder, processes, *arguments), processes, start_method=start_method(__name__)
        )
        found = [json.loads(Path(folder, f"{rank}.json").read_text(encoding="utf-8")) for rank in range(processes)]
    highest = {name: max(figures[name] for figures in found) for name in found[0]}
    return {**highest, "received_bytes": found[-1]["received_bytes"]}


def main(arguments: list[str]):
    """Measures both models with every number of processes, prints the figures and writes them to a JSON file."""
    parser = argparse.ArgumentParser(prog="lsgpt bench split", description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=at_least(1), nargs="+", default=[1, 2, 4], help="default: 1 2 4")
    parser.add_argument(
        "--length", type=at_least(1), default=2**14, help="tokens in the sequence; default: %(default)s"
    )
    parser.add_argument("--steps", type=at_least(1), default=2, help="the fastest counts; default: %(default)s")
    parser.add_argument(
        "--preset", default="paper-v1", metavar="PRESET_OR_FOLDER", help="shape of the models; default: %(default)s"
    )
    parser.add_argument(
        "--output", type=result_file, metavar="FILE", default=OUTPUT / "split.json", help="default: %(default)s"
    )
    options = parser.parse_args(arguments)

    configs = {
        name: load_shape(options.preset, max_position_embeddings=options.length, **fields)
        for name, fields in MODELS.items()
    }
    if any(options.length % processes for processes in options.processes):
        parser.error(f"`--length` must be a multiple of every number of `--processes`; got {options.length}")
    if (most := max(options.processes)) > (count := torch.cuda.device_count() or most):
        parser.error(
            f"`--processes` must be at most {count}, the number of GPUs; got {most}. With CUDA_VISIBLE_DEVICES set to "
            "nothing, they share the CPU"
        )
    result = begin_result("split", *arguments) | {"rows": []}
    for name, fields in MODELS.items():
        first: dict[str, float] = {}
        for processes in options.processes:
            row = run(processes, options.preset, fields, options.length, options.steps)
            in_float32 = split_bytes(configs[name], options.length, processes, bytes_per_value=4)
            row["formula_bytes"] = configs[name].num_hidden_layers * sum(in_float32)
            first = first or row
            result["rows"].append({"model": name, "processes": processes, "tokens": options.length, **row})
            print(
                f"{name:<8}{processes:3d} processes, {options.length:,} tokens: {row['peak_bytes'] / 2**20:6.0f} MiB "
                f"({first['peak_bytes'] / row['peak_bytes']:.2f} times less), {row['received_bytes'] / 1e6:7.1f} MB "
                f"received (formula: {row['formula_bytes'] / 1e6:.1f}), {row['seconds'] / first['seconds']:.2f} of "
                f"the time with --processes {options.processes[0]}",
                flush=True,
            )
            write_result(options.output, result)
    print(f"saved in {options.output}")
