"""What a policy has a selective checkpoint save reaches our hooks, moves, and comes back bit for bit.

On PyTorch before 2.14, which does not hand it over, the same tests run on a double of 2.14; see ``respecting.py``.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from support import hazards, recomputed_training
from support.hazards import Saving, leaf
from support.recomputed_training import Net, Plain, check
from support.respecting import respecting
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils import checkpoint as checkpointing
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from ds_tba.core.cache import TensorCache
from ds_tba.errors import ActivationModifiedError

aten = torch.ops.aten
SIDE, MM = 64, [aten.mm.default, aten.addmm.default]
BYTES = SIDE * SIDE * 4
RESPECT = "respect_saved_tensors_hooks"
make = recomputed_training.make
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def newest(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    respecting(monkeypatch)
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        yield


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[TensorCache]:
    with hazards.nvme_cache(tmp_path) as cache:
        yield cache


def moved_bytes(cache: TensorCache) -> int:
    return sum(store.stats.offloaded_bytes for store in cache.stores)


def everything(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """But for what is changed in place, which a checkpoint would refuse."""
    is_changed = op._schema.is_mutable or op is aten.empty_like.default
    return CheckpointPolicy.PREFER_RECOMPUTE if is_changed else CheckpointPolicy.PREFER_SAVE


def selective(policy: Any = MM, **more: Any) -> Callable[[], Any]:
    return functools.partial(create_selective_checkpoint_contexts, policy, **more)


def checkpointed(function: Callable[[Tensor], Tensor], x: Tensor, **more: Any) -> Tensor:
    """Call it under a checkpoint: a selective one, which saves products, unless more is said."""
    options = {"context_fn": selective(), **more}
    return checkpointing.checkpoint(function, x, use_reentrant=False, **options)  # type: ignore[no-any-return]


class Layer(nn.Module):
    """Products, views and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(SIDE, 2 * SIDE), nn.Linear(2 * SIDE, SIDE)

    def forward(self, x: Tensor) -> Tensor:
        heads = torch.tanh(self.up(x)).view(SIDE, 2, SIDE).transpose(0, 1)
        weights = nn.functional.dropout(torch.softmax(heads @ heads.transpose(1, 2), -1), 0.1)
        return x + self.down((weights @ heads).transpose(0, 1).reshape(SIDE, 2 * SIDE))


def over_layers(call: Callable[..., Tensor], depth: int = 3) -> Callable[[Saving], list[Tensor]]:
    """A training of so many layers, each called in this way."""

    def scenario(saving: Saving) -> list[Tensor]:
        layers = nn.ModuleList(Layer() for _ in range(depth))
        x, found = leaf(SIDE, SIDE), []
        for _ in range(3):
            with saving():
                y = x
                for layer in layers:
                    y = call(layer, y)
                loss = y.square().mean()
            loss.backward()
            found += [loss, *(one.clone() for one in hazards.grads(x, *layers.parameters()))]
        return found

    return scenario


def saved_by_policy(layers: int = 3, steps: int = 3) -> int:
    """Bytes of the two products of each layer."""
    return layers * steps * 3 * BYTES


def test_what_a_policy_saves_moves_unless_the_call_says_no(cache: TensorCache) -> None:
    moved = []
    for more in ({RESPECT: False}, {}, {RESPECT: True}):
        before = moved_bytes(cache)
        hazards.check(over_layers(functools.partial(checkpointed, **more)), cache)
        moved.append(moved_bytes(cache) - before)
    inputs = moved[0]
    assert inputs < saved_by_policy() and moved[1:] == [inputs + saved_by_policy()] * 2


@pytest.mark.parametrize("policy", [everything, [aten.view.default, aten.transpose.int, aten.t.default, *MM]])
def test_views_and_all_else_that_a_policy_may_name(cache: TensorCache, policy: Any) -> None:
    hazards.check(over_layers(functools.partial(checkpointed, context_fn=selective(policy))), cache)
    # What a policy saves has no graph: of everything most shares memory with another tensor, and stays.
    assert moved_bytes(cache) > (0 if policy is everything else saved_by_policy())


def test_kept_and_small_tensors_too() -> None:
    cache = TensorCache([], "cpu", hazards.MIN_BYTES)
    hazards.check(over_layers(functools.partial(checkpointed, context_fn=selective(everything))), cache)
    assert cache.stats.saved.peak > 3 * 3 * BYTES


def test_a_checkpoint_in_a_checkpoint(cache: TensorCache) -> None:
    """The inner one's saved tensors come to us in forward; in backward no hooks are in scope."""

    def outer(layer: Any, x: Tensor) -> Tensor:
        return checkpointing.checkpoint(lambda y: checkpointed(layer, y).sin(), x, use_reentrant=False)  # type: ignore[no-any-return]

    hazards.check(over_layers(outer, 2), cache)
    assert moved_bytes(cache) >= saved_by_policy(2)


def test_hooks_of_the_user_inside_ours_are_the_users(cache: TensorCache) -> None:
    def call(layer: Any, x: Tensor) -> Tensor:
        with save_on_cpu():
            return checkpointed(layer, x, **{RESPECT: True})

    hazards.check(over_layers(call, 1), cache)
    assert moved_bytes(cache) == 3 * BYTES  # of the loss, which is outside of theirs


def changes_what_was_saved(x: Tensor) -> Tensor:
    return (x @ x).mul_(2).sin()


def test_a_change_after_the_save_raises(cache: TensorCache) -> None:
    def mutated(saving: Any) -> Tensor:
        with saving():
            return checkpointed(changes_what_was_saved, leaf(SIDE, SIDE)).sum()

    with pytest.raises(RuntimeError, match="has been mutated"):
        mutated(nullcontext).backward()
    for one in (cache, TensorCache([], "cpu", 1), TensorCache([], "cpu", 1 << 20)):  # moved, kept, small
        with pytest.raises(ActivationModifiedError):
            mutated(one.saving).backward()


def test_a_change_that_is_allowed_counts_as_without_us(cache: TensorCache) -> None:
    def scenario(saving: Saving) -> list[Tensor]:
        x, contexts = leaf(SIDE, SIDE), selective(allow_cache_entry_mutation=True)
        with saving():
            loss = checkpointed(changes_what_was_saved, x, context_fn=contexts).sum()
        return hazards.grads_after(loss, x)

    hazards.check(scenario, cache)


def test_a_loss_after_forward_too(cache: TensorCache) -> None:
    x = leaf(SIDE, SIDE)
    with cache.saving():
        y = x.sin()
    hooks = cache.after_forward()
    assert hooks is not None
    with hooks:
        loss = checkpointed(Layer(), y).sum()
    assert cache.stats.saved.peak >= saved_by_policy(1, 1)
    loss.backward()


@pytest.mark.parametrize("is_over", [False, True])
def test_under_other_hooks_a_call_is_the_users(cache: TensorCache, is_over: bool) -> None:
    """What they have not chosen, we do not choose for them, nor after our forward."""
    with nullcontext() if is_over else cache.saving(), pytest.warns(FutureWarning), save_on_cpu():
        checkpointed(Layer(), leaf(SIDE, SIDE))


# ---- in blocks that plans would recompute ---------------------------------------------------------------------------


class Inside(Plain):
    """Checkpoints a part of its forward."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(checkpointed(self.part, x)))

    def part(self, x: Tensor) -> Tensor:
        return self.drop(self.up(self.norm(x)).tanh())  # type: ignore[no-any-return]


def test_a_block_with_a_policy_trains_to_the_bit(make: Callable[..., Any]) -> None:
    """What the policy names stays with the checkpoint then."""
    check(make, Inside, Net, recompute=True)
