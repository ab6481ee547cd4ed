"""Time: a whole that ends when it must, and parts that end when theirs is up."""

from __future__ import annotations

import faulthandler
import os
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any

OUT_OF_TIME = "not run: out of time"
KEEP_TRIES = 5


class NotRunError(Exception):
    """A part cannot run here; the message says why, in the words "not run: ..."."""


class Deadline:
    """A point in time.

    Args:
        at_s: on the monotonic clock.
    """

    def __init__(self, at_s: float) -> None:
        self.at_s = at_s

    @classmethod
    def after(cls, seconds: float) -> Deadline:
        return cls(time.monotonic() + seconds)

    @property
    def left_s(self) -> float:
        """Seconds until then, negative after it."""
        return self.at_s - time.monotonic()

    def has(self, seconds: float) -> bool:
        """Whether so much time is left."""
        return self.left_s > seconds

    def share(self, part: float) -> Deadline:
        """The point in time when that part of what is left is over."""
        return Deadline.after(max(0.0, self.left_s) * part)


class Suite:
    """Runs parts in order and writes down what became of each.

    Time that a part does not need goes to the next ones. What a part has put into its result so far is kept when it
    fails.

    Args:
        minutes: for everything.
        keep: called with the results after each part, and when time is up, whatever is still running then.
        started_s: when the time began, on the monotonic clock; None: now.
    """

    def __init__(self, minutes: float, keep: Callable[[dict[str, Any]], None], started_s: float | None = None) -> None:
        self.started_s = time.monotonic() if started_s is None else started_s
        self.results: dict[str, Any] = {"minutes": minutes, "parts": {}}
        self._keep = keep
        self._whole_s = minutes * 60
        # The last part of the time is for writing, and for what cannot be interrupted.
        self._usable_s = self._whole_s - min(20.0, 0.1 * self._whole_s)
        self._used_share = 0.0
        self._at_end: list[Callable[[], None]] = []
        late_s = time.monotonic() - self.started_s
        self._watchdog = threading.Timer(max(0.0, self._whole_s * 0.98 - late_s), self._end_now)
        self._watchdog.daemon = True
        self._watchdog.start()
        # Also where no Python runs any more.
        faulthandler.dump_traceback_later(max(1.0, self._whole_s * 0.995 - late_s), exit=True)

    def at_end(self, clean_up: Callable[[], None]) -> None:
        """Have something done when time is up in mid-part."""
        self._at_end.append(clean_up)

    def run(self, name: str, share: float, work: Callable[[dict[str, Any], Deadline], None]) -> dict[str, Any]:
        """Run one part.

        Args:
            share: of the whole time; what earlier parts left over is added.
            work: fills the part's result, and should end by the deadline.
        """
        self._used_share += share
        deadline = Deadline(self.started_s + self._usable_s * min(1.0, self._used_share))
        part: dict[str, Any] = {"status": OUT_OF_TIME, "duration_s": 0.0}
        self.results["parts"][name] = part
        started = time.monotonic()
        if deadline.has(0):
            part["status"] = "not finished: out of time"
            try:
                work(part, deadline)
                part["status"] = "done"
            except NotRunError as reason:
                part["status"] = str(reason)
            except Exception as error:  # noqa: BLE001 - the other parts must run, the device is not had every day
                part["status"] = f"failed: {type(error).__name__}: {error}"
                part["traceback"] = traceback.format_exc()
        part["duration_s"] = round(time.monotonic() - started, 3)
        print(f"{name}: {part['status']} ({part['duration_s']:.1f} s)", flush=True)
        self._keep(self.results)
        return part

    def end(self) -> None:
        """All parts are through."""
        self._watchdog.cancel()
        faulthandler.cancel_dump_traceback_later()
        self.results["duration_s"] = round(time.monotonic() - self.started_s, 3)
        self._keep(self.results)

    def _end_now(self) -> None:
        print("time is up in the middle of a part; writing what there is", flush=True)
        try:
            for clean_up in self._at_end:
                clean_up()
            self.results["duration_s"] = round(time.monotonic() - self.started_s, 3)
            self.results["cut"] = True
            for _ in range(KEEP_TRIES):
                with suppress(RuntimeError):  # the part that is still running may be adding to its result
                    self._keep(self.results)
                    break
        finally:
            os._exit(4)
