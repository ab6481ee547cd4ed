"""What the placements would make of a trace: the peak, the time, the wear, and what stands in offload's way. Pure.

[Note: What holds the peak] Where offload lowers the peak little, each group is taken out of the replay in its turn: the
one without which the peak falls most is what holds it.
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
from ds_tba.planner.plan import Limits, Plan, Prediction, longest_step_s
from ds_tba.planner.search import adaptive
from ds_tba.planner.search import recompute as plan_recompute
from ds_tba.planner.simulator import replay
from ds_tba.planner.timeline import Assignment, StorageColumns, Timeline
from ds_tba.planner.trace import OUTSIDE, StorageTrace, Trace
from ds_tba.telemetry.drive_health import DAY_S, life_days, write_limit_bytes_per_step

# Of keep's peak: the budgets for which it is told what they would cost.
BUDGETS = (0.75, 0.5, 0.25)
# A peak that is lower by less than this part has not moved to speak of.
MIN_GAIN = 0.1


@dataclass(frozen=True, slots=True)
class Need:
    """The bandwidth at which offload would cost no time, had it nothing else in its way.

    Attributes:
        moved_bytes: all that may be moved.
        write_s, read_s: from the first save to the end of forward, and the rest of the micro-step.
    """

    moved_bytes: int
    write_s: float
    read_s: float

    @property
    def write_bytes_per_s(self) -> float:
        """To have written everything when forward ends."""
        return self.moved_bytes / self.write_s if self.write_s else 0.0

    @property
    def read_bytes_per_s(self) -> float:
        """To have read everything by the time backward ends."""
        return self.moved_bytes / self.read_s if self.read_s else 0.0


@dataclass(frozen=True, slots=True)
class Wear:
    """What writing costs the drives.

    Attributes:
        life_days: at the rating, if it is known and anything is written.
    """

    written_bytes_per_step: int
    steps_per_day: float
    written_bytes_per_day: float
    life_days: float | None


@dataclass(frozen=True, slots=True)
class Budgeted:
    """A plan of least time within a budget.

    Attributes:
        fraction: of keep's peak.
        budget_bytes: for ``activation_budget_bytes``.
        is_within: the plan keeps to it.
    """

    fraction: float
    budget_bytes: int
    cost: Prediction
    is_within: bool


@dataclass(frozen=True, slots=True)
class Outlook:
    """What to expect.

    Attributes:
        costs: of ``keep``, ``recompute``, ``offload`` (everything to NVMe) and ``plan`` (the planner's).
        plan: the planner's.
        plan_bytes: saved bytes by placement.
        is_within: the plan keeps the limits.
        limits: what it was made for.
        budgets: what plans of least time within parts of keep's peak would cost.
        holder: what holds the peak under offload, and by how many bytes it falls without; see [Note: What holds the
            peak].
        too_large_bytes: saved in storages above ``io.staging_bytes``, which stay.
    """

    groups: list[Group]
    costs: dict[str, Prediction]
    plan: Plan
    plan_bytes: dict[str, int]
    limits: Limits
    is_within: bool
    budgets: list[Budgeted]
    holder: tuple[str, int] | None
    need: Need
    wear: dict[str, Wear]
    too_large_bytes: int

    @property
    def offload_gain(self) -> float:
        """The part of keep's peak that offload takes away."""
        return _gain(self.costs["keep"], self.costs["offload"])

    @property
    def plan_gain(self) -> float:
        """The part of keep's peak that the plan takes away."""
        return _gain(self.costs["keep"], self.costs["plan"])

    @property
    def pays(self) -> bool:
        """Whether the plan lowers the peak to speak of, within the limits, with bytes on NVMe or host memory."""
        moved_bytes = self.plan_bytes.get("nvme", 0) + self.plan_bytes.get("host", 0)
        return self.is_within and self.plan_gain >= MIN_GAIN and moved_bytes > 0

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "groups": [
                {
                    "name": group.name,
                    "count": group.count,
                    "saved_bytes": group.nbytes,
                    "movable_bytes": group.movable_bytes,
                    "forward_s": group.forward_s,
                }
                for group in self.groups
            ],
            "predictions": {name: asdict(cost) for name, cost in self.costs.items()},
            "plan_bytes": self.plan_bytes,
            "recomputed_blocks": sum(self.plan.recomputed_blocks),
            "is_within_limits": self.is_within,
            "offload_gain": self.offload_gain,
            "plan_gain": self.plan_gain,
            "pays": self.pays,
            "budgets": [asdict(one) for one in self.budgets],
            "peak_holder": None if self.holder is None else {"name": self.holder[0], "bytes": self.holder[1]},
            "needed_write_bytes_per_s": self.need.write_bytes_per_s,
            "needed_read_bytes_per_s": self.need.read_bytes_per_s,
            "wear": {name: asdict(one) for name, one in self.wear.items()},
            "larger_than_staging_bytes": self.too_large_bytes,
        }


