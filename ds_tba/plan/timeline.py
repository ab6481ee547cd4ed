"""A trace as arrays: what is saved under an assignment, and when it is needed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ds_tba.config import IO_ALIGNMENT_BYTES, Placement
from ds_tba.plan.trace import OUTSIDE, Trace

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Places = npt.NDArray[np.int8]


class Spans(NamedTuple):
    """Bytes held beside storages, with their begins and ends on the trace's clock."""

    begins_s: Floats
    ends_s: Floats
    nbytes: Ints


@dataclass(frozen=True, slots=True)
class Assignment:
    """A choice for every storage and every block.

    Attributes:
        placements: of each storage if it exists; RECOMPUTE is as KEEP, as it follows from ``recomputed``, and so is
            what no store would take, and REMATERIALIZE where a source does not exist or is dropped.
    """

    placements: Places
    recomputed: Bools


@dataclass(frozen=True, slots=True)
class Lifetimes:
    """The storages that are saved, where, and until when, under an assignment.

    Attributes:
        placements: those that can be kept to.
        recomputed: the same of blocks.
        exists: saved at all.
        dropped: dropped in forward; its block's recomputation makes the storage again.
        need_s: first needed in backward, on the trace's clock.
        freed_s: no longer needed by anyone.
        used: needed in backward at all.
    """

    placements: Places
    recomputed: Bools
    exists: Bools
    dropped: Bools
    need_s: Floats
    freed_s: Floats
    used: Bools


