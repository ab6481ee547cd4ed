"""Steps of one variant, and rounds in which all variants take turns.

A step is: forward, backward, and plain SGD on every parameter (the optimizer is in the time of every variant). Before
each run the parameters are set to the same values. Parameters and gradients stay allocated and are the model's state;
the activation peak is the most bytes allocated during the measured steps less that state (and the batch).
"""

from __future__ import annotations

import math
import random
import statistics
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from gpu.budget import OUT_OF_TIME, Deadline, NotRunError
from gpu.device import Device
from gpu.models import Shape, Transformer, build
from gpu.variants import VARIANTS, Variants, Way

LEARNING_RATE = 0.01
WARM_UP_STEPS = 2  # in the first, and where memory comes back to the device also in the second, the allocator grows
OUT_OF_MEMORY = "not run: out of device memory"
FAILED = "failed"


@dataclass
class Workload:
    """A model with its batch, shared by all variants."""

    shape: Shape
    model: Transformer
    batch: tuple[torch.Tensor, torch.Tensor]
    parameters: list[torch.Tensor] = field(default_factory=list)

    @classmethod
    def of(cls, shape: Shape, device: Device) -> Workload:
        model, batch = build(shape, device.torch)
        return cls(shape, model, batch, list(model.parameters()))

    @property
    def state_bytes(self) -> int:
        """Parameters, gradients and the batch."""
        held = [*self.parameters, *(one.grad for one in self.parameters if one.grad is not None), *self.batch]
        return sum(one.nbytes for one in held)

    def step(self, way: Way) -> torch.Tensor:
        """The loss, on the device."""
        with way.saving():
            loss: torch.Tensor = self.model(*self.batch, way.call)
        loss.backward()
        way.after_backward()
        gradients = [one.grad for one in self.parameters if one.grad is not None]
        with torch.no_grad():
            torch._foreach_add_(self.parameters, gradients, alpha=-LEARNING_RATE)
            torch._foreach_zero_(gradients)
        way.after_step()
        return loss.detach()


def run(workload: Workload, variant: str, variants: Variants, device: Device, steps: int) -> dict[str, Any]:
    """A few steps of one variant, from the same parameters each time.

    Raises:
        NotRunError: it cannot run here.
    """
    started = time.monotonic()
    way = variants.prepared(variant, workload.shape, workload.model)
    variants.settle()
    device.give_back()  # or what another variant left in the allocator would decide what this one reserves
    variants.get_ready(variant, lambda: workload.step(way))
    device.synchronize()
    setup_s = time.monotonic() - started
    workload.model.reset()
    losses, times = [], []
    for _ in range(WARM_UP_STEPS):
        losses.append(workload.step(way).item())
    device.synchronize()
    before = variants.counters(variant)
    variants.reset_peak(variant)
    device.reset_peak()
    for _ in range(steps):
        found: list[torch.Tensor] = []
        times.append(device.time_s(lambda found=found: found.append(workload.step(way))))
        losses.append(found[0].item())
    peak_bytes, reserved_bytes = device.peak_bytes()
    after = variants.counters(variant)
    saved_bytes, saved_without_bytes = variants.peaks(variant)
    return {
        "setup_s": setup_s,
        "step_s": times,
        "losses": [loss.hex() for loss in losses],
        "state_bytes": workload.state_bytes,
        "activation_peak_bytes": None if peak_bytes is None else peak_bytes - workload.state_bytes,
        "reserved_peak_bytes": reserved_bytes,
        "peak_saved_bytes": saved_bytes,
        "peak_saved_bytes_without": saved_without_bytes,
        "plan": variants.plan(variant),
        "per_step": None if after is None or before is None else {k: (after[k] - before[k]) / steps for k in after},
    }


