"""Contenders that step through one model in turns: the plain model, and the model under plans of each kind.

All of them are tied to one model in one process. A step is forward, backward and SGD. That all train alike is proven by
one more step of each, from the same parameters and under strictly deterministic kernels: loss, gradients and the new
parameters must be the same, bit for bit. The steps that are timed run under the kernels that PyTorch takes by itself.
"""

from __future__ import annotations

import math
import os
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import xxhash
from alternating import rounds_of
from planners import PLANNERS

from curves.device import Device
from curves.models import Workload
from curves.throttled import opened
from ds_tba.cli.plan.dry_run import OpClock
from ds_tba.config import AioConfig, OffloadConfig
from ds_tba.offloader import ActivationOffloader
from ds_tba.plan.agreement import Alone
from ds_tba.storage.backends import IoBackend

MAX_STEPS_TO_A_PLAN = 20
STEPS_AFTER_A_PLAN = 2
# The plan of one that may choose is made again from what its steps take: it has come to rest after so many of them.
STEPS_AT_REST, MAX_STEPS_TO_REST = 17, 80
LEARNING_RATE = 1e-3
# Read when CUDA's matrix library starts, which is refused without it where kernels must be deterministic.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


class PeakMeter(OpClock):  # type: ignore[no-untyped-call]
    """Peak bytes of the storages that the operations inside read or make, but for those that existed before.

    Takes time at every operation, so a step under this meter must not be timed. On a CPU a tensor that was read back
    lies in a slot of staging; its storage counts, as it would in device memory.
    """

    def __init__(self, ignored: Iterable[torch.UntypedStorage] = ()) -> None:
        super().__init__(flops_per_s=1.0, memory_bytes_per_s=1.0)
        self.peak_bytes = 0
        self.ignore(ignored)

    def __torch_dispatch__(self, *call: Any) -> Any:
        result = super().__torch_dispatch__(*call)
        self.peak_bytes = max(self.peak_bytes, self.now_bytes)
        return result


Meter = TypeVar("Meter", bound=PeakMeter)


@dataclass(frozen=True)
class Contender:
    """One way to run a step.

    Attributes:
        planner: of ``PLANNERS``; None is the model without us.
        limits: keys of the config block.
        drive: backend in place of the machine's own.
        around: makes the context in which forward and backward run.
    """

    name: str
    planner: str | None = None
    limits: Mapping[str, Any] = field(default_factory=dict)
    drive: IoBackend | None = None
    around: Callable[[], AbstractContextManager[Any]] = nullcontext


PLAIN = Contender("plain")
# The plain model once more: how far two equal things are apart.
AGAIN = Contender("plain again")


@dataclass
class StepTaken:
    """One measured step.

    Attributes:
        plans: how many there were by then.
        is_recorded: it ran without the plan, because it was to be recorded.
        held_bytes, device_peak_bytes: on CUDA, what is held between steps, and the peak beyond that.
        host_s: seconds of the host in forward, and in backward; it runs ahead of a device.
        counts: of the allocator in this step (``curves.device.COUNTS``).
    """

    step_s: float
    plan: dict[str, Any] | None
    plans: int
    device_peak_bytes: int | None
    saved_peak_bytes: int | None = None
    is_recorded: bool = False
    host_s: tuple[float, float] | None = None
    counts: dict[str, int] = field(default_factory=dict)
    held_bytes: int | None = None


