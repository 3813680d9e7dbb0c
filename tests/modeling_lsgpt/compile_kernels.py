"""Compiles the kernels of `triton` for GPUs that need not be there, and prints what they take as lines of JSON.

Runs in a process of its own: `python compile_kernels.py`, without Triton's interpreter.
"""

import json
import subprocess
import tempfile
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from lsgpt import triton_kernels


KERNELS = ("_forward_kernel", "_backward_keys_kernel", "_backward_queries_kernel")
NUMBERS = {"batch_size": "i32", "q_length": "i32", "kv_length": "i32", "window": "i32", "scaling": "fp32"}
IN_FLOAT32 = ("lse", "largest", "delta")
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


def compile_kernel(name: str, capability: int, head_dim: int, has_spans: bool, measure: bool, has_sinks: bool):
    """A kernel in bfloat16 for 12 heads, 1 of them global, of a GPU's compute capability."""
    kernel = getattr(triton_kernels, name)
    query = torch.empty(1, 128, 12, head_dim, device="meta", dtype=torch.bfloat16)
    options = triton_kernels._options(kernel, query)
    constants = {**triton_kernels._describe(query, query, None, None, 1, 100, 0.1), **options, "MEASURE": measure}
    constants["SINKS_OF_QUERIES"] = False
    constants = {name: value for name, value in constants.items() if name.isupper()}
    if not has_spans:
        constants |= {"first": None, "last": None}
    if not has_sinks:
        constants["sinks"] = None
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}

    def type_of(argument):
        if argument in constants:
            return "constexpr"
        if argument in NUMBERS:
            return NUMBERS[argument]
        return "*i32" if argument in ("first", "last") else "*fp32" if argument in IN_FLOAT32 else "*bf16"

    signature = {argument: type_of(argument) for argument in kernel.arg_names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(signature.values()) if kind.startswith("*")}
    source = ASTSource(
        kernel, signature, {(kernel.arg_names.index(name),): x for name, x in constants.items()}, aligned
    )
    warps = {name: options[name] for name in ("num_warps", "num_stages")}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=warps)


def spilled_bytes(binary: bytes) -> int:
    """Bytes of each thread that found no place in its registers."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(binary)
        output = subprocess.run([CUOBJDUMP, "--dump-resource-usage", file.name], capture_output=True, check=True)
    return sum(int(word[6:]) for word in output.stdout.decode().split() if word.startswith(("STACK:", "LOCAL:")))


if __name__ == "__main__":
    plain, all_options = (False, False, False), (True, True, True)
    for capability, head_dim, options in ((90, 64, plain), (90, 64, all_options), (86, 128, plain)):
        for name in KERNELS:
            compiled = compile_kernel(name, capability, head_dim, *options)
            found = {"kernel": name, "capability": capability, "head_dim": head_dim, "options": options}
            found |= {"shared": compiled.metadata.shared, "spilled": spilled_bytes(compiled.asm["cubin"])}
            print(json.dumps(found), flush=True)
