"""Passes are told of, and outside of forwards the ``forward`` of a block is the user's, whatever he does with it."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from ds_tba.core.cache import TensorCache
from ds_tba.recompute.blocks import Blocks, find_blocks


class Doubles(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((3,), 2.0))

    def forward(self, x: torch.Tensor, fails: bool = False) -> torch.Tensor:
        if fails:
            raise ValueError("as asked")
        return x * self.weight


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Doubles() for _ in range(2))

    def forward(self, x: torch.Tensor, fails: bool = False) -> torch.Tensor:
        return self.layers[1](self.layers[0](x), fails=fails)


NO_ROOM = TensorCache([], "cpu", 1)  # nothing runs again


class Told:
    def __init__(self) -> None:
        self.of: list[str] = []
        self.entered: list[str] = []  # and not left

    def enter(self, path: str, inputs: Sequence[torch.Tensor], obstacle: str) -> None:
        self.of.append(f"{path} with {len(inputs)}")
        self.entered.append(path)

    def leave(self, obstacle: str) -> None:
        self.of.append(f"{self.entered.pop()} left")


@pytest.fixture
def model() -> Model:
    return Model()


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.fixture
def blocks(model: Model, told: Told) -> Blocks:
    return Blocks(find_blocks(model, None), NO_ROOM, may_recompute=False)


PASSES = ["layers.0 with 1", "layers.0 left", "layers.1 with 1", "layers.1 left"]


def test_passes_are_told_of_inside_listening_only(model: Model, told: Told, blocks: Blocks) -> None:
    model(torch.ones(3))
    with blocks.listening(told), torch.no_grad():
        model(torch.ones(3))
    assert told.of == []
    with blocks.listening(told):
        model(torch.ones(3))
    assert told.of == PASSES


def test_a_pass_in_a_forward_inside_of_a_forward_is_told_of_once(model: Model, told: Told, blocks: Blocks) -> None:
    with blocks.listening(told):
        with blocks.listening(told):
            model(torch.ones(3))
        model(torch.ones(3))
    assert told.of == 2 * PASSES


def test_a_pass_that_is_interrupted_is_over_with_the_forward(model: Model, told: Told, blocks: Blocks) -> None:
    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    model.layers[1].forward = interrupt  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt), blocks.listening(told):
        model(torch.ones(3))
    del model.layers[1].forward
    assert told.of == PASSES


@pytest.mark.parametrize("may_recompute", [False, True])
def test_the_forward_of_a_block_stays_the_users(
    model: Model, told: Told, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, may_recompute: bool
) -> None:
    if may_recompute:
        request.getfixturevalue("needs_recompute")
    blocks = Blocks(find_blocks(model, None), NO_ROOM, may_recompute=may_recompute)
    with blocks.listening(told):
        model(torch.ones(3))
    assert "forward" not in model.layers[0].__dict__ and model.layers[0].forward.__func__ is Doubles.forward
    monkeypatch.setattr(Doubles, "forward", lambda self, x, fails=False: x + 1)
    with blocks.listening(told):
        assert torch.equal(model(torch.ones(3)), torch.full((3,), 3.0))


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_a_copy_of_a_block_tells_nobody(model: Model, told: Told, blocks: Blocks, how: Any) -> None:
    other = how(model.layers[0])
    with blocks.listening(told):
        assert torch.equal(other(torch.ones(3)), torch.full((3,), 2.0))
    assert told.of == []


def test_a_block_shows_the_signature_of_its_class_in_forwards(model: Model, blocks: Blocks) -> None:
    own = inspect.signature(model.layers[0].forward)
    with blocks.listening(told):
        assert inspect.signature(model.layers[0].forward) == own


def test_a_compiled_block_is_told_of_and_one_inside_a_compiled_model_is_not(told: Told) -> None:
    model = Model()
    model.layers[0] = torch.compile(model.layers[0], backend="eager")
    model.layers[1] = torch.compile(model.layers[1], backend="eager")
    blocks = Blocks(find_blocks(model, None), NO_ROOM, may_recompute=False)
    with blocks.listening(told):
        expected = model(torch.ones(3))
    assert told.of == PASSES
    whole = Model()
    within = Blocks(find_blocks(whole, None), NO_ROOM, may_recompute=False)
    compiled = torch.compile(whole, backend="eager")
    with within.listening(told):
        assert torch.equal(compiled(torch.ones(3)), expected)
    assert told.of == PASSES


def test_a_pass_that_raises_is_over(model: Model, told: Told, blocks: Blocks) -> None:
    with blocks.listening(told):
        with pytest.raises(ValueError, match="as asked"):
            model(torch.ones(3), fails=True)
        assert told.of == PASSES