def outlook(trace: Trace, config: OffloadConfig) -> Outlook:
    """What the placements would make of a trace under a config's limits."""
    timeline = Timeline.of(trace)
    limits = limits_of(config, trace.step_s)
    plan, everything = adaptive(trace, limits), _everything(timeline)
    costs = {
        "keep": replay(timeline, timeline.kept).cost,
        "recompute": plan_recompute(trace, limits).prediction,
        "offload": replay(timeline, everything).cost,
        "plan": plan.prediction,
    }
    groups = groups_of(trace)
    rated = config.ssd.rated_endurance_tbw
    holder = None
    if _gain(costs["keep"], costs["offload"]) < MIN_GAIN:
        holder = _holder(trace, groups, costs["offload"].peak_saved_bytes)
    too_large = timeline.storages.movable & ~timeline.can_go_to_nvme()
    return Outlook(
        groups,
        costs,
        plan,
        _bytes_by_placement(trace, plan),
        limits,
        _is_within(plan.prediction, limits, trace.step_s),
        [_budgeted(trace, limits, part, costs["keep"].peak_saved_bytes) for part in BUDGETS],
        holder,
        _need(trace, timeline.storages),
        {name: wear_of(costs[name], rated) for name in ("offload", "plan")},
        int(timeline.storages.nbytes[too_large & ~timeline.storages.unsaved].sum()),
    )


def _budgeted(trace: Trace, limits: Limits, fraction: float, kept_bytes: int) -> Budgeted:
    budget_bytes = int(fraction * kept_bytes)
    limits = replace(limits, activation_budget_bytes=budget_bytes)
    cost = adaptive(trace, limits).prediction
    return Budgeted(fraction, budget_bytes, cost, _is_within(cost, limits, trace.step_s))


def limits_of(config: OffloadConfig, step_s: float) -> Limits:
    """What a plan may cost under a config.

    Raises:
        ConfigError: a life is asked for and the drives' rating is not known.
    """
    return Limits(
        config.max_step_overhead,
        config.activation_budget_bytes,
        config.host_budget_bytes,
        write_limit_bytes_per_step(config.ssd.rated_endurance_tbw, config.ssd.min_life_days, step_s),
        config.recompute,
    )


def wear_of(cost: Prediction, rated_endurance_tbw: float | None) -> Wear:
    """What a day of such steps writes."""
    steps = DAY_S / cost.step_s if cost.step_s else 0.0
    per_day = cost.written_bytes * steps
    return Wear(cost.written_bytes, steps, per_day, life_days(rated_endurance_tbw, per_day))


def _everything(timeline: Timeline) -> Assignment:
    """All that the store would take to NVMe."""
    placements = np.where(timeline.can_go_to_nvme(), int(Placement.NVME), int(Placement.KEEP)).astype(np.int8)
    return Assignment(placements, timeline.kept.recomputed)


def _gain(keep: Prediction, other: Prediction) -> float:
    if not keep.peak_saved_bytes:
        return 0.0
    return 1 - other.peak_saved_bytes / keep.peak_saved_bytes


def _is_within(cost: Prediction, limits: Limits, kept_step_s: float) -> bool:
    if cost.host_bytes > limits.host_budget_bytes or cost.written_bytes > limits.write_limit_bytes_per_step:
        return False
    if limits.activation_budget_bytes is not None:
        return cost.peak_saved_bytes <= limits.activation_budget_bytes
    return cost.step_s <= longest_step_s(limits, kept_step_s)


