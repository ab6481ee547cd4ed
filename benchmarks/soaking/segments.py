"""Segments: some hundred steps with one engine, one block of the config and one set of odds for faults."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarking import MIB

from soaking.faults import BAD_WRITES, LOST_READ, Rates

PATHS = 4
HARD_FAULT_FRACTION = 0.25


@dataclass(frozen=True)
class Segment:
    """One engine's life: ZeRO's stage, our block of the config (None without us), and DeepSpeed's ``"aio"`` block.

    Attributes:
        collected: True if the engine ends by garbage collection instead of ``destroy()``.
    """

    number: int
    stage: int
    block: dict[str, Any] | None
    aio: dict[str, Any]
    rates: Rates
    collected: bool

    @property
    def hard_faults(self) -> tuple[str, ...]:
        """Faults that lose bytes and that this segment can find."""
        if self.block is None or self.block["placement"] in ("host", "keep"):
            return ()
        return (LOST_READ,) if self.block["io"]["integrity"] == "off" else (LOST_READ, *BAD_WRITES)


def segment_of(seed: int, number: int, directory: Path, backends: tuple[str, ...], *, offload: bool) -> Segment:
    """Return segment ``number``; stage and end are the same with and without offload."""
    chance = random.Random(f"{seed}/segment/{number}")
    # Not ZeRO-3, whose engine DeepSpeed keeps alive after destroy(); and ZeRO-1 and -2 outlive a mere del.
    stage = chance.choice([0, 0, 0, 1, 2])
    collected = stage == 0 and chance.random() < 0.4
    aio = {"block_size": chance.choice([256 << 10, 1 << 20])}
    block = _block(chance, directory, chance.choice(backends)) if offload else None
    return Segment(number, stage, block, aio, _rates(chance), collected)


def _block(chance: random.Random, directory: Path, backend: str) -> dict[str, Any]:
    placement = chance.choices(["adaptive", "nvme", "host", "keep"], [8, 8, 2, 1])[0]
    staging = chance.choice([2, 4, 8, 16, 32]) * MIB
    paths = [str(directory / f"path{number}") for number in range(PATHS)]
    return {
        "enabled": True,
        "nvme_path": paths[: chance.choice([1, 2, 4, 4])],
        "placement": placement,
        "min_tensor_bytes": chance.choice([4096, 16384, 65536]),
        "host_budget_bytes": chance.choice([4, 16] if placement == "host" else [0, 0, 3, 16]) * MIB,
        "io": {
            "backend": backend,
            "write_lanes": chance.randint(1, 3),
            "read_lanes": chance.randint(1, 3),
            "staging_bytes": staging,
            "swap_file_bytes": chance.choice([1, 4, 16, 64, 256]) * MIB,
            "integrity": chance.choice(["off", "sampled", "sampled", "full"]),
        },
        "report": {"path": str(directory.parent / "report.json")} if chance.random() < 0.5 else {},
    }


def _rates(chance: random.Random) -> Rates:
    odds = ([0, 0.1, 0.5], [0, 0.1, 0.5], [0, 0, 0.005, 0.02], [0, 0.01, 0.1], [0.002, 0.01])
    return Rates(*map(chance.choice, odds))
