"""Engines that nobody destroys, that never train, or that take turns: what offloaders hold, and who reports where."""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from conftest import Closing, Factory
from support import runs
from support.stepping import forward, note_backward, offloader_of
from torch import nn

from ds_tba.device.accelerator import Accelerator, new_thread
from ds_tba.offloader import ActivationOffloader

pytestmark = pytest.mark.usefixtures("one_thread")
STAGING_BYTES = 16 << 20
TIERS = {"nvme": {"placement": "nvme"}, "host": {"placement": "host", "host_budget_bytes": 8 << 20}}


class Engine:
    """What DeepSpeed keeps of an engine that nobody destroys: the model, and the offloader."""

    def __init__(self, directory: Path, **block: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(3)))
        self.offloader = offloader_of(directory, self.model, **{"min_tensor_bytes": 4096, **TIERS["nvme"], **block})

    def loss(self) -> torch.Tensor:
        self.model.zero_grad(set_to_none=True)
        x = torch.randn(128, 64, generator=torch.Generator().manual_seed(1))
        return forward(self.model, x, self.offloader).square().mean()

    def step(self, loss: torch.Tensor | None = None) -> list[torch.Tensor]:
        (self.loss() if loss is None else loss).backward()
        note_backward(self.offloader)
        self.offloader.note_step()
        return [one.grad for one in self.model.parameters() if one.grad is not None]


@pytest.fixture
def make(tmp_path: Path, closing: Closing) -> Factory:
    return closing(lambda **block: Engine(tmp_path, **block), lambda engine: engine.offloader.close())


def memory(offloader: ActivationOffloader) -> int:
    nvme, host = offloader._tiers.nvme, offloader._tiers.host
    staging = STAGING_BYTES if nvme is not None and nvme.ring._memory is not None else 0
    return staging + (0 if host is None else sum(one.memory.numel() for one in host._segments))


@pytest.mark.parametrize("tier", TIERS)
def test_an_engine_that_gave_back_trains_on_with_the_same_gradients(make: Factory, tmp_path: Path, tier: str) -> None:
    one = make(**TIERS[tier], rematerialize=False)
    expected = one.step()
    other = make(**TIERS[tier], rematerialize=False)
    assert memory(one.offloader) == 0
    for engine in (other, one, other):
        assert all(map(torch.equal, engine.step(), expected))
        assert memory(engine.offloader) > 0
    before, after = one.offloader.report(), other.offloader.report()
    assert before.offloaded_bytes == after.offloaded_bytes > 0 and before.fallbacks == after.fallbacks == 0


@pytest.mark.parametrize("placement", ["nvme", "host"])
def test_a_tier_that_gave_back_while_another_could_not_opens_again(
    make: Factory, monkeypatch: pytest.MonkeyPatch, placement: str
) -> None:
    """Copies may be under way in one, or a tensor of the user's be its memory, after all graphs are gone."""
    one = make(placement=placement, host_budget_bytes=8 << 20, rematerialize=False)
    expected, tiers = one.step(), one.offloader._tiers
    used, stuck = (tiers.nvme, tiers.host) if placement == "nvme" else (tiers.host, tiers.nvme)
    monkeypatch.setattr(stuck, "give_back", lambda: False)
    before_bytes = used.stats.offloaded_bytes
    make().step()
    assert all(map(torch.equal, one.step(), expected))
    assert used.stats.offloaded_bytes == 2 * before_bytes > 0


def test_an_engine_with_a_graph_to_go_back_through_holds_its_bytes(make: Factory, tmp_path: Path) -> None:
    one = make()
    expected = one.step()
    loss = one.loss()
    make().step()
    assert memory(one.offloader) == STAGING_BYTES
    assert all(map(torch.equal, one.step(loss), expected))


def test_engines_that_take_turns_keep_what_they_have(make: Factory) -> None:
    """A GAN's two: giving back and taking again would cost more than the step."""
    engines = [make(), make()]
    expected = [engine.step() for engine in engines]
    before = [engine.offloader._tiers.nvme.ring._memory for engine in engines]
    for _ in range(3):
        for engine, gradients in zip(engines, expected, strict=True):
            assert all(map(torch.equal, engine.step(), gradients))
    assert all(a is b.offloader._tiers.nvme.ring._memory for a, b in zip(before, engines, strict=True))


