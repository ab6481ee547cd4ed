"""What finalizers leave behind for whoever next holds a lock.

A finalizer may run anywhere: in any thread, and inside any critical section, also one that its own thread is in. So it
may neither wait for a lock nor take one that its thread could hold. It leaves a note, and acts on it only if the lock
happens to be free.
"""

from __future__ import annotations

import queue
from collections.abc import Callable
from functools import partial
from typing import Generic, Protocol, TypeVar

Note = TypeVar("Note")


class Lock(Protocol):
    """A lock that is not reentrant."""

    def acquire(self, blocking: bool = ...) -> bool: ...
    def release(self) -> None: ...


class DeferredFinalizers(Generic[Note]):
    """Notes for the holder of a lock.

    Args:
        lock: not reentrant, or a note left in a critical section would be acted on in the middle of it.
        act: deals with one note; called under the lock.
    """

    def __init__(self, lock: Lock, act: Callable[[Note], None]) -> None:
        self._lock = lock
        self._take_if_free = partial(lock.acquire, False)
        self._act = act
        self._left: queue.SimpleQueue[Note] = queue.SimpleQueue()

    def leave(self, note: Note) -> None:
        """Leave a note, and act on all of them if the lock is free. Never blocks."""
        self._left.put(note)
        self.act_if_free()

    def act_if_free(self) -> None:
        """Act on the notes unless somebody holds the lock; whoever lets go of the lock calls this."""
        if self._left.empty():
            return
        # A `for`, not `while acquire(): try`: a signal handler that raises, as that of Ctrl-C does, may come between a
        # call and what follows it, and nobody would let go. Between an iterator and the body of its loop none comes.
        for _ in iter(self._take_if_free, False):
            try:
                self.act()
            finally:
                self._lock.release()
            # Again after letting go: a note that came in the meantime found the lock taken.
            if self._left.empty():
                return

    def act(self) -> None:
        """Act on every note; call it under the lock."""
        while True:
            try:
                note = self._left.get_nowait()
            except queue.Empty:
                return
            self._act(note)
