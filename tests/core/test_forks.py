"""A child that is forked between forward and backward of its parent."""

from __future__ import annotations

import os

import pytest
import torch
from conftest import StoreFactory
from support.doubles import wait_for_writes

from ds_tba.core.cache import TensorCache
from ds_tba.errors import StateError


def loss_of(x: torch.Tensor) -> torch.Tensor:
    for _ in range(8):
        x = x.sin()
    return x.sum()


@pytest.mark.parametrize("is_written", [False, True])
def test_a_child_is_told_that_it_has_no_lanes_and_its_parent_goes_on(
    make_store: StoreFactory, is_written: bool
) -> None:
    store = make_store()
    cache, x = TensorCache([store], "cpu", 1024), torch.randn(128, 128, requires_grad=True)
    with cache.saving():
        loss = loss_of(x)
    if is_written:
        wait_for_writes(store)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            loss.backward()
        except StateError:
            cache.refuse_broken()  # a forward of its own is not refused for that
            with cache.saving():
                loss_of(x.detach().requires_grad_()).backward()
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    loss.backward()
    expected = x.detach().clone().requires_grad_()
    loss_of(expected).backward()
    assert torch.equal(x.grad, expected.grad)