def test_a_second_engine_says_what_both_take(make: Factory) -> None:
    one, other = make(), make()
    assert "more engine(s)" not in other.offloader.start_line()  # the first one is a reference, say
    one.step()
    line = make().offloader.start_line()
    assert "1 more engine(s) of this process have trained" in line and "32.00 MiB of staging" in line
    one.offloader.close()
    assert "more engine(s)" not in make().offloader.start_line()


def test_five_engines_in_a_row_take_what_two_do(tmp_path: Path) -> None:
    """That nobody destroys: 40 MiB, three threads and no disk space more."""
    done = runs.python("-c", ENGINES_IN_A_ROW, tmp_path, cwd=runs.ROOT)
    assert done.returncode == 0, done.stderr
    (of_two, of_five) = json.loads(done.stdout)
    assert of_five["threads"] <= of_two["threads"] + 3
    assert of_five["disk_bytes"] <= of_two["disk_bytes"]
    assert of_five["memory_bytes"] <= of_two["memory_bytes"] + (40 << 20), (of_two, of_five)


# With staging that five engines would take 320 MiB of.
ENGINES_IN_A_ROW = """
import json, sys
from pathlib import Path
import torch
from support.models import Stack
from support.stepping import offloader_of, train
sys.path.append("benchmarks")
from soaking.meters import take

directory, engines, found = Path(sys.argv[1]), [], []
for number in range(5):
    model = Stack(lambda: torch.nn.Linear(256, 256), 16)
    io = {"backend": "posix", "staging_bytes": 64 << 20}
    offloader = offloader_of(directory, model, placement="nvme", min_tensor_bytes=4096, io=io, rematerialize=False)
    engines.append((model, offloader))
    train(model, offloader, [torch.randn(4096, 256)] * 2)
    assert offloader.report().offloaded_bytes > 0
    if number in (1, 4):
        found.append(vars(take(0, 0, directory, None, 0.0)))
sys.stdout.write(json.dumps(found))
"""


def test_whoever_asks_for_the_end_starts_no_thread_and_a_thread_of_ours_does_not_wait_for_itself(
    make: Factory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Starting a thread waits for it, and a user's finalizer, which the garbage collector runs in a lane, may close."""
    offloader = make().offloader
    lane = new_thread(Accelerator(), offloader.close, "ds_tba-write-0")
    offloader.on_close(lane.join)
    lane.start()
    with monkeypatch.context() as patch:
        patch.delattr(threading.Thread, "start")
        offloader.close_soon()
    started_s = time.monotonic()
    offloader.close()
    assert time.monotonic() - started_s < 30 and offloader.report().state == "finished" and not lane.is_alive()


def test_an_engine_whose_space_is_gone_trains_on_in_memory(
    make: Factory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    one = make()
    expected = one.step()
    other = make()
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, logger="ds_tba"):
        patch.setattr(os, "posix_fallocate", Mock(side_effect=OSError(28, "No space left on device")))
        for _ in range(2):
            assert all(map(torch.equal, one.step(), expected))
    assert memory(one.offloader) == 0 and one.offloader.report().fallbacks > 0
    assert [record for record in caplog.messages if "activations stay in memory" in record] == caplog.messages[:1]
    other.step()


# ---- reports --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "with gradients"])
def test_a_reference_that_never_trains_takes_nothing_and_reports_nothing(
    make: Factory, tmp_path: Path, grad: bool
) -> None:
    """One from the same config, with its optimizer: DPO by hand."""
    block = {"report": {"path": str(tmp_path / "report.json")}}
    policy, reference = make(**block), make(**block)
    for _ in range(3):
        policy.step()
        with torch.set_grad_enabled(grad):
            forward(reference.model, torch.randn(128, 64), reference.offloader)
    assert grad or memory(reference.offloader) == 0
    for engine in (policy, reference):
        engine.offloader.close()
    (only,) = tmp_path.glob("*.json")
    assert json.loads(only.read_text())["steps"] == 3
