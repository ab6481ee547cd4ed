"""How many bytes of saved tensors are in device memory: one account for each storage, whoever has saved it.

Sees tensors and their storages, and makes no room for them (``residency.py`` does); cannot see records or stores.
"""

from __future__ import annotations

import threading
import uuid
from abc import ABC, abstractmethod

import torch

from ds_tba.core.interrupts import Ends, Notice
from ds_tba.core.prefetch import MicroStep
from ds_tba.core.tensors import has_plain_storage, held_memory, is_parameter
from ds_tba.device.accelerator import Accelerator, Stream
from ds_tba.device.copies import Releases
from ds_tba.stats import CacheStats


class CountedMemory:
    """The account of a storage's device memory in one cache. Changed only under the cache's lock.

    The end of a storage that is watched is told with its account. With consumers the event of the release must come
    after all that the allocator records when the memory goes. It does: the storage's object goes before the memory, and
    nobody acts on that within the finalizer.

    Attributes:
        users: records and tensors that have it counted.
        nbytes: that are counted: of the largest user, since one may have a slice of the storage, another all of it;
            none once the memory is free, or nobody wants it counted.
        savers: records and tensors for which autograd would hold the storage without us, also once the memory is free.
        saved_bytes: of the largest of them.
        consumers: streams that may still use the memory when the host lets go of it.
        lent: how many of the users belong to recipes, which make another storage from these bytes.
        is_watched: the end of the storage is told, since a user does not hold it.
        is_of_function: a custom Function has saved the storage, so that nothing is rematerialized from it.
    """

    users = nbytes = savers = saved_bytes = lent = 0
    is_watched = is_of_function = False

    def __init__(self) -> None:
        self.consumers: list[Stream] = []

    def save(self, nbytes: int) -> int:
        """Add a saver; return the bytes that this adds."""
        added_bytes = max(nbytes - self.saved_bytes, 0)  # a slice of it may have been saved before
        self.savers += 1
        self.saved_bytes += added_bytes
        return added_bytes

    def unsave(self) -> int:
        """Take a saver away; return the bytes that go with the last of them."""
        self.savers -= 1
        if self.savers:
            return 0
        nbytes, self.saved_bytes = self.saved_bytes, 0
        return nbytes


class CountedGone(Notice):
    """Tells the end of a tensor without a record that had this memory counted.

    Attributes:
        micro_step: that has saved it; None where autograd has not, so that it belongs to a recipe.
    """

    __slots__ = ("memory", "micro_step")

    memory: CountedMemory
    micro_step: MicroStep | None


class MemoryGone(Notice):
    """Tells the end of a storage, whose memory the host has freed."""

    __slots__ = ("memory",)

    memory: CountedMemory


