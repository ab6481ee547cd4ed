"""Variants of a benchmark that take turns, because machines are noisy, and where need be each in a process of its own.

A benchmark whose variants run in processes starts itself again for each: with ``--variant`` it measures that one and
writes what it found to ``--result``.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

Name = TypeVar("Name")
Found = TypeVar("Found")

# A process group of one. And glibc gives freed memory back, or resident bytes say nothing about the bytes in use.
ALONE = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MALLOC_MMAP_THRESHOLD_": str(1 << 20),
}
LEFT_BY_DEEPSPEED = "deepspeed_allreduce_buffer_*_{port}_*"
TAIL_CHARACTERS = 4000


def rounds_of(
    variants: Sequence[Name],
    turn: Callable[[Name], Found],
    most: int,
    ends_s: float = math.inf,
    chance: random.Random | None = None,
) -> Iterator[dict[Name, Found]]:
    """Yield what ``turn`` answers for each variant, round by round, each time in a new random order.

    There are fewer than ``most`` where the next would not end before ``ends_s`` (monotonic clock); two at least.
    """
    chance, longest_s = chance or random.Random(), 0.0
    for number in range(most):
        began_s = time.monotonic()
        if number >= 2 and began_s + longest_s >= ends_s:
            return
        yield {variant: turn(variant) for variant in chance.sample(variants, len(variants))}
        longest_s = max(longest_s, time.monotonic() - began_s)


def add_process_options(parser: argparse.ArgumentParser, variants: Sequence[str]) -> None:
    """Add the options that :func:`in_a_process` adds to the command line."""
    parser.add_argument("--variant", choices=variants, help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)


def has_answered(options: argparse.Namespace, measure: Callable[[argparse.Namespace], Any]) -> bool:
    """Measure the variant and write its result, if this is a process of :func:`in_a_process`; return whether it is."""
    if options.variant:
        options.result.write_text(json.dumps(measure(options)))
    return bool(options.variant)


def in_a_process(program: str, variant: str, argv: Sequence[str], **variables: str) -> dict[str, Any]:
    """Return what a variant writes to ``--result`` in a process of its own, under DeepSpeed as the only rank.

    It is the benchmark's program with the benchmark's own arguments; ``variables`` are its environment's, beside ours.
    """
    port = str(free_port())
    with tempfile.NamedTemporaryFile(suffix=".json") as result:
        done = subprocess.run(
            [sys.executable, program, *argv, "--variant", variant, "--result", result.name],
            env={**os.environ, **ALONE, "MASTER_PORT": port, **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        for left in Path("/dev/shm").glob(LEFT_BY_DEEPSPEED.format(port=port)):
            left.unlink()
        if done.returncode:
            raise SystemExit(f"{variant} ended with status {done.returncode}:\n{done.stdout[-TAIL_CHARACTERS:]}")
        found: dict[str, Any] = json.loads(Path(result.name).read_text())
        return found


def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])
