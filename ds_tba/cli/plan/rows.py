"""Rows of a plan: what each setting needs of the device, what it costs in time and wear, and which one to take.

[Note: Need] Forward and backward need what is held, and what is saved and temporary, with ``FRAGMENTATION`` of the
latter for what the allocator cannot use; the optimizer's step may need more. A need above ``TIGHT`` of the memory is
tight. Settings that make no plan are replayed beside the temporary tensors of each operation; for a plan both peaks are
added. With everything kept both together are measured, and no other row needs more, but for what layers that run again
leave unused: [Note: Segments] in ``dry_run.py``. Staging counts where it is memory of the training device.

[Note: Traffic] What ZeRO moves over PCIe and to drives by its own offloads shares them with activations. Forward and
backward take as long as all of it takes in one direction at least, and the optimizer's step as long as its states take
to be read and written, where they are on a drive.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from operator import itemgetter, le
from typing import NamedTuple

import numpy as np

from ds_tba.cli.plan.training import Beside, Device, DryRun, Training, beside, held_of
from ds_tba.config import BLOCK, DsConfig, Placement
from ds_tba.explain.account import SAVED, TEMPORARY, ModelMemory, Way
from ds_tba.plan.plan import Limits, Prediction
from ds_tba.plan.replay import peak_beside, replay
from ds_tba.plan.search import adaptive
from ds_tba.plan.timeline import Assignment, Timeline
from ds_tba.plan.trace import OUTSIDE, Trace
from ds_tba.wear import DAY_S, life_days, write_limit_bytes_per_step

FRAGMENTATION = 0.05
TIGHT = 0.9
# Of rows whose steps are as short within this factor, the first is taken: it changes least.
SAME_STEP = 1.05
SHORT_LIFE_DAYS = 365.0  # a row that wears drives out sooner is not recommended while another fits
CHECKPOINTING_TO_HOST = 'model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"offload": True})'
CHECKPOINTING = "turn on gradient checkpointing (model.gradient_checkpointing_enable())"
NO_CHECKPOINTING = "gradient checkpointing must be off (model.gradient_checkpointing_disable())"
UNIT, MOST, NEAR = 16, 1 << 24, 0.01  # answers of --longest: multiples, bound, and no closer one is sought
ADAPTIVE = "+ adaptive in a budget"
HOST_FULL = "lacks host memory"
HOST_AIR = 1.1  # of host_budget_bytes: segments of memory are not filled to the last byte


@dataclass(frozen=True, slots=True)
class Row:
    """A setting.

    Attributes:
        cost, held, need_bytes: of a step, beside it, and of the device in all; see [Note: Need].
        verdict: ``fits``, ``tight``, ``does not fit`` or ``lacks host memory``; empty where the device's memory is not
            known.
        written_bytes_per_day, life_days: wear of the drives, with ZeRO's own writes; no life where nothing is written.
        merged, advice: what to merge into ``ds_config.json``, and what else to do.
        host_bytes, swap_bytes: of host memory and of the drives, for activations and by ZeRO's own offload.
    """

    name: str
    cost: Prediction
    held: ModelMemory
    need_bytes: int
    verdict: str
    written_bytes_per_day: float
    life_days: float | None
    merged: DsConfig
    advice: str
    host_bytes: int
    swap_bytes: int

    @property
    def price(self) -> tuple[float, ...]:
        """Return what it takes: memory of the device and of the host, and time."""
        return self.need_bytes, self.host_bytes, self.cost.step_s

    @property
    def spares_drives(self) -> bool:
        """True if the drives last for a year."""
        return self.life_days is None or self.life_days >= SHORT_LIFE_DAYS


@dataclass(frozen=True)
class Setup:
    """The training, the device and the drives of some rows.

    Attributes:
        tbw: terabytes that this rank's part of the drives is rated for.
        sharers, drives: GPUs of a node that share its drives, and how many these are.
        way: what is done about memory already.
        stored_share: bytes that the drives are written for a byte of saved tensors.
        host_memory_bytes: that are free for the GPUs of a node together.
    """

    run: DryRun
    training: Training
    device: Device
    ranks: int
    tbw: float
    nvme_path: str | list[str]
    sharers: int = 1
    drives: int = 1
    way: Way = field(default_factory=Way)
    stored_share: float = 1.0
    host_memory_bytes: float = math.inf

    @cached_property
    def held(self) -> ModelMemory:
        """The bytes that the device holds all the time, and in forward and backward."""
        return held_of(self.training, self.run, self.ranks, self.device.kind)

    @cached_property
    def zero(self) -> Beside:
        """The bytes that ZeRO's own offloads hold and move."""
        return beside(self.training, self.run, self.ranks)

    @cached_property
    def trace(self) -> Trace:
        """The trace with the optimizer's time."""
        update_s = self.training.update_s(self.run.trained, self.ranks, self.device)
        resources, zero = self.run.trace.resources, self.zero
        if self.training.offloads("optimizer") == "nvme" and resources.paths:
            read_s = zero.state_read_bytes / resources.drives.read_bytes_per_s
            update_s = max(update_s, read_s + zero.written_bytes / resources.drives.write_bytes_per_s)
        return replace(self.run.trace, optimizer_s=update_s)

    @cached_property
    def staging_on_device(self) -> int:
        """Bytes of staging that are memory of the training device: on a CPU, and with GPUDirect Storage."""
        io = self.training.offload.io
        return io.ring_bytes if self.trace.resources.is_synchronous or io.backend == "gds" else 0

    @cached_property
    def limits(self) -> Limits:
        """The config's limits; the room that the device has for activations is the budget where it is known."""
        offload, device = self.training.offload, self.device
        write_limit = write_limit_bytes_per_step(self.tbw, offload.ssd.min_life_days, self.trace.step_s)
        limits = Limits.of(offload, write_limit / self.stored_share)
        if device.memory_bytes is None:
            return limits
        room = TIGHT * device.memory_bytes - self.held.nbytes - self.staging_on_device
        budget_bytes = max(0, int(room / (1 + FRAGMENTATION) - self.run.temporary_bytes))
        return replace(limits, activation_budget_bytes=budget_bytes)

    def block(self, placement: str, **more: object) -> DsConfig:
        """Return a block with the drive to merge into ``ds_config.json``."""
        return {BLOCK: {"enabled": True, "nvme_path": self.nvme_path, "placement": placement, **more}}

    def paced(self, cost: Prediction) -> Prediction:
        """Return the cost with a step that is no shorter than what is moved; see [Note: Traffic]."""
        zero, resources = self.zero, self.trace.resources
        back_bytes = cost.read_bytes + cost.forwarded_bytes
        moving_s = (zero.link_bytes + back_bytes) / self.device.copy_bytes_per_s
        if zero.parameter_read_bytes and resources.paths:
            read_bytes = zero.parameter_read_bytes + cost.read_bytes
            moving_s = max(moving_s, read_bytes / resources.drives.read_bytes_per_s)
        return replace(cost, step_s=max(cost.step_s, moving_s + self.trace.optimizer_s))

    def filled(self, row: Row) -> float:
        """Return how full a row has the device, or host memory where activations go there; above 1 it is no fit."""
        host = row.host_bytes * self.sharers / self.host_memory_bytes if row.cost.host_bytes else 0.0
        return max(host, row.need_bytes / (TIGHT * (self.device.memory_bytes or math.inf)))

    def row(
        self, name: str, cost: Prediction, merged: DsConfig, advice: str = "", moving_bytes: int | None = None
    ) -> Row:
        """Return a row with its need, its verdict and its wear.

        Args:
            moving_bytes: the peak of saved and temporary tensors together, where that is known.
        """
        held, zero, memory_bytes = self.held, self.zero, self.device.memory_bytes
        cost = self.paced(cost)
        if moving_bytes is None:
            moving_bytes = cost.peak_saved_bytes + self.run.temporary_bytes
        # Both peaks together may never come: with everything kept their sum was measured, and no setting holds more.
        moving = min(self.run.kept_bytes, moving_bytes)
        staging_bytes = self.training.offload.io.ring_bytes if cost.written_bytes else 0
        staged_on_device = min(staging_bytes, self.staging_on_device)
        loose_bytes = self.run.loose_bytes if cost.recomputed_s else 0
        stepping = sum(held.always.values()) + held.stepping_bytes
        need = staged_on_device + max(stepping, held.nbytes + loose_bytes + int(moving * (1 + FRAGMENTATION)))
        verdict = ""
        if memory_bytes is not None:
            verdict = "does not fit" if need > memory_bytes else "tight" if need > TIGHT * memory_bytes else "fits"
        written_bytes = self.stored_share * cost.written_bytes + zero.written_bytes
        per_day = written_bytes * DAY_S / cost.step_s if cost.step_s else 0.0
        host_bytes = zero.host_bytes + staging_bytes - staged_on_device + cost.host_bytes
        if verdict in ("fits", "tight") and cost.host_bytes and host_bytes * self.sharers > self.host_memory_bytes:
            verdict = HOST_FULL
        swap_bytes = zero.swap_bytes + cost.written_bytes // self.training.micro_steps
        life = life_days(self.tbw, per_day)
        return Row(name, cost, held, need, verdict, per_day, life, merged, advice, host_bytes, swap_bytes)

    def fixed_row(self, setting: Setting) -> Row:
        """Return the row of a setting that makes no plan; see :func:`assign`."""
        assigned = assign(self.trace, setting.placement, recompute=setting.recompute)
        cost = replay(*assigned).cost
        block: DsConfig = {}
        if setting.waits_for_copies:
            kept = replay(*assign(self.trace, Placement.KEEP, recompute=True)).cost
            copied_s = 2 * self.training.micro_steps * cost.host_bytes / self.device.copy_bytes_per_s
            cost = replace(cost, step_s=kept.step_s + copied_s)
        elif setting.placement is Placement.NVME:
            block = self.block("nvme")
        elif setting.placement is Placement.HOST:  # null would take half of what is free
            host_bytes = int(HOST_AIR * cost.host_bytes)
            block = {BLOCK: {"enabled": True, "placement": "host", "host_budget_bytes": host_bytes}}
        return self.row(setting.name, cost, block, setting.advice, peak_beside(*assigned, self.run.temporary))


