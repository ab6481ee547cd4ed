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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import pairwise
from typing import Any, TypeVar

from ds_tba.errors import TraceError

FORMAT = 1
OUTSIDE = -1
MIN_FRACTION = 0.05


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

    @property
    def forward_s(self) -> float:
        """The duration of its forward."""
        return self.forward_end_s - self.forward_start_s


Row = TypeVar("Row", StorageTrace, BlockTrace)


@dataclass(frozen=True, slots=True)
class PathRates:
    """Measured rates of one directory of ``nvme_path``, in bytes per second, alone and while the other kind runs."""

    write_bytes_per_s: float
    read_bytes_per_s: float
    write_beside_read_bytes_per_s: float
    read_beside_write_bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Resources:
    """The rates and bounds of a machine.

    Attributes:
        paths: the drives; none means that nothing can go to NVMe.
        copy_out_bytes_per_s, copy_in_bytes_per_s: between device and host memory.
        staging_bytes: bound of what is between device and file.
        is_synchronous: the device copies in the training thread, which waits for it (a CPU).
        prefetches_from_backward_start: reading ahead begins with the first unpack of the micro-step, whatever it is of;
            else with the first unpack of something that was moved.
        compute_s_per_byte: kernel time that moving a storage out and back takes, for each byte.
    """

    paths: tuple[PathRates, ...]
    copy_out_bytes_per_s: float
    copy_in_bytes_per_s: float
    staging_bytes: int
    is_synchronous: bool = False
    prefetches_from_backward_start: bool = True
    compute_s_per_byte: float = 0.0

    @property
    def write_bytes_per_s(self) -> float:
        """Of all paths, without concurrent reads."""
        return sum(path.write_bytes_per_s for path in self.paths)

    @property
    def read_bytes_per_s(self) -> float:
        """Of all paths, without concurrent writes."""
        return sum(path.read_bytes_per_s for path in self.paths)

    @property
    def rates(self) -> tuple[float, ...]:
        """Of each path, in bytes per second: writes, then reads."""
        return tuple(rate for path in self.paths for rate in (path.write_bytes_per_s, path.read_bytes_per_s))


