"""A trace as arrays: what replays and searches work on, also at a coarser grain."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ds_tba.plan.placement import Assignment
from ds_tba.planner.trace import OUTSIDE, Resources, Trace

ALIGNMENT_BYTES = 4096
# A group may be no larger than this part of staging, or it could not flow through it as its members do.
GROUP_PART_OF_STAGING = 0.125

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
            -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES,
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
        wanted = min(wanted, self.resources.staging_bytes * GROUP_PART_OF_STAGING)
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
