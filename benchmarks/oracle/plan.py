"""What a replay comes to, how outcomes are ranked, and the assignments that a search tries."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from ds_tba.config import Placement
from ds_tba.plan.plan import Limits, Plan, Prediction
from oracle.timeline import Assignment, Bools, Floats, Liveness, OneForward, Timeline

_ALL = Placement.KEEP, Placement.HOST, Placement.NVME, Placement.REMATERIALIZE
_KEEP, _HOST, _NVME, _REMATERIALIZE = map(int, _ALL)
# Shorter differences are the rounding of sums, not time.
SAME_TIME_S = 1e-9


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a replay.

    Attributes:
        assignment: where each storage really was, KEEP for those that do not exist or were refused.
        cost: of a step.
        stalls: of each storage for which compute waited, the seconds.
        order: of the first uses of what was moved.
        prefetch_distance: that was kept to, as in ``Plan``.
    """

    assignment: Assignment
    liveness: Liveness
    cost: Prediction
    stalls: list[tuple[int, float]]
    order: list[int]
    prefetch_distance: tuple[int, ...]

    def gathered(self, one: OneForward) -> Outcome:
        """The same, in terms of one forward: where most forwards have each storage, and the mean of their stalls."""
        placements = self.assignment.placements
        counts = [np.bincount(one.storage[placements == place], minlength=len(one.timeline.storages)) for place in _ALL]
        usual = np.array(_ALL, np.int8)[np.argmax(counts, axis=0)]
        recomputed = np.zeros(len(one.timeline.blocks), bool)
        recomputed[one.block[self.assignment.recomputed]] = True
        return replace(
            self,
            assignment=Assignment(usual, recomputed),
            stalls=[(int(one.storage[index]), seconds / one.timeline.micro_steps) for index, seconds in self.stalls],
            order=list(dict.fromkeys(one.storage[self.order].tolist())),
        )


def assignment_of(plan: Plan) -> Assignment:
    """As arrays, for a replay."""
    placements = np.array(plan.placements, np.int8)
    placements[placements == Placement.RECOMPUTE] = Placement.KEEP
    return Assignment(placements, np.array(plan.recomputed_blocks, bool))


Rank = tuple[bool, bool, float, float, int]


def rank(prediction: Prediction, limits: Limits, kept_step_s: float) -> Rank:
    """The lower the better: within the bounds of host memory and wear, then what ``limits`` ask for.

    Without a budget the lowest peak of those within ``max_step_overhead``, with one the least time of those that fit;
    of equal ones the better other figure, then fewer bytes written. Where none is within, the nearest.
    """
    step_s = round(prediction.step_s / SAME_TIME_S) * SAME_TIME_S
    peak_bytes = prediction.peak_saved_bytes
    refused = (
        prediction.host_bytes > limits.host_budget_bytes or prediction.written_bytes > limits.write_limit_bytes_per_step
    )
    if limits.activation_budget_bytes is None:
        over = prediction.step_s > longest_step_s(limits, kept_step_s)
        first, second = (step_s, peak_bytes) if over else (peak_bytes, step_s)
    else:
        over = peak_bytes > limits.activation_budget_bytes
        first, second = (peak_bytes, step_s) if over else (step_s, peak_bytes)
    return refused, over, first, second, prediction.written_bytes


def is_outside(found: Rank) -> bool:
    """Whether a rank is that of a plan outside of the limits."""
    return found[0] or found[1]


def longest_step_s(limits: Limits, kept_step_s: float) -> float:
    """The step that ``max_step_overhead`` allows."""
    return kept_step_s * (1 + limits.max_step_overhead) + SAME_TIME_S


# The assignments that a search tries.

Change = Callable[[Assignment], Assignment]
MAX_STORAGES_FOR_PAIRS = 16


