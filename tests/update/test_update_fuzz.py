from __future__ import annotations

from pathlib import Path

import forked
import fuzz_update
import pytest


@pytest.mark.engine
@pytest.mark.parametrize(
    "first", [0, pytest.param(8, marks=pytest.mark.thorough), pytest.param(16, marks=pytest.mark.thorough)]
)
def test_random_trainings_leave_every_bit_as_stock_does(first: int, tmp_path: Path) -> None:
    (result,) = forked.run(fuzz_update.compare, None, tmp_path, seeds=list(range(first, first + 8)))
    assert result["failed"] == {}
    assert 0 < result["elements"][1] < result["elements"][0]