def _bytes_by_placement(trace: Trace, plan: Plan) -> dict[str, int]:
    found: Counter[str] = Counter()
    for storage, placement in zip(trace.storages, plan.placements, strict=True):
        if storage.blocks:
            found[placement.word] += storage.nbytes
    return dict(found)


def _holder(trace: Trace, groups: list[Group], peak_bytes: int) -> tuple[str, int] | None:
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


def _need(trace: Trace, storages: StorageColumns) -> Need:
    moved = storages.movable & ~storages.unsaved
    if not moved.any():
        return Need(0, 0.0, 0.0)
    starts_s = float(storages.pack_s[moved].min())
    turn_s = float(storages.first_backward_use_s[moved].min())
    return Need(int(storages.nbytes[moved].sum()), turn_s - starts_s, trace.end_s - turn_s)


# What a trace's micro-step saves, where: groups of equal blocks, and what lies outside of them. Pure.
#
# A storage that several blocks save counts in the first.


_LAST_NUMBER = re.compile(r"\d+(?!.*\d)")


@dataclass(frozen=True, slots=True)
class Group:
    """Neighbouring passes through blocks that save as much as each other, or what one module outside of blocks saves.

    Attributes:
        name: the path, with a range of numbers for several.
        count: how many; 0 for what is outside.
        nbytes, movable_bytes: of one of them; the second is what may leave device memory.
        forward_s: of one of them.
        members: indices of the storages of all of them.
    """

    name: str
    count: int
    nbytes: int
    movable_bytes: int
    forward_s: float
    members: tuple[int, ...]

    @property
    def total_bytes(self) -> int:
        """Of all of them."""
        return self.nbytes * max(1, self.count)


def groups_of(trace: Trace) -> list[Group]:
    """What is saved in blocks, in the order of forward; then what is outside, the most bytes first."""
    return [*_blocks(trace), *_outside(trace)]


def owner_of(storage: StorageTrace) -> int | None:
    """The first pass that saves a storage, or OUTSIDE; None where nobody does."""
    return storage.blocks[0] if storage.blocks else None


def _blocks(trace: Trace) -> Iterator[Group]:
    members: list[list[int]] = [[] for _ in trace.blocks]
    for index, storage in enumerate(trace.storages):
        owner = owner_of(storage)
        if owner is not None and owner != OUTSIDE:
            members[owner].append(index)

    def alike(number: int) -> tuple[str, int, int]:
        path = _LAST_NUMBER.sub("*", trace.blocks[number].module)
        return path, _nbytes(trace, members[number]), _movable_bytes(trace, members[number])

    for (_, nbytes, movable_bytes), run in groupby(range(len(trace.blocks)), alike):
        numbers = list(run)
        paths = [trace.blocks[number].module for number in numbers]
        forward_s = sum(trace.blocks[number].forward_s for number in numbers) / len(numbers)
        own = tuple(index for number in numbers for index in members[number])
        yield Group(_range(paths), len(numbers), nbytes, movable_bytes, forward_s, own)


def _outside(trace: Trace) -> list[Group]:
    members: dict[str, list[int]] = {}
    for index, storage in enumerate(trace.storages):
        if owner_of(storage) == OUTSIDE:
            members.setdefault(storage.module, []).append(index)
    groups = [
        Group(module or "the model itself", 0, _nbytes(trace, own), _movable_bytes(trace, own), 0.0, tuple(own))
        for module, own in members.items()
    ]
    return sorted(groups, key=lambda group: -group.nbytes)


def _range(paths: Sequence[str]) -> str:
    """``layers.3 .. layers.5`` as ``layers.3-5``."""
    first, last = paths[0], paths[-1]
    number = _LAST_NUMBER.search(last)
    if first == last or number is None:
        return first
    return _LAST_NUMBER.sub(lambda found: f"{found[0]}-{number[0]}", first)


def _nbytes(trace: Trace, members: Sequence[int]) -> int:
    return sum(trace.storages[index].nbytes for index in members)


def _movable_bytes(trace: Trace, members: Sequence[int]) -> int:
    return sum(trace.storages[index].nbytes for index in members if trace.storages[index].is_movable)
