"""Bookkeeping that is not to be gone on with: an exception has left it half changed, or it is of the parent process.

[Note: Poison] An interrupt, Python's memory that ran out, or a defect may have left records half changed. Nobody mends
that: the next forward refuses, because a later step could have a wrong gradient.

[Note: Forks] The threads, locks and drives of a parent are none of its child's, which may train a model of its own.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

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
