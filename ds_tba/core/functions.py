"""Memory for what a Function of the user's, or of a C++ extension, reads: it may write there without a version.

Knows what autograd holds, and where room is; cannot see how bytes come back, nor what is rematerialized.
"""

from __future__ import annotations

import torch

from ds_tba.core.originals import OwnMemory
from ds_tba.core.saved import Keeper, SavedCounted, SavedStorage, SavedView
from ds_tba.core.tensors import ViewSpec, has_plain_storage, span_bytes, storage_bytes
from ds_tba.device.accelerator import Accelerator, moment
from ds_tba.device.copies import Arrival


class Functions:
    """Gives Functions of the user's and of extensions saved tensors in memory that nobody else reads.

    Args:
        cache: has the room for copies.
        accelerator: of the device, where that is asynchronous.
    """

    def __init__(self, cache: Keeper, accelerator: Accelerator | None) -> None:
        self._cache = cache
        self._accelerator = accelerator

    def hand_out(self, held: SavedCounted | SavedView, memory: OwnMemory) -> torch.Tensor:
        """Return a saved tensor to a Function of the user's, which may write into it without a version.

        It has one memory for all its reads, as without hooks, and shares it with no recipe, nor with bytes that others
        will read: what it returns may become ``.grad``, and be written into. A write with a version counts for the
        tensor that was saved, so that whoever else has saved it raises, as without hooks. A tensor without a graph that
        the user still has may be a state that backward updates, a running mean say: it is that memory.

        Args:
            memory: of what the node has read before.
        """
        owner = held.record if isinstance(held, SavedView) else held.memory
        if held.held is not None and not held.memory.is_operand:
            tensor = held.restore()
            if isinstance(held, SavedView) and held.holds(held.record.key):  # it may be moved between two reads
                memory[owner] = Arrival.done(storage_bytes(tensor))
            return tensor
        known = memory.get(owner)
        # A read on another stream waits, or it would see what the copy there has not written yet.
        storage = None if known is None else known.join().untyped_storage()
        if storage is None and isinstance(held, SavedView):
            storage = self._source_of(held.record)
        if storage is not None:
            tensor = held.over(storage)
            if isinstance(held, SavedView):
                with self._cache.finalizers, self._cache.finalizers.lock:
                    self._cache.room.note_unpacked(held)
            return tensor
        tensor = held.restore()
        if not _is_its_bytes(tensor):
            return tensor.clone()  # a conjugate's mark would be lost with bytes alone
        data = storage_bytes(tensor)
        if _others_read(held):  # or what the Function writes would be their bytes
            data = self._cache.room.copied(data)
        memory[owner] = self._arrival(data)
        return held.over(data.untyped_storage())

    def _arrival(self, data: torch.Tensor) -> Arrival:
        """Return bytes that come on the calling thread's current stream, for its other streams."""
        accelerator = self._accelerator
        if accelerator is None:
            return Arrival.done(data)
        arrival = Arrival(accelerator, data, moment(accelerator), accelerator.current_stream())
        counted = self._cache.room.memory_of(data.untyped_storage())
        if counted is not None:
            arrival.consumers = counted.consumers  # one list: the memory is free when all who read it are done
        return arrival

    def _source_of(self, record: SavedStorage) -> torch.UntypedStorage | None:
        """Return the storage that was saved, if it is moved and the user has it all the same."""
        storage = None if record.is_kept or record.source is None else record.source()
        if storage is None or storage.nbytes() != record.nbytes or record.ticket is None:  # gone, or resized by now
            return None
        for copy in record.ticket.store.copies_out():  # else one that is under way would take what backward writes
            copy.wait()
        return storage

    def own(self, held: SavedCounted | SavedView, tensor: torch.Tensor) -> torch.Tensor:
        """Return a saved tensor to a Function in C++, in memory of its own and with a version of its own.

        It, too, may write into that without a version, and what it returns may become ``.grad``, or be added to in
        place: nobody else refers to the tensor that autograd makes of ours. Nothing tells whether it reads once more,
        so that each read has another memory.
        """
        if held.held is None and not _others_read(held):
            return tensor
        if not _is_its_bytes(tensor):
            return tensor.detach().clone()  # its mark is not in its bytes
        spec = ViewSpec.of(tensor)
        start = spec.storage_offset * tensor.element_size()
        own = self._cache.room.copied(storage_bytes(tensor)[start : start + span_bytes(tensor)])
        return spec._replace(storage_offset=0).rebuild(own)


def _is_its_bytes(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has a storage of its own, and no mark that the bytes there do not have."""
    return has_plain_storage(tensor) and not tensor.is_conj() and not tensor.is_neg()


def _others_read(held: SavedCounted | SavedView) -> bool:
    """Return whether bytes that backward has just got are what another tensor is made of, or another reader's, too."""
    return held.memory.is_operand or (isinstance(held, SavedView) and held.record.loaded is not None)
