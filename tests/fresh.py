"""
Python programs in processes of their own, in which nobody has imported this package, as users start them.

Most of the time of such a process goes into the import of PyTorch and Transformers. So there is one process for each
worker of pytest, Python's fork server, that imports them, and every program gets a fork of it.
"""

import atexit
import multiprocessing
import os
import random
import runpy
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from multiprocessing import forkserver
from pathlib import Path
from unittest import mock


SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(
    [
        "accelerate.commands.launch",
        "datasets",
        "evaluate",
        "matplotlib.figure",
        "scipy.stats",
        "torch.distributed.checkpoint.state_dict",
        "torch.distributed.fsdp",
        "transformers.modeling_gguf_pytorch_utils",
        "transformers.models.llama.modeling_llama",
        "transformers.trainer",
    ]
)


@cache
def folder() -> str:
    """Where programs leave what nobody needs afterwards."""
    path = tempfile.mkdtemp(prefix="fresh-")
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return path


@cache
def path() -> list[str]:
    """Where Python looks for modules when it starts: pytest and tests have added to it in this process."""
    code = "import sys; print(*sys.path[1:], sep='\\n')"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.splitlines()


def environment() -> dict[str, str]:
    """What libraries read when they are imported; it is the same for all programs."""
    caches = {f"HF_{name}_CACHE": f"{folder()}/{name.lower()}" for name in ("DATASETS", "METRICS", "MODULES")}
    return {**caches, "HF_HUB_OFFLINE": "1", "PYTHONUTF8": "1"}


def start_server():
    """Starts the server, unless it runs. Python has only one: whoever starts it decides what it has imported."""
    with mock.patch.dict(os.environ, environment()):
        forkserver.ensure_running()


class Program:
    """`python ARGUMENTS` in the folder `cwd`."""

    def __init__(self, *arguments, cwd=".", **variables):
        """
        Args:
            *arguments: `-m` and a module, or `-c` and code, and what it finds in `sys.argv`.
            cwd: The folder that it runs in.
            **variables: More of its environment, for what is read later than at the import of libraries.
        """
        place = Path(tempfile.mkdtemp(dir=folder()))
        self._files = [place / "output", place / "errors"]
        for file in self._files:
            file.touch()
        start_server()
        cwd, all_variables = str(Path(cwd).resolve()), {**os.environ, **environment(), **variables}
        target = [str(x) for x in arguments], cwd, [cwd, *path()], self._files, all_variables
        self.process = SERVER.Process(target=_become, args=target)
        self.process.start()

    @property
    def output(self) -> str:
        """What it has printed."""
        return self._files[0].read_text(encoding="utf-8")

    @property
    def errors(self) -> str:
        """What it has printed to the standard error."""
        return self._files[1].read_text(encoding="utf-8")

    def wait_until(self, condition: Callable[[], bool], timeout: float = 120):
        """Waits for something that the program does while it runs."""
        deadline = time.monotonic() + timeout
        while not condition():
            assert self.process.is_alive() and time.monotonic() < deadline, self.errors
            time.sleep(0.01)

    def wait(self, timeout: float = 600) -> int:
        """The exit status. A program that takes longer is told to end, and then killed."""
        self.process.join(timeout)
        for end in (self.process.terminate, self.process.kill):
            if self.process.exitcode is None:
                end()
                self.process.join(10)
        return self.process.exitcode


def run(*arguments, cwd=".", **variables) -> str:
    """Runs a `Program` to its end, which must be a good one, and returns its output."""
    program = Program(*arguments, cwd=cwd, **variables)
    assert program.wait() == 0, f"{arguments}\n{program.errors}"
    return program.output


def find_port() -> int:
    """A free port. As it is used only later, it is not one of those that the system gives to whoever asks for any."""
    for port in random.SystemRandom().sample(range(10_000, 32_768), 100):  # not the same in all workers of pytest
        with socket.socket() as free, suppress(OSError):
            free.bind(("127.0.0.1", port))
            return port
    raise OSError("no port is free")


def run_together(number: int, *arguments, **variables) -> list[str]:
    """The outputs of that many processes of one job, which know of each other what launchers tell them."""
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": find_port()}
    shared = {"WORLD_SIZE": number, "LOCAL_WORLD_SIZE": number, **address}
    programs = []
    for rank in range(number):
        own = {**shared, "RANK": rank, "LOCAL_RANK": rank, **variables}
        programs.append(Program(*arguments, **{name: str(value) for name, value in own.items()}))
    statuses = [program.wait() for program in programs]
    assert not any(statuses), "\n".join(program.errors for program in programs)
    return [program.output for program in programs]


def _become(arguments: list[str], cwd: str, path: list[str], files: list[Path], variables: dict[str, str]):
    for number, file in enumerate(files, start=1):
        os.dup2(os.open(file, os.O_WRONLY), number)
    os.chdir(cwd)
    os.environ.update(variables)
    sys.path[:] = path
    option, what, *sys.argv[1:] = arguments
    if option == "-m":
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    else:
        sys.argv[0] = option
        sys.modules["__main__"] = main = types.ModuleType("__main__")
        exec(compile(what, "<string>", "exec"), vars(main))
