"""Which hooks stay open after a forward? Those of ``until_backward``: what a thread saves then is offloaded, too.

PyTorch's hooks are a stack of each thread, and whoever ends takes the innermost off. Ours go on it where nobody else's
are, and come off only while they are the innermost: no others are ever taken off in their place.
"""

from __future__ import annotations

import os
import threading
import weakref
from typing import Protocol

from torch.autograd.graph import saved_tensors_hooks

from ds_tba.core.tensors import innermost_hooks, take_off


class Closable(Protocol):
    """The owner of hooks that stay open."""

    @property
    def is_closed(self) -> bool:
        """True once its hooks are of no use any more."""


class KeptHooks(threading.local):
    """The hooks that a thread has kept open last.

    They are remembered once they are off: autograd restores a stack that was changed inside of a backward.
    """

    def __init__(self) -> None:
        self._hooks: saved_tensors_hooks | None = None
        self._owner: weakref.ref[Closable] | None = None

    @staticmethod
    def may_open() -> bool:
        """Return whether nobody else's hooks are on this thread's stack."""
        return innermost_hooks() is None

    def open(self, hooks: saved_tensors_hooks, owner: Closable) -> None:
        """Put hooks on the stack, to stay there."""
        # Remembered before they are there: a signal handler may raise in between.
        self._owner, self._hooks = weakref.ref(owner), hooks
        hooks.__enter__()

    def close(self, owner: Closable) -> None:
        """Take the hooks of an owner off, or those of one that is closed, which may have been in another thread.

        Where hooks of others are inside of them, a later call does.
        """
        found = None if self._owner is None else self._owner()
        if found is None or found is owner or found.is_closed:
            self.close_any()

    def close_any(self) -> None:
        """Take the hooks off, whoever owns them."""
        take_off(self._hooks)


KEPT = KeptHooks()
os.register_at_fork(after_in_child=KEPT.close_any)  # a child has neither our lanes nor our staging
