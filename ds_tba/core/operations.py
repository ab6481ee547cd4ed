"""Holds back what an operation saves until the operation is over, because its kernel may still write into that.

Knows records, threads and streams; cannot see where storages go.

[Note: Operations under way] Autograd packs what an operation saves before its kernel runs, and a kernel may write into
that (``rrelu`` into its noise). So a storage that no finished operation has made leaves only when the operation that
saves it is over: at the next save with another sequence number, which each node of the graph takes, or when forward
is over. On a device the host has then also told the stream to wait for what a Function began on another one.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

import torch

from ds_tba.core.originals import SavedTensors
from ds_tba.core.saved import Operation, RecordState, SavedStorage
from ds_tba.core.tensors import next_sequence_number
from ds_tba.device.accelerator import Accelerator, Stream
from ds_tba.storage.base import Choice


class InUse(NamedTuple):
    """A storage that leaves once the operation that saves it is over.

    Attributes:
        operation: the first one that has saved it.
        stream: that saved it; None where everything is done at once.
    """

    record: SavedStorage
    choice: Choice
    operation: Operation
    stream: Stream | None


class Operations:
    """The operations under way, of all threads; see [Note: Operations under way].

    Args:
        accelerator: of the device, where that is asynchronous.
        originals: counts checkpoints, and knows the storages that a compiled graph saves.

    Attributes:
        held_back: the storages that wait for the end of their operation, by thread.
    """

    def __init__(self, accelerator: Accelerator | None, originals: SavedTensors) -> None:
        self._accelerator = accelerator
        self._originals = originals
        self.held_back: dict[int, deque[InUse]] = {}

    def present(self) -> Operation:
        """Return what tells the operation that saves now from later ones."""
        return Operation(threading.get_ident(), next_sequence_number(), self._originals.checkpoints)

    def hold(self, record: SavedStorage, operation: Operation, tensor: torch.Tensor, choice: Choice) -> bool:
        """Hold back a storage that an operation saves, unless whatever fills it has; return whether it is held back.

        Call it under the cache's lock, in the saving thread.
        """
        if record.is_complete or self._originals.is_of_compiled(tensor.untyped_storage()):
            return False
        stream = None if self._accelerator is None else self._accelerator.current_stream()
        self.held_back.setdefault(operation.thread, deque()).append(InUse(record, choice, operation, stream))
        if choice.stores:  # or a recording would take it for one that stays
            record.move(RecordState.LEAVING)
        return True

    def are_over(self, present: Operation | None = None) -> bool:
        """Return whether operations of this thread are over that have saved what is held back.

        Args:
            present: the operation that saves now; without one all are over.
        """
        waiting = self.held_back.get(threading.get_ident())
        return bool(waiting and waiting[-1].operation != present)

    def ended(self) -> Iterator[InUse]:
        """Yield what this thread has held back and is still wanted; held back no longer. Call it under the lock."""
        waiting = self.held_back[threading.get_ident()]
        while waiting:
            one = waiting.popleft()
            if not one.record.is_kept:  # dropped meanwhile: nobody wants it any more
                continue
            if one.record.state is RecordState.LEAVING:  # not yet, where an interrupt came before that
                one.record.move(RecordState.KEPT)
            accelerator = self._accelerator
            if accelerator is not None and one.stream is not None and one.stream != accelerator.current_stream():
                event = accelerator.new_event()
                event.record(one.stream)  # else the copy may begin before that stream has filled it
                accelerator.current_stream().wait_event(event)
            yield one
        del self.held_back[threading.get_ident()]  # or an ended thread would be remembered for ever
