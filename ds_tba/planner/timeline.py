"""A trace as arrays, also at a coarser grain, and the memory timeline of a replay."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ds_tba.config import IO_ALIGNMENT_BYTES, Placement
from ds_tba.planner.trace import OUTSIDE, Resources, Trace

# A group may be no larger than this fraction of staging, or it could not flow through staging as its members do.
GROUP_FRACTION_OF_STAGING = 0.125

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Places = npt.NDArray[np.int8]


@dataclass(frozen=True, slots=True)
class Assignment:
    """A choice for every storage and every block, as arrays.

    Attributes:
        placements: of each storage if it exists; never RECOMPUTE, which follows from ``recomputed``.
        recomputed: of each block.
    """

    placements: Places
    recomputed: Bools


@dataclass(frozen=True, slots=True)
class Liveness:
    """Which storages are saved, and until when, under a choice of recomputed blocks.

    Attributes:
        exists: saved at all.
        dropped: dropped in forward; its block's recomputation makes the storage again.
        need_s: first needed in backward, on the trace's clock.
    """

    exists: Bools
    dropped: Bools
    need_s: Floats


@dataclass(frozen=True, slots=True)
class StorageColumns:
    """One entry for each storage.

    Attributes:
        padded_bytes: sizes as they count in staging and on the drive.
        owner: the block whose recomputation makes a storage again; -1 where several blocks saved it, or none.
        unsaved: nobody saves it unless a block that reads it is recomputed.
        made_again_s: how far into that recomputation; 0 without an owner.
    """

    nbytes: Ints
    padded_bytes: Ints
    pack_s: Floats
    last_forward_use_s: Floats
    first_backward_use_s: Floats
    freed_s: Floats
    movable: Bools
    owner: Ints
    unsaved: Bools
    made_again_s: Floats

    @classmethod
    def of(cls, trace: Trace) -> StorageColumns:
        """The storages of ``trace``."""
        rows, blocks = trace.storages, trace.blocks
        nbytes = np.array([row.nbytes for row in rows], np.int64)
        owners = [row.blocks[0] if len(row.blocks) == 1 else OUTSIDE for row in rows]
        into_s = [
            0.0 if n == OUTSIDE else row.pack_s - blocks[n].forward_start_s for n, row in zip(owners, rows, strict=True)
        ]
        return cls(
            nbytes,
            -(-nbytes // IO_ALIGNMENT_BYTES) * IO_ALIGNMENT_BYTES,
            np.array([row.pack_s for row in rows], float),
            np.array([row.last_forward_use_s for row in rows], float),
            np.array([row.first_backward_use_s for row in rows], float),
            np.array([row.freed_s for row in rows], float),
            np.array([row.is_movable for row in rows], bool),
            np.array(owners, np.int64),
            np.array([not row.blocks for row in rows], bool),
            np.maximum(0.0, np.array(into_s, float)) * trace.recompute_factor,
        )

    def __len__(self) -> int:
        return len(self.nbytes)

    def first(self, count: int) -> StorageColumns:
        """The first so many."""
        return StorageColumns(*(getattr(self, column.name)[:count] for column in fields(self)))

    def merged(self, firsts: Ints) -> StorageColumns:
        """One storage for each run of neighbours, which begin at ``firsts``; times are means, weighted by size."""
        nbytes = np.add.reduceat(self.nbytes, firsts)

        def mean(times: Floats) -> Floats:
            return np.asarray(np.add.reduceat(times * self.nbytes, firsts) / nbytes)

        return StorageColumns(
            nbytes,
            np.add.reduceat(self.padded_bytes, firsts),
            mean(self.pack_s),
            mean(self.last_forward_use_s),
            mean(self.first_backward_use_s),
            mean(self.freed_s),
            self.movable[firsts],
            self.owner[firsts],
            self.unsaved[firsts],
            mean(self.made_again_s),
        )


class Pairs(NamedTuple):
    """A relation between storages and blocks: one entry for each pair."""

    storage: Ints
    block: Ints

    @classmethod
    def of(cls, pairs: list[tuple[int, int]]) -> Pairs:
        """These pairs, as columns."""
        return cls(*np.array(pairs, np.int64).reshape(-1, 2).T)

    def unique(self) -> Pairs:
        """Each pair once."""
        return Pairs(*np.unique(np.stack(self), axis=1))

    def within(self, storages: int, blocks: int) -> Pairs:
        """Those of the first so many."""
        is_within = (self.storage < storages) & (self.block < blocks)
        return Pairs(self.storage[is_within], self.block[is_within])

    def grouped(self, group: Ints) -> Pairs:
        """The pairs of the groups that the storages are in."""
        return Pairs(group[self.storage], self.block).unique()

    def signature(self, storages: int) -> Ints:
        """A number for each storage that tells apart which blocks it is paired with."""
        found = np.zeros(storages, np.int64)
        # A sum of odd multiples of the block numbers is enough.
        np.add.at(found, self.storage, (self.block + 1) * 2654435761)
        return found


@dataclass(frozen=True, slots=True)
class BlockColumns:
    """One entry for each block, and which storages the blocks use.

    Attributes:
        inputs: the storages that each block reads and does not produce.
        readers: the same, and the blocks that saved each storage.
    """

    recompute_s: Floats
    backward_start_s: Floats
    recomputable: Bools
    inputs: Pairs
    readers: Pairs

    @classmethod
    def of(cls, trace: Trace) -> BlockColumns:
        """The blocks of ``trace``."""
        blocks = trace.blocks
        inputs = [(index, number) for number, block in enumerate(blocks) for index in block.inputs]
        savers = [(index, number) for index, row in enumerate(trace.storages) for number in row.blocks]
        return cls(
            np.array([block.forward_s * trace.recompute_factor for block in blocks], float),
            np.array([block.backward_start_s for block in blocks], float),
            np.array([block.is_recomputable for block in blocks], bool),
            Pairs.of(inputs),
            Pairs.of(inputs + [pair for pair in savers if pair[1] != OUTSIDE]),
        )

    def __len__(self) -> int:
        return len(self.recompute_s)

    def first(self, count: int, storages: int) -> BlockColumns:
        """The first so many, and of the storages that they use the first so many."""
        return BlockColumns(
            self.recompute_s[:count],
            self.backward_start_s[:count],
            self.recomputable[:count],
            self.inputs.within(storages, count),
            self.readers.within(storages, count),
        )


@dataclass(frozen=True, slots=True)
class Timeline:
    """The columns of a trace, and the scalars of its step."""

    storages: StorageColumns
    blocks: BlockColumns
    resources: Resources
    end_s: float
    optimizer_s: float
    micro_steps: int
    forwards: tuple[int, ...] = ()

    @classmethod
    def of(cls, trace: Trace) -> Timeline:
        """The columns of ``trace``."""
        return cls(
            StorageColumns.of(trace),
            BlockColumns.of(trace),
            trace.resources,
            trace.end_s,
            trace.optimizer_s,
            trace.micro_steps,
            trace.forwards,
        )

    @property
    def step_s(self) -> float:
        """A step with every storage kept."""
        return self.micro_steps * self.end_s + self.optimizer_s

    @property
    def kept(self) -> Assignment:
        """Nothing moved, nothing recomputed."""
        return Assignment(np.zeros(len(self.storages), np.int8), np.zeros(len(self.blocks), np.bool_))

    def liveness(self, recomputed: Bools) -> Liveness:
        """Which storages are saved, and until when, if these blocks are recomputed."""
        storages, blocks = self.storages, self.blocks
        if not recomputed.any():
            return Liveness(~storages.unsaved, np.zeros(len(storages), bool), storages.first_backward_use_s)
        is_input = np.zeros(len(storages), bool)
        is_input[blocks.inputs.storage[recomputed[blocks.inputs.block]]] = True
        dropped = (storages.owner >= 0) & recomputed[storages.owner] & ~is_input
        need_s = storages.first_backward_use_s.copy()
        read = recomputed[blocks.readers.block]
        np.minimum.at(need_s, blocks.readers.storage[read], blocks.backward_start_s[blocks.readers.block[read]])
        return Liveness(~storages.unsaved | is_input, dropped, np.maximum(need_s, storages.last_forward_use_s))

    def can_go_to_nvme(self) -> Bools:
        """Which storages the NVMe store would take at all."""
        if not self.resources.paths:
            return np.zeros(len(self.storages), bool)
        return self.storages.movable & (self.storages.padded_bytes <= self.resources.staging_bytes)

    def one_forward(self) -> OneForward | None:
        """The first of several interleaved forwards, if all are alike."""
        count = len(self.forwards)
        if count < 2 or len(self.storages) % count or len(self.blocks) % count:
            return None
        storages, blocks = len(self.storages) // count, len(self.blocks) // count
        owner = self.storages.owner.reshape(count, storages) - blocks * np.arange(count)[:, None]
        alike = (
            np.where(self.storages.owner.reshape(count, storages) == OUTSIDE, OUTSIDE, owner),
            self.storages.movable.reshape(count, storages),
            self.storages.unsaved.reshape(count, storages),
            self.blocks.recomputable.reshape(count, blocks),
        )
        starts = np.arange(count) * storages
        if not np.array_equal(self.forwards, starts) or any((one != one[0]).any() for one in alike):
            return None
        first = replace(
            self,
            storages=self.storages.first(storages),
            blocks=self.blocks.first(blocks, storages),
            end_s=self.end_s / count,
            micro_steps=self.micro_steps * count,
            forwards=(),
        )
        return OneForward(first, np.tile(np.arange(storages), count), np.tile(np.arange(blocks), count))

    def grouped(self, max_groups: int) -> tuple[Timeline, Ints]:
        """Neighbours merged until about ``max_groups`` are left, and the group of each storage.

        Only storages that the same blocks save, read and own are merged.
        """
        if len(self.storages) <= max_groups:
            return self, np.arange(len(self.storages))
        group = self._groups(max_groups)
        blocks = self.blocks
        merged = replace(
            self,
            storages=self.storages.merged(np.flatnonzero(np.diff(group, prepend=-1))),
            blocks=replace(blocks, inputs=blocks.inputs.grouped(group), readers=blocks.readers.grouped(group)),
        )
        return merged, group

    def _groups(self, max_groups: int) -> Ints:
        """Runs of like storages, cut where their bytes pass a multiple of the intended size."""
        storages, count = self.storages, len(self.storages)
        group_bytes = max(1.0, float(storages.nbytes.sum()) / max_groups)
        group_bytes = min(group_bytes, self.resources.staging_bytes * GROUP_FRACTION_OF_STAGING)
        readers, inputs = self.blocks.readers.signature(count), self.blocks.inputs.signature(count)
        part = (np.cumsum(storages.nbytes) / group_bytes).astype(np.int64)
        cut = np.zeros(count, bool)
        cut[0] = True
        for column in (storages.owner, storages.movable, storages.unsaved, readers, inputs, part):
            cut[1:] |= column[1:] != column[:-1]
        return np.asarray(np.cumsum(cut) - 1)


@dataclass(frozen=True, slots=True)
class OneForward:
    """One of several interleaved forwards that are alike; see ``Trace.forwards``.

    Attributes:
        timeline: of that one, with its part of the time; a step has as many micro-steps as there are forwards.
        storage, block: its storage, or block, for each of the whole.
    """

    timeline: Timeline
    storage: Ints
    block: Ints

    def spread(self, assignment: Assignment) -> Assignment:
        """An assignment of that one for the whole."""
        return Assignment(assignment.placements[self.storage], assignment.recomputed[self.block])

    def grouped(self, max_groups: int) -> OneForward:
        """With neighbours merged, as in :meth:`Timeline.grouped`."""
        coarse, group = self.timeline.grouped(max_groups)
        return OneForward(coarse, group[self.storage], self.block)


# The memory timeline of a replay: device memory and the host tier, in bytes.


@dataclass(slots=True)
class ReplayClock:
    """The trace's clock, delayed by stalls and recomputation.

    Attributes:
        recompute_at_s: of each block, on the replay's clock.
        shift_s: the delay so far.
        stalls: of each storage for which compute waited, the seconds.
    """

    recompute_at_s: Floats
    shift_s: float = 0.0
    stall_s: float = 0.0
    recomputed_s: float = 0.0
    stalls: list[tuple[int, float]] = field(default_factory=list)
    _at_s: list[float] = field(default_factory=list)
    _shifts_s: list[float] = field(default_factory=list)

    def stall(self, storage: int, seconds: float) -> None:
        """Compute waits for a storage."""
        self.stalls.append((storage, seconds))
        self.stall_s += seconds
        self.shift_s += seconds

    def recompute(self, block: int, at_s: float, seconds: float) -> None:
        """A block's forward runs again, from ``at_s`` of the trace's clock on."""
        self.recompute_at_s[block] = at_s + self.shift_s
        self.recomputed_s += seconds
        self.shift_s += seconds

    def record(self, at_s: float) -> None:
        """Remember the delay after the event at ``at_s`` of the trace's clock, if the event changed it."""
        if self.shift_s != (self._shifts_s[-1] if self._shifts_s else 0.0):
            self._at_s.append(at_s)
            self._shifts_s.append(self.shift_s)

    def shifted(self, at_s: Floats, *, after: bool) -> Floats:
        """Times of the trace's clock as the replay's, before or after the events of that very time."""
        shifts = np.array([0.0, *self._shifts_s])
        return np.asarray(at_s + shifts[np.searchsorted(np.array(self._at_s), at_s, "right" if after else "left")])


