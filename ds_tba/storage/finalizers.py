"""What finalizers leave behind for whoever next holds a lock.

A finalizer may run anywhere: in any thread, and inside any critical section, also one that its own thread is in. So it
may neither wait for a lock nor take one that its thread could hold. It leaves a note, and acts on it only if the lock
happens to be free.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, Protocol, TypeVar

Note = TypeVar("Note")


class Lock(Protocol):
    """A lock that is not reentrant, or a condition over one."""

    def acquire(self, blocking: bool = ...) -> bool: ...
    def release(self) -> None: ...
    def __enter__(self) -> bool: ...
    def __exit__(self, *exception: Any) -> None: ...


class FinalizerNotes(Generic[Note]):
    """Notes for the holder of a lock.

    Args:
        lock: not reentrant, or a note left in a critical section would be acted on in the middle of it.
        act: deals with one note; called under the lock.
    """

    def __init__(self, lock: Lock, act: Callable[[Note], None]) -> None:
        self._lock = lock
        self._act = act
        self._left: queue.SimpleQueue[Note] = queue.SimpleQueue()

    def leave(self, note: Note) -> None:
        """Leave a note, and act on all of them if the lock is free. Never blocks."""
        self._left.put(note)
        self.act_if_free()

    def leave_for_later(self, note: Note) -> None:
        """Leave a note for the next holder of the lock, where acting on it may block."""
        self._left.put(note)

    def act_if_free(self) -> None:
        """Act on the notes unless somebody holds the lock; whoever lets go of the lock calls this."""
        # Again after letting go: a note that came in the meantime found the lock taken.
        while not self._left.empty() and self._lock.acquire(blocking=False):
            try:
                self.act()
            finally:
                self._lock.release()

    @contextmanager
    def locked(self) -> Iterator[None]:
        """The lock, with the notes left so far acted on at the beginning, and those left meanwhile at the end."""
        with self._lock:
            self.act()
            yield
        self.act_if_free()

    def act(self) -> None:
        """Act on every note; call it under the lock."""
        while True:
            try:
                note = self._left.get_nowait()
            except queue.Empty:
                return
            self._act(note)
