"""What a real device physically holds in backward, and models that are compiled into CUDA graphs.

    python -m pytest -m gpu tests/gpu/test_gpu_memory.py

"Physically" is what the allocator calls active: a freed block stays so until the streams that use it get there, which
"allocated" does not show.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from curves.device import Device
from gpu_rig import shows_something
from torch import nn

from ds_tba.config import AioConfig, OffloadConfig
from ds_tba.offloader import ActivationOffloader
from ds_tba.plan.agreement import Alone

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
__all__ = ["shows_something"]
MIB = 1 << 20
ROW_BYTES = 8 * MIB
SAVED = 40
BUDGET_BYTES = 64 * MIB
RING_BYTES = 32 * MIB
SLEEP_CYCLES = 20_000_000  # 10 ms at 2 GHz


def offloader_of(tmp_path: Path, **block: Any) -> ActivationOffloader:
    io = {"backend": "posix", "staging_bytes": RING_BYTES, "swap_file_bytes": 1 << 30}
    drive = {"nvme_path": str(tmp_path), "io": io, "min_tensor_bytes": 4096}
    config = OffloadConfig.model_validate({**drive, "host_budget_bytes": 512 * MIB, **block})
    return ActivationOffloader(config, AioConfig(), Device("cuda").accelerator)


class Sines(nn.Module):
    """Each saves its input; backward of each begins 10 ms after that of the one behind it, on the device."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(1, device="cuda"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * self.gain
        for _ in range(SAVED):
            y = y.sin()
            y.register_hook(lambda _: torch.cuda._sleep(SLEEP_CYCLES))
        return y.sum()


def a_step(model: Sines, x: torch.Tensor, offloader: ActivationOffloader | None) -> tuple[int, torch.Tensor]:
    """The physical peak of backward beyond what was held before it, and the gradient."""
    with nullcontext() if offloader is None else offloader.saving():
        loss = model(x)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["active_bytes.all.current"]
    loss.backward()
    peak = torch.cuda.memory_stats()["active_bytes.all.peak"]
    torch.cuda.synchronize()
    if offloader is not None:
        offloader.note_micro_step()
        offloader.note_step()
    gradient, model.gain.grad = model.gain.grad, None
    assert gradient is not None
    return peak - before, gradient.cpu()


@pytest.mark.parametrize(
    ("block", "bound_bytes"),
    [
        ({"placement": "host", "rematerialize": False}, SAVED * ROW_BYTES // 2),
        ({"placement": "nvme", "rematerialize": False}, SAVED * ROW_BYTES // 2),
        # One sine in some is moved, and the others are made again from it.
        ({"placement": "host"}, SAVED * ROW_BYTES // 2),
        ({"placement": "nvme"}, SAVED * ROW_BYTES // 2),
        # Beside the budget: the gradient that flows, the output of the kernel that runs, and one reload at a time.
        ({"activation_budget_bytes": BUDGET_BYTES, "rematerialize": False}, BUDGET_BYTES + 4 * ROW_BYTES),
        ({"activation_budget_bytes": BUDGET_BYTES}, BUDGET_BYTES + 4 * ROW_BYTES),
    ],
    ids=["host", "nvme", "host, made again", "nvme, made again", "a budget", "a budget, made again"],
)
def test_backward_does_not_run_ahead_of_the_device(tmp_path: Path, block: dict[str, Any], bound_bytes: int) -> None:
    """The host reloads all 320 MiB in no time, while kernels take 0.4 s to consume them."""
    model, x = Sines(), torch.rand(ROW_BYTES // 4, device="cuda")
    _, expected = a_step(model, x, None)
    offloader = offloader_of(tmp_path, **block)
    offloader.watch(model, Alone())
    retries = torch.cuda.memory_stats()["num_alloc_retries"]
    for _ in range(8):  # some are recorded, then there is a plan
        held_bytes, found = a_step(model, x, offloader)
        assert torch.equal(found, expected)
        assert held_bytes <= bound_bytes, f"{held_bytes / MIB:.0f} MiB in backward"
    assert torch.cuda.memory_stats()["num_alloc_retries"] == retries
    report = offloader.report()
    assert report.offloaded_bytes > 0 and (report.rematerialized_bytes > 0) is ("rematerialize" not in block)
    offloader.close()


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.moves_nothing  # what belongs to a graph stays
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("placement", ["nvme", "host", "adaptive"])
def test_a_model_compiled_into_cuda_graphs(tmp_path: Path, placement: str) -> None:
    """``mode="reduce-overhead"``: saved tensors in a graph's pool are not ours to free."""
    torch.manual_seed(3)
    blocks = [nn.Sequential(nn.LayerNorm(256), nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)) for _ in range(3)]
    model = nn.Sequential(*blocks).cuda()
    compiled = torch.compile(model, mode="reduce-overhead")
    x = torch.randn(512, 256, device="cuda")
    offloader = offloader_of(tmp_path, placement=placement)
    offloader.watch(model, Alone())

    def gradients(ours: bool) -> list[torch.Tensor]:
        torch.compiler.cudagraph_mark_step_begin()
        with offloader.saving() if ours else nullcontext():
            loss = compiled(x).square().mean()
        loss.backward()
        if ours:
            offloader.note_micro_step()
            offloader.note_step()
        found = [one.grad.clone() for one in model.parameters() if one.grad is not None]
        model.zero_grad(set_to_none=True)
        return found

    for _ in range(4):  # warms up, records, replays
        expected = gradients(ours=False)
    for _ in range(8):
        found = gradients(ours=True)
        assert len(found) == len(expected) and all(map(torch.equal, found, expected))
    assert all(map(torch.equal, gradients(ours=False), expected))
    offloader.close()
