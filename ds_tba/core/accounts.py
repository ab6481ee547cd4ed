"""How many bytes of saved tensors are in device memory: one account for each storage, whoever has saved it.

Sees tensors and their storages, and makes no room for them (``residency.py`` does); cannot see records or stores.

[Note: Ends] A finalizer may run anywhere: in any thread, and inside any critical section, also one that its own thread
is in. So it may neither wait for a lock nor take one that its thread could hold: it only puts the end of its object
into a queue. Packing, unpacking, waiting for room and reading figures act on the queue, under the cache's lock.

[Note: No Python in finalizers] A signal handler runs before the first bytecode of whatever Python function is called
next, and what it raises inside a finalizer (``__del__``, a weak reference's callback) Python reports and drops: the
``sys.exit`` of a handler that has saved a checkpoint would be lost, and training go on until SIGKILL. So no class has a
``__del__``. A :class:`Notice` is a weak reference whose callback is a method written in C, which puts the notice into
a queue: no bytecode runs between the end of the object and that.
"""

from __future__ import annotations

import threading
import uuid
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeVar

import torch

from ds_tba.core.prefetch import MicroStep
from ds_tba.device.accelerator import Accelerator, Event, Stream, moment
from ds_tba.stats import CacheStats, Gauge

# ---- the ends of objects --------------------------------------------------------------------------------------------


class Notice(weakref.ref[Any]):
    """A weak reference that enters a queue when its object is gone; see [Note: No Python in finalizers].

    A kind of notice has attributes that say what the end means. Whoever watches sets them.
    """

    __slots__ = ()
    __hash__, __eq__ = object.__hash__, object.__eq__  # those of a weak reference ask its object, which may be gone


OneNotice = TypeVar("OneNotice", bound=Notice)


class Ends:
    """The ends of watched objects that nobody has acted on yet."""

    def __init__(self, act_on: Callable[[Any], None]) -> None:
        self._act_on = act_on  # deals with one notice
        self.left: deque[Notice] = deque()  # notices of objects that are gone; empty if there is nothing to act on
        self.tell: Callable[[Any], None] = self.left.append  # the callback of a notice
        self._watched: set[Notice] = set()  # a weak reference that is gone itself tells nobody

    def watch(self, notice: OneNotice) -> OneNotice:
        """Have a complete notice left when its object is gone, whoever lets go of that."""
        self._watched.add(notice)
        return notice

    def act(self) -> None:
        """Act on every notice that was left; under the lock of what they are about."""
        while self.left:
            try:
                notice = self.left.popleft()
            except IndexError:  # a queue without a lock of its own: another thread has taken the last one
                return
            if notice in self._watched:  # else an interrupt came before it was, and its object is not counted
                self._watched.remove(notice)
                self._act_on(notice)


# ---- memory that the host has freed ---------------------------------------------------------------------------------


class Release(NamedTuple):
    """Device memory that the host has freed, and events of the streams that may still use it."""

    nbytes: int
    events: list[Event]

    def wait(self) -> None:
        """Block the calling host thread until the streams have come so far."""
        for event in self.events:
            event.synchronize()


class Releases:
    """Device memory that the host has freed, oldest first, until the allocator can hand it out again.

    The host runs far ahead of a device. Memory that another stream uses than the one it was allocated on is free only
    when that stream has come so far; new memory would be taken for whatever is reloaded until then. Changed only under
    one lock.
    """

    def __init__(self, accelerator: Accelerator, resident: Gauge) -> None:
        self.nbytes = 0
        self._accelerator = accelerator
        self._resident = resident  # the level that the memory is counted in until then
        self._pending: deque[Release] = deque()

    @property
    def oldest(self) -> Release | None:
        return self._pending[0] if self._pending else None

    def add(self, nbytes: int, streams: Iterable[Stream]) -> None:
        """Count freed memory until these streams, which may still use it, have come so far."""
        accelerator = self._accelerator
        # It is free at once, or nobody can tell: an event of a capture says nothing of the device.
        if accelerator.is_synchronous or accelerator.is_capturing():
            self._resident.add(-nbytes)
            return
        self._pending.append(Release(nbytes, [moment(accelerator, stream) for stream in streams]))
        self.nbytes += nbytes

    def settle(self) -> None:
        """Count no longer what is free by now. Never blocks."""
        while self._pending and all(event.query() for event in self._pending[0].events):
            nbytes = self._pending.popleft().nbytes
            self.nbytes -= nbytes
            self._resident.add(-nbytes)


# ---- the accounts ---------------------------------------------------------------------------------------------------


class CountedMemory:
    """The account of a storage's device memory in one cache. Changed only under the cache's lock.

    The end of a storage that is watched is told with its account. Where other streams have used the memory, it counts
    until events that we record in them are done. These come after the allocator's own events, so that it is free then:
    nobody acts on an end before both the storage's object and its memory are gone.
    """

    # Users are the records and tensors that have it counted; ``lent`` of them belong to recipes, which make another
    # storage from these bytes. Counted are the ``nbytes`` of the largest user, since one may have a slice of the
    # storage, another all of it; none once the memory is free, or nobody wants it counted. Savers are the records and
    # tensors for which autograd would hold the storage without us, also once the memory is free; ``saved_bytes`` are
    # those of the largest.
    users = nbytes = savers = saved_bytes = lent = 0
    # Whether the end of the storage is told, since a user does not hold it; and whether a custom Function has saved it,
    # so that nothing is rematerialized from it.
    is_watched = is_of_function = False

    def __init__(self) -> None:
        self.consumers: list[Stream] = []  # they may still use the memory when the host lets go of it

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
    """Tells the end of a tensor without a record that had this memory counted."""

    __slots__ = ("memory", "micro_step")

    memory: CountedMemory
    micro_step: MicroStep | None  # that has saved it; None where autograd has not, so that it belongs to a recipe


class MemoryGone(Notice):
    """Tells the end of a storage, whose memory the host has freed."""

    __slots__ = ("memory",)

    memory: CountedMemory


class Accounts(ABC):
    """Counts the device memory of saved tensors. Changes only under the lock, which ``count_kept`` takes."""

    def __init__(self, device: torch.device, accelerator: Accelerator) -> None:
        # Guards everything that the cache changes. It is not reentrant on purpose: code that found it taken by its own
        # thread would change what a critical section is changing.
        self.lock = threading.Lock()
        self.meter = CacheStats()  # may count what is gone and was not acted on: to change, and to read under any lock
        self.ends = Ends(self.finalize)  # of views, counted tensors and storages
        self.is_limited = False  # there is a budget
        self._account = f"_ds_tba_account_{uuid.uuid4().hex}"  # attribute of storages; two engines may save one
        self._gauge = self.meter.resident
        self._device = device  # the training device, with its index
        self._accelerator = accelerator
        self._releases = Releases(accelerator, self._gauge)

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
        notice = CountedGone(user, self.ends.tell)
        notice.memory, notice.micro_step = memory, micro_step
        self.ends.watch(notice)
        if micro_step is None:
            memory.lent += 1
        else:
            micro_step.alive += 1

    def count_until_free(self, storage: torch.UntypedStorage) -> None:
        """Count the memory of a storage no longer than until it is free: a user does not hold it."""
        memory = self.memory_of(storage)
        if memory is not None and not memory.is_watched:
            memory.is_watched, notice = True, MemoryGone(storage, self.ends.tell)
            notice.memory = memory
            self.ends.watch(notice)

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
