"""How ranks come to one plan before any of them follows it: made by the rank that saves most, for the slowest drives.

A rank that recomputed a block which the others do not would, under ZeRO-3, ask for parameters that nobody sends it. The
stages of a pipeline run other layers and need no common plan: only the ranks of one stage agree.

[Note: Answers] Between two collectives a rank runs code of its own, and that code may fail. Then the rank must still
make the second collective, or the others wait for it until they time out. So whatever fails there becomes this rank's
answer, and the plan is delayed, or given up, on all ranks alike.

Knows torch.distributed and the planner; does not know the cache. It cannot see whether a rank still runs.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import distributed

from ds_tba.plan.plan import WEAR_TOLERANCE, Limits, Plan, Planner
from ds_tba.plan.trace import Resources, Trace, slowest

logger = logging.getLogger(__name__)

Value = TypeVar("Value")


class Alone:
    """The ranks that decide together: here one alone. Every method is called by all of them, in the same order.

    Values but numbers must be picklable.
    """

    rank: int = 0  # of this process among them
    size: int = 1
    where: str = ""  # for the log, which ranks these are, after a space; empty for all ranks of the run

    def all_reduce_max(self, value: int) -> int:
        """Return the highest value that any rank has."""
        return value

    def all_gather(self, value: Value) -> list[Value]:
        """Return the values of all ranks."""
        return [value]

    def broadcast(self, value: Value, leader: int) -> Value:
        """Return the value that ``leader`` has."""
        return value


class Ranks(Alone):
    """Ranks over a group of gloo's, in host memory: no device waits for it.

    Building one is a collective: every rank of the run does it. Without a group it makes one of all ranks.
    """

    def __init__(self, group: distributed.ProcessGroup | None = None, where: str = "") -> None:
        self._group = distributed.new_group(backend="gloo") if group is None else group
        self.rank = distributed.get_rank(self._group)
        self.size = distributed.get_world_size(self._group)
        self.where = where

    @classmethod
    def of_stage(cls, stages: Sequence[Sequence[int]]) -> Ranks:
        """Return the ranks of this rank's stage, from those of each: together all ranks, each in one stage."""
        groups = [distributed.new_group(list(stage), backend="gloo") for stage in stages]
        number = next(number for number, stage in enumerate(stages) if distributed.get_rank() in stage)
        return cls(groups[number], f" of stage {number}")

    def all_reduce_max(self, value: int) -> int:
        numbers = torch.tensor([value], device="cpu")
        distributed.all_reduce(numbers, distributed.ReduceOp.MAX, group=self._group)
        return int(numbers.item())

    def all_gather(self, value: Value) -> list[Value]:
        found: list[Any] = [None] * self.size
        distributed.all_gather_object(found, value, group=self._group)
        return found

    def broadcast(self, value: Value, leader: int) -> Value:
        box: list[Any] = [value if self.rank == leader else None]
        source = distributed.get_global_rank(self._group, leader)
        # On the CPU by name: else the bytes would pass through the current device, and wait for its kernels.
        distributed.broadcast_object_list(box, src=source, group=self._group, device=torch.device("cpu"))
        return box[0]


Agreement = Alone | Ranks


@dataclass(frozen=True, slots=True)
class Offer:
    """The facts that each rank shares before a plan is made."""

    saved_bytes: int  # of its trace: the rank with the most makes the plan
    resources: Resources
    limits: Limits  # of the plan, if this rank were alone


class Planning:
    """The making of plans: by a planner, for the ranks of an agreement."""

    def __init__(self, planner: Planner, agreement: Agreement) -> None:
        self._planner = planner
        self.agreement = agreement
        self._warned = set[str]()  # kinds of warnings

    def make(self, trace: Trace | None, limits: Limits) -> Plan | None:
        """Return the plan that all ranks follow; None where there is none now, which the log says. A collective.

        Args:
            trace: of this rank, as long as one of its steps with everything kept, with the rates of now; without one
                there is no plan for any rank.
            limits: of the plan, if this rank were alone.
        """
        ranks = self.agreement
        answers = ranks.all_gather(None if trace is None else Offer(trace.saved_bytes, trace.resources, limits))
        offers = [answer for answer in answers if answer is not None]
        found: Plan | str  # or why there is none, the same for every rank
        if trace is None or len(offers) < len(answers):
            found = f"rank {answers.index(None)}{ranks.where} has no part in one (its log says why)"
        else:
            leader = max(range(len(offers)), key=lambda rank: offers[rank].saved_bytes)
            found = ranks.broadcast(self._planned(trace, limits, offers) if leader == ranks.rank else "", leader)
        if isinstance(found, str):
            self._warn_once(found, f"no new plan now, because {found}: tried again later")
            return None
        self._warn_of_budget(found, is_asked=limits.activation_budget_bytes is not None)
        return found

    def _planned(self, trace: Trace, limits: Limits, offers: Sequence[Offer]) -> Plan | str:
        """Return the leader's plan, within the device's memory whatever the limits are, or why it has none."""
        # The drives of another machine may be slower, and more worn, than the leader's.
        write_limit_bytes = min(offer.limits.write_limit_bytes_per_step for offer in offers)
        room_bytes = min(offer.limits.room_bytes for offer in offers)
        limits = replace(limits, write_limit_bytes_per_step=write_limit_bytes)
        try:
            trace = replace(trace, resources=slowest([offer.resources for offer in offers]))
            plan = self._planner(trace, limits)
            if limits.activation_budget_bytes is None and plan.prediction.peak_saved_bytes > room_bytes:
                plan = self._planner(trace, replace(limits, activation_budget_bytes=int(room_bytes)))
            return plan
        except Exception as error:  # noqa: BLE001 - see [Note: Answers]; training can go on without a plan
            ranks = self.agreement
            return f"rank {ranks.rank}{ranks.where} could not plan ({type(error).__name__}: {error})"

    def _warn_of_budget(self, found: Plan, *, is_asked: bool) -> None:
        budget_bytes, peak_bytes = found.limits.activation_budget_bytes, found.prediction.peak_saved_bytes
        if budget_bytes is None:
            return
        advice = "" if found.limits.recompute else '"recompute": true, '
        bound = "activation_budget_bytes" if is_asked else "the free memory of the device"
        if peak_bytes > budget_bytes:
            self._warn_once(
                "over",
                f"no plan fits {budget_bytes} bytes of activations ({bound}): the lowest peak is {peak_bytes} bytes. "
                "Tensors that do not fit are moved as they are saved, which takes time. A larger budget, smaller "
                f"micro-batches, {advice}or a faster drive would help",
            )
        if found.prediction.written_bytes > WEAR_TOLERANCE * found.limits.write_limit_bytes_per_step:
            self._warn_once(
                "wear",
                f"ssd.min_life_days gives way: {bound} {budget_bytes} takes more writes. For a longer life set "
                f"activation_budget_bytes to more, or to null, {advice}or a host_budget_bytes",
            )

    def _warn_once(self, kind: str, text: str) -> None:
        """Log it on rank 0, unless one of this kind was logged before."""
        if kind not in self._warned and self.agreement.rank == 0:
            logger.warning("%s", text)
        self._warned.add(kind)
