"""Rows of a plan: what each setting needs of the device, what it costs in time and wear, and which one to take.

[Note: Need] Forward and backward need what is held, and what is saved and temporary, with ``FRAGMENTATION`` of the
latter for what the allocator cannot use; the optimizer's step may need more. A need above ``TIGHT`` of the memory is
tight. Settings that make no plan are replayed beside the temporary tensors of each operation; for a plan both peaks are
added. Staging counts as host memory.

[Note: Segments] PyTorch's allocator serves a tensor from one segment that is free in one piece. What a layer takes that
runs again lies in segments that are too small for whole logits, so the head gets new ones beside them
(https://docs.pytorch.org/docs/stable/notes/cuda.html#memory-management): the need has half of what one layer saves once
more, which is about what its first forward takes. A fused loss makes nothing larger than layers do. With
PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True less is taken.

[Note: Traffic] What ZeRO moves over PCIe by its own offloads shares it with activations: forward and backward take as
long as all that crosses it in one direction at least.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from operator import itemgetter

import numpy as np

from ds_tba.cli.plan.training import Account, Device, DryRun, Training, account_of
from ds_tba.config import ASSUMED_RATIO, BLOCK, DsConfig, Placement
from ds_tba.errors import ModelError
from ds_tba.holders import SAVED, TEMPORARY
from ds_tba.plan.plan import Limits, Prediction
from ds_tba.plan.replay import Assignment, Replay, Timeline
from ds_tba.plan.search import adaptive
from ds_tba.plan.trace import OUTSIDE, Trace
from ds_tba.stats import DAY_S, life_days, write_limit_bytes_per_step

FRAGMENTATION = 0.05
TIGHT = 0.9
# Of rows whose steps are as short within this factor, the first is taken: it changes least.
SAME_STEP = 1.05
SHORT_LIFE_DAYS = 365.0  # a row that wears drives out sooner is not recommended while another fits
CHECKPOINTING = "turn on gradient checkpointing (model.gradient_checkpointing_enable())"
NO_CHECKPOINTING = "gradient checkpointing must be off (model.gradient_checkpointing_disable())"
UNIT, NEAR = 16, 0.01  # answers of --longest: multiples, and no closer one is sought
ADAPTIVE = "+ adaptive in a budget"
HOST_FULL = "lacks host memory"
HOST_AIR = 1.1  # of host_budget_bytes: segments of memory are not filled to the last byte


@dataclass(frozen=True, slots=True)
class Row:
    """A setting."""

    name: str
    cost: Prediction  # of a step
    need_bytes: int  # of the device in all; see [Note: Need]
    verdict: str  # "fits", "tight", "does not fit" or "lacks host memory"; empty where the device's memory is not known
    filled: float  # how full it has the device, or host memory where activations go there; above 1 it does not fit well
    written_bytes_per_day: float  # to the drives, with ZeRO's own writes
    life_days: float | None  # of the drives; None where nothing is written
    merged: DsConfig  # what to merge into ``ds_config.json``
    advice: str  # what else to do
    host_bytes: int  # of host memory, for activations and by ZeRO's own offload
    swap_bytes: int  # of the drives, likewise

    @property
    def spares_drives(self) -> bool:
        """True if the drives last for a year."""
        return self.life_days is None or self.life_days >= SHORT_LIFE_DAYS


# Settings that make no plan, by their names: the placement of what is saved; whether layers are checkpointed, so that
# it is of what they then save.
SETTINGS = {
    "as it is": (Placement.KEEP, False),
    "+ checkpointing": (Placement.KEEP, True),
    "+ checkpointing and host": (Placement.HOST, True),
    "+ checkpointing and NVMe": (Placement.NVME, True),
    "offload all": (Placement.NVME, False),
}


@dataclass(frozen=True)
class Setup:
    """The training, the device and the drives of some rows."""

    run: DryRun
    training: Training
    device: Device
    tbw: float  # terabytes that this rank's part of the drives is rated for
    sharers: int = 1  # GPUs of a node, which share its drives and memory
    host_memory_bytes: float = math.inf  # free for all sharers together

    @cached_property
    def account(self) -> Account:
        """The bytes that this rank holds beside activations, and what ZeRO moves."""
        return account_of(self.training, self.run, self.device)

    @cached_property
    def trace(self) -> Trace:
        """The trace with the optimizer's time."""
        return replace(self.run.trace, optimizer_s=self.account.update_s)

    @cached_property
    def loose_bytes(self) -> int:
        """Bytes of a layer that runs again in segments too small for the head; see [Note: Segments]."""
        in_block, largest = defaultdict[int, int](int), 0
        for one in self.run.trace.storages:
            for block in set(one.blocks) - {OUTSIDE}:
                in_block[block], largest = in_block[block] + one.nbytes, max(largest, one.nbytes)
        return max(in_block.values(), default=0) // 2 if self.run.largest_bytes > largest else 0

    @cached_property
    def stored_share(self) -> float:
        """Bytes that the drives are written for a byte of saved tensors."""
        return 1.0 if self.training.offload.io.compression is None else ASSUMED_RATIO

    @cached_property
    def limits(self) -> Limits:
        """The config's limits; where the device's memory is known, its room for activations is the budget.

        In a budget layers may be recomputed, whatever the config says: the row's block does.
        """
        offload, device = self.training.offload, self.device
        write_limit = write_limit_bytes_per_step(self.tbw, offload.ssd.min_life_days, self.trace.step_s)
        limits = Limits.of(offload, write_limit / self.stored_share)
        if device.memory_bytes is None:
            return limits
        room = TIGHT * device.memory_bytes - self.account.held.nbytes
        budget_bytes = max(0, int(room / (1 + FRAGMENTATION) - self.run.temporary_bytes))
        return replace(limits, activation_budget_bytes=budget_bytes, recompute=True)

    def block(self, placement: str, **more: object) -> DsConfig:
        """Return a block with the drive to merge into ``ds_config.json``."""
        path = self.training.offload.nvme_path or "/local_nvme"
        return {BLOCK: {"enabled": True, "nvme_path": path, "placement": placement, **more}}

    def row(self, name: str, cost: Prediction, moving_bytes: int, merged: DsConfig, advice: str) -> Row:
        """Return a row with its need, its verdict and its wear.

        Args:
            moving_bytes: the peak of saved and temporary tensors together.
        """
        account, held, memory_bytes = self.account, self.account.held, self.device.memory_bytes
        linked_bytes = account.link_bytes + cost.read_bytes + cost.forwarded_bytes
        linked_s = linked_bytes / self.device.copy_bytes_per_s + account.update_s
        cost = replace(cost, step_s=max(cost.step_s, linked_s))
        loose_bytes = self.loose_bytes if cost.recomputed_s else 0
        stepping = sum(held.always.values()) + held.stepping_bytes
        need = max(stepping, held.nbytes + loose_bytes + int(moving_bytes * (1 + FRAGMENTATION)))
        per_day = (self.stored_share * cost.written_bytes + account.written_bytes) * DAY_S / cost.step_s
        staging_bytes = self.training.offload.io.ring_bytes if cost.written_bytes else 0
        host_bytes = account.host_bytes + staging_bytes + cost.host_bytes
        host_filled = host_bytes * self.sharers / self.host_memory_bytes if cost.host_bytes else 0.0
        filled = need / (memory_bytes or math.inf)
        verdict = HOST_FULL if host_filled > 1 else "tight" if filled > TIGHT else "fits"
        verdict = "does not fit" if filled > 1 else verdict
        swap_bytes = account.swap_bytes + cost.written_bytes // self.trace.micro_steps
        return Row(
            name, cost, need, verdict if memory_bytes else "", max(host_filled, filled / TIGHT), per_day,
            life_days(self.tbw, per_day), merged, advice, host_bytes, swap_bytes,
        )  # fmt: skip

    def fixed_row(self, name: str, placement: Placement, recompute: bool) -> Row:
        """Return the row of one of :data:`SETTINGS`; see :func:`assign`."""
        beside = replace(self.trace, storages=(*self.trace.storages, *self.run.temporary))
        cost, both = (Replay(*assign(one, placement, recompute=recompute)).cost for one in (self.trace, beside))
        block: DsConfig = {}
        if placement is Placement.NVME:
            block = self.block("nvme")
        elif placement is Placement.HOST:  # null would take half of what is free
            host_bytes = int(HOST_AIR * cost.host_bytes)
            block = {BLOCK: {"enabled": True, "placement": "host", "host_budget_bytes": host_bytes}}
        advice = CHECKPOINTING if recompute else NO_CHECKPOINTING if block else ""
        return self.row(name, cost, both.peak_saved_bytes, block, advice)

    def planned_row(self) -> Row:
        """Return the row of a plan in the budget."""
        budget = self.limits.activation_budget_bytes
        cost = adaptive(self.trace, self.limits).prediction
        budgeted = {} if budget is None else {"activation_budget_bytes": budget}
        block = self.block("adaptive", recompute=cost.recomputed_s > 0, **budgeted)
        return self.row(ADAPTIVE, cost, cost.peak_saved_bytes + self.run.temporary_bytes, block, NO_CHECKPOINTING)