@dataclass(frozen=True, slots=True)
class Trace:
    """One micro-step, and the machine it ran on.

    Attributes:
        storages: in the order in which they were packed.
        blocks: in the order in which their forward began.
        end_s: the end of backward.
        optimizer_s: the time of a step outside of its micro-steps; ``rest_s`` in JSON.
        micro_steps: of one step.
        recompute_factor: the time of recomputing a block, as a fraction of its forward: as measured, else 1.
        forwards: number of the first storage of each forward, where the micro-step is one of several interleaved
            forwards and backwards; see [Note: Micro-steps] in ``ds_tba/autograd/saved.py``.

    Raises:
        TraceError: times out of order, or an index that is not there.
    """

    storages: tuple[StorageTrace, ...]
    blocks: tuple[BlockTrace, ...]
    resources: Resources
    end_s: float
    optimizer_s: float = 0.0
    micro_steps: int = 1
    recompute_factor: float = 1.0
    forwards: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        _check_resources(self.resources)
        if self.micro_steps < 1:
            raise TraceError(f"micro_steps is {self.micro_steps}: a step has one at least")
        if not 0 < self.recompute_factor < math.inf:
            raise TraceError(f"recompute_factor is {self.recompute_factor}: it must be a number above 0")
        _check_order("the step", 0.0, self.end_s, math.inf)
        _check_order("the rest of the step", 0.0, self.optimizer_s, math.inf)
        for number, block in enumerate(self.blocks):
            _check_block(number, block, len(self.storages), self.end_s)
        packed_s = 0.0
        for index, storage in enumerate(self.storages):
            _check_storage(index, storage, packed_s, len(self.blocks), self.end_s)
            packed_s = storage.pack_s

    @property
    def step_s(self) -> float:
        """A step with every storage kept."""
        return self.micro_steps * self.end_s + self.optimizer_s

    @property
    def saved_bytes(self) -> int:
        """Of all storages together."""
        return sum(storage.nbytes for storage in self.storages)

    @property
    def movable_bytes(self) -> int:
        """Of those that may be moved."""
        return sum(storage.nbytes for storage in self.storages if storage.is_movable)

    def without(self, taken_s: float) -> Trace:
        """The same micro-step shorter by ``taken_s``, evenly; longer where that is negative.

        A small fraction of the time stays in any case.
        """
        factor = max(MIN_FRACTION, 1 - taken_s / self.end_s) if self.end_s else 1.0
        storages = tuple(_scaled(one, factor) for one in self.storages)
        blocks = tuple(_scaled(one, factor) for one in self.blocks)
        return replace(self, storages=storages, blocks=blocks, end_s=self.end_s * factor)

    def grown(self, sizes: Mapping[int, int]) -> Trace:
        """The same micro-step with larger storages, and longer by as much as all of them together are larger.

        Args:
            sizes: of the larger storages, by number, in bytes. Storages that cannot be moved grow in proportion: one
                may stand for many small tensors, whose new sizes are not known.
        """
        added_bytes = sum(nbytes - self.storages[index].nbytes for index, nbytes in sizes.items())
        if added_bytes <= 0:
            return self
        factor = 1 + added_bytes / max(1, self.saved_bytes)
        longer = self.without((1 - factor) * self.end_s)
        storages = tuple(
            one
            if index not in sizes and one.is_movable
            else replace(one, nbytes=sizes.get(index, math.ceil(one.nbytes * factor)))
            for index, one in enumerate(longer.storages)
        )
        return replace(longer, storages=storages)

    def to_json(self) -> str:
        """As text; times and rates come back exactly."""
        return json.dumps(
            {
                "format": FORMAT,
                "end_s": self.end_s,
                "rest_s": self.optimizer_s,
                "micro_steps": self.micro_steps,
                "recompute_factor": self.recompute_factor,
                "forwards": self.forwards,
                "resources": asdict(self.resources),
                "blocks": _table(self.blocks, BlockTrace),
                "storages": _table(self.storages, StorageTrace),
            }
        )

    @classmethod
    def from_json(cls, text: str) -> Trace:
        """The trace that :meth:`to_json` wrote.

        Raises:
            TraceError: it is not one, or not consistent.
        """
        try:
            return cls._from_dict(json.loads(text))
        except (KeyError, TypeError, ValueError) as error:
            if isinstance(error, TraceError):
                raise
            raise TraceError(f"this is not a trace of format {FORMAT}: {error!r}") from error

    @classmethod
    def _from_dict(cls, data: Mapping[str, Any]) -> Trace:
        if data["format"] != FORMAT:
            raise TraceError(f"the trace is of format {data['format']!r}: this version reads {FORMAT}; record it again")
        machine = dict(data["resources"])
        machine["paths"] = tuple(PathRates(**path) for path in machine["paths"])
        machine.pop("traffic", None)  # of earlier versions
        return cls(
            tuple(StorageTrace(**row) for row in _rows(data["storages"], "blocks", "sources")),
            tuple(BlockTrace(**row) for row in _rows(data["blocks"], "inputs")),
            Resources(**machine),
            data["end_s"],
            data["rest_s"],
            data["micro_steps"],
            data.get("recompute_factor", 1.0),
            tuple(data.get("forwards", ())),
        )


def _scaled(row: Row, factor: float) -> Row:
    """All times of a row times a factor."""
    times = {field.name: getattr(row, field.name) for field in fields(row) if field.name.endswith("_s")}
    return replace(row, **{name: at_s * factor for name, at_s in times.items() if at_s is not None})


def _table(rows: tuple[Any, ...], kind: type) -> dict[str, list[Any]]:
    """Column by column: a fifth of the size of one object for each."""
    return {field.name: [getattr(row, field.name) for row in rows] for field in fields(kind)}


def _rows(table: Mapping[str, list[Any]], *tuples: str) -> list[dict[str, Any]]:
    names = list(table)
    rows = [dict(zip(names, values, strict=True)) for values in zip(*table.values(), strict=True)]
    for row in rows:
        row |= {name: tuple(row[name]) for name in tuples if name in row}  # traces of earlier versions have no sources
    return rows


def _check_order(what: str, *times: float) -> None:
    if not all(earlier <= later for earlier, later in pairwise(times)):
        raise TraceError(f"{what} has times out of order: {times}; each must be at least the one before")


