"""A trace as arrays: what replays and searches work on, also at a coarser grain."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ds_tba.config import IO_ALIGNMENT_BYTES, Placement
from ds_tba.planner.trace import OUTSIDE, Resources, Trace

# A group may be no larger than this part of staging, or it could not flow through it as its members do.
GROUP_FRACTION_OF_STAGING = 0.125

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Existence:
    """What a choice of recomputed blocks makes of the storages.

    Attributes:
        exists: saved at all.
        dropped: given up in forward and made again by its block's recomputation.
        need_s: first needed in backward, on the trace's clock.
    """

    exists: Bools
    dropped: Bools
    need_s: Floats


@dataclass(frozen=True, slots=True)
class Timeline:
    """The columns of a trace.

    Attributes:
        padded_bytes: sizes as they count in staging and on the drive.
        owner: the block whose recomputation makes a storage again; -1 where several blocks saved it, or none.
        made_again_s: how far into that recomputation; 0 without an owner.
        unsaved: nobody saves it unless a block that reads it is recomputed.
        input_storage, input_block: one entry for each input of each block.
        reader_storage, reader_block: the same, and one for each block that saved the storage.
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
    input_storage: Ints
    input_block: Ints
    reader_storage: Ints
    reader_block: Ints
    made_again_s: Floats
    recompute_s: Floats
    backward_start_s: Floats
    recomputable: Bools
    resources: Resources
    end_s: float
    rest_s: float
    micro_steps: int

    @classmethod
    def of(cls, trace: Trace) -> Timeline:
        """The columns of ``trace``."""
        rows, blocks = trace.storages, trace.blocks
        nbytes = np.array([row.nbytes for row in rows], np.int64)
        owners = [row.blocks[0] if len(row.blocks) == 1 else OUTSIDE for row in rows]
        into_s = [
            0.0 if n == OUTSIDE else row.pack_s - blocks[n].forward_start_s for n, row in zip(owners, rows, strict=True)
        ]
        inputs = [(index, number) for number, block in enumerate(blocks) for index in block.inputs]
        savers = [(index, number) for index, row in enumerate(rows) for number in row.blocks if number != OUTSIDE]
        input_pairs = np.array(inputs, np.int64).reshape(-1, 2)
        reader_pairs = np.array(inputs + savers, np.int64).reshape(-1, 2)
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
            input_pairs[:, 0],
            input_pairs[:, 1],
            reader_pairs[:, 0],
            reader_pairs[:, 1],
            np.maximum(0.0, np.array(into_s, float)) * trace.recompute_factor,
            np.array([block.forward_s * trace.recompute_factor for block in blocks], float),
            np.array([block.backward_start_s for block in blocks], float),
            np.array([block.is_recomputable for block in blocks], bool),
            trace.resources,
            trace.end_s,
            trace.rest_s,
            trace.micro_steps,
        )

    @property
    def step_s(self) -> float:
        """A step with every storage kept."""
        return self.micro_steps * self.end_s + self.rest_s

    @property
    def storages(self) -> int:
        """How many."""
        return len(self.nbytes)

    @property
    def blocks(self) -> int:
        """How many."""
        return len(self.recompute_s)

    @property
    def kept(self) -> Assignment:
        """Nothing moved, nothing recomputed."""
        return Assignment.all_kept(self.storages, self.blocks)

    def existence(self, recomputed: Bools) -> Existence:
        """What becomes of the storages when these blocks are recomputed."""
        if not recomputed.any():
            return Existence(~self.unsaved, np.zeros(self.storages, bool), self.first_backward_use_s)
        is_input = np.zeros(self.storages, bool)
        is_input[self.input_storage[recomputed[self.input_block]]] = True
        dropped = (self.owner >= 0) & recomputed[self.owner] & ~is_input
        need_s = self.first_backward_use_s.copy()
        read = recomputed[self.reader_block]
        np.minimum.at(need_s, self.reader_storage[read], self.backward_start_s[self.reader_block[read]])
        return Existence(~self.unsaved | is_input, dropped, np.maximum(need_s, self.last_forward_use_s))

    def can_go_to_nvme(self) -> Bools:
        """Which storages the NVMe store would take at all."""
        if not self.resources.paths:
            return np.zeros(self.storages, bool)
        return self.movable & (self.padded_bytes <= self.resources.staging_bytes)

    def grouped(self, most_groups: int) -> tuple[Timeline, Ints]:
        """Neighbours merged until about ``most_groups`` are left, and the group of each storage.

        Only storages that the same blocks save, read and own are merged; times are means, weighted by size.
        """
        if self.storages <= most_groups:
            return self, np.arange(self.storages)
        group = self._groups(most_groups)
        firsts = np.flatnonzero(np.diff(group, prepend=-1))
        nbytes = np.add.reduceat(self.nbytes, firsts)

        def mean(times: Floats) -> Floats:
            return np.asarray(np.add.reduceat(times * self.nbytes, firsts) / nbytes)

        inputs = np.unique(np.stack([group[self.input_storage], self.input_block]), axis=1)
        readers = np.unique(np.stack([group[self.reader_storage], self.reader_block]), axis=1)
        merged = Timeline(
            nbytes,
            np.add.reduceat(self.padded_bytes, firsts),
            mean(self.pack_s),
            mean(self.last_forward_use_s),
            mean(self.first_backward_use_s),
            mean(self.freed_s),
            self.movable[firsts],
            self.owner[firsts],
            self.unsaved[firsts],
            inputs[0],
            inputs[1],
            readers[0],
            readers[1],
            mean(self.made_again_s),
            self.recompute_s,
            self.backward_start_s,
            self.recomputable,
            self.resources,
            self.end_s,
            self.rest_s,
            self.micro_steps,
        )
        return merged, group

    def _groups(self, most_groups: int) -> Ints:
        """Runs of like storages, cut where their bytes pass a multiple of the size wanted."""
        wanted = max(1.0, float(self.nbytes.sum()) / most_groups)
        wanted = min(wanted, self.resources.staging_bytes * GROUP_FRACTION_OF_STAGING)
        readers = np.zeros(self.storages, np.int64)
        # A sum of odd multiples of the block numbers is enough to tell apart who reads what.
        np.add.at(readers, self.reader_storage, (self.reader_block + 1) * 2654435761)
        inputs = np.zeros(self.storages, np.int64)
        np.add.at(inputs, self.input_storage, (self.input_block + 1) * 2654435761)
        part = (np.cumsum(self.nbytes) / wanted).astype(np.int64)
        cut = np.zeros(self.storages, bool)
        cut[0] = True
        for column in (self.owner, self.movable, self.unsaved, readers, inputs, part):
            cut[1:] |= column[1:] != column[:-1]
        return np.asarray(np.cumsum(cut) - 1)


