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
from typing import Any, Protocol, TypeVar

FORMAT = 3  # of the JSON
OUTSIDE = -1


class Clock(Protocol):
    """Time as the stream of kernels sees it: marks, and the seconds between two."""

    def mark(self) -> Any: ...
    def elapsed_s(self, earlier: Any, later: Any) -> float: ...


@dataclass(frozen=True, slots=True)
class StorageTrace:
    """One saved storage.

    Attributes:
        module: path of the module that ran when it was first saved, for people and for the scopes of TBA.
        blocks: see [Note: Readers].
        pack_s: first saved.
        last_forward_use_s: from then on forward no longer needs the storage.
        first_backward_use_s: first unpacked; the end of the micro-step where it is not used.
        freed_s: autograd has let go of the storage.
        is_movable: False where it must stay in device memory (too small, not the training device, ...); it still goes
            with its block where that is recomputed.
        rematerialize_s: of the compute stream, to make the storage again from its sources; None where that cannot be.
        sources: indices of storages, each smaller than its own; see [Note: Sources].
        is_used: False where backward never asked for it: a loss that is kept with its graph, say. Once moved, it need
            not come back.
        is_asked: the policy is asked where it goes; not about small ones.
    """

    nbytes: int
    module: str
    blocks: tuple[int, ...]
    pack_s: float
    last_forward_use_s: float
    first_backward_use_s: float
    freed_s: float
    is_movable: bool = True
    rematerialize_s: float | None = None
    sources: tuple[int, ...] = ()
    is_used: bool = True
    is_asked: bool = True


@dataclass(frozen=True, slots=True)
class BlockTrace:
    """One pass through a repeated layer.

    Attributes:
        module: its path.
        forward_start_s, forward_end_s, backward_start_s, backward_end_s: when it ran.
        inputs: indices of storages; see [Note: Readers].
        is_recomputable: whether its forward may run again.
    """

    module: str
    forward_start_s: float
    forward_end_s: float
    backward_start_s: float
    backward_end_s: float
    inputs: tuple[int, ...] = ()
    is_recomputable: bool = True


@dataclass(frozen=True, slots=True)
class Resources:
    """The rates, in bytes per second, and bounds of a machine.

    Attributes:
        write_bytes_per_s, read_bytes_per_s: of all drives together; 0.0 where nothing can go to NVMe.
        copy_out_bytes_per_s, copy_in_bytes_per_s: between device and host memory.
        staging_bytes: bound of what is between device and file.
        is_synchronous: the device copies in the training thread, which waits for it (a CPU).
        compute_s_per_byte: kernel time that moving a storage out and back takes, for each byte.
    """

    write_bytes_per_s: float
    read_bytes_per_s: float
    copy_out_bytes_per_s: float
    copy_in_bytes_per_s: float
    staging_bytes: int
    is_synchronous: bool = False
    compute_s_per_byte: float = 0.0


Row = TypeVar("Row", StorageTrace, BlockTrace)


@dataclass(frozen=True, slots=True)
class Trace:
    """One micro-step, and the machine it ran on.

    Attributes:
        storages: in the order in which they were packed.
        blocks: in the order in which their forward began.
        end_s: the end of backward.
        optimizer_s: the time of a step outside of its micro-steps.
        micro_steps: of one step.
        forwards: number of the first storage of each forward, where the micro-step is one of several interleaved
            forwards and backwards; see [Note: Micro-steps] in ``ds_tba/core/prefetch.py``.
    """

    storages: tuple[StorageTrace, ...]
    blocks: tuple[BlockTrace, ...]
    resources: Resources
    end_s: float
    optimizer_s: float = 0.0
    micro_steps: int = 1
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
        end_s, optimizer_s = self.end_s * time, self.optimizer_s * time
        return replace(self, storages=storages, blocks=blocks, end_s=end_s, optimizer_s=optimizer_s)

    def to_json(self) -> str:
        """Return the trace as text; times and rates are read back exactly."""
        return json.dumps({"format": FORMAT, **asdict(self)})


def _stretched(row: Row, factor: float) -> Row:
    """Return a row with all its times, whose names end in ``_s``, times a factor."""
    times = {field.name: getattr(row, field.name) for field in fields(row) if field.name.endswith("_s")}
    return replace(row, **{name: at_s * factor for name, at_s in times.items() if at_s is not None})


def slowest(machines: Sequence[Resources]) -> Resources:
    """Return the lowest of each rate over all machines, and the least staging.

    Where one machine has no drive, nothing can go to NVMe.
    """
    columns = [*zip(*map(astuple, machines), strict=True)]
    return Resources(*map(min, columns[:-2]), *map(max, columns[-2:]))
