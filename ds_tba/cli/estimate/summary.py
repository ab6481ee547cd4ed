"""The summary of a trace: what is saved where, and what each placement would make of the peak, the time and the wear.

Pure.

[Note: What holds the peak] Where offload lowers the peak little, the replay is repeated without each group in turn. The
group without which the peak falls most holds the peak.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from typing import Any

import numpy as np

from ds_tba.config import OffloadConfig, Placement
from ds_tba.planner.plan import Limits, Plan, Prediction, is_outside, rank
from ds_tba.planner.replay import replay
from ds_tba.planner.search import adaptive
from ds_tba.planner.timeline import Assignment, Timeline
from ds_tba.planner.trace import OUTSIDE, Trace
from ds_tba.telemetry.drive_health import DAY_S, life_days, write_limit_bytes_per_step

# Fractions of keep's peak whose cost as a budget is shown.
BUDGET_FRACTIONS = (0.75, 0.5, 0.25)
# A smaller reduction of the peak does not count as one.
MIN_GAIN = 0.1

_LAST_NUMBER = re.compile(r"\d+(?!.*\d)")


@dataclass(frozen=True, slots=True)
class Group:
    """Neighbouring passes through blocks that save equally much, or what one module outside of blocks saves.

    Attributes:
        name: the path, with a range of numbers for several.
        count: number of passes; 0 outside of blocks.
        nbytes, movable_bytes: of one pass; the second may leave device memory.
        forward_s: of one pass.
        members: indices of the storages of all passes.
    """

    name: str
    count: int
    nbytes: int
    movable_bytes: int
    forward_s: float
    members: tuple[int, ...]

    @property
    def total_bytes(self) -> int:
        """Bytes of all passes."""
        return self.nbytes * max(1, self.count)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "name": self.name,
            "count": self.count,
            "saved_bytes": self.nbytes,
            "movable_bytes": self.movable_bytes,
            "forward_s": self.forward_s,
        }


@dataclass(frozen=True, slots=True)
class BandwidthNeed:
    """The bandwidth at which offload would take no time, if nothing else were in the way.

    Attributes:
        moved_bytes: all that may be moved.
        write_s: from the first save to the end of forward.
        read_s: the rest of the micro-step.
    """

    moved_bytes: int
    write_s: float
    read_s: float

    @property
    def write_bytes_per_s(self) -> float:
        """Rate that has written everything when forward ends."""
        return self.moved_bytes / self.write_s if self.write_s else 0.0

    @property
    def read_bytes_per_s(self) -> float:
        """Rate that has read everything when backward ends."""
        return self.moved_bytes / self.read_s if self.read_s else 0.0


@dataclass(frozen=True, slots=True)
class Wear:
    """Wear of the drives.

    Attributes:
        life_days: at the rating; None where the rating is not known or nothing is written.
    """

    written_bytes_per_step: int
    steps_per_day: float
    written_bytes_per_day: float
    life_days: float | None

    @classmethod
    def of(cls, cost: Prediction, rated_endurance_tbw: float | None) -> Wear:
        """The wear of a day of such steps."""
        steps = DAY_S / cost.step_s if cost.step_s else 0.0
        per_day = cost.written_bytes * steps
        return cls(cost.written_bytes, steps, per_day, life_days(rated_endurance_tbw, per_day))


@dataclass(frozen=True, slots=True)
class Budgeted:
    """A plan of least time within a budget.

    Attributes:
        fraction: of keep's peak.
        budget_bytes: for ``activation_budget_bytes``.
        is_within: whether the plan keeps to the budget and the other limits.
    """

    fraction: float
    budget_bytes: int
    cost: Prediction
    is_within: bool


@dataclass(frozen=True, slots=True)
class ChosenPlan:
    """The planner's plan and the limits that it was made for.

    Attributes:
        is_within: whether the plan keeps to the limits.
        saved_bytes: by placement.
    """

    plan: Plan
    limits: Limits
    is_within: bool
    saved_bytes: dict[str, int]


@dataclass(frozen=True, slots=True)
class Summary:
    """The expected effect of each placement on training.

    Attributes:
        breakdown: saved memory by group; see :func:`breakdown_of`.
        predictions: of ``keep``, ``rematerialize`` (everything that can be, and no drive; absent where the config turns
            it off), ``recompute``, ``offload`` (everything to NVMe) and ``plan`` (the planner's).
        chosen: the planner's plan.
        budgets: the cost of smaller budgets.
        peak_holder: the group that holds the peak under offload, and the bytes by which the peak falls without it; see
            [Note: What holds the peak].
        bandwidth: that offload needs.
        wear: under ``offload`` and ``plan``.
        too_large_bytes: saved in storages above ``io.staging_bytes``, which stay in device memory.
        made_again_bytes: by op, under ``rematerialize`` and ``plan``, in one micro-step.
    """

    breakdown: list[Group]
    predictions: dict[str, Prediction]
    chosen: ChosenPlan
    budgets: list[Budgeted]
    peak_holder: tuple[str, int] | None
    bandwidth: BandwidthNeed
    wear: dict[str, Wear]
    too_large_bytes: int
    made_again_bytes: dict[str, dict[str, int]]

    @property
    def offload_gain(self) -> float:
        """The fraction of keep's peak that offload takes away."""
        return _gain(self.predictions, "offload")

    @property
    def plan_gain(self) -> float:
        """The fraction of keep's peak that the plan takes away."""
        return _gain(self.predictions, "plan")

    @property
    def rematerialize_gain(self) -> float:
        """The fraction of keep's peak that rematerialization alone takes away; 0 where it is turned off."""
        return _gain(self.predictions, "rematerialize") if "rematerialize" in self.predictions else 0.0

    @property
    def pays(self) -> bool:
        """Whether the plan lowers the peak noticeably, within the limits, with bytes on NVMe or in host memory."""
        moved_bytes = self.chosen.saved_bytes.get("nvme", 0) + self.chosen.saved_bytes.get("host", 0)
        return self.chosen.is_within and self.plan_gain >= MIN_GAIN and moved_bytes > 0

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        holder = self.peak_holder
        return {
            "groups": [group.to_dict() for group in self.breakdown],
            "predictions": {name: asdict(cost) for name, cost in self.predictions.items()},
            "plan_bytes": self.chosen.saved_bytes,
            "recomputed_blocks": sum(self.chosen.plan.recomputed_blocks),
            "is_within_limits": self.chosen.is_within,
            "offload_gain": self.offload_gain,
            "plan_gain": self.plan_gain,
            "pays": self.pays,
            "budgets": [asdict(one) for one in self.budgets],
            "peak_holder": None if holder is None else {"name": holder[0], "bytes": holder[1]},
            "needed_write_bytes_per_s": self.bandwidth.write_bytes_per_s,
            "needed_read_bytes_per_s": self.bandwidth.read_bytes_per_s,
            "wear": {name: asdict(one) for name, one in self.wear.items()},
            "larger_than_staging_bytes": self.too_large_bytes,
            **({"made_again_bytes": self.made_again_bytes} if self.made_again_bytes else {}),
        }


def summarize(trace: Trace, config: OffloadConfig, ops: Sequence[str] = ()) -> Summary:
    """Replay a trace under each placement, and plan for it under the limits of a config.

    Args:
        ops: of each storage, the op that could make it again.

    Raises:
        ConfigError: a life is asked for and the drives' rating is not known.
    """
    timeline = Timeline.of(trace)
    rated = config.ssd.rated_endurance_tbw
    limits = Limits.of(config, write_limit_bytes_per_step(rated, config.ssd.min_life_days, trace.step_s))
    plan = adaptive(trace, limits)
    predictions = {"keep": replay(timeline, timeline.kept).cost}
    made_again_bytes = {}
    if limits.rematerialize:
        again = replay(timeline, _all_again(timeline))
        predictions["rematerialize"] = again.cost
        made_again_bytes = {
            "rematerialize": _bytes_by_op(trace, ops, again.assignment.placements.tolist()),
            "plan": _bytes_by_op(trace, ops, plan.placements),
        }
    predictions |= {
        "recompute": replay(timeline, _all_recomputed(timeline)).cost,
        "offload": replay(timeline, _everything(timeline)).cost,
        "plan": plan.prediction,
    }
    breakdown = breakdown_of(trace)
    peak_holder = None
    if _gain(predictions, "offload") < MIN_GAIN:
        peak_holder = _peak_holder(trace, breakdown, predictions["offload"].peak_saved_bytes)
    too_large = timeline.movable & ~timeline.to_nvme
    return Summary(
        breakdown,
        predictions,
        ChosenPlan(plan, limits, _is_within(plan.prediction, limits, trace.step_s), _bytes_by_placement(trace, plan)),
        [_budgeted(trace, limits, part, predictions["keep"].peak_saved_bytes) for part in BUDGET_FRACTIONS],
        peak_holder,
        _bandwidth_need(trace, timeline),
        {name: Wear.of(predictions[name], rated) for name in ("offload", "plan")},
        int(timeline.nbytes[too_large & timeline.saved].sum()),
        made_again_bytes,
    )


def _budgeted(trace: Trace, limits: Limits, fraction: float, kept_bytes: int) -> Budgeted:
    budget_bytes = int(fraction * kept_bytes)
    limits = replace(limits, activation_budget_bytes=budget_bytes)
    cost = adaptive(trace, limits).prediction
    return Budgeted(fraction, budget_bytes, cost, _is_within(cost, limits, trace.step_s))


def _is_within(cost: Prediction, limits: Limits, kept_step_s: float) -> bool:
    return not is_outside(rank(cost, limits, kept_step_s))


def _everything(timeline: Timeline) -> Assignment:
    """All that the store would take, on NVMe."""
    placements = np.where(timeline.to_nvme, int(Placement.NVME), int(Placement.KEEP)).astype(np.int8)
    return Assignment(placements, timeline.kept.recomputed)


def _all_recomputed(timeline: Timeline) -> Assignment:
    return Assignment(timeline.kept.placements, timeline.recomputable)


def _all_again(timeline: Timeline) -> Assignment:
    """Everything made again that can be, nothing moved."""
    again = timeline.rematerializable
    placements = np.where(again, int(Placement.REMATERIALIZE), int(Placement.KEEP)).astype(np.int8)
    return Assignment(placements, timeline.kept.recomputed)


def _bytes_by_op(trace: Trace, ops: Sequence[str], placements: Sequence[int]) -> dict[str, int]:
    """Of what is made again, the largest first."""
    found: Counter[str] = Counter()
    for storage, op, placement in zip(trace.storages, ops, placements, strict=False):
        if placement == Placement.REMATERIALIZE:
            found[op] += storage.nbytes
    return dict(found.most_common())


def _gain(predictions: dict[str, Prediction], name: str) -> float:
    kept_bytes = predictions["keep"].peak_saved_bytes
    return 1 - predictions[name].peak_saved_bytes / kept_bytes if kept_bytes else 0.0


def _bytes_by_placement(trace: Trace, plan: Plan) -> dict[str, int]:
    found: Counter[str] = Counter()
    for storage, placement in zip(trace.storages, plan.placements, strict=True):
        if storage.blocks:
            found[placement.word] += storage.nbytes
    return dict(found)


def _peak_holder(trace: Trace, groups: list[Group], peak_bytes: int) -> tuple[str, int] | None:
    falls = []
    for group in groups:
        members = set(group.members)
        storages = tuple(
            replace(storage, nbytes=1) if index in members else storage for index, storage in enumerate(trace.storages)
        )
        timeline = Timeline.of(replace(trace, storages=storages))
        without = replay(timeline, _everything(timeline)).cost
        falls.append((peak_bytes - without.peak_saved_bytes, group.name))
    if not falls:
        return None
    fall_bytes, name = max(falls, key=lambda fall: fall[0])
    return (name, fall_bytes) if fall_bytes > 0 else None


def _bandwidth_need(trace: Trace, timeline: Timeline) -> BandwidthNeed:
    moved = timeline.movable & timeline.saved
    if not moved.any():
        return BandwidthNeed(0, 0.0, 0.0)
    starts_s = float(timeline.pack_s[moved].min())
    backward_s = float(timeline.used_s[moved].min())
    return BandwidthNeed(int(timeline.nbytes[moved].sum()), backward_s - starts_s, trace.end_s - backward_s)


# ---- the saved-memory breakdown -------------------------------------------------------------------------------------


def breakdown_of(trace: Trace) -> list[Group]:
    """Saved memory of blocks, in the order of forward; then of modules outside of blocks, the largest first.

    A storage that several blocks save counts in the first.
    """
    inside: list[list[int]] = [[] for _ in trace.blocks]
    outside: dict[str, list[int]] = {}
    for index, storage in enumerate(trace.storages):
        if storage.blocks and storage.blocks[0] == OUTSIDE:
            outside.setdefault(storage.module, []).append(index)
        elif storage.blocks:
            inside[storage.blocks[0]].append(index)
    others = [
        Group(module or "the model itself", 0, *_sizes(trace, own), 0.0, tuple(own)) for module, own in outside.items()
    ]
    return [*_block_groups(trace, inside), *sorted(others, key=lambda group: -group.nbytes)]


def _block_groups(trace: Trace, members: list[list[int]]) -> Iterator[Group]:
    def alike(number: int) -> tuple[str, int, int]:
        return _LAST_NUMBER.sub("*", trace.blocks[number].module), *_sizes(trace, members[number])

    for (_, nbytes, movable_bytes), run in groupby(range(len(trace.blocks)), alike):
        numbers = list(run)
        paths = [trace.blocks[number].module for number in numbers]
        forward_s = sum(trace.blocks[number].forward_s for number in numbers) / len(numbers)
        own = tuple(index for number in numbers for index in members[number])
        yield Group(_range(paths), len(numbers), nbytes, movable_bytes, forward_s, own)


def _range(paths: Sequence[str]) -> str:
    """``layers.3 .. layers.5`` as ``layers.3-5``."""
    first, last = paths[0], paths[-1]
    number = _LAST_NUMBER.search(last)
    if first == last or number is None:
        return first
    return _LAST_NUMBER.sub(lambda found: f"{found[0]}-{number[0]}", first)


def _sizes(trace: Trace, members: Sequence[int]) -> tuple[int, int]:
    """Bytes of all these storages, and of those that may leave device memory."""
    storages = [trace.storages[index] for index in members]
    return sum(one.nbytes for one in storages), sum(one.nbytes for one in storages if one.is_movable)