class Setting(NamedTuple):
    """A setting that makes no plan.

    Attributes:
        name: of its row.
        placement: of what is saved; with ``recompute`` of what checkpointed layers save.
        waits_for_copies: transformers does it, which copies on the compute stream, both ways.
    """

    name: str
    placement: Placement = Placement.KEEP
    advice: str = ""
    recompute: bool = False
    waits_for_copies: bool = False


SETTINGS = (
    Setting("as it is"),
    Setting("+ checkpointing", Placement.KEEP, CHECKPOINTING, recompute=True),
    Setting("+ checkpointing, offload", Placement.HOST, CHECKPOINTING_TO_HOST, recompute=True, waits_for_copies=True),
    Setting("+ checkpointing and host", Placement.HOST, CHECKPOINTING, recompute=True),
    Setting("+ checkpointing and NVMe", Placement.NVME, CHECKPOINTING, recompute=True),
    Setting("offload all", Placement.NVME, NO_CHECKPOINTING),
)


def fixed_rows(setup: Setup) -> Iterator[Row]:
    """Yield the rows of settings that make no plan, but for those that the model or the device has no use for."""
    for setting in SETTINGS:
        is_of_device = setting.placement is Placement.HOST and setup.trace.resources.is_synchronous
        if not is_of_device and (setup.trace.blocks or not setting.recompute):
            yield setup.fixed_row(setting)


