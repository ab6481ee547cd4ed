"""One process of the soak: trains all steps, with or without us, and writes down what happened.

Every segment begins with a new engine and the parameters of the last one, as a job does that starts again. A step that
ends in an error that a fault has made due is repeated: with the same engine, or under ZeRO-1 and -2, whose state after
half a backward is good for nothing, with a new one.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import random
import threading
import time
import traceback
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

import deepspeed
import torch

from ds_tba.errors import StorageError
from ds_tba.storage.backends import aio
from ds_tba.storage.integrity import Integrity
from soaking import steps
from soaking.faults import Faults, Injector
from soaking.meters import take
from soaking.segments import HARD_FAULT_FRACTION, PATHS, Segment, segment_of

SUMS = ("offloaded_bytes", "written_bytes", "read_bytes", "forwarded_bytes", "cancelled_bytes", "kept_bytes",
        "deduplicated_bytes", "host_bytes", "fallbacks", "packed_tensors")  # fmt: skip
PEAKS = ("peak_staging_bytes", "peak_saved_bytes", "peak_saved_bytes_without", "swap_file_bytes")
CLOSE_S = SETTLE_S = 60.0
HANG_S = 300.0  # a step that takes longer ends the process, with the stacks of all threads
SABOTAGED_SETTLE_S = 0.5
FLIP_READS = 20
BUCKET = 1 << 20  # elements; DeepSpeed's default reserves gigabytes


class Worker:
    """One run of the soak, with the options of ``soak.py`` and a directory of its own for swap files."""

    def __init__(self, options: Any, directory: Path, *, offload: bool) -> None:
        self._options, self._directory, self._offload = options, directory, offload
        # A build of aio that is not there yet would take minutes and its compiler's memory.
        self._backends = ("posix", "aio") if aio.is_built() else ("posix",)
        self._faults = Faults()
        self._hoard: list[Any] = []
        self._patience_s = SABOTAGED_SETTLE_S if options.sabotage else SETTLE_S
        self._engine: Any = None
        self._parameters: dict[str, torch.Tensor] | None = None
        self.result: dict[str, Any] = {
            "steps": [], "samples": [], "segments": [], "faults": Counter(), "errors": Counter(), "sums": Counter(),
            "peaks": Counter(), "modes": Counter(), "problem": None, "parameters": None,
        }  # fmt: skip

    def run(self) -> dict[str, Any]:
        """Run every segment, up to the first problem."""
        for path in range(PATHS):
            (self._directory / f"path{path}").mkdir(parents=True)
        done = 0
        try:
            with self._faults:
                while done < self._options.steps:
                    count = min(self._options.segment_steps, self._options.steps - done)
                    self._segment(done // self._options.segment_steps, done, count)
                    done += count
                    self._sample(done, -1)
                    if done == count:
                        gc.freeze()  # or every collection would walk all of torch
        except Exception:  # noqa: BLE001 - whatever it is, the soak tells it instead of dying of it
            self.result["problem"] = traceback.format_exc()
        self.result["parameters"] = _crc((self._parameters or {}).values())
        return self.result

    def _segment(self, number: int, first: int, count: int) -> None:
        seed = self._options.seed
        segment = segment_of(seed, number, self._directory, self._backends, offload=self._offload)
        flip_reads, hard_part = self._sabotaged(segment)
        self._faults.injector = injector = Injector(f"{seed}/faults/{number}", segment.rates, flip_reads)
        self.result["segments"].append({"stage": segment.stage, "block": segment.block, "aio": segment.aio})
        self._build(segment)
        try:
            self._steps(segment, range(first, first + count), hard_part)
        finally:
            self.result["faults"] += Counter({kind: n for kind, n in injector.counts.items() if kind})
        self._parameters = _parameters(self._engine)
        self._end(segment)

    def _steps(self, segment: Segment, numbers: range, hard_part: float) -> None:
        chance = random.Random(f"{self._options.seed}/hard/{segment.number}")
        for number in numbers:
            plan = steps.plan_of(self._options.seed, number, segment.stage)
            kinds = segment.hard_faults if plan.mode in steps.COMPLETE else ()
            faulthandler.dump_traceback_later(HANG_S, exit=True)
            self._step(segment, plan, chance.choice(kinds) if kinds and chance.random() < hard_part else "")
            if (number + 1) % self._options.sample_every == 0:
                self._sample(number + 1, segment.number)

    def _sabotaged(self, segment: Segment) -> tuple[int, float]:
        """Return after how many reads a bit flips (0: never), and in which fraction of the steps bytes are lost."""
        sabotage = self._options.sabotage
        if segment.block is None or sabotage not in ("flip", "deaf"):
            return 0, HARD_FAULT_FRACTION
        segment.block["placement"] = "nvme"
        segment.block["io"]["integrity"] = "off" if sabotage == "flip" else "full"
        return (FLIP_READS, 0.0) if sabotage == "flip" else (0, 1.0)

    def _build(self, segment: Segment) -> None:
        model = steps.model()
        if self._parameters is not None:
            model.load_state_dict(self._parameters)
        zero = {"stage": segment.stage, "reduce_bucket_size": BUCKET, "allgather_bucket_size": BUCKET}
        config = {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 1.0, "zero_allow_untested_optimizer": True}
        config["zero_optimization"] = zero
        if segment.block is not None:
            config |= {"activation_nvme_offload": segment.block, "aio": segment.aio}
        # Without a state of its own, so that the parameters are all it takes to start again.
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        self._faults.injector.is_off = True  # a drive that fails while an engine is built is refused, as it should be
        self._engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        self._faults.injector.is_off = False

    def _end(self, segment: Segment) -> None:
        offloader = getattr(self._engine, "activation_offloader", None)
        if offloader is not None:
            self._add_up(offloader)
        if not segment.collected or self._hoard:  # a graph that leaks keeps its engine
            self._engine.destroy()
        self._engine = None
        gc.collect()
        deadline = time.monotonic() + CLOSE_S
        while offloader is not None and (offloader.report().state != "finished" or self._our_threads()):
            if time.monotonic() > deadline:
                left = ", ".join(self._our_threads()) or "none"
                raise steps.SoakError(f"segment {segment.number}: engine gone, offloader open, threads: {left}")
            time.sleep(0.001)

    def _add_up(self, offloader: Any) -> None:
        report = offloader.report().to_dict()
        for key in SUMS:
            self.result["sums"][key] += report[key]
        self.result["peaks"] |= Counter({key: report[key] for key in PEAKS})  # the larger of each
        if offloader._tiers.nvme is not None:
            self.result["sums"]["rescued_bytes"] += offloader._tiers.nvme.stats.rescued_bytes

    def _step(self, segment: Segment, plan: steps.StepPlan, armed: str) -> None:
        injector = self._faults.injector
        before = _parameters(self._engine) if armed and segment.stage else None
        injector.arm(armed)
        raised, text = None, ""
        try:
            losses = steps.do(self._engine, plan)
        except StorageError as error:
            raised, text = type(error), str(error)
        due = injector.due
        injector.arm("")
        if raised is not due:
            wanted, came = (one.__name__ if one else "no error" for one in (due, raised))
            fault = f"step {plan.number} ({plan.mode}), fault '{armed}'"
            raise steps.SoakError(f"{fault}: {wanted} was due and {came} came: {text}")
        if raised is not None:
            self.result["errors"][raised.__name__] += 1
            self._go_back(segment, before)
            losses = steps.do(self._engine, plan)
        gradients = _crc(one.grad for one in self._engine.module.parameters()) if segment.stage == 0 else 0
        self._engine.step()
        self.result["steps"].append([*losses, gradients or _crc(_parameters(self._engine).values())])
        self.result["modes"][plan.mode] += 1
        if self._options.sabotage == "leak" and self._offload:
            self._leak(plan)

    def _go_back(self, segment: Segment, before: dict[str, torch.Tensor] | None) -> None:
        """Return to the state before a step that failed."""
        if before is None:
            self._engine.zero_grad()
            return
        self._end(segment)
        self._parameters = before
        self._build(segment)

    def _leak(self, plan: steps.StepPlan) -> None:
        graph = steps.forward(self._engine, plan.batches[0])
        self._hoard += [torch.ones(1 << 20), graph, os.open(os.devnull, os.O_RDONLY)]

    def _our_threads(self) -> list[str]:
        names = [thread.name for thread in threading.enumerate() if thread.name.startswith("ds_tba")]
        # A graph that leaks is followed by a thread until it ends, which it does not.
        return [name for name in names if not (self._hoard and name == "ds_tba-graphs")]

    def _sample(self, step: int, segment: int) -> None:
        offloader = getattr(self._engine, "activation_offloader", None)
        self.result["samples"].append(vars(take(step, segment, self._directory, offloader, self._patience_s)))


def _parameters(engine: Any) -> dict[str, torch.Tensor]:
    """Return copies of all parameters. No segment has ZeRO-3, which would partition them."""
    return {name: parameter.detach().clone() for name, parameter in engine.module.named_parameters()}


def _crc(tensors: Any) -> int:
    value = 0
    for tensor in tensors:
        value = zlib.crc32(tensor.contiguous().flatten().view(torch.uint8).numpy(), value)
    return value


def main(options: Any) -> int:
    """Run in this process and write the result as JSON."""
    deepspeed.init_distributed(verbose=False)
    if options.sabotage == "deaf":
        Integrity.compare = lambda *_: None  # type: ignore[method-assign]
    worker = Worker(options, options.directory, offload=options.variant == "offload")
    options.result.write_text(json.dumps(worker.run()))
    faulthandler.cancel_dump_traceback_later()
    return 0
