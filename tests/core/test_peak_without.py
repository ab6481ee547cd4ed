"""The report compares the same things: what saved tensors hold with us, and what they would hold without us."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support import hazards
from support.hazards import Scenario
from support.offloaders import make

from ds_tba.core.cache import TensorCache
from ds_tba.offloader import ActivationOffloader


def views_of_one_storage(saving: hazards.Saving) -> list[torch.Tensor]:
    x = hazards.leaf()
    with saving():
        y = x * 2
        loss = (y.t() * y).sum() + y[:48].sin().sum() + (y[16:] * y[:48]).sum() + y.reshape(-1)[5:].cos().sum()
    return hazards.grads_after(loss, x)


PROGRAMS: list[Scenario] = [
    views_of_one_storage, hazards.attention, hazards.data_changed_between_two_saves, hazards.retain_graph,
    hazards.two_forwards_before_one_backward, hazards.a_graph_dropped_without_backward, hazards.sparse_tensors,
]  # fmt: skip
every_program = pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)


def after(directory: Path, program: Scenario, **block: Any) -> ActivationOffloader:
    torch.manual_seed(0)
    offloader = make(directory, rematerialize=False, **block)
    for _ in range(3):
        hazards.run(program, offloader.saving)
        offloader.note_micro_step()
        offloader.note_step()
    offloader.close()
    return offloader


@pytest.mark.parametrize("min_tensor_bytes", [0, 4096, 1 << 20])
@every_program
def test_where_nothing_is_done_nothing_is_saved(tmp_path: Path, program: Scenario, min_tensor_bytes: int) -> None:
    offloader = after(tmp_path, program, placement="keep", min_tensor_bytes=min_tensor_bytes)
    report, stats = offloader.report(), offloader.cache.stats
    assert 0 < report.peak_saved_bytes == report.peak_saved_bytes_without
    assert stats.saved.now == stats.resident.now == 0


@every_program
def test_with_moving_the_other_side_is_what_autograd_would_have_held(tmp_path: Path, program: Scenario) -> None:
    kept, moved = (after(tmp_path, program, placement=placement).report() for placement in ("keep", "nvme"))
    assert moved.peak_saved_bytes_without == kept.peak_saved_bytes


def test_a_storage_counts_once(tmp_path: Path) -> None:
    report = after(tmp_path, views_of_one_storage, placement="keep").report()
    assert report.peak_saved_bytes_without == hazards.SIDE * hazards.SIDE * 4


POINTERS, OTHERS = torch.arange(0, 65 * 64, 64), torch.arange(64).repeat(64)
# By kind: a tensor of 64 x 64 values, and how many integers tell where they are.
LAYOUTS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], int]] = {
    "jagged": (lambda values: torch.nested.nested_tensor_from_jagged(values, torch.tensor([0, 30, 64])), 3),
    "coo": (torch.Tensor.to_sparse, 2 * 64 * 64),
    "csr": (lambda values: torch.sparse_csr_tensor(POINTERS, OTHERS, values.flatten(), (64, 64)), 65 + 64 * 64),
    "csc": (lambda values: torch.sparse_csc_tensor(POINTERS, OTHERS, values.flatten(), (64, 64)), 65 + 64 * 64),
}


@pytest.mark.parametrize(("layout", "integers"), LAYOUTS.values(), ids=LAYOUTS)
def test_the_memory_of_jagged_and_sparse_tensors_is_counted_once(
    layout: Callable[[torch.Tensor], torch.Tensor], integers: int
) -> None:
    cache, saved, nbytes = TensorCache([], "cpu", 1024), layout(torch.randn(64, 64)), 4 * 64 * 64 + 8 * integers
    with cache.saving():
        held = [cache.pack(saved) for _ in range(2)]
    assert cache.stats.saved.now == cache.stats.resident.now == sum(cache.stats.kept_bytes.values()) == nbytes
    del held, saved
    gc.collect()
    cache.settle()
    assert cache.stats.saved.now == cache.stats.resident.now == 0
