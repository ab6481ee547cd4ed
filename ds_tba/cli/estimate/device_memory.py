"""What a rank needs of device memory: parameters, gradients, states, saved tensors, and what operations hold besides.

Left out: fragments of the allocator, the buffers of collectives, and what ZeRO-3 gathers.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ds_tba.cli.estimate.ds_config import Training

# From which stage on ZeRO divides them by the number of ranks.
_DIVIDED_FROM_STAGE = {"states": 1, "gradients": 2, "parameters": 3}


class PeakMeter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The most bytes of the storages that operations read or make inside, alive at once, as an allocator counts them.

    Takes time at every operation: for a step that is not timed. What is read back into a slot of staging lies in host
    memory on a CPU too; it counts with its storage, as it would in device memory.

    Args:
        ignored: storages that were there before.
        beside_bytes: what is not to count, now: such as what autograd's saved tensors hold. Without them there are left
            inputs, buffers, logits, their gradients and those of activations.

    Attributes:
        peak_bytes: the most at once.
        observes_only: activations go where they go without the meter; see ``ds_tba.autograd.tensors.is_under_a_mode``.
    """

    observes_only = True

    def __init__(self, ignored: Iterable[torch.UntypedStorage], beside_bytes: Callable[[], int] = lambda: 0) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak_bytes = 0
        self._beside_bytes = beside_bytes
        self._now_bytes = 0
        self._freed: deque[tuple[int, int]] = deque()  # finalizers run anywhere, and only leave a note
        self._ignored = list(ignored)
        self._seen: dict[int, weakref.ref[torch.UntypedStorage] | None] = {id(one): None for one in self._ignored}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        while self._freed:
            key, nbytes = self._freed.popleft()
            del self._seen[key]
            self._now_bytes -= nbytes
        for one in tree_leaves((args, kwargs, result)):
            if isinstance(one, torch.Tensor):
                self._see(one.untyped_storage())
        self.peak_bytes = max(self.peak_bytes, self._now_bytes - self._beside_bytes())
        return result

    def _see(self, storage: torch.UntypedStorage) -> None:
        key, nbytes = id(storage), storage.nbytes()
        if key not in self._seen:
            self._seen[key] = weakref.ref(storage, lambda _: self._freed.append((key, nbytes)))
            self._now_bytes += nbytes


@dataclass(frozen=True, slots=True)
class DeviceNeed:
    """Bytes of one rank, without saved tensors.

    Attributes:
        states_bytes: of the optimizer; None where it is not known.
        temporary_bytes: of what operations hold beside saved tensors; see :class:`PeakMeter`.
    """

    parameter_bytes: int
    gradient_bytes: int
    states_bytes: int | None
    temporary_bytes: int

    @classmethod
    def of(
        cls, training: Training, parameters: int, parameter_bytes: int, temporary_bytes: int, ranks: int
    ) -> DeviceNeed:
        """What a config makes of so many parameters.

        Args:
            ranks: that ZeRO divides among.
        """

        def held(what: str, nbytes: int) -> int:
            return -(-nbytes // ranks) if training.zero_stage >= _DIVIDED_FROM_STAGE[what] else nbytes

        states_bytes: int | None = None
        if training.offloads_optimizer:
            states_bytes = 0
        elif training.state_bytes is not None:
            states_bytes = held("states", parameters * training.state_bytes)
        return cls(
            0 if training.offloads_parameters else held("parameters", parameter_bytes),
            held("gradients", parameter_bytes),
            states_bytes,
            temporary_bytes,
        )

    def with_saved(self, saved_bytes: int) -> int:
        """All of it, with so many bytes of saved tensors at their peak."""
        return (
            saved_bytes + self.parameter_bytes + self.gradient_bytes + (self.states_bytes or 0) + self.temporary_bytes
        )
