"""Runs several commands at once, each in its own process with its share of the cores."""

import os
import signal
import subprocess
from collections.abc import Generator, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path
from threading import Event
from typing import NamedTuple


class Command(NamedTuple):
    """A command to run, and the file to which its output is appended."""

    arguments: Sequence[str | Path]
    log: Path


def run_commands(commands: Sequence[Command], num_processes: int = 1) -> Generator[tuple[int, int], None, None]:
    """
    Runs commands in order, `num_processes` at a time. SIGTERM to this process is passed on to the running commands, so
    that they can save their work.

    Args:
        commands: The commands to run.
        num_processes: How many commands run at once. Each uses an equal share of the cores, unless the environment
            variable `OMP_NUM_THREADS` is set.

    Yields:
        The index of a command and its exit status, as the commands end. When the generator is closed, or an exception
        passes through it, commands that have not started are skipped, and running ones are ended with SIGTERM.
    """
    environment = {**os.environ}
    if num_processes > 1:
        environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // num_processes)))
    running: set[subprocess.Popen] = set()
    is_ending = Event()

    def run(index: int) -> tuple[int, int]:
        if is_ending.is_set():
            return index, -signal.SIGTERM
        arguments, log = commands[index]
        with log.open("a", encoding="utf-8") as file:
            process = subprocess.Popen(arguments, stdout=file, stderr=subprocess.STDOUT, env=environment)
            running.add(process)
            status = process.wait()
        running.discard(process)
        return index, status

    def terminate(*_):
        is_ending.set()
        for process in list(running):
            process.terminate()

    previous = signal.signal(signal.SIGTERM, terminate)
    with ThreadPoolExecutor(num_processes) as pool:
        pending = {pool.submit(run, index) for index in range(len(commands))}
        try:
            while pending:
                done, pending = wait(pending, return_when=FIRST_COMPLETED)
                for future in done:
                    yield future.result()
        finally:
            for future in pending:
                future.cancel()
            terminate()
            signal.signal(signal.SIGTERM, previous)
