"""Hooks that stay open go with their owner, or with anybody's next forward; what is none of ours passes through."""

from __future__ import annotations

import weakref
from collections.abc import Iterator

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from ds_tba.core.hooks import Bystander, ForwardHooks, KeptHooks, innermost_hooks
from ds_tba.core.saved import PassedThrough
from ds_tba.errors import ActivationModifiedError


class Owner:
    """Of hooks."""


@pytest.fixture
def kept() -> Iterator[KeptHooks]:
    kept = KeptHooks()
    yield kept
    kept.close()


def pass_by(tensor: torch.Tensor) -> Bystander:
    return Bystander(PassedThrough(tensor).restore)


def hooks() -> ForwardHooks:
    return ForwardHooks(lambda tensor: tensor, lambda tensor: tensor, pass_by)


def test_another_owner_takes_them_off_only_where_theirs_is_gone_or_has_ended_them(kept: KeptHooks) -> None:
    owner, other, of_owner = Owner(), Owner(), hooks()
    assert kept.may_open()
    kept.open(of_owner, owner)
    kept.close(other)
    assert not kept.may_open()
    with saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        of_owner.end()
    kept.close(other)
    assert kept.may_open()
    kept.open(hooks(), Owner())  # gone at once
    kept.close(other)
    assert kept.may_open()
    kept.open(hooks(), owner)
    kept.close()
    assert kept.may_open()


def test_what_passes_through_is_checked_and_freed_as_by_autograd_itself() -> None:
    packed: list[torch.Tensor] = []
    ours = ForwardHooks(lambda tensor: packed.append(tensor) or tensor, lambda tensor: tensor, pass_by)
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
    del loss, out, changed
    assert not packed and gone() is None


def test_hooks_of_others_inside_stay(kept: KeptHooks) -> None:
    owner, others = Owner(), saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)
    kept.open(hooks(), owner)
    with others:
        kept.close(owner)
        assert innermost_hooks() == (others.pack_hook, others.unpack_hook)
    kept.close(owner)
    assert kept.may_open()
