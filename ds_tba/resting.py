"""Who has lanes, staging and disk space? An offloader whose engine trains; the others of its process give theirs back.

Knows the tiers and whether the cache has anything in their care; cannot see engines.

[Note: Resting] DeepSpeed keeps every engine alive, and most programs never call ``destroy()``: a cell of a notebook
that runs again, a search for the batch size, a sweep. So an offloader has lanes, staging and disk space while its
engine trains: it takes them (*wakes*) at a forward with gradients, and gives them back (*rests*) where nothing is
in their care, as another engine is made, or as another steps and waking again would be a hundredth of the time
idle. Engines that take turns within a step keep theirs.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from ds_tba.core.cache import TensorCache
from ds_tba.errors import PathError
from ds_tba.storage.tiers import Tiers

logger = logging.getLogger(__name__)

RESTING_FACTOR = 100  # seconds idle for each second that waking takes
LOCK_LIMIT_S = 2.0


class Process:
    """The offloaders of this process: what one of them takes another may want.

    Attributes:
        open: the resting of each offloader that is not closed.
    """

    def __init__(self) -> None:
        self.open: list[Resting] = []

    def rest(self, *, now: bool = False, but: Resting | None = None) -> None:
        """Have all rest but one; see :meth:`Resting.rest`."""
        for one in (*self.open,):
            if one is not but:
                one.rest(now=now)


PROCESS = Process()


class Resting:
    """The taking and giving back of one offloader; see [Note: Resting].

    Args:
        tiers: awake.
        cache: says whether anything is in their care.
        rank: of this process, for the log.
        waking_s: seconds that opening the tiers took.
    """

    def __init__(self, tiers: Tiers, cache: TensorCache, rank: int, waking_s: float) -> None:
        self._tiers = tiers
        self._cache = cache
        self._rank = rank
        self._pid = os.getpid()
        self._life = threading.Lock()  # guards the next seven; the first to be taken of all locks of ours
        # Neither is so where one tier rests and another could not: that is to be woken, too, or it would refuse all.
        self._is_awake, self._is_resting = True, False
        self._is_over = self._has_warned = False
        self._in_use = 0  # forwards and ends of steps under way
        self._used_at = time.monotonic()
        self._waking_s = waking_s
        PROCESS.open.append(self)

    @property
    def is_over(self) -> bool:
        """True once the tiers are closed, or about to be."""
        return self._is_over

    @contextmanager
    def using(self) -> Iterator[None]:
        """Want lanes, staging and disk space."""
        # Under the lock: another thread may be about to give back what this one is about to use.
        with self._life:
            if not (self._is_awake or self._is_over):
                self._wake()
            self._in_use += 1  # last: an interrupt of waking would leave it in use for ever
        try:
            yield
        finally:
            with self._life:
                self._in_use -= 1
                self._used_at = time.monotonic()

    def rest(self, *, now: bool = False) -> None:
        """Give lanes, staging and disk space back where nothing is in their care.

        Args:
            now: also where the engine may go on in a moment.
        """
        if self._pid != os.getpid():  # the lock may be taken for ever in a forked child
            return
        with self._life:
            idle_s = time.monotonic() - self._used_at
            if self._is_over or self._is_resting or self._in_use or self._cache.live_records:
                return
            if now or idle_s > RESTING_FACTOR * self._waking_s:
                self._is_awake, self._is_resting = False, self._tiers.give_back()

    def end(self) -> None:
        """Close the tiers; they wake no more."""
        # A signal handler may have interrupted the lock's holder, who cannot go on before it returns.
        is_taken = self._life.acquire(timeout=LOCK_LIMIT_S)
        try:
            self._tiers.close()
        finally:
            self._is_over = True
            if is_taken:
                self._life.release()
            PROCESS.open.remove(self)

    def _wake(self) -> None:
        started_s, is_whole = time.monotonic(), self._is_resting
        try:
            self._tiers.open()
            self._is_awake, self._is_resting = True, False
        except (OSError, RuntimeError, MemoryError, PathError) as error:
            if not self._has_warned:
                logger.warning("rank %d: activations stay in memory, for want of %s", self._rank, error)
            self._has_warned = True
        if is_whole:
            self._waking_s = time.monotonic() - started_s
