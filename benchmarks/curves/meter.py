"""The most bytes of tensors that are alive at once, whoever made them: the same meter for every way to save memory."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class PeakMeter(TorchDispatchMode):
    """Counts the storages that operations read or make while it is on, as CUDA's allocator would count them.

    Takes time at every operation: for a step that is not timed. What is read back into a slot of staging lies in host
    memory on a CPU too; it counts with its storage, as it would in device memory.

    Args:
        ignored: storages that were there before.

    Attributes:
        peak_bytes: the most at once.
    """

    def __init__(self, ignored: Iterable[torch.UntypedStorage]) -> None:
        super().__init__()
        self.peak_bytes = 0
        self._now_bytes = 0
        self._freed: deque[tuple[int, int]] = deque()  # finalizers run anywhere, and only leave a note
        self._known: dict[int, weakref.ref[torch.UntypedStorage] | None] = {}
        self._ignored = list(ignored)
        for storage in self._ignored:
            self._known[id(storage)] = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._settle()
        for tensor in tree_leaves((args, kwargs, result)):
            if isinstance(tensor, torch.Tensor):
                self._see(tensor.untyped_storage())
        self.peak_bytes = max(self.peak_bytes, self._now_bytes)
        return result

    def _see(self, storage: torch.UntypedStorage) -> None:
        key, nbytes = id(storage), storage.nbytes()
        if key not in self._known:
            self._known[key] = weakref.ref(storage, lambda _: self._freed.append((key, nbytes)))
            self._now_bytes += nbytes

    def _settle(self) -> None:
        while self._freed:
            key, nbytes = self._freed.popleft()
            del self._known[key]
            self._now_bytes -= nbytes
