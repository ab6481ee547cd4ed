"""Ranks of a job, forked from a process that has torch, DeepSpeed and transformers imported.

They are what a launcher starts, in a tenth of the time: importing is most of what a small training takes.
"""

from __future__ import annotations

import errno
import gc
import multiprocessing
import os
import random
import runpy
import socket
import sys
import time
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest import mock

PRELOADED = (
    "torch", "deepspeed", "deepspeed.runtime.engine", "deepspeed.runtime.zero.stage3",
    "deepspeed.runtime.zero.stage_1_and_2", "transformers", "transformers.trainer", "accelerate",
    "deepspeed.runtime.zero.muon.muon_optimizer", "deepspeed.module_inject.auto_ep_config",  # which engines import
    "peft", "trl.trainer.sft_trainer", "trl.trainer.dpo_trainer", "support.preloaded",
)  # fmt: skip
GRACE_S = 5.0  # of the other ranks, when one has failed
# Below those that the kernel gives to whoever connects, or somebody's connection may take one before the ranks do.
PORTS = range(10_000, 32_000)
_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(list(PRELOADED))


def environment(**more: str) -> dict[str, str]:
    """Return the environment of a process that trains."""
    return {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", **more}


def free_port() -> int:
    """A port where nobody listens, nor at the next one; another one each time, whatever ``random.seed`` was told."""
    while True:
        port = random.SystemRandom().choice(PORTS)
        try:
            for one in (port, port + 1):
                with socket.socket() as probe:
                    probe.bind(("", one))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
        else:
            return port


def remove_shared_memory(port: int) -> None:
    """DeepSpeed's CPU communication leaves 66 MiB of memory behind for each process, until the machine restarts."""
    for left in Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_*_{port}_*"):
        left.unlink()


def fork(
    target: Callable[..., None], *arguments: Any, directory: Path, ranks: int, timeout_s: float, **variables: str | None
) -> tuple[list[int], list[str]]:
    """Call a function in each rank; exit codes, and what each has printed. Where one rank fails, the others are ended.

    Args:
        directory: where the ranks work.
        variables: of their environment; None takes one away.
    """
    port = free_port()
    world = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
    outputs = [directory / f"output{rank}.txt" for rank in range(ranks)]
    # Read by the server, which ignores the path that multiprocessing hands it, and by what it imports.
    with mock.patch.dict(os.environ, environment(HF_HUB_OFFLINE="1", PYTHONPATH=os.pathsep.join(sys.path))):
        forkserver.ensure_running()
    processes: list[BaseProcess] = []
    for rank, output in enumerate(outputs):
        output.write_text("")  # of a rank that is ended before it begins
        own = environment(**world, MASTER_PORT=str(port), RANK=str(rank), LOCAL_RANK=str(rank))
        own = {name: value for name, value in (own | variables).items() if value is not None}
        processes.append(_FORKS.Process(target=_live, args=(own, directory, output, target, arguments), daemon=True))
        processes[-1].start()
    try:
        _wait(processes, time.monotonic() + timeout_s)
    finally:
        for used in (port, port + 1):  # the example's --compare meets at the second one too
            remove_shared_memory(used)
    codes = [process.exitcode or 0 for process in processes]
    return codes, [output.read_text(errors="replace") for output in outputs]


def launched(path: str, *arguments: str) -> None:
    """Run a script as the launcher does, for :func:`fork`."""
    script(path, f"--local_rank={os.environ['LOCAL_RANK']}", *arguments)


def script(path: str, *arguments: str) -> None:
    """Run a script as Python does, for :func:`fork`."""
    sys.argv = [path, *arguments]
    sys.path.insert(0, str(Path(path).parent))
    runpy.run_path(path, run_name="__main__")


def _wait(processes: list[BaseProcess], until_s: float) -> None:
    """Wait until all have ended; where one fails, the others would wait for it in a collective."""
    # Each is asked once: it may end at any time.
    while running := [process for process in processes if process.exitcode is None]:
        running[0].join(0.1)
        is_late = time.monotonic() > until_s
        if is_late or any(process.exitcode for process in processes):
            for process in processes:
                process.join(0 if is_late else GRACE_S)
                process.kill()
                process.join()


def _live(
    variables: dict[str, str], directory: Path, output: Path, target: Callable[..., None], arguments: tuple[Any, ...]
) -> None:
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(directory)
    with output.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    gc.freeze()  # DeepSpeed collects garbage at each start: not among what was imported before the fork
    target(*arguments)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # what libraries leave behind for the interpreter's exit is not what is tested here
