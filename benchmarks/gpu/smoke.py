"""Losses and gradients of every placement, bit for bit those of a run without us: each step, on one stream and on two.

Kernels are strictly deterministic. "keep again" is the control: where two runs without us differ, equality says
nothing. A run of ours that moved no byte and made nothing again has shown nothing, and is a failure, too.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from benchmarking import MIB, write_json
from curves.device import Device
from curves.turns import digest, strict
from planners import PLANNERS

from ds_tba.config import AioConfig, OffloadConfig
from ds_tba.offloader import ActivationOffloader
from ds_tba.plan.agreement import Alone
from gpu.llama import BYTE_VALUES, Llama, Shape
from gpu.results import piece_parser

LEARNING_RATE = 0.01
STEPS, STEPS_WITH_A_PLAN = 5, 10
# A step has begun by then; the next would not end in time.
LEAST_S = 5.0
KEEP, CONTROL, REMATERIALIZE, BUDGET = "keep", "keep again", "rematerialize", "budget with recompute"
MOVED = ("host_bytes", "written_bytes", "rematerialized_bytes", "recomputed_bytes")
# What a way is for, in the report: without any of it nothing was shown.
SHOWN = {
    REMATERIALIZE: ("rematerialized_bytes",),
    "host": ("host_bytes",),
    "nvme": ("written_bytes",),
    "adaptive": MOVED,
    BUDGET: ("recomputed_bytes",),
}
REPORTED = (
    "plans", *MOVED, "read_bytes", "fallbacks", "fallbacks_by_reason", "stall_s", "peak_saved_bytes",
    "peak_saved_bytes_without", "budget_excess_bytes",
)  # fmt: skip
Step = tuple[str, str]


class Setting(NamedTuple):
    """How a model trains: its dtype, and the streams that the script uses."""

    dtype: str
    streams: str


class Smoke:
    """All ways in all settings: a row for each that was tried, what failed, and what there was no time for."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._device = Device(options.device)
        self._ends_s = time.monotonic() + options.seconds
        sizes = (64, 176, 4, 2, 2) if options.tiny else (1024, 2816, 16, 8, 4)
        self._shape, self._tokens = Shape(*sizes), (1, 192) if options.tiny else (2, 1024)
        self.rows: list[dict[str, Any]] = []
        self.failed: list[str] = []
        self.untried: list[str] = []

    def run(self) -> None:
        streams = ("default stream", "two streams", "own stream")[: 3 if self._device.is_cuda else 1]
        for setting in itertools.starmap(Setting, itertools.product(("bf16", "autocast"), streams)):
            self._run(setting)

    def _run(self, setting: Setting) -> None:
        expected: list[Step] | None = None
        saved_bytes = 0
        for way in (KEEP, CONTROL, *SHOWN):
            name = ", ".join((*setting, way))
            if time.monotonic() + LEAST_S >= self._ends_s:
                self.untried.append(name)
                self.keep()
                continue
            row: dict[str, Any] = {**setting._asdict(), "way": way}
            began_s = time.monotonic()
            try:
                found, report = self._train(setting, way, self._block(way, saved_bytes))
            except Exception as error:  # noqa: BLE001 - whatever it is, it is the answer of this row
                row["failed"] = f"{type(error).__name__}: {error}"[:400]
            else:
                expected = expected or found
                both = list(zip(found, expected, strict=False))
                row["first other step"] = next((at for at, (one, other) in enumerate(both) if one != other), None)
                row["equal"] = row["first other step"] is None
                row["report"] = {key: report[key] for key in REPORTED if key in report}
                saved_bytes = report.get("peak_saved_bytes_without", saved_bytes)
                row["failed"] = self._failure(way, row)
            row["took_s"] = round(time.monotonic() - began_s, 1)
            self.rows.append(row)
            if row["failed"]:
                self.failed.append(f"{name}: {row['failed']}")
            self.keep()

    def _failure(self, way: str, row: Mapping[str, Any]) -> str:
        if not row["equal"] and way == CONTROL:
            return "two runs without us differ, so that equality says nothing here"
        if not row["equal"]:
            return f"losses or gradients differ from step {row['first other step']} on"
        if way in SHOWN and not any(row["report"].get(key) for key in SHOWN[way]):
            return f"nothing is shown: no {' and no '.join(SHOWN[way])}"
        return ""

    def _block(self, way: str, saved_bytes: int) -> dict[str, Any] | None:
        """Return the config block of a way."""
        most = (8 if self._options.tiny else 1024) * MIB
        drive = {"backend": "posix", "swap_file_bytes": most}
        blocks: dict[str, dict[str, Any]] = {
            REMATERIALIZE: {"placement": "keep"},
            "host": {"placement": "host", "host_budget_bytes": most},
            "nvme": {"placement": "nvme", "io": {**drive, "staging_bytes": most // 8}},
            "adaptive": {"host_budget_bytes": most // 2},
            BUDGET: {"activation_budget_bytes": max(1, int(0.4 * saved_bytes)), "max_step_overhead": 100.0},
        }
        blocks[BUDGET]["recompute"] = True
        common = {"nvme_path": str(self._options.nvme_path), "min_tensor_bytes": 4096 if self._options.tiny else MIB}
        return {**common, "io": drive, **blocks[way]} if way in blocks else None

    def _train(self, setting: Setting, way: str, block: dict[str, Any] | None) -> tuple[list[Step], dict[str, Any]]:
        """Return digests of loss and gradients of each step, and the report."""
        device = self._device
        side = torch.cuda.Stream() if device.is_cuda and setting.streams == "two streams" else None
        torch.manual_seed(1)
        with device.torch:
            model: torch.nn.Module = Llama(self._shape, side)
        if setting.dtype == "bf16":
            model = model.bfloat16()
        tokens = torch.randint(BYTE_VALUES, self._tokens, generator=torch.Generator().manual_seed(2)).to(device.torch)
        offloader = None
        if block is not None:
            offloader = ActivationOffloader(OffloadConfig.model_validate(block), AioConfig(), device.accelerator)
        device.synchronize()
        is_own = device.is_cuda and setting.streams == "own stream"
        count = STEPS if block is None or "placement" in block else STEPS_WITH_A_PLAN
        try:
            if offloader is not None:
                # Ours may find something cheaper than to recompute, which then nothing would have shown.
                offloader.watch(model, Alone(), PLANNERS["recompute" if way == BUDGET else "adaptive"])
            with torch.cuda.stream(torch.cuda.Stream()) if is_own else nullcontext():
                steps = [self._step(model, tokens, setting, offloader) for _ in range(count)]
            return steps, {} if offloader is None else offloader.report().to_dict()
        finally:
            if offloader is not None:
                offloader.close()
            del model
            device.give_back()

    def _step(
        self, model: torch.nn.Module, tokens: torch.Tensor, setting: Setting, offloader: ActivationOffloader | None
    ) -> Step:
        autocast = torch.autocast(self._device.torch.type, torch.bfloat16, enabled=setting.dtype == "autocast")
        with nullcontext() if offloader is None else offloader.saving(inputs=(tokens,)), autocast:
            loss = model(tokens)
        loss.backward()
        if offloader is not None:
            offloader.note_micro_step()
        parameters = list(model.parameters())
        gradients = [one.grad for one in parameters if one.grad is not None]
        found = loss.item().hex(), digest(gradients)
        with torch.no_grad():
            torch._foreach_add_(parameters, gradients, alpha=-LEARNING_RATE)
        for one in parameters:
            one.grad = None
        if offloader is not None:
            offloader.note_step()
        return found

    def keep(self) -> None:
        """Write what there is so far."""
        write_json(self._options.result, {"rows": self.rows, "failed": self.failed, "untried": self.untried})


def main(argv: list[str] | None = None) -> int:
    smoke = Smoke(piece_parser(__doc__, seconds=(110.0, "for everything")).parse_args(argv))
    with strict():
        smoke.run()
    for one in smoke.failed:
        print(one, flush=True)
    return 1 if smoke.failed or smoke.untried else 0


if __name__ == "__main__":
    raise SystemExit(main())
