"""Rows of a plan: what each setting needs of the device, what it costs in time and wear, and which one to take.

[Note: Need] Forward and backward need what is held, and what is saved and temporary, with ``FRAGMENTATION`` of the
latter for what the allocator cannot use; the optimizer's step may need more. A need above ``TIGHT`` of the memory is
tight. The peak of saved tensors and that of temporary ones need not coincide: with everything kept both together are
measured, and no other row needs more.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import numpy as np

from ds_tba.cli.plan.training import Device, DryRun, Held, Training, held_of
from ds_tba.config import BLOCK, Placement, zero_block
from ds_tba.planner.plan import Limits, Plan, Prediction
from ds_tba.planner.replay import replay
from ds_tba.planner.search import adaptive
from ds_tba.planner.timeline import Assignment, Timeline
from ds_tba.planner.trace import OUTSIDE, Trace
from ds_tba.telemetry.drive_health import DAY_S, life_days, write_limit_bytes_per_step

FRAGMENTATION = 0.05
TIGHT = 0.9
# Of rows whose steps are as short within this factor, the first is taken: it changes least.
SAME_STEP = 1.05
SHORT_LIFE_DAYS = 30.0  # of drives that a recommended row would wear out, if another fits
BUDGET_FRACTIONS = (0.75, 0.5, 0.25)  # of keep's peak; their cost is shown in detail
CHECKPOINTING = "turn on gradient checkpointing (model.gradient_checkpointing_enable())"
REMEDIES = {
    "parameters": "ZeRO stage 3 over more ranks, or offload_param",
    "gradients": "ZeRO stage 2 with offload_optimizer, or LoRA (--lora 16)",
    "optimizer states": "offload_optimizer to cpu, more ranks, or LoRA (--lora 16)",
    "gathered parameters": "a lower stage3_max_live_parameters",
    "ZeRO's buckets": "a lower reduce_bucket_size",
    "saved tensors": "a smaller batch, a shorter sequence, or sequence parallelism over more ranks",
    "logits and other temporary tensors": "a fused loss, which never makes all logits (Liger's), or a smaller batch",
    "CUDA context": "a larger GPU",
}
ADAPTIVE = "+ adaptive in a budget"
_LAST_NUMBER = re.compile(r"\d+(?!.*\d)")


@dataclass(frozen=True, slots=True)
class Row:
    """A setting.

    Attributes:
        name: in the table and in JSON.
        cost: of a step.
        held: what the device holds beside.
        need_bytes: of the device; see [Note: Need].
        verdict: ``fits``, ``tight`` or ``does not fit``; empty where the device's memory is not known.
        written_bytes_per_day, life_days: wear of the drives; no life where nothing is written.
        merged: what to merge into ``ds_config.json``.
        advice: what else to do.
    """

    name: str
    cost: Prediction
    held: Held
    need_bytes: int
    verdict: str
    written_bytes_per_day: float
    life_days: float | None
    merged: dict[str, Any]
    advice: str = ""


@dataclass(frozen=True, slots=True)
class Setup:
    """What all rows have in common.

    Attributes:
        tbw: terabytes that this rank's part of the drives is rated for, of which ``used_tbw`` are written already.
        nvme_path: to paste.
        sharers: GPUs that share the drives.
        drives: of a node.
    """

    run: DryRun
    training: Training
    device: Device
    ranks: int
    tbw: float
    nvme_path: Any
    sharers: int = 1
    drives: int = 1
    used_tbw: float = 0.0

    def trace(self, training: Training) -> Trace:
        """With the optimizer's time."""
        update_s = training.update_s(self.run.trained, self.ranks, self.device.memory_bytes_per_s)
        return replace(self.run.trace, optimizer_s=update_s)

    def row(self, name: str, cost: Prediction, training: Training, merged: dict[str, Any], advice: str = "") -> Row:
        """A row with its need, its verdict and its wear."""
        held, memory_bytes = held_of(training, self.run, self.ranks, self.device.kind), self.device.memory_bytes
        moving = min(self.run.kept_bytes, cost.peak_saved_bytes + self.run.temporary_bytes)
        stepping = sum(held.always.values()) + held.stepping_bytes
        need = max(stepping, held.nbytes + int(moving * (1 + FRAGMENTATION)))
        verdict = ""
        if memory_bytes is not None:
            verdict = "does not fit" if need > memory_bytes else "tight" if need > TIGHT * memory_bytes else "fits"
        per_day = cost.written_bytes * DAY_S / cost.step_s if cost.step_s else 0.0
        return Row(
            name, cost, held, need, verdict, per_day, life_days(self.tbw - self.used_tbw, per_day), merged, advice
        )

    def limits(self, training: Training) -> Limits:
        """Of the config, with the room that the device has for activations as the budget where that is known."""
        offload, memory_bytes = training.offload, self.device.memory_bytes
        life, step_s = offload.ssd.min_life_days, self.trace(training).step_s
        limits = Limits.of(offload, write_limit_bytes_per_step(self.tbw - self.used_tbw, life, step_s))
        if memory_bytes is None:
            return limits
        held = held_of(training, self.run, self.ranks, self.device.kind)
        room = (TIGHT * memory_bytes - held.nbytes) / (1 + FRAGMENTATION) - self.run.temporary_bytes
        return replace(limits, activation_budget_bytes=max(0, int(room)))