def rows_of(setup: Setup) -> list[Row]:
    """Return the rows, the last a plan in the budget, but for those that gain nothing over one before.

    The plan recomputes where that holds less or is faster.
    """
    limits = setup.limits
    cost, budget = adaptive(setup.trace, limits).prediction, limits.activation_budget_bytes
    if budget is not None and not limits.recompute:
        again = adaptive(setup.trace, replace(limits, recompute=True)).prediction
        held, held_again = (max(one.peak_saved_bytes, budget) for one in (cost, again))
        if held_again < held or (held_again == held and again.step_s * SAME_STEP < cost.step_s):
            cost, limits = again, replace(limits, recompute=True)
    budgeted = {} if budget is None else {"activation_budget_bytes": budget}
    block = setup.block("adaptive", recompute=limits.recompute, **budgeted)
    found: list[Row] = []
    for row in [*fixed_rows(setup), setup.row(ADAPTIVE, cost, block, NO_CHECKPOINTING)]:
        if not any(all(map(le, one.price, row.price)) for one in found):
            found.append(row)
    return found


def assign(trace: Trace, placement: Placement, *, recompute: bool = False) -> tuple[Timeline, Assignment]:
    """Give one placement to everything that it is possible for; all else is kept.

    Storages larger than staging go to NVMe in pieces, so staging is taken to be as large as the largest of them.

    Args:
        recompute: also every block, and then only what blocks save is placed.
    """
    inputs = {index for block in trace.blocks for index in block.inputs}  # which a checkpointed block saves
    places = [Placement.KEEP] * len(trace.storages)
    largest = 0
    for index, one in enumerate(trace.storages):
        if one.is_movable and (not recompute or one.blocks[:1] not in ((), (OUTSIDE,)) or index in inputs):
            places[index] = placement
            largest = max(largest, one.nbytes) if not recompute or index in inputs else largest
    machine = replace(trace.resources, staging_bytes=max(trace.resources.staging_bytes, largest + 4096))
    timeline = Timeline(replace(trace, resources=machine))
    owned = enumerate(timeline.owner.tolist())
    owners = {at for index, at in owned if at >= 0 and index not in trace.blocks[at].inputs}  # not checkpointed already
    again = [recompute and at in owners for at in range(len(trace.blocks))]
    return timeline, Assignment(np.array(places, np.int8), np.array(again, bool))


