"""What may come in the middle of our bookkeeping: an exception, a fork, the end of an object.

Knows nothing of what is kept in the books.

[Note: Poison] An interrupt, Python's memory that ran out, or a defect may have left records half changed. Nobody mends
that: the next forward refuses, because a later step could have a wrong gradient.

[Note: Forks] The threads, locks and drives of a parent are none of its child's, which may train a model of its own.

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

import os
import weakref
from collections import deque
from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from ds_tba.device.accelerator import is_out_of_memory
from ds_tba.errors import DsTbaError, StateError

P = ParamSpec("P")
R = TypeVar("R")
Self = TypeVar("Self", bound="Poisoned")


class Forks:
    """Counts how often the program was forked before it came into this process.

    A system call that asks for the process would be a tenth of what a saved tensor costs.
    """

    def __init__(self) -> None:
        self.count = 0
        os.register_at_fork(after_in_child=self._note)

    def _note(self) -> None:
        self.count += 1


FORKS = Forks()


class Poisoned:
    """Whoever refuses to go on after such an exception, and in a child; see [Note: Poison] and [Note: Forks]."""

    def __init__(self) -> None:
        self._broken_by = ""  # the type of the exception
        self._forks = FORKS.count

    @property
    def is_forked(self) -> bool:
        """True in a child of the process that has made it: see [Note: Forks]."""
        return FORKS.count != self._forks

    def refuse_broken(self) -> None:
        """Refuse to go on where an exception has left records half changed: see [Note: Poison].

        Raises:
            StateError: one has.
        """
        if self._broken_by:
            raise StateError(
                f"{self._broken_by} came in the middle of ds_tba's bookkeeping of saved tensors, and a later step "
                "could have a wrong gradient: load the last checkpoint and go on with a new engine, or restart the "
                "program."
            )

    def note_exception(self, error: BaseException) -> None:
        """Refuse every later forward, unless the exception is a refusal: see [Note: Poison]."""
        # Our own errors are raised before anything was changed, but for a bug's; so is a device's want of memory.
        is_refusal = isinstance(error, DsTbaError) and not isinstance(error, StateError)
        if not (is_refusal or self.is_forked) and (isinstance(error, MemoryError) or not is_out_of_memory(error)):
            self._broken_by = self._broken_by or type(error).__name__  # not itself: it holds frames with all tensors


def poisons(method: Callable[Concatenate[Self, P], R]) -> Callable[Concatenate[Self, P], R]:
    """Have an exception that leaves a method poison its object: see [Note: Poison]."""

    @wraps(method)
    def guarded(self: Self, /, *args: P.args, **options: P.kwargs) -> R:
        try:
            return method(self, *args, **options)
        except BaseException as error:
            self.note_exception(error)
            raise

    return guarded


# ---- the ends of objects --------------------------------------------------------------------------------------------


class Notice(weakref.ref[Any]):
    """A weak reference that enters a queue when its object is gone; see [Note: No Python in finalizers].

    A kind of notice has attributes that say what the end means. Whoever watches sets them.
    """

    __slots__ = ()


OneNotice = TypeVar("OneNotice", bound=Notice)


class Ends:
    """The ends of watched objects that nobody has acted on yet.

    Args:
        act_on: deals with one notice; called by :meth:`act`.

    Attributes:
        left: the notices of objects that are gone; empty if there is nothing to act on.
    """

    def __init__(self, act_on: Callable[[Any], None]) -> None:
        self._act_on = act_on
        self.left: deque[Notice] = deque()
        self._tell: Callable[[Any], None] = self.left.append
        self._watched: set[Notice] = set()  # a weak reference that is gone itself tells nobody

    def watch(self, watched: object, kind: type[OneNotice]) -> OneNotice:
        """Return a notice that is left when an object, which is equal to itself only, is gone, whoever lets go of it.

        Args:
            kind: of the notice, one of those that ``act_on`` deals with.
        """
        notice = kind(watched, self._tell)
        self._watched.add(notice)
        return notice

    def act(self) -> None:
        """Act on every notice that was left; under the lock of what they are about."""
        while self.left:
            try:
                notice = self.left.popleft()
            except IndexError:  # a queue without a lock of its own: another thread has taken the last one
                return
            self._watched.discard(notice)
            self._act_on(notice)