def attempt(
    workload: Workload, variant: str, variants: Variants, device: Device, deadline: Deadline, steps: int
) -> dict[str, Any] | str:
    """A run, or why there is none. Once it has returned, no exception holds memory any more."""
    if not deadline.has(0):
        return OUT_OF_TIME
    try:
        return run(workload, variant, variants, device, steps)
    except NotRunError as reason:
        return str(reason)
    except torch.OutOfMemoryError:
        return OUT_OF_MEMORY
    except Exception as error:  # noqa: BLE001 - the other variants must run; the exit status tells
        traceback.print_exc()
        return f"{FAILED}: {type(error).__name__}: {error}"


def compare(
    shape: Shape,
    names: Sequence[str],
    variants: Variants,
    device: Device,
    deadline: Deadline,
    *,
    rounds: int,
    steps: int,
) -> dict[str, Any]:
    """Rounds of all variants, as many as fit, at most ``rounds``: the first in the order given, so that what matters
    most is measured, the others in a new random order each."""
    result: dict[str, Any] = {"shape": vars(shape), "steps": steps, "rounds": [], "not_run": {}}
    workload = Workload.of(shape, device)
    result["flops_per_step"] = workload.model.flops
    slowest_round_s = 0.0
    chance = random.Random(0)
    for _ in range(rounds):
        if result["rounds"] and not deadline.has(slowest_round_s):
            break
        left_s = deadline.left_s
        one: dict[str, Any] = {}
        for variant in chance.sample(names, len(names)) if result["rounds"] else names:
            if variant in result["not_run"]:
                continue
            found = attempt(workload, variant, variants, device, deadline, steps)
            if not isinstance(found, str):
                one[variant] = found
            elif found != OUT_OF_TIME or not result["rounds"]:
                result["not_run"][variant] = found
        result["rounds"].append(one)
        setup_s = sum(found["setup_s"] for found in one.values())  # once for all rounds
        slowest_round_s = max(slowest_round_s, left_s - deadline.left_s - setup_s)
    variants.let_go_of_models()
    del workload
    device.give_back(pinned=True)
    result["summary"] = summary(result)
    result["losses_equal"] = losses_equal(result["rounds"])
    return result


def spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def summary(result: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Medians with range over the rounds; ratios are to keep in the same round."""
    found: dict[str, dict[str, Any]] = {}
    ran = {name for one in result["rounds"] for name in one}
    for variant in (name for name in VARIANTS if name in ran):
        runs = [one[variant] for one in result["rounds"] if variant in one]
        both = [(one[variant], one["keep"]) for one in result["rounds"] if variant in one and "keep" in one]
        row: dict[str, Any] = {
            "rounds": len(runs),
            "step_s": spread([statistics.median(one["step_s"]) for one in runs]),
        }
        ratios = [statistics.median(a["step_s"]) / statistics.median(b["step_s"]) for a, b in both]
        row["step_to_keep"] = spread(ratios) if ratios else None
        row["flops_per_s"] = result["flops_per_step"] / row["step_s"]["median"]
        for name in ("activation_peak_bytes", "reserved_peak_bytes", "peak_saved_bytes", "peak_saved_bytes_without"):
            values = [one[name] for one in runs if one[name] is not None]
            row[name] = spread(values) if values else None
        peaks = [(a["activation_peak_bytes"], b["activation_peak_bytes"]) for a, b in both]
        to_keep = [a / b for a, b in peaks if a is not None and b]
        row["peak_to_keep"] = spread(to_keep) if to_keep else None
        row["per_step"], row["plan"] = runs[-1]["per_step"], runs[-1]["plan"]
        found[variant] = row
    return found


def losses_equal(rounds: list[dict[str, Any]]) -> bool | None:
    """Whether every loss of every run has the same bits, and is a number; None where there is nothing to compare."""
    losses = [tuple(found["losses"]) for one in rounds for found in one.values()]
    if len(losses) < 2:
        return None
    return len(set(losses)) == 1 and all(math.isfinite(float.fromhex(loss)) for loss in losses[0])
