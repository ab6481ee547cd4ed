"""The device's part of an update: chunks are copied in, updated, cast and written back, on streams of their own.

[Note: Streams] There are three, so that both directions of the link and the kernels run at once. One job goes through
them in turn: compute waits for its upload, the write-back waits for its compute. The host puts the next job into a slot
only when it has seen the slot's last write-back done, so that no stream waits for a slot. All streams begin after what
the caller's stream was given before :meth:`DevicePipeline.begin`: kernels that still read the parameters, gradients
that are still being copied, and the former tenants of the slots' memory. That memory comes from the pool of the
caller's stream, where activations were, and is freed when the host has seen all three streams done. So the allocator
need not know of them, and whatever is queued later on any stream, or done by the host, comes after the update.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial

import torch

from ds_tba.device.accelerator import Accelerator, Event, Stream, moment
from ds_tba.update import ARRAYS_PER_CHUNK, BYTES_PER_ELEMENT
from ds_tba.update.formula import cast, scale
from ds_tba.update.host import SubGroup

Update = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], object]
"""Updates master and two moments in place by a gradient, which stays; the last tensor is scratch. See ``update_``."""


class DevicePipeline:
    """Runs jobs on the device, one step after the other: ``begin``, jobs and uploads, ``drain``. See [Note: Streams].

    On a synchronous accelerator a job is done when :meth:`submit` returns. Only one thread at a time may call it.

    Args:
        chunk_elements: most elements of a job.
        buffer_bytes: bytes for slots; one slot is made even where it is larger. Where memory runs out, later steps make
            no more slots than there was memory for.
    """

    def __init__(self, accelerator: Accelerator, device: torch.device, chunk_elements: int, buffer_bytes: int) -> None:
        self.uploaded_bytes = self.written_back_bytes = 0  # copied to the device and to the host so far
        self._accelerator = accelerator
        self._device = device  # of the slots
        array_bytes = BYTES_PER_ELEMENT * chunk_elements
        self._slots = max(1, buffer_bytes // (ARRAYS_PER_CHUNK * array_bytes))
        self._array_bytes = array_bytes
        self._up, self._compute, self._down = (accelerator.new_stream() for _ in range(3))
        # A slot is the arrays of a chunk. One under way has the event of its write-back.
        self._free: list[list[torch.Tensor]] = []
        self._in_flight: deque[tuple[Event, list[torch.Tensor]]] = deque()
        # What the device may still use in this step, also for a job that failed: it has addresses, and no references.
        self._held: list[object] = []
        self._upload_begins: Event | None = None  # of the last job

    def begin(self, *, most_jobs: int) -> bool:
        """Begin a step: all that follows comes after what the current stream was given so far.

        Args:
            most_jobs: number of jobs that bounds the slots; 0 where there are uploads only.

        Returns:
            True if the device has memory for at least one slot. Where it has not, :meth:`upload` still works.
        """
        if self._held:
            self.drain()  # the drain of the step before was interrupted
        while len(self._free) < min(self._slots, most_jobs):
            try:
                arrays = [self._accelerator.allocate(self._array_bytes, self._device) for _ in range(ARRAYS_PER_CHUNK)]
                self._free.append([one.view(torch.float32) for one in arrays])
            except torch.OutOfMemoryError:
                # Not tried again in each step: the allocator gives its whole cache back before it refuses.
                self._slots = max(1, len(self._free))
                break
        so_far = moment(self._accelerator)  # after the allocation: kernels may use that memory until now
        for stream in (self._up, self._compute, self._down):
            stream.wait_event(so_far)  # or it writes into what kernels before still read
        return bool(self._free)

    def has_room(self) -> bool:
        """Return whether a slot is free, that is, its last write-back is done. Never blocks."""
        while self._in_flight and self._in_flight[0][0].query():
            self._free.append(self._in_flight.popleft()[1])
        return bool(self._free)

    def wants_job(self) -> bool:
        """Return whether a slot is free, and the uploads of all jobs have begun. Never blocks.

        With more than one job waiting, the host's own uploads would wait behind them all, and the host for its buffers.
        """
        return self.has_room() and (self._upload_begins is None or bool(self._upload_begins.query()))

    def wait_for_room(self) -> None:
        """Block until a slot is free, where :meth:`begin` made any."""
        while not self.has_room():
            self._in_flight[0][0].synchronize()

    def submit(self, part: SubGroup, update: Update) -> None:
        """Queue one job: the update of a part of a sub-group in pinned memory, final when it is done. Never blocks.

        The parameters are cast on the device, if the part has them. Where ``update`` raises, nothing of the job was or
        will be written. Where something else fails, its tensors may hold anything. Other jobs still run: call
        :meth:`drain`, which ends all writing. Call it only where :meth:`has_room` says so.
        """
        slot = self._free.pop()
        self._held.append((slot, part))
        written_back = self._queue(part, update, [array[: part.elements] for array in slot])
        self._in_flight.append((written_back, slot))

    def upload(self, source: torch.Tensor, target: torch.Tensor) -> Event:
        """Queue a copy of the bytes of parameters that the host has updated, and cast into pinned memory.

        Return the copy's event: wait for it before ``source`` is filled again.
        """
        self._held.append((source, target))
        with self._accelerator.on(self._up):
            self._upload_bytes(source, target)
            return moment(self._accelerator)

    def drain(self) -> None:
        """End a step: block until all that was queued is done, then free the slots.

        Afterwards the host's tensors and the parameters are final, for the host and for everything that any stream is
        given from now on. Call it also after a failure; a second call does no harm.
        """
        for stream in (self._down, self._up, self._compute):
            self._block_until_done(stream)
            self.has_room()
        self._free.clear()
        self._in_flight.clear()
        self._held.clear()
        self._upload_begins = None

    def _queue(self, part: SubGroup, update: Update, arrays: list[torch.Tensor]) -> Event:
        """Queue a job in a slot, and return the event of its write-back."""
        accelerator = self._accelerator
        master, exp_avg, exp_avg_sq, gradient, scratch = arrays
        state = [(part.master, master), (part.exp_avg, exp_avg), (part.exp_avg_sq, exp_avg_sq)]
        with accelerator.on(self._up):
            self._upload_begins = moment(accelerator)
            for on_host, on_device in [*state, (part.gradient, gradient)]:
                self._upload_bytes(on_host, on_device)
            uploaded = moment(accelerator)
        with accelerator.on(self._compute):
            self._compute.wait_event(uploaded)  # else the update reads the chunk before it is there
            if part.factor != 1.0:
                accelerator.launch(partial(scale, part.factor), gradient)
            accelerator.launch(update, master, exp_avg, exp_avg_sq, gradient, scratch)
            if part.target is not None:
                accelerator.launch(cast, master, part.target)
            updated = moment(accelerator)
        with accelerator.on(self._down):
            self._down.wait_event(updated)  # else the old values are written back
            for on_host, on_device in state + ([(part.gradient, gradient)] if part.factor != 1.0 else []):
                accelerator.copy(on_device.view(torch.uint8), on_host.view(torch.uint8))
                self.written_back_bytes += on_host.nbytes
            return moment(accelerator)

    def _upload_bytes(self, source: torch.Tensor, target: torch.Tensor) -> None:
        self._accelerator.copy(source.view(torch.uint8), target.view(torch.uint8))
        self.uploaded_bytes += source.nbytes

    def _block_until_done(self, stream: Stream) -> None:
        with self._accelerator.on(stream):
            event = moment(self._accelerator)
        event.synchronize()


def uploads_before(chunk_elements: int) -> int:
    """Return the bytes that may be queued before an upload of the host: a chunk on the link, and one that waits."""
    return 2 * 4 * BYTES_PER_ELEMENT * chunk_elements  # parameters, two moments, gradient