class Runner:
    """One contender at work; ``block`` is the config's beside what the contender wants."""

    def __init__(self, contender: Contender, workload: Workload, device: Device, block: Mapping[str, Any]) -> None:
        self.contender, self._workload, self._device = contender, workload, device
        self.offloader: ActivationOffloader | None = None
        self._last: StepTaken | None = None
        self._host_s: tuple[float, float] | None = None
        self._is_planned = False
        if contender.planner is not None:
            config = OffloadConfig.model_validate({"placement": "adaptive", **block, **contender.limits})
            self._is_planned = config.placement == "adaptive"
            with opened(contender.drive):
                self.offloader = ActivationOffloader(config, AioConfig(), device.accelerator)
            self.offloader.watch(workload.model, Alone(), PLANNERS[contender.planner])

    def warm_up(self, until_s: float = math.inf) -> None:
        """Step until there is a plan, and on until it has come to rest, or the monotonic clock has ``until_s``."""
        self.step()
        for _ in range(MAX_STEPS_TO_A_PLAN if self._is_planned else 0):
            if time.monotonic() >= until_s or (self.offloader is not None and self.offloader.report().plans):
                break
            self.step()
        plans, since = 0, 0
        at_rest = STEPS_AT_REST if self._is_planned and self.contender.planner == "adaptive" else STEPS_AFTER_A_PLAN
        for _ in range(MAX_STEPS_TO_REST):
            if time.monotonic() >= until_s or since >= at_rest:
                break
            now = self.step().plans
            plans, since = now, since + 1 if now == plans else 0

    def turn(self, steps: int) -> list[StepTaken]:
        """Take so many measured steps."""
        return [self.step() for _ in range(steps)]

    def step(self) -> StepTaken:
        """Take a step and measure it."""
        device, offloader = self._device, self.offloader
        before_it = None if offloader is None else offloader.report()  # at its end there may be another plan
        is_recorded = self.is_measuring
        device.synchronize()
        before, counted = device.held_bytes(), device.counts()
        device.reset_peak()
        started = time.perf_counter()
        self._step()
        device.synchronize()
        took_s = time.perf_counter() - started
        peak, counts = device.peak_bytes(), device.counts(counted)
        device_peak = None if peak is None or before is None else peak - before
        taken = StepTaken(took_s, None, 0, device_peak, None, is_recorded, self._host_s, counts, before)
        if offloader is None or before_it is None:
            return taken
        taken.plan, taken.plans = before_it.plan, before_it.plans
        report = offloader.report()
        if self._last is not None:  # its peak is known when the next step has begun
            self._last.saved_peak_bytes = report.step_peak_saved_bytes
        self._last = taken
        return taken

    def settle(self) -> None:
        """Step until the next step follows a plan."""
        for _ in range(MAX_STEPS_TO_A_PLAN):
            if not self.is_measuring:
                return
            self.step()

    @property
    def is_measuring(self) -> bool:
        """True if the next step is recorded, instead of following a plan."""
        controller = self.offloader.controller if self.offloader is not None else None
        return controller is not None and controller._recording.wanted > 0

    def _forward_and_backward(self) -> torch.Tensor:
        workload, offloader = self._workload, self.offloader
        began_s = time.perf_counter()
        with self.contender.around():
            with nullcontext() if offloader is None else offloader.saving():
                loss: torch.Tensor = workload.model(*workload.batch)
            forward_s = time.perf_counter() - began_s
            loss.backward()
        self._host_s = forward_s, time.perf_counter() - began_s - forward_s
        if offloader is not None:
            offloader.note_micro_step()
        return loss

    def _step(self) -> None:
        self._forward_and_backward()
        self._update()

    def _update(self) -> None:
        gradients = [one.grad for one in self._workload.parameters if one.grad is not None]
        with torch.no_grad():
            torch._foreach_add_(self._workload.parameters, gradients, alpha=-LEARNING_RATE)
            torch._foreach_zero_(gradients)
        if self.offloader is not None:
            self.offloader.note_step()

    def metered_peak_bytes(self) -> int | None:
        """Return the peak of one more step, which is not timed; None on a device that counts by itself."""
        return None if self._device.is_cuda else self.metered(PeakMeter).peak_bytes

    def metered(self, make: Callable[[list[torch.UntypedStorage]], Meter]) -> Meter:
        """Return a meter, made from the storages that it does not count, after one more step, which is not timed."""
        self._step()  # an offloader that was idle has freed its staging: allocating it anew is no part of a step
        self.settle()
        parameters = self._workload.parameters
        held = [*parameters, *self._workload.batch, *(one.grad for one in parameters if one.grad is not None)]
        storages = [one.untyped_storage() for one in held]
        if self.offloader is not None and self.offloader._tiers.nvme is not None:
            self.offloader._tiers.nvme.open()
            storages.append(self.offloader._tiers.nvme.ring._memory.untyped_storage())
        with make(storages) as meter:
            self._step()
        return meter

    def proof(self, start: Sequence[torch.Tensor]) -> str:
        """Return a digest of loss, gradients and new parameters of one more step from ``start``, strict and untimed."""
        self.settle()
        torch.manual_seed(0)
        parameters = self._workload.parameters
        with strict():
            with torch.no_grad():
                for parameter, value in zip(parameters, start, strict=True):
                    parameter.copy_(value)
            loss = self._forward_and_backward()
            found = digest([loss, *(one.grad for one in parameters if one.grad is not None)])
            self._update()
            return found + digest(parameters)

    def close(self) -> None:
        if self.offloader is not None:
            self.offloader.close()


