"""What the optimizer updates did, as JSON."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

logger = logging.getLogger("ds_tba")


@dataclass(frozen=True, slots=True)
class UpdateReport:
    """The report. Counts and seconds are of this rank, since the run began.

    Attributes:
        steps: updates that were interleaved.
        stock_steps: updates that were left to DeepSpeed; ``fallbacks`` says why.
        elements: parameters updated in ``steps``, each counted once per step.
        device_elements: those of them that the device updated.
        device_share: the part of the device, over all steps.
        last_device_share: in the last step.
        update_s: from the first chunk until everything is in place.
        host_s: of it, in the host's own chunks.
        drain_s: of it, waiting for the device at the end.
        device_busy_s: from the first chunk that went to the device until the last one was seen to be back.
        device_idle_s: the rest of ``update_s``.
        host_adam_per_s: elements per second of the host in its own chunks, with unscaling and cast; 0.0: none yet.
        device_adam_per_s: elements per second of the device, with both copies; 0.0: none yet.
        uploaded_bytes, written_back_bytes: to the device and from it, in updates.
        upload_bytes_per_s, write_back_bytes_per_s: those by ``device_busy_s``.
        predicted_s: of the updates at the rates of both sides, had neither waited for the other; beside ``update_s``.
        pinned_bytes: of host memory, master and moments (in place) and buffers.
        fallbacks: how often something was left to the host or to DeepSpeed, by reason.
    """

    rank: int = 0
    state: str = "running"
    steps: int = 0
    stock_steps: int = 0
    elements: int = 0
    device_elements: int = 0
    device_share: float = 0.0
    last_device_share: float = 0.0
    update_s: float = 0.0
    host_s: float = 0.0
    drain_s: float = 0.0
    device_busy_s: float = 0.0
    device_idle_s: float = 0.0
    host_adam_per_s: float = 0.0
    device_adam_per_s: float = 0.0
    uploaded_bytes: int = 0
    written_back_bytes: int = 0
    upload_bytes_per_s: float = 0.0
    write_back_bytes_per_s: float = 0.0
    predicted_s: float = 0.0
    pinned_bytes: int = 0
    fallbacks: dict[str, int] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    def line(self) -> str:
        """For the log, after a number of steps."""
        steps = max(self.steps, 1)
        return (
            f"{self.steps} optimizer updates of {self.update_s / steps:.3f} s: {self.device_share:.0%} on the device, "
            f"{self.host_s / steps:.3f} s in the host's part, {self.drain_s / steps:.3f} s waiting for the device"
        )


class UpdateCounters:
    """Counts, for the report."""

    def __init__(self) -> None:
        self.steps = self.stock_steps = self.elements = self.device_elements = 0
        self.last_device_share = self.update_s = self.host_s = self.drain_s = 0.0
        self.fallbacks: Counter[str] = Counter()

    def count(self, elements: int, device_elements: int, update_s: float, host_s: float, drain_s: float) -> None:
        """One update."""
        self.steps += 1
        self.elements += elements
        self.device_elements += device_elements
        self.last_device_share = device_elements / max(elements, 1)
        self.update_s += update_s
        self.host_s += host_s
        self.drain_s += drain_s

    @property
    def host_adam_per_s(self) -> float:
        """Elements per second of the host."""
        return (self.elements - self.device_elements) / self.host_s if self.host_s else 0.0

    def fall_back(self, reason: str, words: str) -> None:
        """Something was left to the host or to DeepSpeed; said once for each reason."""
        if not self.fallbacks[reason]:
            logger.warning("interleaved optimizer update: %s", words)
        self.fallbacks[reason] += 1
