"""Which shapes at which batch sizes, and the parts that step through them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from gpu.budget import OUT_OF_TIME, Deadline
from gpu.device import Device
from gpu.measure import OUT_OF_MEMORY, compare
from gpu.models import Shape
from gpu.variants import VARIANTS, Variants

SIZES = ((8192, 4), (12288, 3), (16384, 2))
MODELS = ("GPT", "BERT", "T5")
BATCHES = (16, 8, 4, 2, 1)
ROK_BATCHES = (4, 8, 16, 32)
ROK_VARIANTS = ("keep", "recompute", "ours host", "ours nvme", "ours adaptive")
# "ours nvme" writes and reads every activation; a drive that makes a step longer than this would take all the time.
LONGEST_NVME_STEP_S = 4.0
USABLE_PART_OF_DEVICE = 0.85


@dataclass(frozen=True)
class Plan:
    """Shapes in order of importance: each size and each model comes up among the first three."""

    steps: list[Shape]
    curve: list[Shape]
    rounds: int
    measured_steps: int

    @property
    def all(self) -> list[Shape]:
        return [*self.steps, *self.curve]


def make_plan(device: Device, drive_bytes_per_s: float | None, batch: int | None, *, tiny: bool) -> Plan:
    """The shapes, each at the largest batch that device and drive allow."""
    order = [(SIZES[(i + j) % 3], MODELS[i]) for j in range(3) for i in range(3)]
    if tiny:
        shapes = [Shape(model, hidden // 128, layers, 64, 512, 32) for (hidden, layers), model in order[:3]]
        curve = [Shape("BERT", 96, 3, 64, 512, 32, batch) for batch in (1, 2)]
        return Plan([replace(shape, batch=batch or 2) for shape in shapes], curve, rounds=2, measured_steps=1)
    shapes = [Shape(model, hidden, layers, 1024, 32768, 128) for (hidden, layers), model in order]
    chosen = [replace(shape, batch=batch or largest_batch(shape, device, drive_bytes_per_s)) for shape in shapes]
    curve = [Shape("BERT", 12288, 3, 1024, 32768, 128, batch) for batch in ROK_BATCHES]
    return Plan(chosen, curve, rounds=3, measured_steps=2)


def largest_batch(shape: Shape, device: Device, drive_bytes_per_s: float | None) -> int:
    """The largest of ``BATCHES`` whose activations fit, and come and go in time if the drive's rate is known."""
    for batch in BATCHES:
        one = replace(shape, batch=batch)
        room = device.total_bytes
        fits = room is None or one.activation_bytes + one.state_bytes < USABLE_PART_OF_DEVICE * room
        if fits and nvme_in_time(one, drive_bytes_per_s):
            return batch
    return BATCHES[-1]


def nvme_in_time(shape: Shape, drive_bytes_per_s: float | None) -> bool:
    return drive_bytes_per_s is None or 2 * shape.activation_bytes / drive_bytes_per_s < LONGEST_NVME_STEP_S


@contextmanager
def kernels(device: Device, part: dict[str, Any]) -> Iterator[None]:
    """Flash attention only, and kernels that give the same bits each time, so that losses can be compared."""
    if not device.is_cuda:
        part["kernels"] = "as torch chooses on the CPU"
        yield
        return
    from torch.nn.attention import SDPBackend, sdpa_kernel

    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # it would write to every tensor once more
    part["kernels"] = "flash attention; deterministic algorithms in every variant"
    try:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            yield
    finally:
        torch.use_deterministic_algorithms(False)


def step_time(part: dict[str, Any], deadline: Deadline, plan: Plan, variants: Variants, device: Device) -> None:
    """Part 3."""
    part["shapes"] = {}
    with kernels(device, part):
        for index, shape in enumerate(plan.steps):
            if not deadline.has(0):
                part["shapes"][shape.name] = {"status": OUT_OF_TIME}
                continue
            # The first three cover all sizes and models and share the time; the others take what is left over.
            share = deadline.share(1 / max(1, 3 - index))
            part["shapes"][shape.name] = one_shape(shape, VARIANTS, variants, device, share, plan.rounds, plan)
    part["ours"] = variants.start_lines()


def curve(
    part: dict[str, Any], deadline: Deadline, plan: Plan, variants: Variants, device: Device, rate: float | None
) -> None:
    """Part 4: one run of each variant at each batch size."""
    part["shapes"] = {}
    with kernels(device, part):
        for index, shape in enumerate(plan.curve):
            if not deadline.has(0):
                part["shapes"][shape.name] = {"status": OUT_OF_TIME}
                continue
            in_time = nvme_in_time(shape, rate)
            names = [name for name in ROK_VARIANTS if in_time or name != "ours nvme"]
            share = deadline.share(1 / (len(plan.curve) - index))
            found = one_shape(shape, names, variants, device, share, 1, plan)
            if not in_time and "not_run" in found:
                found["not_run"]["ours nvme"] = "not run: the drive would take longer than this part has"
            part["shapes"][shape.name] = found


def one_shape(
    shape: Shape,
    names: tuple[str, ...] | list[str],
    variants: Variants,
    device: Device,
    deadline: Deadline,
    rounds: int,
    plan: Plan,
) -> dict[str, Any]:
    """The comparison at one shape, or why there is none."""
    try:
        found = compare(shape, names, variants, device, deadline, rounds=rounds, steps=plan.measured_steps)
    except torch.OutOfMemoryError:
        device.give_back()
        return {"status": OUT_OF_MEMORY}
    return {"status": "done", **found}