def fixed_rows(setup: Setup) -> list[Row]:
    """Return the rows of settings that make no plan; of checkpointing only where there are layers."""
    return [
        setup.fixed_row(name, placement, recompute)
        for name, (placement, recompute) in SETTINGS.items()
        if setup.trace.blocks or not recompute
    ]


def assign(trace: Trace, placement: Placement, *, recompute: bool = False) -> tuple[Timeline, Assignment]:
    """Give one placement to everything that it is possible for; all else is kept.

    Storages larger than staging go to NVMe in pieces, so staging is taken to be as large as the largest of them.

    Args:
        recompute: also every block, and then only what enters blocks is placed.
    """
    inputs = {index for block in trace.blocks for index in block.inputs}  # which a checkpointed block saves
    placed = [at for at, one in enumerate(trace.storages) if one.is_movable and (not recompute or at in inputs)]
    places = np.full(len(trace.storages), int(Placement.KEEP), np.int8)
    places[placed] = int(placement)
    largest = max((trace.storages[at].nbytes for at in placed), default=0)
    resources = replace(trace.resources, staging_bytes=max(trace.resources.staging_bytes, largest + 4096))
    return Timeline(replace(trace, resources=resources)), Assignment(places, np.full(len(trace.blocks), recompute))


def recommended(rows: Sequence[Row]) -> Row | None:
    """Choose the first of the fastest that fit, else that are tight; one that spares the drives if any does."""
    for spares, verdict in ((True, "fits"), (True, "tight"), (False, "fits"), (False, "tight")):
        fitting = [row for row in rows if row.verdict == verdict and row.spares_drives is spares]
        least_s = min((row.cost.step_s for row in fitting), default=0.0)
        for row in fitting:
            if row.cost.step_s <= SAME_STEP * least_s:
                return row
    return None