# What lies where at a time of a replay, and the most of it: device memory and the host tier, in bytes.


@dataclass(slots=True)
class Clock:
    """A replay's clock: the trace's, later by what was waited and recomputed.

    Attributes:
        shift_s: by how much, now.
    """

    shift_s: float = 0.0
    _at_s: list[float] = field(default_factory=list)
    _shifts_s: list[float] = field(default_factory=list)

    def note(self, at_s: float) -> None:
        """What happened at ``at_s`` of the trace's clock is done; remember the shift if it is another."""
        if self.shift_s != (self._shifts_s[-1] if self._shifts_s else 0.0):
            self._at_s.append(at_s)
            self._shifts_s.append(self.shift_s)

    def shifted(self, at_s: Floats, *, after: bool) -> Floats:
        """Times of the trace's clock as the replay's, before or after what happened at that very time."""
        shifts = np.array([0.0, *self._shifts_s])
        return np.asarray(at_s + shifts[np.searchsorted(np.array(self._at_s), at_s, "right" if after else "left")])


@dataclass(frozen=True, slots=True)
class Moves:
    """When a replay moved what, by its own clock.

    Attributes:
        place: of each storage, in the end.
        copied_s: out of device memory.
        allocated_s: on its way back.
        recompute_at_s: of each block.
    """

    place: Places
    copied_s: Floats
    allocated_s: Floats
    recompute_at_s: Floats


def peak_saved_bytes(timeline: Timeline, existence: Existence, clock: Clock, moves: Moves) -> int:
    """Most device bytes that storages held at once; what begins when another ends counts with it."""
    nbytes, exists, dropped = timeline.nbytes, existence.exists, existence.dropped
    packed_s = clock.shifted(timeline.pack_s, after=False)
    left_s = clock.shifted(timeline.last_forward_use_s, after=True)
    freed_s = clock.shifted(np.maximum(timeline.freed_s, existence.need_s), after=True)
    moved = moves.place != Placement.KEEP
    first_end_s = np.where(moved, np.maximum(moves.copied_s, left_s), np.where(dropped, left_s, freed_s))
    again = exists & (moved | dropped)
    again_s = np.where(dropped, _made_again_s(timeline, dropped, moves.recompute_at_s), moves.allocated_s)
    begins = np.concatenate([packed_s[exists], again_s[again]])
    ends = np.concatenate([first_end_s[exists], freed_s[again]])
    return _highest(begins, ends, np.concatenate([nbytes[exists], nbytes[again]]))


def peak_host_bytes(timeline: Timeline, existence: Existence, clock: Clock, place: Places) -> int:
    """Most bytes that the host tier held at once."""
    on_host = place == Placement.HOST
    freed_s = np.maximum(timeline.freed_s, existence.need_s)
    return _highest(
        clock.shifted(timeline.pack_s[on_host], after=False),
        clock.shifted(freed_s[on_host], after=True),
        timeline.nbytes[on_host],
    )


def _made_again_s(timeline: Timeline, dropped: Bools, recompute_at_s: Floats) -> Floats:
    owner = np.where(dropped, timeline.owner, 0)
    if not dropped.any():
        return np.zeros(timeline.storages)
    return np.asarray(recompute_at_s[owner] + np.minimum(timeline.made_again_s, timeline.recompute_s[owner]))


def _highest(begins: Floats, ends: Floats, nbytes: Ints) -> int:
    times = np.concatenate([begins, np.maximum(begins, ends)])
    changes = np.concatenate([nbytes, -nbytes])
    order = np.lexsort((-changes, times))
    return int(np.cumsum(changes[order]).max(initial=0))


Places = npt.NDArray[np.int8]


@dataclass(frozen=True, slots=True)
class Assignment:
    """A choice for every storage and every block, as arrays.

    Attributes:
        placements: of each storage if it exists; never RECOMPUTE, which follows from ``recomputed``.
        recomputed: of each block.
    """

    placements: Places
    recomputed: npt.NDArray[np.bool_]

    @classmethod
    def all_kept(cls, storages: int, blocks: int) -> Assignment:
        """Nothing moved, nothing recomputed."""
        return cls(np.zeros(storages, np.int8), np.zeros(blocks, np.bool_))
