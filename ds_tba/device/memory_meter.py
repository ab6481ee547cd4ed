"""Device memory beside saved tensors: gradients, logits, buckets, optimizer states.

Knows an accelerator and how much saved tensors hold; does not know where they are.

[Note: Room] Saved tensors may take what is left of a device beside the peak of everything else in a step. What is free
after the optimizer step says too little: gradients and logits are gone by then. So everything else is sampled at the
ends of steps, and at every hook while micro-steps are recorded. Between two samples the accelerator's own peak tells
whether there was more.
"""

from __future__ import annotations

from ds_tba.device.accelerator import Accelerator
from ds_tba.telemetry.stats import Gauge


class MemoryMeter:
    """The most device memory that everything but saved tensors held at once.

    Args:
        accelerator: tells what is allocated.
        resident: what saved tensors hold of that.
    """

    def __init__(self, accelerator: Accelerator, resident: Gauge) -> None:
        self._accelerator = accelerator
        self._resident = resident
        self._resident_before_bytes = 0
        self._peak_bytes: int | None = None
        self.most_bytes = 0

    def sample(self) -> None:
        """Look at this moment, and at what came between the last sample and this one."""
        resident_bytes = self._resident.now
        peak_bytes = self._accelerator.peak_in_use_bytes()
        others_bytes = self._accelerator.in_use_bytes() - resident_bytes
        if self._peak_bytes is not None and peak_bytes > self._peak_bytes:
            # Nobody knows how much was ours then. The less, the more was others': that is the safe side.
            others_bytes = max(others_bytes, peak_bytes - min(self._resident_before_bytes, resident_bytes))
        self.most_bytes = max(self.most_bytes, others_bytes)
        self._resident_before_bytes, self._peak_bytes = resident_bytes, peak_bytes

    def room_bytes(self) -> float:
        """What saved tensors may hold; see [Note: Room]."""
        free_bytes = self._accelerator.free_bytes()
        others_bytes = self._accelerator.in_use_bytes() - self._resident.now
        return max(0.0, free_bytes - max(0, self.most_bytes - others_bytes))
