"""Closes an offloader in a thread of its own: a finalizer may not wait, and a signal handler may hold a lock.

Knows a function to call, and nothing of what that closes.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from ds_tba.device.accelerator import THREAD_PREFIX, Accelerator, new_thread


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
        self._thread = new_thread(accelerator, self._run, f"{THREAD_PREFIX}close")
        self._thread.start()

    def ask(self) -> None:
        """Have it closed. Waits for nothing, so that finalizers and signal handlers may call it."""
        self._asked.put(None)

    def wait(self, limit_s: float) -> bool:
        """Block until it is closed; False where that takes longer than ``limit_s``.

        In a thread of ours it returns at once: a user's finalizer runs there, and closing waits for that thread.
        """
        if threading.current_thread().name.startswith(THREAD_PREFIX):
            return True
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
