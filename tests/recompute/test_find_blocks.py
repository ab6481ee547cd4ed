"""Which layers are found in models, and what is said of paths that are none."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from ds_tba.errors import ConfigError
from ds_tba.recompute.blocks import find_blocks


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
    assert [block.index for block in blocks] == list(range(len(blocks)))
    assert all(modules[block.path] is block.module for block in blocks)
    return [block.path for block in blocks]


def test_a_list_of_equal_layers() -> None:
    model = nn.Module()
    model.first, model.layers, model.last = nn.Linear(4, 4), nn.ModuleList(Layer() for _ in range(3)), mlp()
    assert paths(model) == ["layers.0", "layers.1", "layers.2"]


def test_layers_between_others_in_a_sequential() -> None:
    assert paths(nn.Sequential(nn.Embedding(4, 8), Layer(), Layer(), nn.Linear(8, 4))) == ["1", "2"]


def test_members_of_a_dict() -> None:
    assert paths(nn.ModuleDict({"a": Layer(), "b": Layer()})) == ["a", "b"]


def test_small_layers_in_a_sequential_are_none() -> None:
    assert paths(mlp()) == []
    assert paths(nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])) == []


def test_sequentials_are_layers_where_nothing_repeats_inside() -> None:
    assert paths(nn.Sequential(*(mlp() for _ in range(3)))) == ["0", "1", "2"]
    assert paths(nn.Sequential(nn.Sequential(Layer(), Layer()), nn.Sequential(Layer(), Layer()))) == [
        "0.0", "0.1", "1.0", "1.1",
    ]  # fmt: skip


def test_a_layer_with_nothing_but_parameters() -> None:
    assert paths(nn.ModuleList([Bare(), Bare()])) == ["0", "1"]
    model = nn.ModuleList(nn.Sequential(Bare(), nn.Tanh(), Bare()) for _ in range(2))
    assert paths(model) == ["0", "1"]  # in a Sequential it may be the user's own activation function


def test_experts_are_part_of_their_layer() -> None:
    assert paths(nn.ModuleList(Mixture() for _ in range(2))) == ["0", "1"]


def test_stages_of_different_width_give_their_layers() -> None:
    found = paths(nn.ModuleList([Stage(8, 2), Stage(16, 3)]))
    assert found == ["0.layers.0", "0.layers.1", "1.layers.0", "1.layers.1", "1.layers.2"]


def test_the_first_layer_may_differ_a_little() -> None:
    layers = [Layer(), Layer()]
    layers[0].table = nn.Embedding(3, 8)
    model = nn.ModuleDict({"a": nn.ModuleList(layers), "b": nn.ModuleList([Mixture(), Mixture()])})
    assert paths(model) == ["a.0", "a.1", "b.0", "b.1"]


def test_half_of_the_parameters_must_be_alike() -> None:
    class Stem(Stage):
        def __init__(self, width: int, depth: int) -> None:
            super().__init__(width, depth)
            self.in_common, self.more = nn.Linear(2, 2), nn.Linear(2, 2)

    assert paths(nn.ModuleList([Stem(8, 2), Stem(16, 2)])) == ["0.layers.0", "0.layers.1", "1.layers.0", "1.layers.1"]


def test_shapes_are_those_before_zero_3_took_the_parameters_apart() -> None:
    model = nn.ModuleList([Stage(8, 2), Stage(16, 2)])
    for parameter in model.parameters():
        parameter.ds_shape = parameter.shape
        parameter.data = torch.empty(0)
    assert paths(model) == ["0.layers.0", "0.layers.1", "1.layers.0", "1.layers.1"]


def test_one_layer_in_many_places_is_one_block() -> None:
    layer = Layer()
    assert paths(nn.ModuleList([layer, layer, layer])) == ["0"]


def test_a_lone_layer_counts_where_nothing_repeats() -> None:
    assert paths(nn.ModuleDict({"layers": nn.ModuleList([Layer()])})) == ["layers.0"]
    assert paths(nn.ModuleList([Layer(), nn.ModuleList([Mixture(), Mixture()])])) == ["1.0", "1.1"]


def test_encoder_and_decoder_both_count() -> None:
    model = nn.Transformer(8, 2, 2, 3, 16)
    assert paths(model) == [*(f"encoder.layers.{i}" for i in range(2)), *(f"decoder.layers.{i}" for i in range(3))]


# ---- paths ----------------------------------------------------------------------------------------------------------


def test_named_modules_are_the_blocks_in_the_order_given() -> None:
    model = nn.ModuleDict({"a": Layer(), "b": nn.ModuleList([Layer(), Layer()])})
    assert paths(model, ["b.1", "a"]) == ["b.1", "a"]
    assert paths(model, ["b"]) == ["b.0", "b.1"]
    assert paths(model, ["a.linear"]) == ["a.linear"]
    assert paths(model, []) == []


@pytest.mark.parametrize(
    ("named", "words"),
    [
        (["layers.7"], r'"activation_nvme_offload.blocks" names .layers.7.: .*did you mean layers\.'),
        (["layer.1"], r"did you mean layers\.1"),
        (["nothing like it"], r"named_modules\(\) has the paths"),
        ([""], "must be the path of a module"),
        (["layers.1", "layers.1.linear"], r"names .layers\.1. and .layers\.1\.linear., which is inside it"),
        (["layers.1.linear", "layers"], "which is inside it"),
    ],
)
def test_a_path_that_is_none_is_refused_with_the_repair(named: list[str], words: str) -> None:
    model = nn.ModuleDict({"layers": nn.ModuleList(Layer() for _ in range(3))})
    with pytest.raises(ConfigError, match=words):
        find_blocks(model, named)


@pytest.mark.parametrize("compiled", [torch.compile, lambda model: torch.compile(model, backend="eager")])
def test_layers_of_a_compiled_model_are_found(compiled: Callable[[nn.Module], nn.Module]) -> None:
    assert paths(compiled(nn.ModuleDict({"h": nn.ModuleList([Layer(), Layer()])}))) == [
        "_orig_mod.h.0",
        "_orig_mod.h.1",
    ]


class NumberedChildren(nn.Module):
    """A stage of a pipeline keeps its layers so."""

    def __init__(self) -> None:
        super().__init__()
        self.add_module("3", nn.Embedding(8, 8))
        for number in (4, 5):
            self.add_module(str(number), Layer())
        self.tied_modules = nn.ModuleDict({"head": Mixture()})


def test_layers_under_numbers_as_names_are_found() -> None:
    found = [block.path for block in find_blocks(NumberedChildren(), None)]
    assert [path for path in found if not path.startswith("tied")] == ["4", "5"]
