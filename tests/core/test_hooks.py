"""Our hooks pass through what is none of ours. ``test_until_backward.py`` has hooks that stay open."""

from __future__ import annotations

import weakref

import pytest
import torch
from support.awkward import function

from ds_tba.core.hooks import ForwardHooks, keep_originals
from ds_tba.errors import ActivationModifiedError


def test_what_passes_through_is_checked_freed_and_shared_with_no_gradient_as_by_autograd_itself() -> None:
    keep_originals()
    packed, weight = list[torch.Tensor](), torch.nn.Parameter(torch.randn(64))
    ours = ForwardHooks(lambda tensor: packed.append(tensor) or tensor, lambda tensor: tensor)
    with ours:
        ours.end()  # not on top for another thread, say: put on again
        ours.__enter__()
        x = torch.randn(64, requires_grad=True)
        out = x.exp()
        loss = out.square().sum()
        gone = weakref.ref(out.untyped_storage())
        loss.backward()
        assert x.grad is not None and torch.equal(x.grad, (2 * out * out).detach())
        changed = x.exp()
        changed.mul_(2)
        with pytest.raises(ActivationModifiedError):
            changed.sum().backward()
        returns_what_it_saved = function(lambda x, weight: (x * 1, [weight]), lambda _, read: (None, read()[0]))
        returns_what_it_saved(torch.randn(64, requires_grad=True), weight).sum().backward()
    assert weight.grad is not None and weight.grad.data_ptr() != weight.data_ptr()
    del loss, out, changed
    assert not packed and gone() is None
