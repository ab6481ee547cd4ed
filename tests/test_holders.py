"""The table of who holds saved bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ds_tba.explain import sample
from ds_tba.holders import MAX_ROWS, Holder, merged, table

MIB = 1 << 20


def holder(module: str, mib: int) -> Holder:
    return Holder(module, "Mul", 1, mib * MIB, mib * MIB, largest="[8, 64] float32")


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("model.layers.17.mlp", "model.layers.*.mlp"),
        ("0", "*"),
        ("h.3.experts.12.w1", "h.*.experts.*.w1"),
        ("conv2d.layer1", "conv2d.layer1"),
        ("", ""),
    ],
)
def test_numbers_of_layers_are_merged(path: str, expected: str) -> None:
    assert merged(path) == expected


def test_a_storage_counts_where_it_is() -> None:
    one = Holder("mlp", "Gelu")
    for nbytes, where in ((5, "resident"), (7, "moved"), (11, "again"), (3, "moved")):
        one.add(nbytes, where, f"[{nbytes}]")
    assert one == Holder("mlp", "Gelu", 4, 26, 5, 10, 11, "[11]", 11)


def test_rows_beyond_the_first_are_one() -> None:
    lines = table([holder(f"m{number}", 50 - number) for number in range(MAX_ROWS + 3)])
    assert len(lines) == 1 + MAX_ROWS + 1
    assert lines[-1].startswith("3 more")
    assert f"{50 - MAX_ROWS + 49 - MAX_ROWS + 48 - MAX_ROWS}.00 MiB" in lines[-1]
    assert len({len(line) for line in lines}) == 1


def test_without_holders_there_is_no_table() -> None:
    assert table([]) == []


def test_the_functions_of_zero_3_made_no_tensor() -> None:
    class PreBackwardFunctionForModule(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, outputs: torch.Tensor) -> torch.Tensor:
            return outputs.view_as(outputs)

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return grad

    made = PreBackwardFunctionForModule.apply(torch.nn.functional.gelu(torch.ones(2, requires_grad=True)))
    assert sample._op(made) == "Gelu"
