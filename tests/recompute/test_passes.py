"""Blocks that run again because the config asks for it, in whole training runs beside a twin without us.

A block of plain layers gives every bit; under the default block nothing runs twice, whatever state it has; and with
``"recompute": true`` a block that reads or changes more than its arguments raises an error that names it. Blocks that
the user checkpoints, inside or around, and others of which nothing can be recomputed, train as without us.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import pytest
import torch
from support import recomputed_training as training
from support.recomputed_training import DEPTH, ROWS, WIDTH, Net, Plain, check
from torch import Tensor, nn
from torch.utils import checkpoint as checkpointing
from torch.utils.checkpoint import checkpoint

from ds_tba.errors import RecomputationError
from ds_tba.offloader import ActivationOffloader

pytestmark = pytest.mark.usefixtures("one_thread")
make = training.make
Making = Callable[..., ActivationOffloader]


class Renormalizes(Plain):
    """Its forward changes a parameter in place, and to the same value again when it runs once more."""

    def __init__(self) -> None:
        super().__init__()
        self.offsets = nn.Embedding(ROWS, WIDTH, max_norm=0.5)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.offsets(torch.arange(ROWS)))


class Scales(Plain):
    """Scales its input by what a function of its own returns."""

    def __init__(self, factor: Callable[[], Any]) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.factor())


def counts() -> Scales:
    numbers = itertools.count(1)
    return Scales(lambda: 1 + next(numbers) / 100)


def has_a_generator() -> Scales:
    chance = torch.Generator().manual_seed(5)
    return Scales(lambda: 1 + torch.rand(WIDTH, generator=chance) / 10)


class Memory(Plain):
    """What the last segment left, set between forward and backward by the model, as in Transformer-XL."""

    memory: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if self.memory is None else x + self.memory)


SCALE: ContextVar[float] = ContextVar("SCALE", default=1.0)


class SetsMemory(Net):
    def call(self, layer: Any, x: Tensor) -> Tensor:
        inside: Tensor = layer(x)
        layer.memory = x.detach()
        return inside


class InContext(Net):
    def forward(self, x: Tensor) -> Tensor:
        token = SCALE.set(1.5)
        try:
            return super().forward(x)
        finally:
            SCALE.reset(token)


def test_under_the_default_block_nothing_runs_twice(make: Making) -> None:
    report = check(make, counts, Net).report()
    assert report.plans >= 1 and report.recomputed_bytes == 0


@pytest.mark.parametrize(
    "block",
    [Renormalizes, Plain, lambda: nn.TransformerEncoderLayer(WIDTH, 2, 32)],
    ids=["an embedding with max_norm", "MLP with dropout", "torch's own"],
)
def test_a_block_without_state_is_recomputed_to_the_bit(make: Making, block: training.Make) -> None:
    report = check(make, block, Net, recompute=True).report()
    assert report.recomputed_bytes > 0 and report.plan is not None and report.plan["recomputed_blocks"] == DEPTH


@pytest.mark.parametrize(
    ("block", "net"),
    [
        pytest.param(counts, Net, id="counter"),
        pytest.param(has_a_generator, Net, id="own generator"),
        pytest.param(lambda: Scales(lambda: 1 + random.random()), Net, id="Python's random"),
        pytest.param(Memory, SetsMemory, id="memory of the last segment"),
        pytest.param(lambda: Scales(SCALE.get), InContext, id="ContextVar"),
    ],
)
def test_a_block_with_state_raises_in_its_first_recomputation(
    make: Making, block: training.Make, net: type[Net]
) -> None:
    training.begin()
    ours = net(block)
    offloader = make(ours, recompute=True)
    done = 0
    with pytest.raises(RecomputationError, match=r"'layers\.2' .*\"recompute\", or set \"recompute\": false"):
        for _ in training.steps(ours, offloader):
            done += 1
    assert offloader.report().plans == 1 and done >= 1


def test_a_block_with_state_is_left_out_by_naming_the_others(make: Making) -> None:
    made: list[nn.Module] = []

    def block() -> nn.Module:
        made.append(counts() if len(made) % DEPTH == 1 else Plain())
        return made[-1]

    report = check(make, block, Net, recompute=["layers.0", "*.2"]).report()
    assert report.plan is not None and report.recomputed_bytes > 0


def test_an_evaluation_with_gradients_under_a_plan_is_exact(make: Making) -> None:
    training.begin()
    ours = Net(Plain)
    offloader = make(ours, recompute=True)
    list(training.steps(ours, offloader))
    before = offloader.report().recomputed_bytes
    training.check_steps(ours.eval(), offloader, training.twin_of(ours, Plain).eval(), 3)
    assert offloader.report().recomputed_bytes > before


# ---- checkpoints of the user's --------------------------------------------------------------------------------------

# Whether each run of a checkpointed part to its end was one of backward.
ENDS: list[bool] = []


def reentrant(kind: type[Any]) -> Any:
    return type(f"{kind.__name__}Reentrant", (kind,), {"use_reentrant": True})


class Inside(Plain):
    """Checkpoints a part of its forward."""

    use_reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        part = checkpoint(self.part, x, use_reentrant=self.use_reentrant)
        return x + self.down(torch.nn.functional.gelu(part))

    def part(self, x: Tensor) -> Tensor:
        x = self.drop(self.up(self.norm(x)).tanh())
        ENDS.append(torch._C._current_graph_task_id() != -1)
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


@pytest.mark.parametrize(
    ("block", "net", "recomputed_blocks"),
    [
        (Inside, Embedded, DEPTH),
        (reentrant(Inside), Embedded, DEPTH),
        (Twice, Embedded, DEPTH),
        (Whole, Embedded, 0),
        (reentrant(Whole), Embedded, 0),
        (Plain, Around, 0),
        (Plain, reentrant(Around), 0),
        (Plain, Compiled, 0),
        (Plain, CompiledInPlace, 0),
        (Plain, Elsewhere, 0),
    ],
)
def test_a_plan_chooses_the_blocks_of_which_something_is_freed(
    make: Making, block: Callable[[], nn.Module], net: type[Net], recomputed_blocks: int
) -> None:
    report = check(make, block, net, recompute=True).report()
    assert report.plan is not None and report.plan["recomputed_blocks"] == recomputed_blocks
    assert (report.recomputed_bytes > 0) == (recomputed_blocks > 0)


@pytest.mark.parametrize("is_on", [True, False])
def test_a_checkpoint_inside_stops_where_it_stops_without_us(
    make: Making, monkeypatch: pytest.MonkeyPatch, is_on: bool
) -> None:
    """Under ZeRO-3 the hooks after what is checkpointed would let go of parameters that backward is using."""
    monkeypatch.setattr(checkpointing, "_enable_checkpoint_early_stop", is_on)
    steps, found = 5, []
    for recompute in (False, True):
        ENDS.clear()
        model = Embedded(Inside)
        offloader = make(model, recompute=recompute)
        training.begin()
        list(training.steps(model, offloader, steps))
        found.append(sum(ENDS))
    of_its_own = 0 if is_on else steps * DEPTH
    again = (steps - 3) * DEPTH  # what the block's forward runs again; its own checkpoint is not asked for more
    assert found == [of_its_own, of_its_own + again]