def rows_of(setup: Setup) -> tuple[list[Row], Plan]:
    """The rows, and the plan of the adaptive one."""
    training, trace = setup.training, setup.trace(setup.training)
    found = [setup.row("as it is", fixed(trace), training, {})]
    if training.offload.rematerialize_enabled:
        block = {"enabled": True, "placement": "keep"}
        found.append(setup.row("+ rematerialize", fixed(trace, Placement.REMATERIALIZE), training, {BLOCK: block}))
    if trace.blocks:
        found.append(setup.row("+ checkpointing", fixed(trace, recompute=True), training, {}, CHECKPOINTING))
        block = {"enabled": True, "nvme_path": setup.nvme_path, "placement": "adaptive"}
        cost = fixed(trace, Placement.NVME, recompute=True)
        found.append(setup.row("+ checkpointing and NVMe", cost, training, {BLOCK: block}, CHECKPOINTING))
    row, plan = _adaptive(setup, training, ADAPTIVE, {})
    found.append(row)
    if not training.offloads("optimizer"):
        zero = {"stage": max(2, training.stage), "offload_optimizer": {"device": "cpu"}}
        config = {**training.config, "zero_optimization": {**zero_block(training.config), **zero}}
        offloading = replace(training, config=config)
        found.append(_adaptive(setup, offloading, "+ offloaded optimizer", {"zero_optimization": zero})[0])
    return found, plan


def detail_rows(setup: Setup) -> list[Row]:
    """Everything to NVMe, and plans for smaller budgets."""
    training, trace = setup.training, setup.trace(setup.training)
    found = [setup.row("offload all", fixed(trace, Placement.NVME), training, {})]
    for budget in (int(part * fixed(trace).peak_saved_bytes) for part in BUDGET_FRACTIONS):
        cost = adaptive(trace, replace(setup.limits(training), activation_budget_bytes=budget)).prediction
        name = f"budget {budget}{'' if cost.peak_saved_bytes <= budget else ' (cannot be held)'}"
        found.append(setup.row(name, cost, training, {}))
    return found


def _adaptive(setup: Setup, training: Training, name: str, merged: dict[str, Any]) -> tuple[Row, Plan]:
    """The plan of the default block in the budget; with recomputation where only that fits, or is faster."""
    trace, limits = setup.trace(training), setup.limits(training)
    plan, budget = adaptive(trace, limits), limits.activation_budget_bytes
    if budget is not None and not limits.recompute:
        again = adaptive(trace, replace(limits, recompute=True))
        costs = plan.prediction, again.prediction
        held, held_again = (max(cost.peak_saved_bytes, budget) for cost in costs)
        if held_again < held or (held_again == held and costs[1].step_s * SAME_STEP < costs[0].step_s):
            plan, limits = again, replace(limits, recompute=True)
    block = {"enabled": True, "nvme_path": setup.nvme_path, "placement": "adaptive", "recompute": limits.recompute}
    if budget is not None:
        block["activation_budget_bytes"] = budget
    return setup.row(name, plan.prediction, training, {BLOCK: block, **merged}), plan


def fixed(trace: Trace, placement: Placement = Placement.KEEP, *, recompute: bool = False) -> Prediction:
    """The cost of one placement for everything that it is possible for; all else is kept.

    Storages larger than staging go to NVMe in pieces, so staging is taken to be as large as the largest.

    Args:
        recompute: also every block, and then only what blocks save is placed.
    """
    largest = max((storage.nbytes for storage in trace.storages), default=0) + 4096
    machine = replace(trace.resources, staging_bytes=max(trace.resources.staging_bytes, largest))
    timeline = Timeline.of(replace(trace, resources=machine))
    inputs = {index for block in trace.blocks for index in block.inputs}  # which a checkpointed block saves
    owned = enumerate(timeline.owner.tolist())
    owners = {at for index, at in owned if at >= 0 and index not in trace.blocks[at].inputs}  # not checkpointed already
    places = [Placement.KEEP] * len(trace.storages)
    for index, one in enumerate(trace.storages):
        can = one.is_movable if placement is not Placement.REMATERIALIZE else one.rematerialize_s is not None
        if can and (not recompute or one.blocks[:1] not in ((), (OUTSIDE,)) or index in inputs):
            places[index] = placement
    again = [recompute and at in owners for at in range(len(trace.blocks))]
    return replay(timeline, Assignment(np.array(places, np.int8), np.array(again, bool))).cost


