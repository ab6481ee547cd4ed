"""Public bug reports of people who offload or checkpoint activations: each has a test.

``docs/evidence/reports.md`` has a row for each, and names its test or its hazard.
"""

from __future__ import annotations

import re
from pathlib import Path

import torch
from conftest import StoreFactory
from support.awkward import Read, function
from torch import Tensor

from ds_tba.core.cache import TensorCache

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "evidence" / "reports.md"
ROW = re.compile(
    r"^\| \[(?P<repository>[^ \]]+) #(?P<number>\d+)\]\((?P<url>[^)]+)\) \|.*\| (?P<tests>[^|]+) \|$", re.M
)
TEST = re.compile(r"\[`(?P<name>\w+)`\]\(\.\./\.\./(?P<path>tests/[\w/]+\.py)\)")


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


def test_torchtune_2456_a_function_that_wants_its_tensor_on_the_cpu(make_store: StoreFactory) -> None:
    seen: list[Tensor] = []

    def gradient(grad: Tensor, read: Read) -> Tensor:
        seen.extend(read())
        return grad * 2

    store, x = make_store(), torch.randn(64, 64, requires_grad=True)
    with TensorCache([store], "meta", 1).saving():
        loss = function(lambda x: (x * 2, [x]), gradient)(x).sum()
    loss.backward()
    assert seen[0].device.type == "cpu" and seen[0].data_ptr() == x.data_ptr()
    assert store.stats.offloaded_bytes == 0
