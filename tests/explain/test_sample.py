"""Steps that are looked at: who holds saved bytes, when they came and went, and that nothing else changes."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Closing
from support import hazards, stepping
from support.doubles import wait_for_writes
from support.hazards import Scenario, scenarios
from support.models import Mlp, Stack
from support.stepping import offloader_of
from torch import nn

from ds_tba.core.tensors import form_of
from ds_tba.device.accelerator import is_out_of_memory
from ds_tba.explain import sample
from ds_tba.offloader import ActivationOffloader

LAYERS = 3
Made = tuple[Stack, ActivationOffloader]
Make = Callable[..., Made]


@pytest.fixture
def make(tmp_path: Path, closing: Closing) -> Make:
    def make(**block: Any) -> Made:
        torch.manual_seed(0)
        model = Stack(lambda: Mlp(64), LAYERS)
        return model, closing(offloader_of)(tmp_path, model, **{"min_tensor_bytes": 4096, **block})

    return make


def train(
    model: nn.Module, offloader: ActivationOffloader | None, steps: int, between: Callable[[], object] = lambda: None
) -> list[list[torch.Tensor]]:
    torch.manual_seed(1)
    return stepping.train(model, offloader, (torch.randn(4, 64, 64) for _ in range(steps)), between)


@scenarios
def test_whatever_is_saved_is_looked_at_without_an_error(tmp_path: Path, scenario: Scenario) -> None:
    """Sparse, jagged and nested tensors, what ``vmap`` saves."""
    block = {"placement": "nvme", "report": {"timeline_path": str(tmp_path / "step.json")}}
    offloader = offloader_of(tmp_path, nn.Identity(), min_tensor_bytes=hazards.MIN_BYTES, **block)
    expected, found = (hazards.run(scenario, saving) for saving in (nullcontext, offloader.saving))
    offloader.note_micro_step()
    offloader.note_step()
    offloader.close()
    hazards.compare(expected, found, scenario.__name__)


@pytest.mark.parametrize(("placement", "rematerialize"), [("nvme", False), ("keep", False), ("nvme", True)])
def test_holders_are_what_the_cache_counts(make: Make, placement: str, rematerialize: bool) -> None:
    model, offloader = make(placement=placement, rematerialize=rematerialize)
    train(model, offloader, 4)
    report = offloader.report()
    by_module = {(one["module"], one["op"]): one for one in report.holders}
    # In each layer the input of the second projection: 4 x 64 x 256 numbers.
    projections = by_module["layers.*.down", "Gelu"]
    assert (projections["tensors"], projections["saved_bytes"]) == (LAYERS, LAYERS * 4 * 64 * 256 * 4)
    moved = sum(one["moved_bytes"] for one in report.holders)
    assert (moved > 0) == (placement == "nvme")
    again = sum(one["again_bytes"] for one in report.holders)
    assert (again > 0) == (report.rematerialized_bytes > 0) == rematerialize
    assert sum(one["saved_bytes"] for one in report.holders) == report.peak_saved_bytes_without
    assert report.holders_step == 4


def test_numbers_of_layers_are_merged() -> None:
    names = ["0", "h.3.experts.12.w1", "conv2d.layer1", ""]
    assert [sample.LAYER_NUMBER.sub("*", one) for one in names] == ["*", "h.*.experts.*.w1", "conv2d.layer1", ""]


def test_the_timeline_is_on_the_clock_of_the_profiler(make: Make, tmp_path: Path) -> None:
    path = tmp_path / "step.json"
    model, offloader = make(placement="nvme", rematerialize=False, report={"timeline_path": str(path)})
    before = time.time()
    train(model, offloader, 2, lambda: wait_for_writes(offloader._tiers.nvme))  # else backward may be there before them
    after = time.time()
    report = offloader.report()
    offloader.close()
    trace = json.loads(path.read_text())
    assert trace["otherData"]["step"] == 2
    assert report.timeline_path == str(path)
    spans = [one for one in trace["traceEvents"] if one["ph"] == "X"]
    assert {"forward", "backward", "optimizer", "write", "copy out", "copy back"} <= {one["name"] for one in spans}
    for one in spans:
        assert one["dur"] >= 0
        assert before * 1e6 <= one["ts"] + 1000
        assert one["ts"] + one["dur"] <= after * 1e6 + 1000
    levels = [one["args"] for one in trace["traceEvents"] if one["ph"] == "C"]
    assert max(one["without"] for one in levels) == report.peak_saved_bytes_without
    assert max(one["resident"] for one in levels) <= report.peak_saved_bytes
    written = sum(one["args"]["bytes"] for one in spans if one["name"] == "write")
    assert written <= report.written_bytes


@pytest.mark.parametrize(
    ("error", "is_told"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 64 bytes"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), True),
        (RuntimeError("shapes cannot be multiplied"), False),
    ],
)
def test_memory_that_runs_out_is_told_from_other_errors(error: BaseException, is_told: bool) -> None:
    assert is_out_of_memory(error) == is_told


def test_the_error_of_a_backward_of_the_users_own_is_explained_at_exit(
    make: Make, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, offloader = make(placement="keep")
    train(model, offloader, 1)
    monkeypatch.setattr(sys, "last_value", MemoryError(), raising=False)
    with caplog.at_level(logging.ERROR, logger="ds_tba"):
        offloader.close()
    assert "memory ran out" in caplog.text


def test_a_subclass_is_not_asked_for_its_form() -> None:
    assert form_of(torch.ones(4).as_subclass(hazards.KnowsFewFunctions)) == "[4] float32"


class PreBackwardFunctionForModule(torch.autograd.Function):
    """As ZeRO-3's, which makes no tensor; and with an attribute of a user's in the place of a method of the node."""

    @staticmethod
    def forward(ctx: Any, outputs: torch.Tensor) -> torch.Tensor:
        ctx.name = "outputs"
        return outputs.view_as(outputs)


def test_the_functions_of_zero_3_made_no_tensor() -> None:
    made = PreBackwardFunctionForModule.apply(torch.nn.functional.gelu(torch.ones(2, requires_grad=True)))
    assert sample._op(made) == "Gelu"