def scale(setup: Setup, row: Row, nodes: int, network_bytes_per_s: float) -> dict[str, float]:
    """What a step moves in one of so many nodes: to and from its drives, and over its network, in each direction.

    ZeRO-3 gathers all parameters in forward and again in backward, and reduces all gradients, in each micro-step. The
    other stages reduce gradients, stage 2 in each micro-step, and gather what was updated once. Of all of it a node has
    its own part already.
    """
    run, training, cost = setup.run, setup.training, row.cost
    gradients = run.trained * run.parameter_bytes / max(1, run.parameters)
    stage = row.merged.get("zero_optimization", {}).get("stage", training.stage)  # of what the row turns on
    times = training.micro_steps if stage >= 2 else 1
    gathered = 2 * times * run.parameter_bytes if stage == 3 else gradients
    network_bytes = (gathered + times * gradients) * (nodes - 1) / nodes
    step_s = cost.step_s or 1.0
    return {
        "nodes": nodes,
        "stage": stage,
        "written_bytes": setup.sharers * cost.written_bytes,
        "write_bytes_per_s": setup.sharers * cost.written_bytes / step_s,
        "read_bytes_per_s": setup.sharers * cost.read_bytes / step_s,
        "network_bytes": int(network_bytes),
        "network_s": network_bytes / network_bytes_per_s,
    }


def recommended(rows: Sequence[Row]) -> Row | None:
    """The first of the fastest that fit, else of those that are tight; where there are some, that spare the drives."""
    for verdict in ("fits", "tight"):
        fitting = [row for row in rows if row.verdict == verdict]
        fitting = [row for row in fitting if row.life_days is None or row.life_days >= SHORT_LIFE_DAYS] or fitting
        least_s = min((row.cost.step_s for row in fitting), default=0.0)
        for row in fitting:
            if row.cost.step_s <= SAME_STEP * least_s:
                return row
    return None


def holders(row: Row, run: DryRun) -> list[tuple[str, int]]:
    """What the device would hold, the largest first."""
    moving = {"saved tensors": row.cost.peak_saved_bytes, "logits and other temporary tensors": run.temporary_bytes}
    return sorted({**row.held.always, **row.held.passing, **moving}.items(), key=lambda one: -one[1])


# ---- in detail ------------------------------------------------------------------------------------------------------


def groups_of(trace: Trace) -> list[dict[str, Any]]:
    """Neighbouring passes through blocks that save equally much, then modules outside of them, the largest first.

    ``count`` is the number of passes, 0 outside; ``saved_bytes`` and ``movable_bytes`` are of one pass. A storage that
    several blocks save counts in the first.
    """
    saved: Counter[int | str] = Counter()
    movable: Counter[int | str] = Counter()
    for storage in trace.storages:
        if storage.blocks:
            is_outside = storage.blocks[0] == OUTSIDE
            key = (storage.module or "the model itself") if is_outside else storage.blocks[0]
            saved[key] += storage.nbytes
            movable[key] += storage.nbytes if storage.is_movable else 0
    paths = [block.module for block in trace.blocks]
    found = []
    for _, run in groupby(range(len(paths)), lambda at: (_LAST_NUMBER.sub("*", paths[at]), saved[at], movable[at])):
        first, *others = run
        last_number = _LAST_NUMBER.search(paths[others[-1]]) if others else None
        name = paths[first] if last_number is None else _LAST_NUMBER.sub(rf"\g<0>-{last_number[0]}", paths[first])
        found.append((name, 1 + len(others), saved[first], movable[first]))
    found += [(key, 0, nbytes, movable[key]) for key, nbytes in saved.most_common() if isinstance(key, str)]
    return [dict(zip(("name", "count", "saved_bytes", "movable_bytes"), one, strict=True)) for one in found]


def made_again(run: DryRun, placements: Sequence[Placement] | None = None) -> dict[str, int]:
    """Bytes by op, the largest first: of all that can be made again, or of what a plan has made again."""
    found: Counter[str] = Counter()
    for index, (op, storage) in enumerate(zip(run.ops, run.trace.storages, strict=True)):
        if op and (placements is None or placements[index] is Placement.REMATERIALIZE):
            found[op] += storage.nbytes
    return dict(found.most_common())