@dataclass(frozen=True, slots=True)
class Moves:
    """Where a replay moved each storage and when, on the replay's clock.

    Attributes:
        place: of each storage, in the end.
        copied_s: the copy out of device memory is done.
        allocated_s: device memory is taken again.
    """

    place: Places
    copied_s: Floats
    allocated_s: Floats


def peak_saved_bytes(timeline: Timeline, liveness: Liveness, clock: ReplayClock, moves: Moves) -> int:
    """Most device bytes that storages held at once; what begins when another ends counts with it."""
    storages, exists, dropped = timeline.storages, liveness.exists, liveness.dropped
    nbytes = storages.nbytes
    packed_s = clock.shifted(storages.pack_s, after=False)
    left_s = clock.shifted(storages.last_forward_use_s, after=True)
    freed_s = clock.shifted(np.maximum(storages.freed_s, liveness.need_s), after=True)
    moved = moves.place != Placement.KEEP
    first_end_s = np.where(moved, np.maximum(moves.copied_s, left_s), np.where(dropped, left_s, freed_s))
    again = exists & (moved | dropped)
    again_s = np.where(dropped, _made_again_s(timeline, dropped, clock.recompute_at_s), moves.allocated_s)
    begins = np.concatenate([packed_s[exists], again_s[again]])
    ends = np.concatenate([first_end_s[exists], freed_s[again]])
    return _peak(begins, ends, np.concatenate([nbytes[exists], nbytes[again]]))


def peak_host_bytes(timeline: Timeline, liveness: Liveness, clock: ReplayClock, place: Places) -> int:
    """Most bytes that the host tier held at once."""
    on_host = place == Placement.HOST
    freed_s = np.maximum(timeline.storages.freed_s, liveness.need_s)
    return _peak(
        clock.shifted(timeline.storages.pack_s[on_host], after=False),
        clock.shifted(freed_s[on_host], after=True),
        timeline.storages.nbytes[on_host],
    )


def _made_again_s(timeline: Timeline, dropped: Bools, recompute_at_s: Floats) -> Floats:
    owner = np.where(dropped, timeline.storages.owner, 0)
    if not dropped.any():
        return np.zeros(len(owner))
    into_s = np.minimum(timeline.storages.made_again_s, timeline.blocks.recompute_s[owner])
    return np.asarray(recompute_at_s[owner] + into_s)


def _peak(begins: Floats, ends: Floats, nbytes: Ints) -> int:
    times = np.concatenate([begins, np.maximum(begins, ends)])
    changes = np.concatenate([nbytes, -nbytes])
    order = np.lexsort((-changes, times))
    return int(np.cumsum(changes[order]).max(initial=0))
