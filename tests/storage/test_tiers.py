"""Host memory first and the drive behind it, also while the machine's memory becomes short: nothing is lost or kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator
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

MIB = 1 << 20
LAYERS = 12


def train(
    directory: Path, block: dict[str, Any] | None, before: Callable[[int], None] = lambda _: None, steps: int = 6
) -> tuple[list[bytes], ActivationOffloader | None]:
    torch.manual_seed(0)
    model = Stack(lambda: nn.Sequential(nn.Linear(256, 256), nn.Tanh()), LAYERS)
    chance, offloader = torch.Generator().manual_seed(1), None
    if block is not None:
        offloader = offloader_of(directory, model, **{"min_tensor_bytes": 4096, "rematerialize": False, **block})

    def batches() -> Iterator[torch.Tensor]:
        for step in range(steps):
            before(step)
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
def test_new_tensors_go_to_the_drive_while_memory_is_short(
    tmp_path: Path, placement: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    free_bytes = 256 * MIB
    taken: list[Callable[[], int]] = []

    def available_bytes() -> int:
        return free_bytes - sum(one() for one in taken)

    monkeypatch.setattr("ds_tba.storage.host.available_bytes", available_bytes)
    monkeypatch.setattr("ds_tba.storage.host.MemoryMeter", lambda _memory, taken_bytes: Unchanged(taken, taken_bytes))
    plain, _ = train(tmp_path, None, steps=12)
    offloader: list[ActivationOffloader] = []
    moved: list[tuple[int, int]] = []

    def before(step: int) -> None:
        nonlocal free_bytes
        free_bytes = 20 * MIB if 6 <= step < 9 else 256 * MIB
        moved.append((taken[0](), sum(store.stats.offloaded_bytes for store in stores if store is not None)))

    stores: list[Any] = []
    real = ActivationOffloader.watch

    def watch(self: ActivationOffloader, *args: Any, **more: Any) -> None:
        stores.append(self._tiers.host)
        offloader.append(self)
        real(self, *args, **more)

    monkeypatch.setattr(ActivationOffloader, "watch", watch)
    block = {"placement": placement, "host_budget_bytes": None, "max_step_overhead": 1000.0}
    ours, _ = train(tmp_path, block, before, steps=12)
    assert ours == plain
    with closing(offloader[0]):
        held, _ = zip(*moved, strict=True)
        assert held[1] == 0  # the first step went to the drive
        assert held[6] > 8 * MIB and held[7] == held[8] == 0
        assert held[11] > 8 * MIB or placement == "adaptive"  # whose plan may be of a step without
        report = offloader[0].report()
        assert report.written_bytes > 0 and report.host_bytes > 0
        assert "no room in host_budget_bytes" not in report.kept_bytes_by_reason


class Unchanged:
    """A meter of a process whose other memory does not change."""

    def __init__(self, taken: list[Callable[[], int]], taken_bytes: Callable[[], int]) -> None:
        taken[:] = [taken_bytes]

    def sample(self) -> float:
        return 0.0
