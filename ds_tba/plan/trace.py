"""One micro-step with every storage kept, and the rates of its machine: the input of the planners.

[Note: The trace's clock] Times are seconds of the compute stream since the micro-step's forward began, with nothing
moved. A replay shifts them by the stalls and the recomputation that a plan adds.

[Note: Readers] ``StorageTrace.blocks`` are those in which autograd saved the storage, ``OUTSIDE`` for saves in none.
``BlockTrace.inputs`` are the storages that a block reads and does not produce: they must outlive its forward where it
is recomputed. An input that nobody saves has empty ``blocks``, and exists only under a plan that recomputes one of its
readers.

[Note: Sources] Some storages are the output of an operation whose inputs are saved, too, so that the operation alone
can make them again: ``StorageTrace.sources`` are those inputs, all of them packed earlier. Small tensors and parameters
that the operation needs are not among them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass, fields, replace
from typing import TypeVar

FORMAT = 3  # of the JSON
OUTSIDE = -1


@dataclass(frozen=True, slots=True)
class StorageTrace:
    """One saved storage."""

    nbytes: int
    module: str  # path of the one that ran when it was first saved, for people and for the scopes of TBA
    blocks: tuple[int, ...]
    pack_s: float  # first saved
    last_forward_use_s: float  # from then on forward no longer needs it
    first_backward_use_s: float  # first unpacked; the end of the micro-step where it is not used
    freed_s: float  # autograd has let go of it
    is_movable: bool = True  # else it stays (too small, not the training device), but goes with a recomputed block
    rematerialize_s: float | None = None  # of compute, to make it again from its sources; None where that cannot be
    sources: tuple[int, ...] = ()  # indices of storages, each smaller than its own
    is_used: bool = True  # else backward never asks for it (a loss kept with its graph), and it need not come back
    is_asked: bool = True  # the policy is asked where it goes; not about small ones


@dataclass(frozen=True, slots=True)
class BlockTrace:
    """One pass through a repeated layer."""

    module: str
    forward_start_s: float
    forward_end_s: float
    backward_start_s: float
    backward_end_s: float
    inputs: tuple[int, ...] = ()  # indices of storages
    is_recomputable: bool = True


@dataclass(frozen=True, slots=True)
class Resources:
    """The rates and bounds of a machine."""

    write_bytes_per_s: float  # of all drives together; 0.0 where nothing can go to NVMe
    read_bytes_per_s: float
    copy_out_bytes_per_s: float  # from device to host memory
    copy_in_bytes_per_s: float
    staging_bytes: int  # bound of what is between device and file
    is_synchronous: bool = False  # the training thread does the copies, and waits for them: on a CPU
    compute_s_per_byte: float = 0.0  # kernel time that moving a storage out and back takes


Row = TypeVar("Row", "StorageTrace", "BlockTrace", "Trace")


@dataclass(frozen=True, slots=True)
class Trace:
    """One micro-step, and the machine it ran on."""

    storages: tuple[StorageTrace, ...]  # in the order in which they were packed
    blocks: tuple[BlockTrace, ...]  # in the order in which their forward began
    resources: Resources
    end_s: float  # of backward
    optimizer_s: float = 0.0  # of a step, outside of its micro-steps
    micro_steps: int = 1  # of a step
    # The first storage of each forward, where several alternate with backwards: ``prefetch.py``, [Note: Micro-steps].
    forwards: tuple[int, ...] = ()

    @property
    def step_s(self) -> float:
        """Return the seconds of a step with every storage kept."""
        return self.micro_steps * self.end_s + self.optimizer_s

    @property
    def saved_bytes(self) -> int:
        """Return the bytes of all storages together."""
        return sum(storage.nbytes for storage in self.storages)

    @property
    def movable_bytes(self) -> int:
        """Return the bytes of those that may be offloaded."""
        return sum(storage.nbytes for storage in self.storages if storage.is_movable)

    def scaled(self, time: float, size: float = 1.0) -> Trace:
        """Return a step ``time`` times as long, whose storages are ``size`` times as large."""
        storages = tuple(replace(_stretched(one, time), nbytes=math.ceil(one.nbytes * size)) for one in self.storages)
        blocks = tuple(_stretched(one, time) for one in self.blocks)
        return replace(_stretched(self, time), storages=storages, blocks=blocks)

    def to_json(self) -> str:
        """Return the trace as text; times and rates are read back exactly."""
        return json.dumps({"format": FORMAT, **asdict(self)})


def _stretched(row: Row, factor: float) -> Row:
    """Return a row with all its times, whose names end in ``_s``, times a factor."""
    times = {field.name: getattr(row, field.name) for field in fields(row) if field.name.endswith("_s")}
    return replace(row, **{name: at_s * factor for name, at_s in times.items() if at_s is not None})


def slowest(machines: Sequence[Resources]) -> Resources:
    """Return the lowest of each rate over all machines, and the least staging: no NVMe where one has no drive."""
    columns = [*zip(*map(astuple, machines), strict=True)]
    return Resources(*map(min, columns[:-2]), *map(max, columns[-2:]))
