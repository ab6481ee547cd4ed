"""Which layers are found in models, and what is said of paths that are none."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from ds_tba.errors import ConfigError
from ds_tba.recompute import find_blocks, matching


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


def between_others() -> nn.Module:
    model = nn.Module()
    model.first, model.layers, model.last = nn.Linear(4, 4), nn.ModuleList(Layer() for _ in range(3)), mlp()
    return model


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
    "a list of equal layers": (between_others, ["layers.0", "layers.1", "layers.2"]),
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
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_the_layers_of_a_model_are_found(name: str) -> None:
    make, expected = MODELS[name]
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
    model = nn.ModuleDict({"layers": nn.ModuleList(Layer() for _ in range(3))})
    words = (
        rf'"activation_nvme_offload.blocks" has .{named}., which matches no module of the model: the nearest are lay'
    )
    with pytest.raises(ConfigError, match=words):
        find_blocks(model, ["layers.1", named])
    with pytest.raises(ConfigError, match="none, so name the layers in blocks"):
        matching([], ["layers.?"], "recompute")


@pytest.mark.parametrize("compiled", [torch.compile, lambda model: torch.compile(model, backend="eager")])
def test_layers_of_a_compiled_model_are_found(compiled: Callable[[nn.Module], nn.Module]) -> None:
    assert paths(compiled(nn.ModuleDict({"h": nn.ModuleList([Layer(), Layer()])}))) == [
        "_orig_mod.h.0",
        "_orig_mod.h.1",
    ]