def recommended(rows: Sequence[Row]) -> Row | None:
    """Choose the first of the fastest that fit, else that are tight; one that spares the drives if any does."""
    for spares, verdict in ((True, "fits"), (True, "tight"), (False, "fits"), (False, "tight")):
        fitting = [row for row in rows if row.verdict == verdict and row.spares_drives is spares]
        least_s = min((row.cost.step_s for row in fitting), default=0.0)
        for row in fitting:
            if row.cost.step_s <= SAME_STEP * least_s:
                return row
    return None


def holders(row: Row, run: DryRun) -> list[tuple[str, int]]:
    """Return the holders of the device's memory with their bytes, the largest first."""
    moving = {SAVED: row.cost.peak_saved_bytes, TEMPORARY: run.temporary_bytes}
    return sorted({**row.held.always, **row.held.passing, **moving}.items(), key=itemgetter(1), reverse=True)


def longest_of(setup_of: Callable[[int], Setup], first: int) -> list[tuple[int, Row]]:
    """Find the longest sequence of each setting that makes no plan, and its row; each was run on shapes.

    Where not even ``UNIT`` tokens fit it is 0, with the row of those; longer ones than ``MOST`` are not tried.

    Args:
        setup_of: what a micro-step of a length takes; called once for each length.
        first: a length to begin with.
    """

    @cache
    def rows(sequence: int) -> dict[str, Row]:
        return {row.name: row for row in fixed_rows(setup_of(sequence))}

    def longest(name: str) -> tuple[int, Row]:
        """Double or halve until one length fits and another does not, then try on the line through the two."""
        filled: dict[int, float] = {}
        fits, fails, guess = 0, MOST + UNIT, first
        while fails - fits > max(UNIT, NEAR * fits):
            filled[guess] = setup_of(guess).filled(rows(guess)[name])
            fits, fails = (guess, fails) if filled[guess] <= 1 else (fits, guess)
            if fails > MOST:
                guess = min(MOST, 2 * fits)
            elif not fits:
                guess = max(UNIT, fails // 2)
            else:
                least = max(UNIT, NEAR / 2 * fits)  # away from both, or the line would come ever nearer to one
                part = (1 - filled[fits]) / (filled[fails] - filled[fits])
                guess = int(min(fails - least, max(fits + least, fits + part * (fails - fits))))
            guess = guess // UNIT * UNIT
        return fits, rows(fits or UNIT)[name]

    first = min(MOST, max(UNIT, first // UNIT * UNIT))
    return [longest(name) for name in rows(first)]