def _check_storage(index: int, storage: StorageTrace, packed_s: float, blocks: int, end_s: float) -> None:
    if storage.nbytes < 1:
        raise TraceError(f"storage {index} has {storage.nbytes} bytes: one at least is needed")
    times = (storage.pack_s, storage.last_forward_use_s, storage.first_backward_use_s, storage.freed_s)
    if not packed_s <= times[0] <= times[1] <= times[2] <= times[3] <= end_s:
        _check_order(f"storage {index} ({storage.module})", packed_s, *times, end_s)
        raise TraceError(f"storage {index} ({storage.module}) has a time that is not a number: {times}")
    if any(not OUTSIDE <= block < blocks for block in storage.blocks):
        raise TraceError(f"storage {index} names blocks {storage.blocks}: there are {blocks}, counted from 0")
    if storage.rematerialize_s is not None and not 0 <= storage.rematerialize_s < math.inf:
        raise TraceError(
            f"storage {index} has rematerialize_s {storage.rematerialize_s}: it must be a number of 0 or more, or None "
            "where the storage cannot be made again"
        )
    if any(not 0 <= source < index for source in storage.sources):
        raise TraceError(
            f"storage {index} names sources {storage.sources}: each must be the index of a storage packed before it"
        )


def _check_block(number: int, block: BlockTrace, storages: int, end_s: float) -> None:
    times = (block.forward_start_s, block.forward_end_s, block.backward_start_s, block.backward_end_s)
    _check_order(f"block {number} ({block.module})", 0.0, *times, end_s)
    if any(not 0 <= index < storages for index in block.inputs):
        raise TraceError(f"block {number} names inputs {block.inputs}: there are {storages} storages, counted from 0")


def _check_resources(resources: Resources) -> None:
    rates = [resources.copy_out_bytes_per_s, resources.copy_in_bytes_per_s]
    for path in resources.paths:
        rates += [getattr(path, field.name) for field in fields(PathRates)]
    if not all(rate > 0 for rate in rates):
        raise TraceError(f"the rates {rates} must all be above 0 bytes per second: measure them again")
    if not 0 <= resources.compute_s_per_byte < math.inf:
        raise TraceError(f"compute_s_per_byte is {resources.compute_s_per_byte}: it must be a number of 0 or more")
    if resources.staging_bytes < 1:
        raise TraceError(f"staging_bytes is {resources.staging_bytes}: one at least is needed")


def slowest(machines: Sequence[Resources]) -> Resources:
    """The lowest of each rate over all machines, and the least staging.

    Paths are compared one by one where all machines have as many, else by their sums; where one machine has none,
    nothing can go to NVMe.

    Raises:
        TraceError: there is no machine.
    """
    if not machines:
        raise TraceError("there are no resources to take the slowest of: every rank has its own")
    return Resources(
        _paths([machine.paths for machine in machines]),
        min(machine.copy_out_bytes_per_s for machine in machines),
        min(machine.copy_in_bytes_per_s for machine in machines),
        min(machine.staging_bytes for machine in machines),
        is_synchronous=any(machine.is_synchronous for machine in machines),
        prefetches_from_backward_start=all(machine.prefetches_from_backward_start for machine in machines),
        compute_s_per_byte=max(machine.compute_s_per_byte for machine in machines),
    )


def _paths(machines: Sequence[tuple[PathRates, ...]]) -> tuple[PathRates, ...]:
    if not all(machines):
        return ()
    if len({len(paths) for paths in machines}) > 1:
        machines = [(_combined(sum, paths),) for paths in machines]
    return tuple(_combined(min, paths) for paths in zip(*machines, strict=True))


def _combined(how: Callable[[Sequence[float]], float], paths: Sequence[PathRates]) -> PathRates:
    return PathRates(*(how([getattr(path, field.name) for path in paths]) for field in fields(PathRates)))


# Which storage of a trace is which in another micro-step of the same model.
#
# [Note: Scopes] A micro-step is cut where passes through blocks begin and end: before the first pass, the
# first pass, between the first and the second, ... In each scope the storages are known by the order in which they
# are first saved *there*, so that a block which is recomputed (and saves its inputs only) shifts nobody else's place.


@dataclass(frozen=True, slots=True)
class Layout:
    """The places of a trace's storages.

    Attributes:
        scopes: for each scope the storages in the order in which they were first saved in it; pass ``n`` through a
            block is scope ``2 * n + 1``.
    """

    scopes: tuple[tuple[int, ...], ...]

    def expected(self, scope: int, trace: Trace, recomputed: tuple[bool, ...]) -> tuple[int, ...]:
        """The storages that a scope saves when these blocks are recomputed."""
        if scope >= len(self.scopes):
            return ()
        number = scope // 2
        if scope % 2 and recomputed[number]:
            return trace.blocks[number].inputs
        return self.scopes[scope]