@contextmanager
def strict() -> Iterator[None]:
    """Have kernels inside give the same bits each time, or PyTorch refuse them.

    Not ``warn_only``: under that the backward of flash and of efficient attention stays random.
    """
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    fills = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # else every tensor is written once more
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.utils.deterministic.fill_uninitialized_memory = fills


def digest(tensors: Iterable[torch.Tensor]) -> str:
    """Return a digest of all bytes."""
    found = xxhash.xxh3_128()
    for one in tensors:
        found.update(one.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy())
    return found.hexdigest()


def parameters_of(workload: Workload) -> list[torch.Tensor]:
    """Return copies of all parameters, in host memory."""
    return [one.detach().to("cpu", copy=True) for one in workload.parameters]


class Race:
    """All contenders of one model and batch; ``block`` is the config's beside what each wants."""

    def __init__(self, workload: Workload, device: Device, block: Mapping[str, Any]) -> None:
        self._workload, self._device, self._block = workload, device, dict(block)
        self.runners: dict[str, Runner] = {}

    def enter(self, contenders: Sequence[Contender], until_s: float = math.inf) -> None:
        """Add contenders, each warmed up (:meth:`Runner.warm_up`)."""
        for contender in contenders:
            runner = Runner(contender, self._workload, self._device, self._block)
            self.runners[contender.name] = runner
            runner.warm_up(until_s)

    def drop(self, name: str) -> None:
        """Take out a contender that failed as it entered or raced, with the gradients and the memory of its step."""
        if name in self.runners and name == list(self.runners)[-1]:  # else others have wrapped the blocks after it
            self.runners.pop(name).close()
        for parameter in self._workload.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            parameter.grad.zero_()
        self._device.give_back()

    def run(self, rounds: int, steps: int, ends_s: float) -> list[dict[str, list[StepTaken]]]:
        """Run rounds in which each takes a turn, in a new random order each time.

        As many are run as end before ``ends_s`` on the monotonic clock, two at least.
        """
        names, chance = list(self.runners), random.Random(0)
        done = list(rounds_of(names, lambda name: self.runners[name].turn(steps), rounds, ends_s, chance))
        for runner in self.runners.values():
            runner.step()  # tells the peak of the last one
        return done

    def proven(self) -> tuple[dict[str, int | None], bool]:
        """Return the peak of one more step of each, and whether all train alike (:meth:`Runner.proof`)."""
        peaks = {name: runner.metered_peak_bytes() for name, runner in self.runners.items()}
        start = parameters_of(self._workload)
        return peaks, len({runner.proof(start) for runner in self.runners.values()}) == 1

    def __enter__(self) -> Race:
        return self

    def __exit__(self, *_: object) -> None:
        for runner in reversed(self.runners.values()):  # each has wrapped the blocks as the one before left them
            runner.close()
        self._device.give_back()
