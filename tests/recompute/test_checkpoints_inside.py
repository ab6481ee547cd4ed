"""Blocks that the user checkpoints, inside or around, and others of which nothing can be recomputed: they train as
without us.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import recomputed_training
from support.recomputed_training import DEPTH, WIDTH, Net, Plain, check
from torch import Tensor, nn
from torch.utils import checkpoint as checkpointing
from torch.utils.checkpoint import checkpoint

from ds_tba.offloader import ActivationOffloader

pytestmark = pytest.mark.usefixtures("one_thread")
make = recomputed_training.make


def ends() -> list[bool]:
    """Where nobody looks for it: whether each run of a checkpointed part to its end was one of backward."""
    return vars(os).setdefault("_test_of_ds_tba", {}).setdefault("ends", [])  # type: ignore[no-any-return]


def reentrant(kind: type[Any]) -> Any:
    return type(f"{kind.__name__}Reentrant", (kind,), {"use_reentrant": True})


class Inside(Plain):
    """Checkpoints a part of its forward."""

    use_reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        part = checkpoint(self.part, x, use_reentrant=self.use_reentrant)
        return x + self.down(torch.nn.functional.gelu(part))

    def part(self, x: Tensor) -> Tensor:
        return self.ended(self.drop(self.up(self.norm(x)).tanh()))

    def ended(self, x: Tensor) -> Tensor:
        ends().append(torch._C._current_graph_task_id() != -1)
        return x


class Twice(Inside):
    """A checkpoint in a checkpoint, and a part outside of both."""

    def part(self, x: Tensor) -> Tensor:
        x = x + self.down(torch.tanh(self.up(x)))
        return checkpoint(super().part, x, use_reentrant=False)  # type: ignore[no-any-return]


class Whole(Plain):
    """Checkpoints all of its forward, as a layer of transformers does."""

    use_reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=self.use_reentrant)  # type: ignore[no-any-return]


class Embedded(Net):
    """Its blocks have inputs with gradients, which reentrant checkpoints need."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__(make)
        self.first = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.first(x))


class Around(Embedded):
    use_reentrant = False

    def call(self, layer: nn.Module, x: Tensor) -> Tensor:
        return checkpoint(layer, x, use_reentrant=self.use_reentrant)  # type: ignore[no-any-return]


class Compiled(Embedded):
    """Compiled as a whole."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__(make)
        self.compile(backend="eager")


class CompiledInPlace(Embedded):
    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__(make)
        for layer in self.layers:
            layer.compile(backend="eager")


class Elsewhere(Embedded):
    """Runs its blocks through another function than their call, which nobody is told of."""

    def call(self, layer: nn.Module, x: Tensor) -> Tensor:
        return type(layer).forward(layer, x)


@pytest.mark.parametrize("block", [Inside, reentrant(Inside), Twice])
def test_a_block_that_checkpoints_a_part_of_itself_is_recomputed(
    make: Callable[..., ActivationOffloader], block: Callable[[], nn.Module]
) -> None:
    report = check(make, block, Embedded, recompute=True).report()
    assert report.plan is not None and report.plan["recomputed_blocks"] == DEPTH and report.recomputed_bytes > 0


@pytest.mark.parametrize("is_on", [True, False])
def test_a_checkpoint_inside_stops_where_it_stops_without_us(
    make: Callable[..., ActivationOffloader], monkeypatch: pytest.MonkeyPatch, is_on: bool
) -> None:
    """Under ZeRO-3 the hooks after what is checkpointed would let go of parameters that backward is using."""
    monkeypatch.setattr(checkpointing, "_enable_checkpoint_early_stop", is_on)
    steps, found = 5, []
    for recompute in (False, True):
        ends().clear()
        model = Embedded(Inside)
        offloader = make(model, recompute=recompute)
        recomputed_training.begin()
        list(recomputed_training.steps(model, offloader, steps))
        found.append(sum(ends()))
    of_its_own = 0 if is_on else steps * DEPTH
    again = (steps - 3) * DEPTH  # what the block's forward runs again; its own checkpoint is not asked for more
    assert found == [of_its_own, of_its_own + again]


@pytest.mark.parametrize(
    ("block", "net"),
    [
        (Whole, Embedded),
        (reentrant(Whole), Embedded),
        (Plain, Around),
        (Plain, reentrant(Around)),
        (Plain, Compiled),
        (Plain, CompiledInPlace),
        (Plain, Elsewhere),
    ],
)
def test_a_plan_chooses_no_block_of_which_nothing_would_be_freed(
    make: Callable[..., ActivationOffloader], block: Callable[[], nn.Module], net: type[Net]
) -> None:
    torch.manual_seed(0)
    ours = net(block)
    twin = recomputed_training.twin_of(ours, block)
    offloader = make(ours, recompute=True)
    recomputed_training.check_steps(ours, offloader, twin)
    report = offloader.report()
    assert report.recomputed_bytes == 0 and report.plan is not None and report.plan["recomputed_blocks"] == 0