class Candidates:
    """The assignments that the limits leave open.

    Attributes:
        may_recompute: of each block.
        may_rematerialize: of each storage.
    """

    def __init__(self, timeline: Timeline, limits: Limits) -> None:
        self.may_recompute: Bools = timeline.blocks.recomputable & limits.recompute
        self.may_rematerialize: Bools = timeline.storages.rematerializable & limits.rematerialize
        self._timeline = timeline
        self._host_budget_bytes = limits.host_budget_bytes
        self._to_nvme = timeline.can_go_to_nvme()
        self._to_host = timeline.storages.movable & (timeline.storages.nbytes <= limits.host_budget_bytes)

    def count(self) -> float:
        """How many there are, up to a large number."""
        logarithm = sum(math.log(len(options)) for options in self._options())
        logarithm += float(self.may_recompute.sum()) * math.log(2)
        return math.exp(min(logarithm, 100.0))

    def all(self) -> Iterator[Assignment]:
        """Every one."""
        choices = self._options() + [[0, 1] if may else [0] for may in self.may_recompute]
        count = len(self._timeline.storages)
        for number in range(math.prod(map(len, choices))):
            digits = []
            for options in choices:
                number, digit = divmod(number, len(options))
                digits.append(options[digit])
            yield Assignment(np.array(digits[:count], np.int8), np.array(digits[count:], bool))

    def everything(self, recomputed: list[int], rematerialized: list[int]) -> Assignment:
        """These blocks recomputed and these storages made again from others, all else moved to NVMe."""
        again = np.zeros(len(self._timeline.blocks), bool)
        again[recomputed] = True
        placements = np.where(self._to_nvme, _NVME, _KEEP).astype(np.int8)
        placements[rematerialized] = _REMATERIALIZE
        return Assignment(placements, again)

    def late_to_host(self, moved: Assignment) -> Assignment:
        """Fill the host budget with the storages packed last: they come back first, when the drive has least time."""
        placements = moved.placements.copy()
        liveness = self._timeline.liveness(moved.recomputed)
        is_open = liveness.exists & ~liveness.dropped & (placements != _REMATERIALIZE)
        late = np.flatnonzero(self._to_host & is_open)[::-1]
        held = np.cumsum(self._timeline.storages.nbytes[late])
        placements[late[held <= self._host_budget_bytes]] = _HOST
        return Assignment(placements, moved.recomputed)

    def changes(self) -> Iterator[Change]:
        """Changes of runs of neighbours, long runs first."""
        storages, blocks = len(self._timeline.storages), len(self._timeline.blocks)
        for start, end in _runs(blocks):
            for again in (True, False):
                yield partial(self._with_blocks, start=start, end=end, again=again)
            yield partial(self._with_blocks_moved, start=start, end=end)
            if self.may_rematerialize.any():
                yield partial(self._with_blocks_rematerialized, start=start, end=end)
        for start, end in _runs(storages):
            for place in self._places():
                yield partial(self._with_run, start=start, end=end, place=place)
        if storages <= MAX_STORAGES_FOR_PAIRS:
            yield from self._pairs(storages)

    def _options(self) -> list[list[int]]:
        return [
            [_KEEP] + [_HOST] * bool(host) + [_NVME] * bool(nvme) + [_REMATERIALIZE] * bool(again)
            for host, nvme, again in zip(self._to_host, self._to_nvme, self.may_rematerialize, strict=True)
        ]

    def _places(self) -> list[int]:
        allowed = {_NVME: self._to_nvme, _HOST: self._to_host, _REMATERIALIZE: self.may_rematerialize}
        return [place for place, which in allowed.items() if which.any()] + [_KEEP]

    def _pairs(self, storages: int) -> Iterator[Change]:
        """Two storages at once, as one in another's stead."""
        places = self._places()
        for one in range(storages):
            for other in range(one):
                for place in places:
                    for instead in places:
                        yield lambda old, x=(one, place), y=(other, instead): self._with_run(  # type: ignore[misc]
                            self._with_run(old, x[0], x[0] + 1, x[1]), y[0], y[0] + 1, y[1]
                        )

    def _with_run(self, old: Assignment, start: int, end: int, place: int) -> Assignment:
        placements = old.placements.copy()
        allowed = {_HOST: self._to_host, _NVME: self._to_nvme, _REMATERIALIZE: self.may_rematerialize}.get(place)
        placements[start:end][... if allowed is None else allowed[start:end]] = place
        return Assignment(placements, old.recomputed)

    def _with_blocks(self, old: Assignment, start: int, end: int, again: bool) -> Assignment:
        recomputed = old.recomputed.copy()
        recomputed[start:end] = again & self.may_recompute[start:end]
        return Assignment(old.placements, recomputed)

    def _with_blocks_moved(self, old: Assignment, start: int, end: int) -> Assignment:
        """Blocks not recomputed, and their storages moved instead: each of the two alone may make it worse."""
        new = self._with_blocks(old, start, end, False)
        owner, placements = self._timeline.storages.owner, old.placements.copy()
        placements[(owner >= start) & (owner < end) & self._to_nvme] = _NVME
        return Assignment(placements, new.recomputed)

    def _with_blocks_rematerialized(self, old: Assignment, start: int, end: int) -> Assignment:
        """Blocks not recomputed, and of their storages made again what can be."""
        new = self._with_blocks(old, start, end, False)
        owner, placements = self._timeline.storages.owner, old.placements.copy()
        placements[(owner >= start) & (owner < end) & self.may_rematerialize] = _REMATERIALIZE
        return Assignment(placements, new.recomputed)


def _runs(count: int) -> Iterator[tuple[int, int]]:
    """Halves of the whole, quarters, ..., single ones."""
    size = count
    while size >= 1:
        yield from ((start, min(start + size, count)) for start in range(0, count, size))
        if size == 1:
            return
        size = -(-size // 2)


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
        storages, resources = timeline.storages, timeline.resources
        nowhere = np.full(len(storages), np.inf)
        return cls(
            storages.first_backward_use_s - storages.last_forward_use_s,
            storages.nbytes / resources.copy_out_bytes_per_s,
            storages.nbytes / resources.copy_in_bytes_per_s,
            storages.padded_bytes / resources.write_bytes_per_s if resources.paths else nowhere,
            storages.padded_bytes / resources.read_bytes_per_s if resources.paths else nowhere,
        )

    @property
    def nvme_s(self) -> Floats:
        """There and back over copy engine and drive."""
        return self.copy_out_s + self.write_s + self.read_s + self.copy_in_s

    @property
    def host_s(self) -> Floats:
        """There and back over the copy engine."""
        return self.copy_out_s + self.copy_in_s


def make_plan(planner: str, outcome: Outcome) -> Plan:
    """The plan of a replay's assignment."""
    places = np.where(outcome.liveness.dropped, int(Placement.RECOMPUTE), outcome.assignment.placements)
    return Plan(
        planner,
        tuple(map(list(Placement).__getitem__, places.tolist())),
        tuple(outcome.assignment.recomputed.tolist()),
        outcome.prefetch_distance,
        outcome.cost,
    )
