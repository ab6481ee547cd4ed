"""Step time and physical peak of Llama-3-8B's layers at one length, every way to train in turn, in one process.

All ways train one model. A step is forward, backward and SGD. Once a way has its plan, one step under strictly
deterministic kernels, from the same parameters for all, must give the same loss, gradients and new parameters as that
of the first way, bit for bit; the steps that are timed run under the kernels that PyTorch takes by itself. In a round
each takes a turn, in a new random order; reported are medians over the rounds of the ratios to keep's turn in the same
round, or, where keep does not fit, to that of the first way that does. Where there is no time for a round, they are
those of one step, taken in order. The peak is what the device physically holds, what was freed and a stream may still
use included. A way that fails, does not fit or gets no turn in time is a row with its reason. With
``--profile`` one more step of each tells every wait of the host for the device, and every allocation, by name.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import statistics
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent), *map(str, Path(__file__).resolve().parents[1:3])]

import torch  # noqa: E402
from alternating import rounds_of  # noqa: E402
from curves.device import Device  # noqa: E402
from curves.turns import Contender, Runner, StepTaken, parameters_of  # noqa: E402

from ds_tba.device.accelerator import available_bytes  # noqa: E402
from gpu.llama import GIB, WAYS, Room, Shape, Way, workload  # noqa: E402
from gpu.results import write_whole  # noqa: E402

KEEP_FITS_TOKENS = 32768
STEPS, MAX_STEPS_TO_A_PLAN, STEPS_AFTER_A_PLAN = 2, 12, 3
# Counts of the allocator of which a row has the increase.
NUMBERS = {"alloc_retries", "mallocs", "frees"}
PROFILE_FACTOR = 4
NO_TIME = "no time was left"
# Parts of the names of what a profiled step is searched for.
TELLING = (
    "ynchronize", "cudaMalloc", "cudaFree", "cudaHost", "cudaEventQuery", "cudaEventRecord", "cudaStreamWaitEvent",
    "cudaMemcpyAsync", "cudaLaunchKernel", "aten::item", "aten::nonzero",
)  # fmt: skip


@dataclass
class Entrant:
    """A way to train, and what came of it.

    Attributes:
        state: "runs", "out of memory", "failed" or "no time".
        first_s: of one step when it entered, for want of rounds.
        unproven: why it could not be compared under strictly deterministic kernels.
        turns: medians of the steps of each, by round.
        peaks: what is held between steps and what is held beyond that, in bytes.
        steps: all that were measured.
        numbers: of retries, mallocs and frees, in its measured steps.
        profiled: of one step, for each event its number and the milliseconds of the host.
    """

    way: Way
    runner: Runner | None = None
    state: str = "runs"
    reason: str = ""
    equal: bool | None = None
    unproven: str = ""
    first_s: float | None = None
    turns: list[float | None] = field(default_factory=list)
    peaks: list[tuple[int, int]] = field(default_factory=list)
    steps: list[StepTaken] = field(default_factory=list)
    profiled: dict[str, tuple[int, float]] | None = None
    numbers: Counter[str] = field(default_factory=Counter)

    def fail(self, error: BaseException) -> None:
        """Take it out of the race, with the reason."""
        text = (str(error).strip().splitlines() or [""])[0]
        self.state = "out of memory" if isinstance(error, torch.OutOfMemoryError) else "failed"
        self.reason = f"{type(error).__name__}: {text}"[:300]


class Headline:
    """All ways at one length.

    Args:
        ends_s: end of the time, on the monotonic clock.
    """

    def __init__(self, options: argparse.Namespace, ends_s: float) -> None:
        self._options, self._ends_s = options, ends_s
        self._device = Device(options.device)
        self.shape = _shape(options)
        self._workload = workload(self.shape, options.tokens, self._device.torch)
        self._start = parameters_of(self._workload)
        self._expected = ""
        self.equal_to = ""
        self.entrants = [Entrant(way) for way in WAYS if options.ways is None or way.name in options.ways]
        self.rounds = 0
        least = 4096 if options.tiny else 1 << 20
        self._block = {"nvme_path": str(options.nvme_path), "min_tensor_bytes": least}
        self._io = {"backend": "posix", "staging_bytes": (4 << 20) if options.tiny else GIB}
        self.room = self._room(self._kept_bytes())

    def _room(self, kept: int) -> Room:
        """Return room for everything where it fits; each way that plans has a part of what drive and host have left."""
        planning = max(1, sum(one.way.plans for one in self.entrants))
        drive = shutil.disk_usage(self._options.nvme_path).free
        host = available_bytes()
        least = (4 if self._options.tiny else 64) << 20
        return Room(
            kept=kept,
            host=max(least, min(int(1.1 * kept), int(0.35 * host))),
            swap=max(least, min(int(1.2 * kept), int(0.5 * drive))),
            small_host=max(least, min(kept // 2, int(0.2 * host / planning))),
            small_swap=max(least, min(kept, int(0.3 * drive / (planning + 1)))),
        )

    def _kept_bytes(self) -> int:
        """Return the bytes saved with everything kept, by the line through those of two short lengths."""
        lengths = [max(64, self._options.tokens // part) for part in (16, 32)]
        found = []
        for length in lengths:
            # Short as they are, all tensors count that are counted at full length.
            block = {"placement": "keep", "rematerialize": False, "min_tensor_bytes": 4096}
            model = workload_of(self._workload, length)
            runner = Runner(Contender("measure", "adaptive", block), model, self._device, {})
            runner.step()
            found.append(runner.offloader.report().peak_saved_bytes_without)  # type: ignore[union-attr]
            runner.close()
        if lengths[0] == lengths[1]:
            return found[0] * self._options.tokens // lengths[0]
        slope = (found[0] - found[1]) / (lengths[0] - lengths[1])
        return int(found[0] + slope * (self._options.tokens - lengths[0]))

    # ---- the race ------------------------------------------------------------------------------------------------

    def enter(self) -> None:
        """Run each for the first time: warm it up, compare its gradients, and leave it out where it cannot run."""
        for number, entrant in enumerate(self.entrants):
            left_s = self._ends_s - time.monotonic()
            # What is left is shared among those to come and the rounds.
            until_s = time.monotonic() + left_s / (len(self.entrants) - number + 2)
            if left_s <= 0:
                entrant.state, entrant.reason = "no time", NO_TIME
                continue
            try:
                self._enter(entrant, until_s)
            except (RuntimeError, ValueError, OSError) as error:
                entrant.fail(error)
            if entrant.state != "runs":
                self._drop(entrant)
            print(f"{entrant.way.name}: {entrant.state} {entrant.reason}", flush=True)
            self.keep()

    def _enter(self, entrant: Entrant, until_s: float) -> None:
        way = entrant.way
        self._device.give_back()
        around = way.around(self._workload.model)
        limits: dict[str, Any] = {}
        if way.block is not None:
            limits = way.block(self.room)
            limits["io"] = {**self._io, **limits.get("io", {})}
        contender = Contender(way.name, "adaptive" if way.block else None, limits, around=around)
        entrant.runner = runner = Runner(contender, self._workload, self._device, self._block)
        runner.step()
        for _ in range(MAX_STEPS_TO_A_PLAN if way.plans else 0):
            runner.step()
            if (runner.offloader is not None and runner.offloader.report().plans) or time.monotonic() >= until_s:
                break
        for _ in range(STEPS_AFTER_A_PLAN if way.plans else 0):
            if time.monotonic() < until_s:
                runner.step()
        self._prove(entrant, runner)
        entrant.first_s = self._measured(entrant, runner, 1)

    def _measured(self, entrant: Entrant, runner: Runner, steps: int) -> float:
        """Measure so many steps, and return their median."""
        before = self._device.counts()
        found = runner.turn(steps)
        for name in NUMBERS & before.keys():
            entrant.numbers[name] += found[-1].counts[name] - before[name]
        entrant.steps += found
        held = self._device.held_bytes() or 0
        entrant.peaks += [(held, one.device_peak_bytes) for one in found if one.device_peak_bytes is not None]
        return statistics.median(one.step_s for one in found)

    def _prove(self, entrant: Entrant, runner: Runner) -> None:
        """Compare one strict step with that of the first way that ran."""
        try:
            found = runner.proof(self._start)
        except RuntimeError as error:
            if "deterministic" not in str(error):  # out of memory, say
                raise
            entrant.unproven = str(error).splitlines()[0][:300]
            return
        if not self._expected:
            self._expected, self.equal_to = found, entrant.way.name
        entrant.equal = found == self._expected

    def _drop(self, entrant: Entrant) -> None:
        """Have it run no more, and hold nothing."""
        if entrant.runner is not None and entrant.first_s is None:  # else others have wrapped the blocks after it
            entrant.runner.close()
            entrant.runner = None
        self._device.give_back()
        for parameter in self._workload.parameters:
            if parameter.grad is not None:
                parameter.grad.zero_()

    def run(self, most: int) -> None:
        """Run as many rounds as there is time for beside the profiled steps."""
        running = {entrant.way.name: entrant for entrant in self.entrants if entrant.state == "runs"}
        round_s = sum(entrant.first_s or 0 for entrant in running.values())
        # Time for the profiled steps, which are slower.
        ends_s = self._ends_s - (PROFILE_FACTOR * round_s if self._options.profile else 0)
        steps = STEPS if time.monotonic() + 2 * STEPS * round_s < ends_s else 1
        if time.monotonic() + round_s >= ends_s:
            return  # a round in part has nothing to compare
        turn = partial(self._turn, running, steps)
        for _ in rounds_of(list(running), turn, most, ends_s, random.Random(0)):
            self.rounds += 1
            self.keep()

    def _turn(self, running: dict[str, Entrant], steps: int, name: str) -> None:
        entrant, took_s = running[name], None
        if entrant.state == "runs" and entrant.runner is not None and time.monotonic() < self._ends_s:
            try:
                took_s = self._measured(entrant, entrant.runner, steps)
            except (RuntimeError, ValueError, OSError) as error:
                entrant.fail(error)
            # Out here, where no traceback holds the tensors of a step that failed.
            if entrant.state != "runs":
                self._drop(entrant)
        entrant.turns.append(took_s)

    def profile(self) -> None:
        """Look at one more step of each."""
        activities = [torch.profiler.ProfilerActivity.CPU]
        activities += [torch.profiler.ProfilerActivity.CUDA] if self._device.is_cuda else []
        for entrant in self.entrants:
            if entrant.state != "runs" or entrant.runner is None or time.monotonic() >= self._ends_s:
                continue
            entrant.runner.settle()
            self._device.synchronize()
            with torch.profiler.profile(activities=activities) as profiler:
                entrant.runner._step()
            entrant.profiled = {
                event.key: (event.count, round(event.cpu_time_total / 1e3, 3))
                for event in profiler.key_averages()
                if any(part in event.key for part in TELLING)
            }
            self.keep()

    def meter(self) -> None:
        """Measure the peak of one more step of each, on a CPU."""
        if self._device.is_cuda:
            return
        held = sum(one.nbytes * 2 for one in self._workload.parameters)
        for entrant in self.entrants:
            if entrant.state == "runs" and entrant.runner is not None:
                peak = entrant.runner.metered_peak_bytes()
                if peak is not None:
                    entrant.peaks.append((held, peak - held))

    # ---- what came of it -----------------------------------------------------------------------------------------

    @property
    def base(self) -> Entrant | None:
        """The entrant to which ratios are: keep, or the first that runs."""
        return next((one for one in self.entrants if one.state == "runs" and one.first_s is not None), None)

    def found(self) -> dict[str, Any]:
        base = self.base
        return {
            "tokens": self._options.tokens,
            "shape": vars(self.shape),
            "device": self._device.name,
            "room": vars(self.room),
            "rounds": self.rounds,
            "base": base.way.name if base else None,
            "equal_to": self.equal_to,
            "rows": [self._row(entrant, base) for entrant in self.entrants],
        }

    def _row(self, entrant: Entrant, base: Entrant | None) -> dict[str, Any]:
        row: dict[str, Any] = {"name": entrant.way.name, "title": entrant.way.title, "state": entrant.state}
        row |= {"reason": entrant.reason, "equal": entrant.equal, "unproven": entrant.unproven, **entrant.numbers}
        if entrant.steps and entrant.steps[0].counts:
            # Reserved bytes of its entry: later there is what others left cached.
            row["reserved_peak_bytes"] = entrant.steps[0].counts["reserved_peak_bytes"]
            for name in ("allocated_peak_bytes", "active_peak_bytes"):
                row[name] = max(one.counts[name] for one in entrant.steps)
        host = [one.host_s for one in entrant.steps if one.host_s is not None]
        if host:
            row["host_forward_s"], row["host_backward_s"] = (statistics.median(one) for one in zip(*host, strict=True))
        if entrant.profiled is not None:
            row["profiled"] = entrant.profiled
        if base is not None and base.first_s is not None and entrant.first_s is not None:
            both = zip(entrant.turns, base.turns, strict=False)
            pairs = [(mine, its) for mine, its in both if mine is not None and its is not None]
            pairs = pairs or [(entrant.first_s, base.first_s)]
            row["step_s"] = statistics.median(mine for mine, _ in pairs)
            row["to_base"] = [mine / its for mine, its in pairs]
        if entrant.peaks:
            row["peak_bytes"] = max(held + more for held, more in entrant.peaks)
            row["activation_peak_bytes"] = max(more for _, more in entrant.peaks)
        offloader = entrant.runner.offloader if entrant.runner is not None else None
        if offloader is not None:
            report = offloader.report().to_dict()
            keys = (
                "steps", "plans", "plan", "written_bytes", "read_bytes", "host_bytes", "rematerialized_bytes",
                "recomputed_bytes", "fallbacks", "fallbacks_by_reason", "stall_s",
                "step_peak_saved_bytes", "budget_excess_bytes",
            )  # fmt: skip
            row["report"] = {key: report[key] for key in keys if key in report}
        return row

    def keep(self) -> None:
        """Write the results so far."""
        write_whole(self._options.result, json.dumps(self.found()))

    def close(self) -> None:
        for entrant in reversed(self.entrants):  # each has wrapped the blocks as the one before left them
            if entrant.runner is not None:
                entrant.runner.close()


def workload_of(whole: Any, tokens: int) -> Any:
    """Return the same model with the first tokens only."""
    return type(whole)(whole.model, tuple(one[:, :tokens] for one in whole.batch), whole.parameters)


def _shape(options: argparse.Namespace) -> Shape:
    if options.tiny:
        return Shape(hidden=64, inner=224, heads=4, key_heads=2, layers=options.layers or 2)
    shape = Shape()
    memory = torch.cuda.get_device_properties(0).total_memory if options.device == "cuda" else 4 * GIB
    layers = options.layers or shape.layers_for(KEEP_FITS_TOKENS, memory)
    return Shape(layers=layers)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tokens", type=int, required=True)
    parser.add_argument("--layers", type=int, help="default: as many as fit with 32k tokens kept")
    parser.add_argument("--ways", nargs="+", choices=[way.name for way in WAYS], help="default: all")
    parser.add_argument("--profile", action="store_true", help="and one step of each under the profiler")
    parser.add_argument("--rounds", type=int, default=7, help="at most")
    parser.add_argument("--seconds", type=float, default=500.0, help="for everything")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--nvme_path", type=Path, default=Path())
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--result", type=Path, required=True)
    options = parser.parse_args(argv)
    ends_s = time.monotonic() + options.seconds
    headline = Headline(options, ends_s)
    try:
        headline.enter()
        headline.run(1 if options.tiny else options.rounds)
        if options.profile:
            headline.profile()
        headline.meter()
    finally:
        headline.keep()
        headline.close()
    return 0 if all(one.equal is not False for one in headline.entrants) else 1


if __name__ == "__main__":
    raise SystemExit(main())
