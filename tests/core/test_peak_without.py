"""The report compares the same things: what saved tensors hold with us, and what they would hold without us."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.doubles import Accelerator
from torch import nn

from ds_tba.config import AioConfig, OffloadConfig
from ds_tba.core.cache import TensorCache
from ds_tba.offloader import ActivationOffloader

SIZE = 64 * 64 * 4


def leaf() -> torch.Tensor:
    return torch.randn(64, 64, requires_grad=True)


def small_tensors(offloader: ActivationOffloader) -> None:
    model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(8, 8), nn.LayerNorm(8), nn.ReLU())))
    with offloader.saving():
        loss = model(torch.randn(4, 8)).square().sum()
    loss.backward()


def views_of_one_storage(offloader: ActivationOffloader) -> None:
    x = leaf()
    with offloader.saving():
        y = x.exp()
        loss = (y.t() * y).sum() + y[:48].sin().sum() + (y[16:] * y[:48]).sum() + y.reshape(-1)[5:].cos().sum()
    loss.backward()


def versions_of_one_storage(offloader: ActivationOffloader) -> None:
    x = leaf()
    with offloader.saving():
        y = x * 2
        first = y.sin()  # saves the version that the next line changes
        y.mul_(3)
        second = y.cos()
    second.sum().backward()
    del first, second


def data_of_another_lineage(offloader: ActivationOffloader) -> None:
    x = leaf()
    with offloader.saving():
        y = x.exp()
        loss = y.sum() + (y.data * x).sum() + (y.detach() * x).sum()
    loss.backward()


def two_backwards(offloader: ActivationOffloader) -> None:
    x = leaf()
    with offloader.saving():
        loss = x.exp().tanh().sum()
    loss.backward(retain_graph=True)
    loss.backward()


def dropped_graphs(offloader: ActivationOffloader) -> None:
    x = leaf()
    for _ in range(3):
        with offloader.saving():
            kept = x.exp().sin()
        del kept
    with offloader.saving():
        loss = x.sigmoid().sum()
    loss.backward()


def two_forwards_of_one_input(offloader: ActivationOffloader) -> None:
    x, weight = torch.randn(64, 64), leaf()
    losses = []
    for _ in range(2):
        with offloader.saving():
            losses.append((x * weight).sum())
    for loss in losses:
        loss.backward()


def without_plain_storage(offloader: ActivationOffloader) -> None:
    table = nn.Embedding(100, 16, sparse=True)
    x = leaf()
    with offloader.saving():
        loss = table(torch.arange(50)).square().sum() + torch.sparse.mm(torch.eye(64).to_sparse(), x).exp().sum()
    loss.backward()


PROGRAMS: list[Callable[[ActivationOffloader], None]] = [
    small_tensors, views_of_one_storage, versions_of_one_storage, data_of_another_lineage, two_backwards,
    dropped_graphs, two_forwards_of_one_input, without_plain_storage,
]  # fmt: skip


def after(program: Callable[[ActivationOffloader], None], **block: Any) -> ActivationOffloader:
    torch.manual_seed(0)
    config = OffloadConfig.model_validate({"min_tensor_bytes": 4096, "rematerialize": False, **block})
    offloader = ActivationOffloader(config, AioConfig(), Accelerator())
    for _ in range(3):
        program(offloader)
        offloader.note_micro_step()
        offloader.note_step()
    offloader.close()
    return offloader


@pytest.mark.parametrize("min_tensor_bytes", [0, 4096, 1 << 20])
@pytest.mark.parametrize("program", PROGRAMS)
def test_where_nothing_is_done_nothing_is_saved(
    program: Callable[[ActivationOffloader], None], min_tensor_bytes: int
) -> None:
    offloader = after(program, placement="keep", min_tensor_bytes=min_tensor_bytes)
    report, stats = offloader.report(), offloader.cache.stats
    assert 0 < report.peak_saved_bytes == report.peak_saved_bytes_without
    assert stats.saved.now == stats.resident.now == 0


@pytest.mark.parametrize("program", PROGRAMS)
def test_with_moving_the_other_side_is_what_autograd_would_have_held(
    tmp_path: Path, program: Callable[[ActivationOffloader], None]
) -> None:
    io = {"backend": "posix", "staging_bytes": 8 << 20, "swap_file_bytes": 64 << 20}
    kept = after(program, placement="keep").report()
    moved = after(program, placement="nvme", nvme_path=str(tmp_path), io=io).report()
    assert moved.peak_saved_bytes_without == kept.peak_saved_bytes


@pytest.mark.parametrize("program", [views_of_one_storage, versions_of_one_storage, two_forwards_of_one_input])
def test_a_storage_counts_once(program: Callable[[ActivationOffloader], None]) -> None:
    assert after(program, placement="keep").report().peak_saved_bytes_without == SIZE


@pytest.mark.parametrize("kind", ["jagged", "coo", "csr", "csc"])
def test_the_memory_of_jagged_and_sparse_tensors_is_counted_once(kind: str) -> None:
    cache = TensorCache([], "cpu", 1024)
    values = torch.randn(64, 64)
    if kind == "jagged":
        saved = torch.nested.nested_tensor_from_jagged(values, torch.tensor([0, 30, 64]))
        nbytes = values.nbytes + 3 * 8
    elif kind == "coo":
        saved = values.to_sparse()
        nbytes = values.nbytes + 2 * 8 * values.numel()
    else:
        pointers, other = torch.arange(0, 65 * 64, 64), torch.arange(64).repeat(64)
        made = torch.sparse_csr_tensor if kind == "csr" else torch.sparse_csc_tensor
        saved = made(pointers, other, values.flatten(), (64, 64))
        nbytes = values.nbytes + pointers.nbytes + other.nbytes
    with cache.saving():
        held = [cache.pack(saved) for _ in range(2)]
    assert cache.stats.saved.now == cache.stats.resident.now == nbytes
    assert sum(cache.stats.kept_bytes.values()) == nbytes
    del held, saved, values
    gc.collect()
    cache.settle()
    assert cache.stats.saved.now == cache.stats.resident.now == 0
