"""Copies between a device and the host, in streams of their own, and the device memory that they use.

Knows one device. Cannot see what is saved, nor why it is copied.

[Note: Ordering] A copy out waits, on the device, for what its tensor's stream was given so far, and the tensor is
held until the copy is done: freed earlier, its memory could go to the next tensor of that stream while it is read. A
copy in waits for the point at which its memory was allocated, because kernels that were queued before may use it for
its former tenant; the stream that consumes the bytes waits for the copy. The host waits for neither.

[Note: Pools] A caching allocator keeps a pool for each stream, and a block of one pool is no use to another. Therefore
the thread that asks for bytes allocates their memory, on its own current stream (:meth:`Copies.allocate`): what comes
back takes the blocks that training itself has freed. On the stream of the copies it would take as much memory again,
and a device that is sized by its budget would give back and take blocks all the time. The allocator is told of any
other stream that reads the bytes (``record_stream``); memory that nobody wants before its copy is done is held until
then (:meth:`Copies.drop`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

import torch

from ds_tba.device.accelerator import AT_ONCE, Accelerator, Arrival, Event, PendingCopy, Stream, moment


class Destination(NamedTuple):
    """New device memory for bytes that come back. See [Note: Pools]."""

    data: torch.Tensor  # uint8, 1-D
    allocated: Event  # right after the allocation
    stream: Stream  # that it was allocated on

    def part(self, start: int, nbytes: int) -> Destination:
        """Return a range of the memory, for a part of the bytes."""
        return self._replace(data=self.data[start : start + nbytes])


class Copies:
    """The copies between one store and the device. See [Note: Ordering]."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._out_stream = accelerator.new_stream()
        self._in_stream = accelerator.new_stream()
        self._pending: deque[PendingCopy] = deque()
        self._dropped: list[Arrival] = []
        self.is_full = False  # no device memory, so that none is asked for ahead of need until somebody has got some

    def out(self, data: torch.Tensor, target: torch.Tensor) -> PendingCopy:
        """Copy device bytes to the beginning of ``target``. Where it raises, a copy may be under way: :meth:`drain`."""
        accelerator = self._accelerator
        target = target[: data.numel()]
        produced = moment(accelerator)
        with accelerator.on(self._out_stream):
            # Else it would read what kernels that are queued have not made yet.
            self._out_stream.wait_event(produced)
            accelerator.copy(data, target)
            copied = moment(accelerator)
        pending = PendingCopy(copied, data)
        if copied is not AT_ONCE:
            self._pending.append(pending)
        return pending

    def allocate(self, nbytes: int, device: torch.device) -> Destination:
        """Allocate memory for bytes that come back, on the calling thread's current stream; see [Note: Pools].

        Raises:
            RuntimeError, MemoryError: the device has none now.
        """
        accelerator = self._accelerator
        try:
            data = accelerator.allocate(nbytes, device)  # in the caller's pool: one of copies would grow beside it
        except (RuntimeError, MemoryError):
            self.is_full = True  # the allocator has given back all that it kept, which is not to come each time
            raise
        self.is_full = False
        # Here and not where the copy is queued: the event would stand behind whatever the stream was given since.
        return Destination(data, moment(accelerator), accelerator.current_stream())

    def into(self, source: torch.Tensor, destination: Destination, after: PendingCopy | None = None) -> Arrival:
        """Copy as many bytes of ``source`` as the destination has room for.

        Args:
            after: the copy that fills ``source``.
        """
        accelerator, data = self._accelerator, destination.data
        source = source[: data.numel()]
        with accelerator.on(self._in_stream):
            # Else kernels that are queued for the former tenant of the memory would write over the bytes.
            self._in_stream.wait_event(destination.allocated)
            if after is not None:  # else it would read a slot that is not filled yet
                self._in_stream.wait_event(after.event)
            try:
                accelerator.copy(source, data)
                event = moment(accelerator)
            except BaseException:
                self._in_stream.synchronize()  # a copy that nobody knows of may be under way into memory about to go
                raise
        return Arrival(accelerator, data, event, destination.stream)

    def drop(self, arrival: Arrival) -> None:
        """Hold memory that nobody wants any more until the copy into it is done, or it would hit the next tenant.

        Call it under the store's lock.
        """
        # A finalizer may run while its thread captures a graph, which a question to an event would spoil.
        if self._accelerator.is_capturing() or not arrival.event.query():
            self._dropped.append(arrival)

    def whole(self, destination: Destination, parts: Sequence[Arrival]) -> Arrival:
        """Return the memory whose parts are all on their way, for any stream."""
        accelerator = self._accelerator
        if len(parts) == 1:
            event = parts[0].event
        else:
            with accelerator.on(self._in_stream):
                event = moment(accelerator)  # the copies of the parts are in this stream, in any order
        return Arrival(accelerator, destination.data, event, destination.stream)

    def settle(self) -> None:
        """Free the device memory of copies that are done. Never blocks. Call it under the store's lock."""
        while self._pending and self._pending[0].free_if_done():
            self._pending.popleft()
        self._dropped = [arrival for arrival in self._dropped if not arrival.event.query()]

    def finish(self) -> None:
        """Block until nothing of a store that is closed is copied any more. Call it under the store's lock."""
        # Both streams, and not the copies that are known: others read host memory that is about to go.
        self._out_stream.synchronize()
        self._in_stream.synchronize()
        self._dropped.clear()
        self.settle()

    def hold_at_most(self, nbytes: int) -> None:
        """Block until copies out hold no more device bytes than that. Call it under the store's lock."""
        self.settle()
        while sum(copy.nbytes for copy in self.under_way) > nbytes:
            self._pending.popleft().wait()

    def drain(self) -> None:
        """Block until every copy out is done, also one that nobody knows of, or the device has failed."""
        with suppress(RuntimeError):  # a device that has failed copies no more
            self._out_stream.synchronize()

    @property
    def under_way(self) -> list[PendingCopy]:
        """The copies out, oldest first, as far as :meth:`settle` knows."""
        return list(self._pending)
