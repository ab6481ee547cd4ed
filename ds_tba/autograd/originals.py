"""Gives a Python ``autograd.Function`` the very tensors that it saved, as autograd does without hooks.

Knows ``torch.autograd.Function`` only; does not know the cache.

[Note: Originals] Without hooks, ``ctx.saved_tensors`` returns a saved leaf as the object that was saved. With hooks,
autograd wraps whatever unpack returned in a new tensor (``torch/csrc/autograd/saved_variable.cpp``, ``unpack``). Two
things go wrong then. A backward that returns a saved leaf as a gradient returns a tensor that nobody else refers to, so
``AccumulateGrad`` takes its memory for ``.grad``, and an optimizer that changes ``.grad`` changes the leaf. And code
that looks for attributes of the parameter it saved (ZeRO-3's ``ds_status``, say) does not find them. Therefore
``saved_tensors`` is replaced, on the base class of every Python Function's context, by a descriptor that returns the
original wherever unpack returned it.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction

_NAME = "saved_tensors"


class SavedTensors:
    """The descriptor in place of ``ctx.saved_tensors``. See [Note: Originals].

    Args:
        builtin: the descriptor of autograd, which unpacks.
    """

    def __init__(self, builtin: Any) -> None:
        self._builtin = builtin
        self._thread = threading.local()

    def __get__(self, ctx: Any, owner: type | None = None) -> Any:
        if ctx is None:
            return self
        outer = getattr(self._thread, "unpacked", None)
        unpacked: list[tuple[torch.Tensor, bool]] = []
        self._thread.unpacked = unpacked
        try:
            found = self._builtin.__get__(ctx, owner)
        finally:
            self._thread.unpacked = outer
        return with_originals(found, unpacked) if any(is_held for _, is_held in unpacked) else found

    def note(self, tensor: torch.Tensor, *, is_held: bool) -> None:
        """Tell what an unpack hook returns.

        Args:
            is_held: ``tensor`` is what the hook has held since it was saved, not a tensor made for this unpack.
        """
        unpacked = getattr(self._thread, "unpacked", None)
        if unpacked is not None:
            unpacked.append((tensor, is_held))


def install() -> SavedTensors:
    """The descriptor, put in its place at the first call."""
    present = BackwardCFunction.__dict__.get(_NAME)
    if not isinstance(present, SavedTensors):
        present = SavedTensors(getattr(BackwardCFunction, _NAME))
        setattr(BackwardCFunction, _NAME, present)
    return present


def with_originals(
    found: Sequence[torch.Tensor | None], unpacked: Sequence[tuple[torch.Tensor, bool]]
) -> tuple[torch.Tensor | None, ...]:
    """What a context saved, with the original in place of each tensor that autograd made around one.

    Args:
        found: what autograd returned; None for an argument that was None.
        unpacked: what our hooks returned meanwhile, in the same order; fewer, where others' hooks had some of them.
    """
    waiting = list(unpacked)
    originals = []
    for one in found:
        if one is not None and waiting and _is_around(one, waiting[0][0]):
            tensor, is_held = waiting.pop(0)
            # A tensor with a graph of its own must keep the edge that autograd gave it.
            one = tensor if is_held and one.grad_fn is None and one.requires_grad == tensor.requires_grad else one
        originals.append(one)
    return tuple(originals)


def _is_around(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one is other:
        return True
    if one.dtype != other.dtype or one.shape != other.shape or one.layout != other.layout:
        return False
    if one.layout is not torch.strided or one.is_nested or one._is_zerotensor():
        return False
    return one.data_ptr() == other.data_ptr() and one.stride() == other.stride()
