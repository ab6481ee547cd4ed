"""Where a saved storage lives between forward and backward, and the state of a whole micro-step under that choice."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

Places = npt.NDArray[np.int8]


class Placement(IntEnum):
    """The four choices. The numbers are for arrays of them only."""

    KEEP = 0
    HOST = 1
    NVME = 2
    RECOMPUTE = 3

    @property
    def word(self) -> str:
        """As in the config and in reports."""
        return self.name.lower()


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
