"""A trace as arrays, also at a coarser grain: what is there under an assignment, and when it is needed."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ds_tba.config import IO_ALIGNMENT_BYTES
from ds_tba.plan.trace import OUTSIDE, Resources, Trace

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
        placements: of each storage if it exists; never RECOMPUTE, which follows from ``recomputed``. REMATERIALIZE is
            as KEEP where a source does not exist or is dropped.
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
        freed_s: no longer needed by anyone.
        used: needed in backward at all.
    """

    exists: Bools
    dropped: Bools
    need_s: Floats
    freed_s: Floats
    used: Bools


@dataclass(frozen=True, slots=True)
class StorageColumns:
    """One entry for each storage.

    Attributes:
        padded_bytes: sizes as they count in staging and on the drive.
        owner: the block whose recomputation makes a storage again; -1 where several blocks saved it, or none.
        unsaved: nobody saves it unless a block that reads it is recomputed.
        made_again_s: how far into that recomputation; 0 without an owner.
        rematerialize_s: to make a storage again from its sources; not a number where that cannot be.
        used: by backward.
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
    rematerialize_s: Floats
    used: Bools

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
            np.array([row.rematerialize_s for row in rows], float),
            np.array([row.is_used for row in rows], bool),
        )

    def __len__(self) -> int:
        return len(self.nbytes)

    @property
    def rematerializable(self) -> Bools:
        """Which can be made again from their sources, where these are there."""
        return ~np.isnan(self.rematerialize_s)

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
            np.add.reduceat(self.rematerialize_s, firsts),
            self.used[firsts],
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


class Sources(NamedTuple):
    """What storages can be made again of: one entry for each pair, by storage."""

    storage: Ints
    source: Ints

    @classmethod
    def of(cls, trace: Trace) -> Sources:
        """Those of all storages."""
        pairs = [
            (index, source)
            for index, row in enumerate(trace.storages)
            if row.rematerialize_s is not None
            for source in dict.fromkeys(row.sources)
        ]
        return cls(*np.array(pairs, np.int64).reshape(-1, 2).T)

    def first(self, count: int) -> Sources:
        """Those of the first so many storages."""
        return Sources(*(column[self.storage < count] for column in self))

    def grouped(self, group: Ints) -> Sources:
        """The sources of groups; what is made within a group is made with it."""
        storage, source = np.unique(group[np.stack(self)], axis=1)
        return Sources(storage[storage != source], source[storage != source])


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
    forwards: tuple[int, ...]
    sources: Sources

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
            Sources.of(trace),
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
            dropped = np.zeros(len(storages), bool)
            return Liveness(~storages.unsaved, dropped, storages.first_backward_use_s, storages.freed_s, storages.used)
        is_input = np.zeros(len(storages), bool)
        is_input[blocks.inputs.storage[recomputed[blocks.inputs.block]]] = True
        dropped = (storages.owner >= 0) & recomputed[storages.owner] & ~is_input
        need_s = storages.first_backward_use_s.copy()
        read = recomputed[blocks.readers.block]
        np.minimum.at(need_s, blocks.readers.storage[read], blocks.backward_start_s[blocks.readers.block[read]])
        need_s = np.maximum(need_s, storages.last_forward_use_s)
        used = storages.used.copy()
        used[blocks.readers.storage[read]] = True
        return Liveness(~storages.unsaved | is_input, dropped, need_s, storages.freed_s, used)

    def rematerializable(self, liveness: Liveness) -> Bools:
        """Which storages can be made again from their sources."""
        is_there = liveness.exists & ~liveness.dropped
        found = self.storages.rematerializable & is_there
        found[self.sources.storage[~is_there[self.sources.source]]] = False
        return found

    def rematerializing(self, liveness: Liveness, again: Bools) -> Liveness:
        """The same where these are made again: sources are needed when the first of what is made of them is."""
        left_s = self.storages.last_forward_use_s.tolist()
        need_s, freed_s, used = liveness.need_s.tolist(), liveness.freed_s.tolist(), liveness.used.tolist()
        is_again = again[self.sources.storage]
        pairs = zip(self.sources.storage[is_again].tolist(), self.sources.source[is_again].tolist(), strict=True)
        for made, source in reversed(list(pairs)):  # a source comes before what is made of it
            need_s[source] = max(left_s[source], min(need_s[source], need_s[made]))
            freed_s[source] = max(freed_s[source], need_s[made])
            used[source] |= used[made]
        return replace(liveness, need_s=np.array(need_s), freed_s=np.array(freed_s), used=np.array(used, bool))

    def recomputing_within(self, budget_bytes: int | None) -> Timeline:
        """The same, where blocks that alone make more again than a budget are not recomputed if that can be moved."""
        if budget_bytes is None:
            return self
        nbytes = self.storages.nbytes
        staying = self.dropped_bytes(np.where(self.can_go_to_nvme(), 0, nbytes))
        is_better_moved = (self.dropped_bytes(nbytes) > budget_bytes) & (staying <= budget_bytes)
        return replace(self, blocks=replace(self.blocks, recomputable=self.blocks.recomputable & ~is_better_moved))

    def dropped_bytes(self, nbytes: Ints) -> Ints:
        """Of each block that is recomputed alone: what it does not save, and makes again all at once.

        Args:
            nbytes: of each storage.
        """
        storages, inputs, count = self.storages, self.blocks.inputs.unique(), len(self.blocks)
        own = storages.owner >= 0
        found = np.bincount(storages.owner[own], nbytes[own], minlength=count)
        is_own = storages.owner[inputs.storage] == inputs.block
        found -= np.bincount(inputs.block[is_own], nbytes[inputs.storage[is_own]], minlength=count)
        return found.astype(np.int64)

    def without_rematerialization(self) -> Timeline:
        """The same where nothing can be made again from other storages."""
        never = np.full(len(self.storages), np.nan)
        return replace(self, storages=replace(self.storages, rematerialize_s=never), sources=self.sources.first(0))

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
            self.storages.used.reshape(count, storages),
            self.blocks.recomputable.reshape(count, blocks),
            self.storages.rematerializable.reshape(count, storages),
        )
        starts = np.arange(count) * storages
        if not np.array_equal(self.forwards, starts) or any((one != one[0]).any() for one in alike):
            return None
        sources = self.sources.first(storages)
        if not np.array_equal(
            np.stack(self.sources), np.concatenate([np.stack(sources) + start for start in starts], axis=1)
        ):
            return None
        first = replace(
            self,
            storages=self.storages.first(storages),
            blocks=self.blocks.first(blocks, storages),
            end_s=self.end_s / count,
            micro_steps=self.micro_steps * count,
            forwards=(),
            sources=sources,
        )
        return OneForward(first, np.tile(np.arange(storages), count), np.tile(np.arange(blocks), count))

    def grouped(self, max_groups: int) -> tuple[Timeline, Ints]:
        """Neighbours merged until about ``max_groups`` are left, and the group of each storage.

        Only storages that the same blocks save, read and own are merged, and that can be made again all or none.
        """
        if len(self.storages) <= max_groups:
            return self, np.arange(len(self.storages))
        group = self._groups(max_groups)
        blocks = self.blocks
        merged = replace(
            self,
            storages=self.storages.merged(np.flatnonzero(np.diff(group, prepend=-1))),
            blocks=replace(blocks, inputs=blocks.inputs.grouped(group), readers=blocks.readers.grouped(group)),
            sources=self.sources.grouped(group),
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
        alike = (storages.owner, storages.movable, storages.unsaved, storages.rematerializable, storages.used)
        for column in (*alike, readers, inputs, part):
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
