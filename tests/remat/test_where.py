"""Which module runs, and where in it, by the stack alone."""

from __future__ import annotations

from torch import Tensor, nn, ones

from ds_tba.remat.where import RunningModule, position_in_code


class Notes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, int]] = []
        self.running = RunningModule({id(self): "layers.0"})

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            self.note()
        self.note()
        return x

    def note(self) -> None:
        self.found.append((self.running.path(), position_in_code()))


def test_a_line_of_a_module_is_told_from_another_and_from_that_of_another_module() -> None:
    one, other = Notes(), Notes()
    one(ones(1))
    other(ones(1))
    assert [path for path, _ in one.found] == ["layers.0"] * 3
    first, again, later = (place for _, place in one.found)
    assert first == again != later and not {place for _, place in other.found} & {first, later}


def test_outside_of_modules_there_is_no_path() -> None:
    assert RunningModule({}).path() == "" and position_in_code() == 0
