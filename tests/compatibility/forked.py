"""Training programs in processes of their own, forked from one that has torch, DeepSpeed and transformers imported.

A *program* is a function of a module in this directory: ``program(config, **arguments) -> dict``. It trains under the
DeepSpeed config that it gets, as one rank of a job, and returns what can be compared. The process knows its rank from
the usual environment variables, as under a launcher.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import sys
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from support.runs import free_port, remove_shared_memory

PRELOADED = (
    "torch", "deepspeed", "deepspeed.runtime.engine", "deepspeed.runtime.zero.stage3",
    "deepspeed.runtime.zero.stage_1_and_2", "transformers", "transformers.trainer", "accelerate",
    "deepspeed.runtime.zero.muon.muon_optimizer",  # which engines import, and torch._inductor with it
    "peft", "trl.trainer.sft_trainer", "trl.trainer.dpo_trainer",
    "diffusers.models.unets.unet_2d_condition", "diffusers.models.transformers.dit_transformer_2d",
)  # fmt: skip
TIMEOUT_S = 300.0
_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(list(PRELOADED))

Program = Callable[..., dict[str, Any]]


class ProgramFailed(Exception):
    """A rank raised or died; the text is the end of what it printed."""


def run(
    program: Program, config: dict[str, Any] | None, directory: Path, *, ranks: int = 1, **arguments: Any
) -> list[dict[str, Any]]:
    """Run a program on some ranks; return what each of them returned, and under ``output`` what it printed.

    Raises:
        ProgramFailed: a rank did not come to its end.
    """
    directory.mkdir(parents=True, exist_ok=True)
    port = free_port()
    os.environ.update({"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"})  # of the fork server
    processes = [
        _FORKS.Process(target=_rank, args=(program, config, arguments, directory, rank, ranks, port), daemon=True)
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    try:
        _wait(processes)
    finally:
        remove_shared_memory(port)
    outputs = [(directory / f"output{rank}.txt").read_text(errors="replace") for rank in range(ranks)]
    if any(process.exitcode != 0 for process in processes):
        codes = [process.exitcode for process in processes]
        raise ProgramFailed(f"exit codes {codes}\n" + "\n".join(output[-8000:] for output in outputs))
    results = [json.loads((directory / f"result{rank}.json").read_text()) for rank in range(ranks)]
    return [{**result, "output": output} for result, output in zip(results, outputs, strict=True)]


def _wait(processes: list[BaseProcess]) -> None:
    """Until all have ended; where one fails, the others would wait for it in a collective."""
    waited_s = 0.0
    while running := [
        process for process in processes if process.exitcode is None
    ]:  # asked once: it may end at any time
        running[0].join(0.25)
        waited_s += 0.25
        if waited_s > TIMEOUT_S or any(process.exitcode for process in processes):
            for process in processes:
                process.join(0 if waited_s > TIMEOUT_S else 5.0)
                process.kill()
                process.join()


def _rank(
    program: Program, config: dict[str, Any] | None, arguments: dict[str, Any], directory: Path, rank: int, ranks: int,
    port: int,
) -> None:  # fmt: skip
    os.environ.update({
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    })  # fmt: skip
    os.chdir(directory)
    with (directory / f"output{rank}.txt").open("w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    gc.freeze()  # DeepSpeed collects garbage at each start: not among what was imported before the fork
    result = program(config, **arguments)
    (directory / f"result{rank}.json").write_text(json.dumps(result))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # what libraries leave behind for the interpreter's exit is not what is tested here
