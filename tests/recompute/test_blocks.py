"""Which layers are found in models, and what is said of paths that are none; recomputing those found is exact."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import LAYERS as LAYERS_OF_EACH
from models import MODELS as TINY
from torch import Tensor, nn

from ds_tba.core.cache import TensorCache
from ds_tba.errors import ConfigError, RecomputationError
from ds_tba.recompute import Blocks, find_blocks, matching

pytestmark = pytest.mark.usefixtures("one_thread")


class Layer(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Layer() for _ in range(5))


class Stage(nn.Module):
    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(width) for _ in range(depth))


class Bare(nn.Module):
    """A layer with no module inside."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU())


def paths(model: nn.Module, named: list[str] | None = None) -> list[str]:
    blocks = find_blocks(model, named)
    modules = dict(model.named_modules(remove_duplicate=False))
    assert all(modules[path] is block for path, block in blocks.items())
    return [*blocks]


def layers(*modules: nn.Module) -> nn.Module:
    return nn.ModuleList(modules)


def with_table() -> nn.Module:
    """A first layer that differs a little from the others."""
    layer = Layer()
    layer.table = nn.Embedding(3, 8)
    return layer


class Stem(Stage):
    """A stage of whose own parameters half are alike in all stages, and no more."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__(width, depth)
        self.in_common, self.more = nn.Linear(2, 2), nn.Linear(2, 2)


def apart() -> nn.Module:
    """Stages as ZeRO-3 leaves them: the parameters' shapes are those before it took them apart."""
    model = layers(Stage(8, 2), Stage(16, 2))
    for parameter in model.parameters():
        parameter.ds_shape = parameter.shape  # type: ignore[attr-defined]
        parameter.data = torch.empty(0)
    return model


IN_STAGES = ["0.layers.0", "0.layers.1", "1.layers.0", "1.layers.1"]
ENCODER = [f"encoder.layers.{number}" for number in range(2)]
DECODER = [f"decoder.layers.{number}" for number in range(3)]
MODELS: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    "a list of equal layers": (
        lambda: nn.ModuleDict({"first": nn.Linear(4, 4), "h": layers(Layer(), Layer(), Layer()), "last": mlp()}),
        ["h.0", "h.1", "h.2"],
    ),
    "layers between others in a Sequential": (
        lambda: nn.Sequential(nn.Embedding(4, 8), Layer(), Layer(), nn.Linear(8, 4)), ["1", "2"]
    ),
    "members of a dict": (lambda: nn.ModuleDict({"a": Layer(), "b": Layer()}), ["a", "b"]),
    "small layers in a Sequential": (mlp, []),
    "small layers in a list": (lambda: layers(nn.Linear(4, 4), nn.Linear(4, 4)), []),
    "Sequentials in which nothing repeats": (lambda: nn.Sequential(mlp(), mlp(), mlp()), ["0", "1", "2"]),
    "Sequentials of layers": (
        lambda: nn.Sequential(*(nn.Sequential(Layer(), Layer()) for _ in range(2))), ["0.0", "0.1", "1.0", "1.1"]
    ),
    "layers with nothing but parameters": (lambda: layers(Bare(), Bare()), []),
    # It may be the user's own activation function.
    "the same in a Sequential": (
        lambda: layers(*(nn.Sequential(Bare(), nn.Tanh(), Bare()) for _ in range(2))), ["0", "1"]
    ),
    "experts are part of their layer": (lambda: layers(Mixture(), Mixture()), ["0", "1"]),
    "stages of different width": (lambda: layers(Stage(8, 2), Stage(16, 3)), [*IN_STAGES, "1.layers.2"]),
    "a first layer that differs a little": (
        lambda: nn.ModuleDict({"a": layers(with_table(), Layer()), "b": layers(Mixture(), Mixture())}),
        ["a.0", "a.1", "b.0", "b.1"],
    ),
    "half of the parameters alike": (lambda: layers(Stem(8, 2), Stem(16, 2)), IN_STAGES),
    "ZeRO-3": (apart, IN_STAGES),
    "one layer in many places": (lambda: layers(*[Layer()] * 3), ["0"]),
    "a lone layer": (lambda: layers(Layer(), layers(Mixture(), Mixture())), ["1.0", "1.1"]),
    "encoder and decoder": (lambda: nn.Transformer(8, 2, 2, 3, 16), ENCODER + DECODER),
    "a compiled model": (
        lambda: torch.compile(nn.ModuleDict({"h": layers(Layer(), Layer())})), ["_orig_mod.h.0", "_orig_mod.h.1"]
    ),
}  # fmt: skip


