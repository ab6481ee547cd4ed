"""What may a finalizer do? Nothing of ours: a queue is told of the end, and the next holder of a lock acts on it.

A finalizer may run anywhere: in any thread, and inside any critical section, also one that its own thread is in. So it
may neither wait for a lock nor take one that its thread could hold. Knows nothing of the items, nor of what else the
lock guards.

[Note: No Python in finalizers] A signal handler runs before the first bytecode of whatever Python function is called
next, and what it raises inside a finalizer (``__del__``, a weak reference's callback) Python reports and drops: the
``sys.exit`` of a handler that has saved a checkpoint would be lost, and training go on until SIGKILL. So no class has a
``__del__``. A :class:`Notice` is a weak reference whose callback is a method written in C, which puts the notice into
a queue: no bytecode runs between the end of the object and that.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Generic, TypeVar

from ds_tba.device.accelerator import Accelerator, new_thread
from ds_tba.device.memory import is_out_of_memory
from ds_tba.errors import DsTbaError, StateError

Item = TypeVar("Item")
FOLLOW_S = 1.0
THREAD_PREFIX = "ds_tba-"  # of the names of our threads


class Notice(weakref.ref, Generic[Item]):  # type: ignore[type-arg]
    """Told of when its object is gone; see [Note: No Python in finalizers].

    Attributes:
        item: the work that the object's end leaves to the holder of the lock.
    """

    __slots__ = ("item",)

    item: Item


class DeferredFinalizers(Generic[Item]):
    """A lock, and the work that finalizers leave to its holders.

    The lock is taken as ``with deferred, deferred.lock:``. Before, and again after, that acts on what was left.

    [Note: Interrupts] A signal handler that raises, as that of Ctrl-C does, may come after any call, and a program may
    catch that and train on. Therefore the lock is a context by itself, and :meth:`act_if_free` has a ``for`` take it:
    CPython does either in one bytecode. After a call of ``acquire()`` the exception might come before the ``try`` that
    releases, and the lock stay taken for ever. For the same reason lanes have queues that are written in C: those of
    Python have such calls.

    [Note: Broken] What the lock guards is whole before and after a critical section, and not in the middle of one. An
    exception that leaves a section and is no refusal of ours (an interrupt, Python's memory that ran out, a defect) may
    have left it half changed, also between an item's way out of the queue and the end of acting on it. That is
    remembered: the next forward refuses (:meth:`refuse_broken`), because a later step could have a wrong gradient.
    Threads of ours are no part of that: no signal handler runs in them, and lanes act on what fails in them.

    Args:
        lock: not reentrant, or an item left in a critical section would be acted on in the middle of it.
        act: deals with one item; called under the lock.
    """

    def __init__(self, lock: threading.Lock, act: Callable[[Item], None]) -> None:
        self.lock = lock
        self._act = act
        self._left: queue.SimpleQueue[Item | Notice[Item]] = queue.SimpleQueue()  # the one that a finalizer may use
        self._tell: Callable[[Notice[Item]], None] = self._left.put
        self._watched: set[Notice[Item]] = set()  # a weak reference that is gone itself tells nobody
        self._broken_by = ""  # the type of the exception; see [Note: Broken]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            self.note_exception(error)
        self.act_if_free()  # on an item that came in the meantime, and found the lock taken

    def refuse_broken(self) -> None:
        """Refuse to go on where a critical section was left half done; see [Note: Broken].

        Raises:
            StateError: one was.
        """
        if self._broken_by:
            raise StateError(
                f"{self._broken_by} came in the middle of ds_tba's bookkeeping of saved tensors, and a later step "
                "could have a wrong gradient: load the last checkpoint and go on with a new engine, or restart the "
                "program."
            )

    def note_exception(self, error: BaseException) -> None:
        """Remember an exception that has left what the lock guards half changed, if it is no refusal of ours."""
        is_ours = threading.current_thread().name.startswith(THREAD_PREFIX)
        if not (self._broken_by or is_ours or _is_refusal(error)):
            self._broken_by = type(error).__name__  # not itself: it holds frames, and all tensors in them

    def watch(self, watched: object, item: Item) -> Notice[Item]:
        """Leave ``item`` when an object, which is equal to itself only, is gone, whoever lets go of it, wherever.

        It is acted on by whoever takes the lock next, or asks to (:meth:`act_if_free`). The notice is a weak reference.
        """
        notice = Notice(watched, self._tell)
        notice.item = item
        self._watched.add(notice)
        return notice

    def leave(self, item: Item) -> None:
        """Leave an item, and act on all of them if the lock is free. Never blocks."""
        self._left.put(item)
        self.act_if_free()

    def act_if_free(self) -> None:
        """Act on the items unless the lock is taken. Whoever releases the lock calls this."""
        # Again after each release: an item that came before it found the lock taken.
        while not self._left.empty():
            for is_taken in map(self.lock.acquire, (False,)):  # see [Note: Interrupts]
                if not is_taken:
                    return
                try:
                    self.act()
                except BaseException as error:
                    self.note_exception(error)
                    raise
                finally:
                    self.lock.release()

    __enter__ = act_if_free

    def act(self) -> None:
        """Act on every item; call it under the lock, which whoever takes an item has."""
        while not self._left.empty():
            self._act_on(self._left.get_nowait())

    def follow(self, goes_on: Callable[[], bool]) -> None:
        """Act on items as they come, for as long as told: in a thread, once nobody else takes the lock any more."""
        while goes_on():
            # With a limit, because another thread may take the last item, after which none comes.
            with suppress(queue.Empty):
                item = self._left.get(timeout=FOLLOW_S)
                with self.lock:
                    self._act_on(item)

    def _act_on(self, item: Item | Notice[Item]) -> None:
        if isinstance(item, Notice):
            self._watched.discard(item)
            item = item.item
        self._act(item)


def _is_refusal(error: BaseException) -> bool:
    """Return whether an exception is raised on purpose, before anything was changed.

    Those are our own errors, but for a bug's, and a device or its allocator without memory. Python's own memory may run
    out between any two statements.
    """
    if isinstance(error, DsTbaError):
        return not isinstance(error, StateError)
    return is_out_of_memory(error) and not isinstance(error, MemoryError)


class Closer:
    """Calls ``close`` once, in a thread of its own, when it is asked to.

    Not in the caller's: a finalizer may not wait, and a signal handler may have interrupted the holder of a lock that
    closing needs. The thread exists from the start, because starting one waits for it.
    """

    def __init__(self, close: Callable[[], None], accelerator: Accelerator) -> None:
        self._close = close
        self._asked: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._is_done = False
        # Held until closing is done. No Event: its own lock has no limit of time, and a signal handler that calls
        # wait() may have interrupted a wait() that holds it.
        self._closing = threading.Lock()
        self._closing.acquire()
        self._thread = new_thread(accelerator, self._run, "ds_tba-close")
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
