"""A recipe runs its ops as forward did."""

from __future__ import annotations

import torch

from ds_tba.remat.recipe import as_in_forward


def test_autocast_which_has_acted_in_forward_does_not_act_again() -> None:
    a, b = torch.ones(2, 2), torch.ones(2, 2, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        with as_in_forward():
            made = a @ b
        assert (a @ b).dtype == torch.bfloat16
    assert made.dtype == torch.float32 and not made.requires_grad