def holders(row: Row, setup: Setup) -> list[tuple[str, int]]:
    """Return the holders of the device's memory with their bytes, the largest first."""
    moving = {SAVED: row.cost.peak_saved_bytes, TEMPORARY: setup.run.temporary_bytes}
    held = setup.account.held
    return sorted({**held.always, **held.passing, **moving}.items(), key=itemgetter(1), reverse=True)


def longest_of(setup_of: Callable[[int], Setup], first: int) -> list[tuple[int, Row]]:
    """Find the longest sequence of each setting that makes no plan, and its row; each was run on shapes.

    Where not even ``UNIT`` tokens fit it is 0, with the row of those.

    Args:
        setup_of: what a micro-step of a length takes; called once for each length.
        first: a length to begin with.
    """

    @cache
    def rows(sequence: int) -> dict[str, Row]:
        try:
            return {row.name: row for row in fixed_rows(setup_of(sequence))}
        except ModelError:  # more tokens than the model has positions for, as of BERT
            return {}

    def longest(name: str) -> tuple[int, Row]:
        """Double or halve until one length fits and another does not, then try on the line through the two."""
        filled: dict[float, float] = {}
        fits, fails, guess = 0, math.inf, first
        while fails - fits > max(UNIT, NEAR * fits):
            filled[guess] = rows(guess)[name].filled if rows(guess) else 2.0
            fits, fails = (guess, fails) if filled[guess] <= 1 else (fits, guess)
            if fails == math.inf:
                guess = 2 * fits
            elif not fits:
                guess = max(UNIT, int(fails) // 2)
            else:
                least = max(UNIT, NEAR / 2 * fits)  # away from both, or the line would come ever nearer to one
                part = (1 - filled[fits]) / (filled[fails] - filled[fits])
                guess = int(min(fails - least, max(fits + least, fits + part * (fails - fits))))
            guess = guess // UNIT * UNIT
        return fits, rows(fits or UNIT)[name]

    first = max(UNIT, first // UNIT * UNIT)
    return [longest(row.name) for row in fixed_rows(setup_of(UNIT))]  # which raises where no length runs