class Accounts(ABC):
    """Counts the device memory of saved tensors. Changes only under the lock, which ``count_kept`` and the two about
    recomputations take.

    Args:
        device: the training device, with its index.
        accelerator: of that device.

    Attributes:
        lock: guards everything that the cache changes. It is not reentrant on purpose: code that found it taken by its
            own thread would change what a critical section is changing.
        meter: the figures, which may count what is gone and was not acted on: to change, and to read under any lock.
        ends: of views, counted tensors and storages.
        is_limited: True if there is a budget.
    """

    def __init__(self, device: torch.device, accelerator: Accelerator) -> None:
        self.lock = threading.Lock()
        self.meter = CacheStats()
        self.ends = Ends(self.finalize)
        self.is_limited = False
        self._account = f"_ds_tba_account_{uuid.uuid4().hex}"  # attribute of storages; two engines may save one
        self._gauge = self.meter.resident
        self._device = device
        self._accelerator = accelerator
        self._releases = Releases(accelerator, self._gauge)
        self._recomputed: list[CountedMemory] = []  # what blocks that ran again have saved in this backward

    @abstractmethod
    def finalize(self, gone: Notice) -> None:
        """Act on the end of a view, a counted tensor, or a storage. Called under the lock."""

    @abstractmethod
    def wait_for(self, nbytes: int) -> bool:
        """Offload, and wait for, what makes room for so many bytes more; return whether they fit now."""

    @abstractmethod
    def make_room(self, nbytes: int) -> None:
        """Have ``nbytes`` more fit the budget, as far as that can be done. Called under the lock."""

    def memory_of(self, storage: torch.UntypedStorage | None) -> CountedMemory | None:
        """Return the account of the memory of a storage, if it has one."""
        memory: CountedMemory | None = getattr(storage, self._account, None)
        return memory

    def count(self, storage: torch.UntypedStorage | None, nbytes: int) -> CountedMemory:
        """Count the memory of a storage for one user (more), until no user wants it counted.

        Args:
            storage: that the user holds, or :meth:`count_until_free` is told of; None for memory without one.
        """
        memory: CountedMemory | None = getattr(storage, self._account, None)
        if memory is None:
            memory = CountedMemory()
            if storage is not None:
                setattr(storage, self._account, memory)
        if nbytes > memory.nbytes:  # else it is counted already: records and tensors share storages
            if self.is_limited:  # without a budget the wait, for what was let go of, has been without the lock
                self.make_room(nbytes - memory.nbytes)
            self._gauge.add(nbytes - memory.nbytes)
            memory.nbytes = nbytes
        memory.users += 1
        return memory

    def count_kept(
        self,
        user: object,
        storage: torch.UntypedStorage | None,
        nbytes: int,
        reason: str,
        micro_step: MicroStep | None,
    ) -> CountedMemory:
        """Count a tensor that is kept, without a record, as ``nbytes`` of its storage.

        Args:
            user: with whose end it is counted no longer.
            reason: in the report's words.
            micro_step: that saves it; None for a tensor of ours, which autograd has not saved.
        """
        if self.is_limited or self._releases.nbytes:
            self.wait_for(nbytes)
        with self.lock:
            if self.ends.left:
                self.ends.act()
            memory = self.count(storage, nbytes)
            self.watch_user(user, memory, micro_step)
            if micro_step is not None:
                added_bytes = memory.save(nbytes)
                self.meter.saved.add(added_bytes)
                self.meter.kept_bytes[reason] += added_bytes
        return memory

    def watch_user(self, user: object, memory: CountedMemory, micro_step: MicroStep | None) -> None:
        """Have the end of a user without a record end its count; see :meth:`count_kept`."""
        notice = self.ends.watch(user, CountedGone)
        notice.memory, notice.micro_step = memory, micro_step
        if micro_step is None:
            memory.lent += 1
        else:
            micro_step.alive += 1

    def count_until_free(self, storage: torch.UntypedStorage) -> None:
        """Count the memory of a storage no longer than until it is free: a user does not hold it."""
        memory = self.memory_of(storage)
        if memory is not None and not memory.is_watched:
            memory.is_watched = True
            self.ends.watch(storage, MemoryGone).memory = memory

    def uncount(self, memory: CountedMemory) -> None:
        """Take a user away; with the last one the memory is counted no longer."""
        memory.users -= 1
        self._end_count(memory)

    def _end_count(self, memory: CountedMemory) -> None:
        if not memory.users:
            nbytes, memory.nbytes = memory.nbytes, 0
            self._gauge.add(-nbytes)

    def free(self, memory: CountedMemory) -> None:
        """Note that the host has freed memory; its bytes count until consumers, which may be late, have come so far."""
        nbytes, memory.nbytes = memory.nbytes, 0
        if memory.consumers:
            self._releases.add(nbytes, memory.consumers)
        else:
            self._gauge.add(-nbytes)

    def count_again(self, tensor: torch.Tensor) -> None:
        """Count a tensor that a forward saves which runs again in backward, until it is free or backward is over."""
        if is_parameter(tensor) or not has_plain_storage(tensor):  # a parameter's memory is its owner's
            return
        storage, nbytes = tensor.untyped_storage(), held_memory(tensor, self._device)[1]
        self.wait_for(nbytes)
        with self.lock:
            self.meter.recomputed_bytes += 0 if self.memory_of(storage) else nbytes
            self._recomputed.append(self.count(storage, nbytes))
            self.count_until_free(storage)

    def end_recomputations(self) -> None:
        """Count no longer what backward has saved again: what others still hold of it, a buffer say, is theirs."""
        with self.lock:
            while self._recomputed:
                self.uncount(self._recomputed.pop())
