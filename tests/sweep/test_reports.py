"""Public bug reports of people who offload or checkpoint activations: each has a test.

``docs/evidence/reports.md`` has a row for each, and names its test or its hazard.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from support import hazards
from support.hazards import leaf
from torch import Tensor

from ds_tba.core.cache import TensorCache

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "evidence" / "reports.md"
ROW = re.compile(
    r"^\| \[(?P<repository>[^ \]]+) #(?P<number>\d+)\]\((?P<url>[^)]+)\) \|.*\| (?P<tests>[^|]+) \|$", re.M
)
TEST = re.compile(r"\[`(?P<name>\w+)`\]\(\.\./\.\./(?P<path>tests/[\w/]+\.py)\)")
SIDE = 64


def test_each_row_names_a_test_that_exists() -> None:
    rows = list(ROW.finditer(PAGE.read_text()))
    assert len(rows) == sum(line.startswith("| [") for line in PAGE.read_text().splitlines())
    assert len({(row["repository"], row["number"]) for row in rows}) == len(rows) >= 30
    for row in rows:
        assert row["url"].endswith(f"/{row['number']}") and f"/{row['repository'].split('/')[0]}/" in row["url"]
        tests = list(TEST.finditer(row["tests"]))
        assert tests, row[0]
        for test in tests:
            assert f"def {test['name']}(" in (ROOT / test["path"]).read_text(), row[0]


def test_torchtune_2456_a_function_that_wants_its_tensor_on_the_cpu(tmp_path: Path) -> None:
    seen: list[Tensor] = []

    class WantsCpu(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            seen.extend(ctx.saved_tensors)
            return grad * 2

    with hazards.nvme_cache(tmp_path) as like:
        cache = TensorCache(like.stores, "meta", 1)
        x = leaf(SIDE, SIDE)
        with cache.saving():
            loss = WantsCpu.apply(x).sum()
        loss.backward()
        assert seen[0].device.type == "cpu" and seen[0].data_ptr() == x.data_ptr()
        assert sum(store.stats.offloaded_bytes for store in cache.stores) == 0
