"""What lies where at a time of a replay, and the most of it: device memory and the host tier, in bytes."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ds_tba.plan.placement import Placement, Places
from ds_tba.planner.timeline import Bools, Existence, Floats, Ints, Timeline


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
