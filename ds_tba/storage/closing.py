"""Closing from anywhere: from a finalizer, which may not wait, and from a signal handler, which may wait in vain.

A signal handler runs in the main thread, between two steps of whatever that thread was doing. Where these were our own,
the thread may hold a lock that closing needs, and holds it until the handler returns. So closing is done in a thread of
its own, and the caller waits no longer than makes sense for him.
"""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Callable

PACKAGE = __name__.partition(".")[0]


class Closer:
    """Calls ``close`` once, in a thread of its own, when it is asked to.

    The thread exists from the start, because starting one waits for it.
    """

    def __init__(self, close: Callable[[], None]) -> None:
        self._close = close
        self._asked: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._is_done = False
        # Held until closing is done. Not the thread's own join(): one that a signal handler leaves with an exception
        # takes the thread for ended.
        self._closing = threading.Lock()
        self._closing.acquire()
        self._thread = threading.Thread(target=self._run, name=f"{PACKAGE}-close", daemon=True)
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
