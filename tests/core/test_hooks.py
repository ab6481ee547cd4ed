"""Hooks that stay open go with their owner, or once that is closed with anybody."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from torch.autograd.graph import saved_tensors_hooks

from ds_tba.core.hooks import SHOWS_HOOKS, KeptHooks, innermost_hooks

pytestmark = pytest.mark.skipif(not SHOWS_HOOKS, reason="this PyTorch does not show its hooks")


class Owner:
    is_closed = False


@pytest.fixture
def kept() -> Iterator[KeptHooks]:
    kept = KeptHooks()
    yield kept
    kept.close_any()


def hooks() -> saved_tensors_hooks:
    return saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)


def test_another_owner_takes_them_off_only_where_theirs_is_closed_or_gone(kept: KeptHooks) -> None:
    owner, other = Owner(), Owner()
    assert kept.may_open()
    kept.open(hooks(), owner)
    assert not kept.may_open()
    kept.close(other)
    assert not kept.may_open()
    owner.is_closed = True
    kept.close(other)
    assert kept.may_open()
    kept.open(hooks(), Owner())  # gone at once
    kept.close(other)
    assert kept.may_open()


def test_hooks_of_others_inside_stay(kept: KeptHooks) -> None:
    owner, others = Owner(), hooks()
    kept.open(hooks(), owner)
    with others:
        kept.close(owner)
        assert innermost_hooks() == (others.pack_hook, others.unpack_hook)
    kept.close(owner)
    assert kept.may_open()