@dataclass(frozen=True, slots=True)
class Timeline:
    """The columns of a trace: of its storages, of its blocks, then pairs of indices.

    Attributes:
        padded_bytes: sizes as they count in staging and on the drive.
        left_s, used_s: last use in forward, first use in backward.
        saved: False where nobody saves a storage unless a block that reads it is recomputed.
        used: by backward.
        owner: the block whose recomputation makes a storage again; -1 where several blocks saved it, or none.
        made_again_s: how far into that recomputation; 0 without an owner.
        rematerialize_s: to make a storage again from its sources; not a number where that cannot be.
        inputs: pairs of a storage and a block that reads it and does not produce it.
        readers: the same, and the blocks that saved each storage.
        sources: pairs of a storage and one that it can be made again of, in the order of the former.
        trace: for the scalars of its step.
    """

    nbytes: Ints
    padded_bytes: Ints
    pack_s: Floats
    left_s: Floats
    used_s: Floats
    freed_s: Floats
    movable: Bools
    saved: Bools
    used: Bools
    owner: Ints
    made_again_s: Floats
    rematerialize_s: Floats
    recompute_s: Floats
    backward_start_s: Floats
    recomputable: Bools
    inputs: Ints
    readers: Ints
    sources: Ints
    trace: Trace

    @classmethod
    def of(cls, trace: Trace) -> Timeline:
        """Return the columns of ``trace``."""
        rows, blocks = trace.storages, trace.blocks
        nbytes = np.array([row.nbytes for row in rows], np.int64)
        owners = [row.blocks[0] if len(row.blocks) == 1 else OUTSIDE for row in rows]
        into_s = [
            0.0 if n == OUTSIDE else row.pack_s - blocks[n].forward_start_s for n, row in zip(owners, rows, strict=True)
        ]
        inputs = [(index, number) for number, block in enumerate(blocks) for index in block.inputs]
        savers = [(index, number) for index, row in enumerate(rows) for number in row.blocks if number != OUTSIDE]
        made = [(index, row) for index, row in enumerate(rows) if row.rematerialize_s is not None]
        return cls(
            nbytes,
            -(-nbytes // IO_ALIGNMENT_BYTES) * IO_ALIGNMENT_BYTES,
            np.array([row.pack_s for row in rows], float),
            np.array([row.last_forward_use_s for row in rows], float),
            np.array([row.first_backward_use_s for row in rows], float),
            np.array([row.freed_s for row in rows], float),
            np.array([row.is_movable for row in rows], bool),
            np.array([bool(row.blocks) for row in rows], bool),
            np.array([row.is_used for row in rows], bool),
            np.array(owners, np.int64),
            np.maximum(0.0, np.array(into_s, float)),
            np.array([row.rematerialize_s for row in rows], float),
            np.array([block.forward_s for block in blocks], float),
            np.array([block.backward_start_s for block in blocks], float),
            np.array([block.is_recomputable for block in blocks], bool),
            _pairs(inputs),
            _pairs(inputs + savers),
            _pairs([(index, source) for index, row in made for source in dict.fromkeys(row.sources)]),
            trace,
        )

    @property
    def kept(self) -> Assignment:
        """Return the assignment that offloads and recomputes nothing."""
        return Assignment(np.zeros(len(self.nbytes), np.int8), np.zeros(len(self.recompute_s), np.bool_))

    @property
    def rematerializable(self) -> Bools:
        """Return the storages that can be rematerialized from their sources, where these are there."""
        return ~np.isnan(self.rematerialize_s)

    @property
    def to_nvme(self) -> Bools:
        """Return the storages that the NVMe store would take at all."""
        return self.movable & bool(self.trace.resources.paths)

    def lifetimes(self, assignment: Assignment) -> Lifetimes:
        """Return the lifetimes of storages under an assignment."""
        recomputed = assignment.recomputed & self.recomputable
        is_input = np.zeros(len(self.nbytes), bool)
        is_input[self.inputs[0, recomputed[self.inputs[1]]]] = True
        exists = self.saved | is_input
        # -1 picks the False: else the last block would drop what no block owns. Its inputs no block can make.
        dropped = np.append(recomputed, False)[self.owner] & ~is_input
        need_s, freed_s, used = self.used_s.copy(), self.freed_s.copy(), self.used.copy()
        storage, block = self.readers[:, recomputed[self.readers[1]]]
        np.minimum.at(need_s, storage, self.backward_start_s[block])
        need_s = np.maximum(need_s, self.left_s)
        used[storage] = True  # by the block that runs again, also where backward itself never asks
        there = exists & ~dropped
        again = there & self.rematerializable & (assignment.placements == Placement.REMATERIALIZE)
        again[self.sources[0, ~there[self.sources[1]]]] = False  # of a dropped source nothing can be made
        placements = np.zeros(len(self.nbytes), np.int8)
        for place, can in (
            (Placement.HOST, there & self.movable),
            (Placement.NVME, there & self.to_nvme),
            (Placement.REMATERIALIZE, again),
        ):
            placements[can & (assignment.placements == place)] = place
        # A source is needed when the first of what is made of it is; it comes before that, so that chains follow.
        for made, source in self.sources[:, again[self.sources[0]]].T[::-1].tolist():
            need_s[source] = max(self.left_s[source], min(need_s[source], need_s[made]))
            freed_s[source] = max(freed_s[source], need_s[made])
            used[source] |= used[made]
        return Lifetimes(placements, recomputed, exists, dropped, need_s, freed_s, used)

    def alike_forwards(self) -> int:
        """Return how many alternating forwards make the micro-step, if all of them are alike; else 1."""
        count = len(self.trace.forwards)
        if count < 2 or any(n % count for n in (len(self.nbytes), len(self.recompute_s), self.sources.shape[1])):
            return 1
        storages, blocks = (np.arange(count)[:, None] * (n // count) for n in (len(self.nbytes), len(self.recompute_s)))
        owner = self.owner.reshape(count, -1)
        columns = [np.where(owner == OUTSIDE, OUTSIDE, owner - blocks)]
        columns += [one.reshape(count, -1) for one in (self.movable, self.saved, self.used, self.rematerializable)]
        columns += [self.recomputable.reshape(count, -1), *(one.reshape(count, -1) - storages for one in self.sources)]
        is_alike = np.array_equal(self.trace.forwards, storages[:, 0]) and all((one == one[0]).all() for one in columns)
        return count if is_alike else 1


def _pairs(pairs: list[tuple[int, int]]) -> Ints:
    return np.asarray(np.array(pairs, np.int64).reshape(-1, 2).T)
