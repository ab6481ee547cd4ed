"""Who moves bytes between staging and a file? The lanes: threads with an I/O handle of their own, and their queue.

Writes and reads of a swap file have lanes and a queue each, so that reads never queue behind writes. Lanes know neither
tickets nor files: a task is a function of a handle.
"""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from ds_tba.device.accelerator import Accelerator, new_thread
from ds_tba.storage.backends.base import IoHandle

# Handles its own errors; what escapes it is a bug and ends the lane loudly.
Task = Callable[[IoHandle], None]

URGENT = 0  # backward waits for it
AHEAD = 1
_STOP = 2


class LaneGroup:
    """The lanes of one kind, and their tasks in order of priority, then of arrival.

    Finalizers may not queue tasks: the garbage collector runs also inside of the queue's lock.

    Attributes:
        handles: of each lane, used and closed by its thread.
    """

    def __init__(self) -> None:
        self.handles: list[IoHandle] = []
        self._threads: list[threading.Thread] = []
        self._tasks: queue.PriorityQueue[tuple[int, int, Any]] = queue.PriorityQueue()
        self._arrivals = itertools.count()

    def open(self, count: int, open_handle: Callable[[], IoHandle]) -> None:
        """Open the handles of ``count`` lanes."""
        for _ in range(count):
            self.handles.append(open_handle())

    def start(self, name: str, accelerator: Accelerator) -> None:
        """Start a thread for each handle, on the accelerator's device."""
        for handle in self.handles:
            thread = new_thread(accelerator, partial(self._run, handle), name)
            thread.start()
            self._threads.append(thread)

    def put(self, task: Task, priority: int = AHEAD) -> None:
        """Queue a task: ``URGENT`` for bytes that backward waits for, ``AHEAD`` for all else."""
        self._tasks.put((priority, next(self._arrivals), task))

    def stop(self) -> None:
        """Let the lanes end once the tasks before are done."""
        for _ in self._threads:
            self._tasks.put((_STOP, next(self._arrivals), None))

    def end(self, seconds_left: Callable[[], float]) -> bool:
        """Wait until the lanes have ended, and close the handles; False where one did not in the time for that."""
        for handle in self.handles[len(self._threads) :]:
            handle.close()  # its thread never started
        del self.handles[len(self._threads) :]
        for thread in self._threads:
            thread.join(max(0.0, seconds_left()))
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self, handle: IoHandle) -> None:
        while (task := self._tasks.get()[2]) is not None:
            task(handle)
            del task  # or an idle lane would keep the last ticket alive
        handle.close()
