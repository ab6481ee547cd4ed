"""The ends of objects: a finalizer only puts one into a queue, and a later call of the cache acts on it.

A finalizer may run anywhere: in any thread, and inside any critical section, also one that its own thread is in. So it
may neither wait for a lock nor take one that its thread could hold. Packing, unpacking, waiting for room and reading
figures act on the queue, under the cache's lock. Knows nothing of what the notices tell.

[Note: No Python in finalizers] A signal handler runs before the first bytecode of whatever Python function is called
next, and what it raises inside a finalizer (``__del__``, a weak reference's callback) Python reports and drops: the
``sys.exit`` of a handler that has saved a checkpoint would be lost, and training go on until SIGKILL. So no class has a
``__del__``. A :class:`Notice` is a weak reference whose callback is a method written in C, which puts the notice into
a queue: no bytecode runs between the end of the object and that.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar


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