@pytest.mark.parametrize(("make", "expected"), MODELS.values(), ids=MODELS)
def test_the_layers_of_a_model_are_found(make: Callable[[], nn.Module], expected: list[str]) -> None:
    assert paths(make()) == expected


# ---- paths ----------------------------------------------------------------------------------------------------------


def test_named_modules_are_the_blocks_in_the_order_of_the_model() -> None:
    layer = Layer()
    model = nn.ModuleDict({"a": layer, "b": nn.ModuleList([Layer(), Layer(), layer])})
    assert paths(model, ["b.1", "a"]) == ["a", "b.1"]
    assert paths(model, ["b"]) == paths(model, ["b.?"]) == ["b.0", "b.1"]  # b.2 is a
    assert paths(model, ["b", "a"]) == ["a", "b.0", "b.1"]
    assert paths(model, ["a.linear"]) == paths(model, ["a.l*"]) == ["a.linear"]
    assert paths(model, ["b.1.linear", "b.1", "b.0.*"]) == ["b.0.norm", "b.0.linear", "b.1"]
    assert paths(model, []) == []


@pytest.mark.parametrize("named", ["layers.7", "layer.1", "nothing like it", ""])
def test_a_path_that_is_none_is_refused_with_the_nearest_ones(named: str) -> None:
    words = (
        rf'"activation_nvme_offload.blocks" has .{named}., which matches no module of the model: the nearest are lay'
    )
    with pytest.raises(ConfigError, match=words):
        find_blocks(nn.ModuleDict({"layers": layers(Layer(), Layer(), Layer())}), ["layers.1", named])
    with pytest.raises(ConfigError, match="none, so name the layers in blocks"):
        matching([], ["layers.?"], "recompute")


# ---- models of Hugging Face, tiny -----------------------------------------------------------------------------------

STACKS = {"T5": ["encoder.block", "decoder.block"], "GPT-2": ["transformer.h"], "Mixtral": ["model.layers"]}


def train(model: nn.Module, batch: dict[str, Any], seed: int) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    model.zero_grad()
    loss = model(**batch).loss
    loss.backward()
    return {"loss": loss.detach(), **{name: one.grad for name, one in model.named_parameters() if one.grad is not None}}


def train_recomputed(name: str, *, use_cache: bool) -> None:
    """Three steps with every layer recomputed are equal to those without us."""
    torch.manual_seed(1)
    model = TINY[name].build().train()
    twin, cache = copy.deepcopy(model), TensorCache([], "cpu", 1)
    found = find_blocks(model, None)
    assert [*found] == [f"{stack}.{index}" for stack in STACKS[name] for index in range(LAYERS_OF_EACH)]
    blocks = Blocks(found, cache, found)
    for seed in range(3):
        batch = {**TINY[name].batch(2, torch.Generator().manual_seed(seed)), "use_cache": use_cache}
        with cache.saving(), blocks.forward():
            ours = train(model, batch, seed)
        cache.end_recomputations()
        theirs = train(twin, batch, seed)
        assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)
    assert cache.stats.recomputed_bytes


# Mixtral's router logits are collected in a ContextVar from transformers 5 on: a second run would add them once more.
@pytest.mark.parametrize("name", STACKS)
def test_every_layer_is_found_and_recomputed_to_the_bit(name: str) -> None:
    pytest.importorskip("transformers")
    train_recomputed(name, use_cache=False)
    try:  # A cache of keys is on by default, in training too; a second run of a layer adds its keys a second time.
        train_recomputed(name, use_cache=True)
    except RecomputationError as error:
        assert "use_cache=False" in str(error)
