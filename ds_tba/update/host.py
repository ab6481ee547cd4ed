"""The host's part of an update: unscale, CPUAdam and cast, slice by slice, so that each slice is in the caches once.

Stock DeepSpeed goes over all gradients, then over everything with CPUAdam, then casts all parameters into new memory
and waits for their copy to the device (``runtime/zero/stage3.py``: ``unscale_and_clip_grads``, ``_optimizer_step``,
``_reassign_or_swap_out_partitioned_parameters``). Here the cast of a slice goes to pinned memory, from which the device
fetches it while the host works on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ds_tba.device.accelerator import Accelerator, Event
from ds_tba.update.formula import Hyper

# Elements that the host updates between two looks at the device. Four arrays of them fit a server processor's caches.
SLICE_ELEMENTS = 1 << 20
LEAST_BUFFERS = 8


Upload = Callable[[torch.Tensor, torch.Tensor], Event]
"""Queues a copy to the device and returns its event."""


@dataclass(slots=True)
class SubGroup:
    """The tensors and numbers of one sub-group of ZeRO-3 in the step that is being taken."""

    # The first four are host tensors: fp32, 1-D, equally long.
    master: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    gradient: torch.Tensor
    # Parameters in the model's dtype, 1-D; None where DeepSpeed itself writes them, to NVMe.
    target: torch.Tensor | None
    hyper: Hyper  # of the sub-group's parameter group
    step: int  # its number, from 1
    factor: float  # of the gradient before the update, for unscaling and clipping

    @property
    def elements(self) -> int:
        """Elements of each tensor."""
        return self.master.numel()

    @property
    def arrays(self) -> tuple[torch.Tensor, ...]:
        """The host tensors that the device reads and writes."""
        return self.master, self.exp_avg, self.exp_avg_sq, self.gradient

    def cut(self, start: int, stop: int) -> SubGroup:
        """Return a part of the sub-group, as views."""
        master, exp_avg, exp_avg_sq, gradient = (one[start:stop] for one in self.arrays)
        target = None if self.target is None else self.target[start:stop]
        return SubGroup(master, exp_avg, exp_avg_sq, gradient, target, self.hyper, self.step, self.factor)


class WriteBack:
    """Writes updated parameters from the host to the device, through a ring of pinned buffers.

    Args:
        elements: most elements of one call.
        queued_bytes: bytes that may be queued earlier in the same stream. The ring is as long: while they are on the
            link the host goes on, unless its parameters alone would fill the link.
    """

    def __init__(self, accelerator: Accelerator, dtype: torch.dtype, elements: int, queued_bytes: int = 0) -> None:
        nbytes = elements * dtype.itemsize
        self.pinned_bytes = max(LEAST_BUFFERS, -(-queued_bytes // nbytes)) * nbytes
        ring = accelerator.pinned(self.pinned_bytes)
        self._free = deque(ring[start : start + nbytes] for start in range(0, ring.numel(), nbytes))
        self._under_way: deque[tuple[Event, torch.Tensor]] = deque()

    def write(self, master: torch.Tensor, target: torch.Tensor, upload: Upload) -> None:
        """Cast ``master`` and queue its copy to ``target``; wait only where all buffers are under way."""
        if self._free:
            buffer = self._free.popleft()
        else:
            event, buffer = self._under_way.popleft()
            event.synchronize()  # else this cast would overwrite parameters that are still being copied
        staged = buffer[: target.nbytes].view(target.dtype)
        staged.copy_(master)
        self._under_way.append((upload(staged, target), buffer))

    def finish(self) -> None:
        """Free all buffers. Every copy must be done."""
        self._free.extend(buffer for _, buffer in self._under_way)
        self._under_way.clear()


class HostUpdate:
    """Updates parts of sub-groups on the host; without ``write_back`` it writes the model's parameters directly."""

    def __init__(self, op: Any, opt_id: int, write_back: WriteBack | None) -> None:
        # The ``ds_opt_adam``, a compiled module, and the ``opt_id`` of a ``DeepSpeedCPUAdam``.
        self._op, self._opt_id = op, opt_id
        self._write_back = write_back

    @property
    def pinned_bytes(self) -> int:
        """Bytes of pinned buffers on the way to the device."""
        return 0 if self._write_back is None else self._write_back.pinned_bytes

    def enter(self, sub_group: SubGroup) -> None:
        """Take CPUAdam's hidden powers of the betas to a sub-group's step, as stock DeepSpeed does once for each."""
        self._update(sub_group.cut(0, 0))

    def slices(self, part: SubGroup, upload: Upload) -> Iterator[None]:
        """Update a part, and yield before each slice is written: that may wait, and the device must be fed first."""
        for start in range(0, part.elements, SLICE_ELEMENTS):
            one = part.cut(start, start + SLICE_ELEMENTS)
            if part.factor != 1.0:
                one.gradient.mul_(part.factor)
            self._update(one)
            yield
            self.write(one, upload)

    def write(self, part: SubGroup, upload: Upload) -> None:
        """Write the updated parameters into the model."""
        if part.target is None:
            return
        if self._write_back is None:
            part.target.copy_(part.master)
        else:
            self._write_back.write(part.master, part.target, upload)

    def finish(self) -> None:
        """Note that every copy to the device is done."""
        if self._write_back is not None:
            self._write_back.finish()

    def _update(self, part: SubGroup) -> None:
        """Call CPUAdam once. Of a part without elements that only takes its hidden powers to this step."""
        tensors = part.master, part.gradient, part.exp_avg, part.exp_avg_sq
        self._op.adam_update(self._opt_id, part.step, *part.hyper.numbers, *tensors)
