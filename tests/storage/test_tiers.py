"""Host memory first and the drive behind it: nothing is lost or kept."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from support import stepping
from support.models import Stack
from support.stepping import offloader_of
from torch import nn

from ds_tba.offloader import ActivationOffloader
from ds_tba.storage.host import HostStore

MIB = 1 << 20
LAYERS = 12


def train(
    directory: Path, block: dict[str, Any] | None, steps: int = 6
) -> tuple[list[bytes], ActivationOffloader | None]:
    torch.manual_seed(0)
    model = Stack(lambda: nn.Sequential(nn.Linear(256, 256), nn.Tanh()), LAYERS)
    chance, offloader = torch.Generator().manual_seed(1), None
    if block is not None:
        offloader = offloader_of(directory, model, **{"min_tensor_bytes": 4096, "rematerialize": False, **block})

    def batches() -> Iterator[torch.Tensor]:
        for _ in range(steps):
            yield torch.randn(1024, 256, generator=chance)

    found = stepping.train(model, offloader, batches())
    return [one.numpy().tobytes() for step in found for one in step], offloader


@pytest.mark.parametrize("placement", ["host", "adaptive", "nvme"])
def test_the_drive_takes_what_a_small_host_tier_cannot(tmp_path: Path, placement: str) -> None:
    plain, _ = train(tmp_path, None)
    more: dict[str, Any] = {"max_step_overhead": 1000.0} if placement == "adaptive" else {}
    ours, offloader = train(tmp_path, {"placement": placement, "host_budget_bytes": 4 * MIB, **more})
    assert offloader is not None and ours == plain
    with closing(offloader):
        report = offloader.report()
        assert (report.host_bytes > 0) == (placement != "nvme")  # which has room for all of it
        assert report.written_bytes > 0 and not report.kept_bytes_by_reason.get("no room in host_budget_bytes")
        assert offloader.start_line().startswith("activations go to host memory") == (placement != "nvme")


@pytest.mark.parametrize("placement", ["host", "adaptive"])
def test_without_a_budget_half_of_the_free_memory_stays_free(
    tmp_path: Path, placement: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    free_bytes, stores = 12 * MIB, list[HostStore]()

    def available_bytes() -> int:
        return free_bytes - sum(store.taken_bytes for store in stores)

    monkeypatch.setattr("ds_tba.storage.host.available_bytes", available_bytes)
    monkeypatch.setattr("ds_tba.storage.tiers.available_bytes", available_bytes)
    monkeypatch.setattr("ds_tba.storage.tiers.HostStore", lambda *args, **more: made(HostStore(*args, **more)))

    def made(store: HostStore) -> HostStore:
        stores.append(store)
        return store

    plain, _ = train(tmp_path, None)
    ours, offloader = train(tmp_path, {"placement": placement, "host_budget_bytes": None, "max_step_overhead": 1000.0})
    assert offloader is not None and ours == plain
    with closing(offloader):
        assert f"host memory, up to {6 * MIB} bytes per rank" in offloader.start_line()
        report = offloader.report()
        assert 2 * MIB < stores[0].taken_bytes <= 6 * MIB
        assert report.written_bytes > 0 and report.host_bytes > 0
        assert "no room in host_budget_bytes" not in report.kept_bytes_by_reason
