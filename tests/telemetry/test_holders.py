"""The table of who holds saved bytes, and what it advises."""

from __future__ import annotations

from typing import Any

import pytest

from ds_tba.config import OffloadConfig
from ds_tba.telemetry.holders import MAX_ROWS, Holder, merged, table
from ds_tba.telemetry.report import remedies

MIB = 1 << 20


def config(**keys: Any) -> OffloadConfig:
    return OffloadConfig(nvme_path="/nvme", **keys)


def holder(module: str, mib: int, tensors: int = 1) -> Holder:
    return Holder(module, "Mul", tensors, mib * MIB, mib * MIB)


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
    for nbytes, where in ((5, "resident"), (7, "moved"), (11, "again")):
        one.add(nbytes, where)
    assert one == Holder("mlp", "Gelu", 3, 23, 5, 7, 11)


def test_rows_beyond_the_first_are_one() -> None:
    lines = table([holder(f"m{number}", 50 - number) for number in range(MAX_ROWS + 3)])
    assert len(lines) == 1 + MAX_ROWS + 1
    assert lines[-1].startswith("3 more")
    assert f"{50 - MAX_ROWS + 49 - MAX_ROWS + 48 - MAX_ROWS}.00 MiB" in lines[-1]
    assert len({len(line) for line in lines}) == 1


def test_without_holders_there_is_no_table() -> None:
    assert table([]) == []


@pytest.mark.parametrize(
    ("keys", "holders", "kept", "resident_mib", "in_use_mib", "expected"),
    [
        ({}, [holder("layers.*", 90, 32)], {}, 10, 100, '"offload_optimizer"'),
        ({}, [holder("layers.*", 90, 32), holder("", 60)], {}, 90, 100, "fused"),
        ({"placement": "keep"}, [holder("layers.*", 90, 32)], {}, 90, 100, '"placement": "adaptive"'),
        ({}, [holder("layers.*", 90, 32)], {}, 90, 0, f'"activation_budget_bytes", for example {45 * MIB}'),
        ({"activation_budget_bytes": 7}, [holder("layers.*", 90, 32)], {}, 90, 0, 'lower "activation_budget_bytes" 7'),
        ({}, [holder("layers.*", 90, 32)], {"small": 9, "plan": 1}, 90, 0, 'lower "min_tensor_bytes" 1048576'),
        ({}, [holder("layers.*", 90, 32)], {"staging_full": 9}, 90, 0, 'raise "io.staging_bytes"'),
        ({}, [holder("layers.*", 90, 32)], {}, 90, 0, '"recompute": true'),
    ],
)
def test_the_key_that_would_have_helped_is_named(
    keys: dict[str, Any],
    holders: list[Holder],
    kept: dict[str, int],
    resident_mib: int,
    in_use_mib: int,
    expected: str,
) -> None:
    found = list(remedies(config(**keys), holders, kept, resident_mib * MIB, in_use_mib * MIB))
    assert any(expected in one for one in found), found


def test_what_is_set_already_is_not_advised() -> None:
    found = " ".join(remedies(config(recompute=True), [holder("layers.*", 90, 32)], {}, 90 * MIB, 100 * MIB))
    assert "recompute" not in found
    assert "fused" not in found
    assert "offload_optimizer" not in found
