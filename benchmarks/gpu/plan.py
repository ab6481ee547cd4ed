"""Which shapes at which batch sizes, and the parts that step through them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch

from gpu.budget import OUT_OF_TIME, Deadline, NotRunError
from gpu.device import Device
from gpu.measure import OUT_OF_MEMORY, Workload, compare
from gpu.models import Shape
from gpu.variants import VARIANTS, Variants, Way

SIZES = ((8192, 4), (12288, 3), (16384, 2))
MODELS = ("GPT", "BERT", "T5")
BATCHES = (16, 8, 4, 2, 1)
ROK_BATCHES = (4, 8, 16, 32)
ROK_VARIANTS = ("keep", "recompute", "ours adaptive, host", "ours adaptive, budget", "ours host", "ours nvme")
# "ours nvme" writes and reads every activation; a drive that makes a step longer than this would take all the time.
LONGEST_NVME_STEP_S = 8.0
USABLE_FRACTION_OF_DEVICE = 0.85
PROBE = Shape("T5", 256, 2, 128, 512, 128, 1)
KERNELS = (
    (True, True, "flash attention, deterministic algorithms in every variant"),
    (False, True, "flash attention; algorithms are not deterministic, so losses may differ in their last bits"),
    (False, False, "whatever attention torch chooses; algorithms are not deterministic, so losses may differ"),
)


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
        curve = [Shape("BERT", 96, 3, 64, 512, 32, batch) for batch in (4, 8)]
        return Plan([replace(shape, batch=batch or 4) for shape in shapes], curve, rounds=2, measured_steps=1)
    shapes = [Shape(model, hidden, layers, 1024, 32768, 128) for (hidden, layers), model in order]
    chosen = [replace(shape, batch=batch or largest_batch(shape, device, drive_bytes_per_s)) for shape in shapes]
    curve = [Shape("BERT", 12288, 3, 1024, 32768, 128, batch) for batch in ROK_BATCHES]
    return Plan(chosen, curve, rounds=3, measured_steps=2)


def largest_batch(shape: Shape, device: Device, drive_bytes_per_s: float | None) -> int:
    """The largest of ``BATCHES`` whose activations fit, and come and go in time if the drive's rate is known."""
    for batch in BATCHES:
        one = replace(shape, batch=batch)
        room = device.total_bytes
        fits = room is None or one.activation_bytes + one.state_bytes < USABLE_FRACTION_OF_DEVICE * room
        if fits and nvme_in_time(one, drive_bytes_per_s):
            return batch
    return BATCHES[-1]


def nvme_in_time(shape: Shape, drive_bytes_per_s: float | None) -> bool:
    return drive_bytes_per_s is None or 2 * shape.activation_bytes / drive_bytes_per_s < LONGEST_NVME_STEP_S


@contextmanager
def kernels(device: Device, part: dict[str, Any]) -> Iterator[None]:
    """Flash attention only, and kernels that give the same bits each time, so that losses can be compared.

    What this device refuses is left out, and said so in ``part["kernels"]``.
    """
    if not device.is_cuda:
        part["kernels"] = "as torch chooses on the CPU"
        yield
        return
    torch.utils.deterministic.fill_uninitialized_memory = False  # it would write to every tensor once more
    said = []
    with ExitStack() as undo:
        undo.callback(torch.use_deterministic_algorithms, False)
        for deterministic, flash, name in KERNELS:
            torch.use_deterministic_algorithms(deterministic)
            refused = _refusal(device, flash)
            if refused is None:
                part["kernels"] = "; ".join([name, *said])
                undo.enter_context(_attention(flash))
                break
            said.append(f"refused: {name} ({refused})")
        else:
            raise RuntimeError("; ".join(said))
        yield


def _attention(flash: bool) -> AbstractContextManager[Any]:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    return sdpa_kernel(SDPBackend.FLASH_ATTENTION) if flash else nullcontext()


def _refusal(device: Device, flash: bool) -> str | None:
    """What a small model says to the present settings."""
    try:
        with _attention(flash):
            Workload.of(PROBE, device).step(Way())
            device.synchronize()
    except RuntimeError as error:
        return " ".join(str(error).split())[:200]
    return None


@dataclass(frozen=True)
class Bench:
    """What the parts that step through shapes have in common.

    Attributes:
        drive_bytes_per_s: as measured; None if it is not known.
    """

    plan: Plan
    variants: Variants
    device: Device
    drive_bytes_per_s: float | None

    def step_time(self, part: dict[str, Any], deadline: Deadline) -> None:
        """Part 3: rounds of all variants at each shape."""
        # The first three shapes cover all sizes and models and share the time; the others take what is left over.
        shares = [1 / max(1, 3 - index) for index in range(len(self.plan.steps))]
        self._shapes(part, deadline, self.plan.steps, shares, VARIANTS, self.plan.rounds)

    def curve(self, part: dict[str, Any], deadline: Deadline) -> None:
        """Part 4: one run of each variant at each batch size."""
        shapes = self.plan.curve
        shares = [1 / (len(shapes) - index) for index in range(len(shapes))]
        self._shapes(part, deadline, shapes, shares, ROK_VARIANTS, 1)

    def _shapes(
        self, part: dict[str, Any], deadline: Deadline, shapes: list[Shape], shares: list[float],
        names: tuple[str, ...], rounds: int,
    ) -> None:  # fmt: skip
        part["shapes"], part["ours"] = {}, self.variants.start_lines
        with kernels(self.device, part):
            for shape, share in zip(shapes, shares, strict=True):
                if deadline.has(0):
                    part["shapes"][shape.name] = self._shape(shape, names, deadline.share(share), rounds)
                else:
                    part["shapes"][shape.name] = {"status": OUT_OF_TIME}
        if not any(found["status"] == "done" for found in part["shapes"].values()):
            raise NotRunError("not run: not one shape was measured")

    def _shape(self, shape: Shape, names: tuple[str, ...], deadline: Deadline, rounds: int) -> dict[str, Any]:
        """The comparison at one shape, or why there is none."""
        in_time = nvme_in_time(shape, self.drive_bytes_per_s)
        chosen = [name for name in names if in_time or name != "ours nvme"]
        steps = self.plan.measured_steps
        try:
            found = compare(shape, chosen, self.variants, self.device, deadline, rounds=rounds, steps=steps)
        except torch.OutOfMemoryError:
            self.device.give_back()
            return {"status": OUT_OF_MEMORY}
        if not in_time:
            found["not_run"]["ours nvme"] = f"not run: the drive needs more than {LONGEST_NVME_STEP_S:.0f} s for a step"
        return {"status": "done" if found["summary"] else OUT_OF_TIME, **found}
