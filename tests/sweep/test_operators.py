"""Every operator and module of PyTorch's database: outputs and gradients with us are those without us, bit for bit.

CI runs a thirtieth of the names, the first of the sorted list and every thirtieth behind it; ``make test-all`` runs
all.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import operators
import pytest
import torch
from conftest import StoreFactory
from operator_page import PAGE
from support.stores import nothing_is_held
from torch import Tensor

from ds_tba.core.cache import TensorCache
from ds_tba.core.tensors import as_uint8

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]


@pytest.fixture
def sweep(make_store: StoreFactory) -> operators.Sweep:
    return operators.Sweep(make_store(staging_bytes=8 << 20))


@pytest.mark.swept
@pytest.mark.parametrize(
    ("part", "parts", "in_ci"),
    [
        *(pytest.param(part, 2, True, marks=pytest.mark.long, id=f"a thirtieth, {part}") for part in range(2)),
        *(pytest.param(part, 30, False, marks=pytest.mark.thorough, id=f"the others, {part}") for part in range(30)),
    ],
)
def test_gradients_are_those_without_us(
    part: int, parts: int, in_ci: bool, sweep: operators.Sweep, record_property: Callable[[str, Any], None]
) -> None:
    sweep.over(operators.part_of_names(part, parts, in_ci=in_ci))
    record_property("sweep", [dict(sweep.counts), dict(sweep.unsteady), sweep.differences])
    assert sweep.differences == []
    assert sweep.counts["moved"] > 0 and sweep.counts["rematerialized"] > 0
    gc.collect()
    nothing_is_held(sweep.store)


@pytest.mark.long
def test_a_wrong_gradient_is_seen(sweep: operators.Sweep, monkeypatch: pytest.MonkeyPatch) -> None:
    right = TensorCache.load

    def wrong(cache: TensorCache, view: Any) -> Tensor:
        data = right(cache, view).clone()
        as_uint8(data.untyped_storage())[0] ^= 1
        return data

    monkeypatch.setattr(TensorCache, "load", wrong)
    sweep.over(["exp"])
    assert any("float32, alone, nvme: tensor 1 of 2" in line for line in sweep.differences)


def test_not_a_number_is_equal_whatever_its_bits_and_zero_has_a_sign() -> None:
    nan = torch.tensor([float("nan")])
    other = (nan.view(torch.int32) ^ 1).view(torch.float32)
    assert operators.difference([nan], [other]) == ""
    assert operators.difference([torch.tensor([0.0])], [torch.tensor([-0.0])]) != ""
    assert operators.difference([torch.ones(2, 2)], [torch.ones(2, 2).t()]) != ""


def test_the_page_has_every_shape_and_no_difference() -> None:
    text = (Path(__file__).parents[2] / PAGE).read_text()
    rows = re.findall(r"^\| (\w+, [\w ]+) \| [1-9]\d* \| [1-9]\d* \|$", text, re.M)
    shapes = {f"{dtype}, {shape}" for dtype in ("float32", "bfloat16", "complex64") for shape in operators.SHAPES}
    assert set(rows) == shapes - {"bfloat16, autocast", "complex64, autocast"}
    assert "\n## Runs that differ: 0\n" in text
