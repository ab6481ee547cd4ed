"""A recipe runs its ops as forward did, and no graph of an earlier forward is entered."""

from __future__ import annotations

import gc

import torch

from ds_tba.core.cache import TensorCache
from ds_tba.core.tensors import next_sequence_number
from ds_tba.remat.recipe import AsInForward, Search
from ds_tba.remat.rules import RULES


def test_nodes_are_told_from_those_of_earlier_forwards() -> None:
    x = torch.ones(4, requires_grad=True)
    earlier = x * 2
    search = Search(TensorCache([], "cpu", 1), RULES, next_sequence_number())
    later = x * 3
    assert search.has(later.grad_fn) and not search.has(earlier.grad_fn)


def test_what_an_interrupt_keeps_from_its_with_leaves_the_modes_as_they_are() -> None:
    """A generator would end when it is collected, and leave the modes of the time when it began."""
    with torch.no_grad(), torch._C.DisableTorchFunction():
        state = AsInForward()
        state.__enter__()
    assert torch.is_grad_enabled()
    del state
    gc.collect()
    assert torch.is_grad_enabled()


def test_autocast_which_has_acted_in_forward_does_not_act_again() -> None:
    a, b = torch.ones(2, 2), torch.ones(2, 2, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        with AsInForward():
            made = a @ b
        assert (a @ b).dtype == torch.bfloat16
    assert made.dtype == torch.float32 and not made.requires_grad
