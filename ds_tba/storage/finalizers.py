"""Deferred finalizers: work that a finalizer leaves to the next holder of a lock.

A finalizer may run anywhere: in any thread, and inside any critical section, also one that its own thread is in. So it
may neither wait for a lock nor take one that its thread could hold. It defers: it queues
an item, and acts on it only if the lock happens to be free.
"""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import Generic, Protocol, TypeVar

from ds_tba.device.accelerator import Accelerator, new_thread

Item = TypeVar("Item")


class Lock(Protocol):
    """A lock that is not reentrant."""

    def acquire(self, blocking: bool = ...) -> bool: ...
    def release(self) -> None: ...


class DeferredFinalizers(Generic[Item]):
    """A queue of items for the holder of a lock.

    Args:
        lock: not reentrant, or an item left in a critical section would be acted on in the middle of it.
        act: deals with one item; called under the lock.
    """

    def __init__(self, lock: Lock, act: Callable[[Item], None]) -> None:
        self._lock = lock
        self._take_if_free = partial(lock.acquire, False)
        self._act = act
        self._left: queue.SimpleQueue[Item] = queue.SimpleQueue()

    def leave(self, item: Item, *, acts: bool = True) -> None:
        """Leave an item, and act on all of them if the lock is free. Never blocks.

        Args:
            acts: False where the item is about memory that goes only when this finalizer has returned.
        """
        self._left.put(item)
        if acts:
            self.act_if_free()

    def act_if_free(self) -> None:
        """Act on the items unless the lock is taken. Whoever releases the lock calls this."""
        if self._left.empty():
            return
        # A `for`, not `while acquire(): try`: a signal handler that raises, as that of Ctrl-C does, may come between a
        # call and what follows it, and nobody would let go. Between an iterator and the body of its loop none comes.
        for _ in iter(self._take_if_free, False):
            try:
                self.act()
            finally:
                self._lock.release()
            # Again after the release: an item that came in the meantime found the lock taken.
            if self._left.empty():
                return

    def act(self) -> None:
        """Act on every item; call it under the lock, which whoever takes an item has."""
        while not self._left.empty():
            self._act(self._left.get_nowait())


# Closing from anywhere: from a finalizer, which may not wait, and from a signal handler, which may wait in vain.
#
# A signal handler runs in the main thread, between two steps of whatever that thread was doing. Where these were our
# own, the thread may hold a lock that closing needs, and holds it until the handler returns. So closing is done in a
# thread of its own, and the caller waits no longer than makes sense for him.


PACKAGE = __name__.partition(".")[0]


class Closer:
    """Calls ``close`` once, in a thread of its own, when it is asked to.

    The thread exists from the start, because starting one waits for it. It runs on the accelerator's device.
    """

    def __init__(self, close: Callable[[], None], accelerator: Accelerator) -> None:
        self._close = close
        self._asked: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._is_done = False
        # Held until closing is done. Not the thread's own join(): one that a signal handler leaves with an exception
        # takes the thread for ended.
        self._closing = threading.Lock()
        self._closing.acquire()
        self._thread = new_thread(accelerator, self._run, f"{PACKAGE}-close")
        self._thread.start()

    def ask(self) -> None:
        """Have it closed. Waits for nothing, so that finalizers and signal handlers may call it."""
        self._asked.put(None)

    def wait(self, limit_s: float) -> bool:
        """Block until it is closed; False where that takes longer than ``limit_s``."""
        if not self._is_done and self._closing.acquire(timeout=limit_s):
            self._closing.release()
        if self._is_done:
            self._thread.join(limit_s)
        return self._is_done

    def _run(self) -> None:
        self._asked.get()
        try:
            self._close()
        finally:
            self._is_done = True
            self._closing.release()


def interrupts_us(*entries: str) -> bool:
    """Whether the caller was called in the middle of this package's own code, as a signal handler may be.

    Args:
        entries: modules of this package through which users call it, so that they do not count.
    """
    frame = sys._getframe(1).f_back
    while frame is not None:
        module = str(frame.f_globals.get("__name__"))
        if module.startswith(f"{PACKAGE}.") and module not in entries:
            return True
        frame = frame.f_back
    return False
