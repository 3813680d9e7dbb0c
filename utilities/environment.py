"""What results depend on: hardware, versions and commit; and how much memory a process has taken."""

import contextlib
import importlib.metadata
import os
import platform
import subprocess
import sys
from pathlib import Path

import psutil  # a dependency of Accelerate
import torch


_REPORTED_PACKAGES = ("lsgpt", "torch", "transformers", "accelerate", "datasets", "tokenizers")


def describe_environment() -> dict[str, str]:
    """Returns the hardware, software versions and commit of this project, which all reports contain."""
    memory = psutil.virtual_memory().total / 2**30
    hardware = f"{_processor()}, {torch.get_num_threads()} of {os.cpu_count()} cores used, {memory:.0f} GiB"
    if torch.cuda.is_available():
        memory = torch.cuda.get_device_properties(0).total_memory / 2**30
        name = torch.cuda.get_device_name()
        hardware = f"{torch.cuda.device_count()} x {name}, {memory:.0f} GiB, CUDA {torch.version.cuda}; {hardware}"
    versions = {name: importlib.metadata.version(name) for name in _REPORTED_PACKAGES}
    system = {"system": platform.system(), "Python": platform.python_version()}
    return {"hardware": hardware, **system, "commit": describe_commit(), **versions}


def describe_commit() -> str:
    """
    Returns the commit of the clone that this code runs from, with `-dirty` if tracked files have changed. An installed
    package has no commit; its version is returned instead.
    """
    folder = Path(__file__).resolve().parents[1]
    if not (folder / ".git").exists():  # no search in parent folders, which may be another project's clone
        return f"none: the installed package, version {importlib.metadata.version('lsgpt')}"
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown: git cannot read the clone"


def _processor() -> str:
    """Returns the CPU's name, if the system reports it, and its instruction set."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    name = names[0] if names else platform.processor() or platform.machine()
    return f"{name} ({torch.backends.cpu.get_cpu_capability()})"


def reset_peak_memory():
    """Resets the peak, so that `peak_memory` counts from now on (for main memory, on Linux only)."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # see proc(5)


def peak_memory() -> int:
    """Returns the peak memory of this process in bytes: on its GPU if it uses one, else in main memory."""
    if torch.cuda.is_available() and torch.cuda.max_memory_allocated():
        return torch.cuda.max_memory_allocated()
    try:
        status = Path("/proc/self/status").read_text(encoding="utf-8")
    except OSError:  # not Linux
        if sys.platform == "win32":
            return psutil.Process().memory_info().peak_wset
        import resource  # noqa: PLC0415 (not available on Windows)

        unit = 1 if sys.platform == "darwin" else 1024  # the unit of `ru_maxrss` depends on the system
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM"))
