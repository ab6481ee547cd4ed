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
        placements, recomputed: those that can be kept to.
        exists: saved at all.
        dropped: in forward; its block's recomputation makes the storage again.
        need_s, freed_s: first needed in backward, and no longer needed by anyone, on the trace's clock.
        used: needed in backward at all.
    """

    placements: Places
    recomputed: Bools
    exists: Bools
    dropped: Bools
    need_s: Floats
    freed_s: Floats
    used: Bools


class Timeline:
    """The columns of a trace.

    Attributes:
        trace: as given.
        nbytes, padded_bytes: sizes, and as they count in staging and on the drive.
        pack_s, left_s, used_s, freed_s: of each storage: saved, last use in forward, first use in backward, freed.
        movable, used: of each storage: see ``StorageTrace``.
        to_nvme: the storages that the NVMe store would take at all.
        saved: False where nobody saves a storage unless a block that reads it is recomputed.
        owner: the block whose recomputation makes a storage again; -1 where several blocks saved it, or none.
        rematerialize_s: to make a storage again from its sources; not a number where that cannot be.
        rematerializable: the storages that can be, where their sources are there.
        recompute_s, backward_start_s, recomputable: of each block.
    """

    def __init__(self, trace: Trace) -> None:
        rows, blocks = trace.storages, trace.blocks
        self.trace = trace
        self.nbytes: Ints = np.array([row.nbytes for row in rows], np.int64)
        self.padded_bytes: Ints = -(-self.nbytes // IO_ALIGNMENT_BYTES) * IO_ALIGNMENT_BYTES
        self.pack_s: Floats = np.array([row.pack_s for row in rows], float)
        self.left_s: Floats = np.array([row.last_forward_use_s for row in rows], float)
        self.used_s: Floats = np.array([row.first_backward_use_s for row in rows], float)
        self.freed_s: Floats = np.array([row.freed_s for row in rows], float)
        self.movable: Bools = np.array([row.is_movable for row in rows], bool)
        self.saved: Bools = np.array([bool(row.blocks) for row in rows], bool)
        self.to_nvme: Bools = self.movable & bool(trace.resources.paths)
        self.used: Bools = np.array([row.is_used for row in rows], bool)
        self.owner: Ints = np.array([row.blocks[0] if len(row.blocks) == 1 else OUTSIDE for row in rows], np.int64)
        self.rematerialize_s: Floats = np.array([row.rematerialize_s for row in rows], float)
        self.rematerializable: Bools = ~np.isnan(self.rematerialize_s)
        self.recompute_s: Floats = np.array([block.forward_s for block in blocks], float)
        self.backward_start_s: Floats = np.array([block.backward_start_s for block in blocks], float)
        self.recomputable: Bools = np.array([block.is_recomputable for block in blocks], bool)
        inputs = [(index, number) for number, block in enumerate(blocks) for index in block.inputs]
        savers = [(index, number) for index, row in enumerate(rows) for number in row.blocks if number != OUTSIDE]
        # Pairs of a storage and a block that reads it and does not produce it; the same, and the blocks that saved it.
        self._inputs, self._readers = _pairs(inputs), _pairs(inputs + savers)
        # Pairs of a storage and one that it can be made again of, in the order of the former.
        made = [(index, row) for index, row in enumerate(rows) if row.rematerialize_s is not None]
        self._sources = _pairs([(index, source) for index, row in made for source in dict.fromkeys(row.sources)])

    @property
    def kept(self) -> Assignment:
        """Return the assignment that offloads and recomputes nothing."""
        return Assignment(np.zeros(len(self.nbytes), np.int8), np.zeros(len(self.recompute_s), np.bool_))

    def lifetimes(self, assignment: Assignment) -> Lifetimes:
        """Return the lifetimes of storages under an assignment."""
        recomputed = assignment.recomputed & self.recomputable
        is_input = np.zeros(len(self.nbytes), bool)
        is_input[self._inputs[0, recomputed[self._inputs[1]]]] = True
        exists = self.saved | is_input
        # -1 picks the False: else the last block would drop what no block owns. Its inputs no block can make.
        dropped = np.append(recomputed, False)[self.owner] & ~is_input
        need_s, freed_s, used = self.used_s.copy(), self.freed_s.copy(), self.used.copy()
        storage, block = self._readers[:, recomputed[self._readers[1]]]
        np.minimum.at(need_s, storage, self.backward_start_s[block])
        need_s = np.maximum(need_s, self.left_s)
        used[storage] = True  # by the block that runs again, also where backward itself never asks
        there = exists & ~dropped
        again = there & self.rematerializable & (assignment.placements == Placement.REMATERIALIZE)
        again[self._sources[0, ~there[self._sources[1]]]] = False  # of a dropped source nothing can be made
        placements = np.zeros(len(self.nbytes), np.int8)
        for place, can in (
            (Placement.HOST, there & self.movable),
            (Placement.NVME, there & self.to_nvme),
            (Placement.REMATERIALIZE, again),
        ):
            placements[can & (assignment.placements == place)] = place
        # A source is needed when the first of what is made of it is; it comes before that, so that chains follow.
        for made, source in self._sources[:, again[self._sources[0]]].T[::-1].tolist():
            need_s[source] = max(self.left_s[source], min(need_s[source], need_s[made]))
            freed_s[source] = max(freed_s[source], need_s[made])
            used[source] |= used[made]
        return Lifetimes(placements, recomputed, exists, dropped, need_s, freed_s, used)

    def alike_forwards(self) -> int:
        """Return how many alternating forwards make the micro-step, if all of them are alike; else 1."""
        trace, count = self.trace, len(self.trace.forwards)
        storages = [(row.module, row.is_movable, bool(row.sources)) for row in trace.storages]
        blocks = [block.module for block in trace.blocks]
        per_forward, blocks_per_forward = (len(rows) // max(1, count) for rows in (storages, blocks))
        is_alike = (
            trace.forwards == tuple(per_forward * number for number in range(count))
            and storages == storages[:per_forward] * count
            and blocks == blocks[:blocks_per_forward] * count
        )
        return count if count and is_alike else 1


def _pairs(pairs: list[tuple[int, int]]) -> Ints:
    return np.asarray(np.array(pairs, np.int64).reshape(-1, 2).T)
