"""A recipe runs its ops as forward did."""

from __future__ import annotations

import gc

import torch

from ds_tba.remat.recipe import AsInForward


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
