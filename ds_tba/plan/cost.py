"""What each placement costs in each resource, with nothing else in its way."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ds_tba.planner.timeline import Floats, Ints, Timeline


@dataclass(frozen=True, slots=True)
class StorageCosts:
    """Columns, one entry for each storage.

    Attributes:
        idle_s: between forward's last and backward's first use.
        copy_out_s, copy_in_s: of either tier, on the link to the host.
        write_s, read_s: of NVMe, on the drives; infinite without any.
    """

    idle_s: Floats
    copy_out_s: Floats
    copy_in_s: Floats
    write_s: Floats
    read_s: Floats

    @classmethod
    def of(cls, timeline: Timeline) -> StorageCosts:
        """Those of every storage."""
        resources, nowhere = timeline.resources, np.full(timeline.storages, np.inf)
        return cls(
            timeline.first_backward_use_s - timeline.last_forward_use_s,
            timeline.nbytes / resources.copy_out_bytes_per_s,
            timeline.nbytes / resources.copy_in_bytes_per_s,
            timeline.padded_bytes / resources.write_bytes_per_s if resources.paths else nowhere,
            timeline.padded_bytes / resources.read_bytes_per_s if resources.paths else nowhere,
        )

    @property
    def nvme_s(self) -> Floats:
        """There and back over copy engine and drive."""
        return self.copy_out_s + self.write_s + self.read_s + self.copy_in_s

    @property
    def host_s(self) -> Floats:
        """There and back over the copy engine."""
        return self.copy_out_s + self.copy_in_s


@dataclass(frozen=True, slots=True)
class BlockCosts:
    """Columns, one entry for each block.

    Attributes:
        compute_s: of one more forward.
        freed_bytes: what is dropped where it alone is recomputed.
    """

    compute_s: Floats
    freed_bytes: Ints

    @classmethod
    def of(cls, timeline: Timeline) -> BlockCosts:
        """Those of every block."""
        own = timeline.owner >= 0
        freed = np.bincount(timeline.owner[own], timeline.nbytes[own], minlength=timeline.blocks)
        pairs = np.unique(np.stack([timeline.input_storage, timeline.input_block]), axis=1)
        is_own = timeline.owner[pairs[0]] == pairs[1]
        freed -= np.bincount(pairs[1][is_own], timeline.nbytes[pairs[0][is_own]], minlength=timeline.blocks)
        return cls(timeline.recompute_s, freed.astype(np.int64))
