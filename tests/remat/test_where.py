"""Which module runs, and where in it, by the stack alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor, nn, ones

from ds_tba.remat.where import ChosenModules, RunningModule, position_in_code


class Notes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, int]] = []
        self.running = RunningModule()
        self.running.watch(nn.ModuleDict({"layers": nn.ModuleList([self])}))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            self.note()
        self.note()
        return x

    def note(self) -> None:
        self.found.append((self.running.path(), position_in_code()))


def test_a_line_of_a_module_is_told_from_another_and_from_that_of_another_module() -> None:
    assert RunningModule().path() == "" and position_in_code() == 0  # outside of all
    one, other = Notes(), Notes()
    one(ones(1))
    other(ones(1))
    assert [path for path, _ in one.found] == ["layers.0"] * 3
    first, again, later = (place for _, place in one.found)
    assert first == again != later and not {place for _, place in other.found} & {first, later}


class Told(nn.Module):
    """Tells when it runs, before its children and after them."""

    def __init__(self, tell: Callable[[nn.Module], None], **children: nn.Module) -> None:
        super().__init__()
        self.tell = tell
        for name, child in children.items():
            self.add_module(name, child)

    def forward(self, x: Tensor) -> Tensor:
        self.tell(self)
        for child in self.children():
            x = child(x)
        self.tell(self)
        return x


def left_by(**patterns: Any) -> list[str]:
    """The paths of the modules whose tensors may leave; ``outside`` what is saved outside of all."""
    may_leave: dict[str, bool] = {}

    def tell(module: nn.Module) -> None:
        (path, *_) = [path for path, one in model.named_modules() if one is module]
        is_free = not chosen.reason()
        assert may_leave.setdefault(path, is_free) == is_free

    def told(**children: nn.Module) -> Told:
        return Told(tell, **children)

    tied = told()
    model = told(first=told(mlp=told(down=told()), tied=tied), second=told(mlp=told(), other=tied))
    running = RunningModule()
    running.watch(model)
    chosen = ChosenModules(running, patterns)
    assert chosen.watch(model) == {}
    model(ones(1))
    may_leave["outside"] = not chosen.reason()
    return [path for path, is_free in may_leave.items() if is_free]


ALL = ["", "first", "first.mlp", "first.mlp.down", "first.tied", "second", "second.mlp", "outside"]


@pytest.mark.parametrize(
    ("patterns", "may_leave"),
    [
        ({"only": ["*"]}, ALL),
        ({"except": ["*"]}, []),
        ({"only": ["*.mlp"]}, ["first.mlp", "first.mlp.down", "second.mlp"]),
        ({"only": ["first.*"]}, ["first.mlp", "first.mlp.down", "first.tied"]),
        ({"only": ["second"]}, ["first.tied", "second", "second.mlp"]),  # which stands in both
        ({"only": ["first", "*.mlp"], "except": ["*.down"]}, ["first", "first.mlp", "first.tied", "second.mlp"]),
        ({"except": ["first"]}, ["", "second", "second.mlp", "outside"]),
        ({"except": ["s*d.mlp", "?????.mlp.down"]}, ["", "first", "first.mlp", "first.tied", "second", "outside"]),
    ],
)
def test_patterns_name_modules_with_all_that_is_inside_of_them(patterns: Any, may_leave: list[str]) -> None:
    assert left_by(**patterns) == may_leave
