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
import random
import shutil
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from alternating import rounds_of
from benchmarking import GIB, first_line, write_json
from curves.device import TOTALS, Device
from curves.models import Workload
from curves.points import point
from curves.turns import Contender, Race, Runner, StepTaken, parameters_of

from ds_tba.device.accelerator import available_bytes
from gpu.llama import WAYS, Room, Shape, Way, workload
from gpu.results import piece_parser

KEEP_FITS_TOKENS = 32768
STEPS = 2
PROFILE_FACTOR = 4
NO_TIME = "no time was left"
REPORTED = (
    "steps", "plans", "plan", "written_bytes", "read_bytes", "host_bytes", "rematerialized_bytes", "recomputed_bytes",
    "fallbacks", "fallbacks_by_reason", "stall_s", "step_peak_saved_bytes", "budget_excess_bytes",
)  # fmt: skip
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
        first: the step that was measured when it entered, for want of rounds.
        unproven: why it could not be compared under strictly deterministic kernels.
        profiled: number of each event in one step, and the host's milliseconds in it.
    """

    way: Way
    state: str = "runs"
    reason: str = ""
    equal: bool | None = None
    unproven: str = ""
    first: list[StepTaken] | None = None
    metered_bytes: int | None = None
    profiled: dict[str, tuple[int, float]] | None = None

    def fail(self, error: BaseException) -> None:
        """Take it out of the race, with the reason."""
        self.state = "out of memory" if isinstance(error, torch.OutOfMemoryError) else "failed"
        self.reason = first_line(error)


class Headline:
    """All ways at one length, until the monotonic clock has ``ends_s``."""

    def __init__(self, options: argparse.Namespace, ends_s: float) -> None:
        self._options, self._ends_s = options, ends_s
        self._device = Device(options.device)
        self.shape = _shape(options)
        self._workload = workload(self.shape, options.tokens, self._device.torch)
        self._start = parameters_of(self._workload)
        self._expected = ""
        self.equal_to = ""
        self.entrants = [Entrant(way) for way in WAYS if options.ways is None or way.name in options.ways]
        self.rounds: list[dict[str, list[StepTaken]]] = []
        block = {"nvme_path": str(options.nvme_path), "min_tensor_bytes": 4096 if options.tiny else 1 << 20}
        self.race = Race(self._workload, self._device, block)
        self._io = {"backend": "posix", "staging_bytes": (4 << 20) if options.tiny else GIB}
        self.room = self._room(self._kept_bytes())

    def _room(self, kept: int) -> Room:
        """Return room for everything where it fits; each way that plans has a part of what drive and host have left."""
        planning = max(1, sum(one.way.plans for one in self.entrants))
        drive = shutil.disk_usage(self._options.nvme_path).free
        host = available_bytes()
        least = (4 if self._options.tiny else 64) << 20
        wanted = {"host": (1.1 * kept, 0.35 * host), "small_host": (kept / 2, 0.2 * host / planning)}
        wanted |= {"swap": (1.2 * kept, 0.5 * drive), "small_swap": (kept, 0.3 * drive / (planning + 1))}
        return Room(kept=kept, **{name: max(least, int(min(both))) for name, both in wanted.items()})

    def _kept_bytes(self) -> int:
        """Return the bytes saved with everything kept, by the line through those of two short lengths."""
        # Short as they are, all tensors count that are counted at full length.
        block = {"placement": "keep", "rematerialize": False, "min_tensor_bytes": 4096}
        whole, tokens, found = self._workload, self._options.tokens, {0: 0}
        for length in (max(64, tokens // part) for part in (32, 16)):
            short = Workload(whole.model, tuple(one[:, :length] for one in whole.batch), whole.parameters)
            runner = Runner(Contender("measure", "adaptive", block), short, self._device, {})
            runner.step()
            found[length] = runner.offloader.report().peak_saved_bytes_without  # type: ignore[union-attr]
            runner.close()
        (shorter, fewer), (longer, more) = list(found.items())[-2:]
        return int(more + (more - fewer) / (longer - shorter) * (tokens - longer))

    def enter(self) -> None:
        """Run each for the first time: warm it up, compare its gradients, and leave it out where it cannot run."""
        for number, entrant in enumerate(self.entrants):
            left_s = self._ends_s - time.monotonic()
            # What is left is shared among those to come and the rounds.
            until_s = time.monotonic() + left_s / (len(self.entrants) - number + 2)
            if left_s <= 0:
                entrant.state, entrant.reason = "no time", NO_TIME
                continue
            self._attempt(entrant, partial(self._enter, entrant, until_s))
            print(f"{entrant.way.name}: {entrant.state} {entrant.reason}", flush=True)
            self.keep()

    def _attempt(self, entrant: Entrant, act: Callable[[], list[StepTaken]]) -> list[StepTaken]:
        """Return the steps that it took; none if it failed, and is out of the race."""
        try:
            return act()
        except (RuntimeError, ValueError, OSError) as error:
            entrant.fail(error)
        self.race.drop(entrant.way.name)  # out here, where no traceback holds the tensors of a step that failed
        return []

    def _enter(self, entrant: Entrant, until_s: float) -> list[StepTaken]:
        way = entrant.way
        self._device.give_back()
        around = way.around(self._workload.model)
        limits: dict[str, Any] = {}
        if way.block is not None:
            limits = way.block(self.room)
            limits["io"] = {**self._io, **limits.get("io", {})}
        self.race.enter([Contender(way.name, "adaptive" if way.block else None, limits, around=around)], until_s)
        runner = self.race.runners[way.name]
        self._prove(entrant, runner)
        entrant.first = runner.turn(1)
        return entrant.first

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

    @property
    def running(self) -> dict[str, tuple[Entrant, Runner]]:
        """Return the ways that have entered and not failed since."""
        entered = [one for one in self.entrants if one.state == "runs" and one.first]
        return {one.way.name: (one, self.race.runners[one.way.name]) for one in entered}

    def run(self, most: int) -> None:
        """Run as many rounds as there is time for beside the profiled steps."""
        round_s = sum(step.step_s for one, _ in self.running.values() for step in one.first or ())
        # Time for the profiled steps, which are slower.
        ends_s = self._ends_s - (PROFILE_FACTOR * round_s if self._options.profile else 0)
        steps = STEPS if time.monotonic() + 2 * STEPS * round_s < ends_s else 1
        if time.monotonic() + round_s >= ends_s:
            return  # a round in part has nothing to compare
        for found in rounds_of(list(self.running), partial(self._turn, steps), most, ends_s, random.Random(0)):
            self.rounds.append(found)
            self.keep()

    def _turn(self, steps: int, name: str) -> list[StepTaken]:
        entrant, runner = self.running.get(name, (None, None))
        if entrant is None or runner is None or time.monotonic() >= self._ends_s:
            return []
        return self._attempt(entrant, partial(runner.turn, steps))

    def profile(self) -> None:
        """Look at one more step of each."""
        activities = [torch.profiler.ProfilerActivity.CPU]
        activities += [torch.profiler.ProfilerActivity.CUDA] if self._device.is_cuda else []
        for entrant, runner in self.running.values():
            if time.monotonic() >= self._ends_s:
                break
            runner.settle()
            self._device.synchronize()
            with torch.profiler.profile(activities=activities) as profiler:
                runner._step()
            events = [one for one in profiler.key_averages() if any(part in one.key for part in TELLING)]
            entrant.profiled = {one.key: (one.count, round(one.cpu_time_total / 1e3, 3)) for one in events}
            self.keep()

    def meter(self) -> None:
        """Measure the peak of one more step of each, on a CPU."""
        for entrant, runner in self.running.values():
            entrant.metered_bytes = runner.metered_peak_bytes()

    def found(self) -> dict[str, Any]:
        """Return all rows; ratios are to keep, or to the first way that runs."""
        base = next(iter(self.running), None)
        found = {"tokens": self._options.tokens, "shape": vars(self.shape), "device": self._device.name}
        found |= {"room": vars(self.room), "rounds": len(self.rounds), "base": base, "equal_to": self.equal_to}
        return {**found, "rows": [self._row(entrant, base) for entrant in self.entrants]}

    def _row(self, entrant: Entrant, base: str | None) -> dict[str, Any]:
        name, first = entrant.way.name, entrant.first
        row: dict[str, Any] = {"name": name, "title": entrant.way.title, "state": entrant.state}
        row |= {"reason": entrant.reason, "equal": entrant.equal, "unproven": entrant.unproven}
        if entrant.profiled is not None:
            row["profiled"] = entrant.profiled
        if not first or base is None or name not in self.running:
            return row
        entry = {one.way.name: one.first for one in self.entrants if one.first}
        rounds = [one for one in self.rounds if one.get(name) and one.get(base)] or [entry]
        measured = point(self.race.runners[name].contender, rounds, entrant.metered_bytes, base)
        steps = [*first, *(step for one in self.rounds for step in one.get(name, ()))]
        row |= {"step_s": measured.step_s.median, "to_base": vars(measured.to_plain)}
        row["host_forward_s"], row["host_backward_s"] = (
            statistics.median(one) for one in zip(*(step.host_s or (0.0, 0.0) for step in steps), strict=True)
        )
        if measured.peak_bytes is not None:
            row["activation_peak_bytes"] = measured.peak_bytes
            row["peak_bytes"] = measured.peak_bytes + max(step.held_bytes or 0 for step in steps)
        if first[0].counts:
            # Reserved bytes of its entry: later there is what others left cached.
            row["reserved_peak_bytes"] = first[0].counts["reserved_peak_bytes"]
            for key in ("allocated_peak_bytes", "active_peak_bytes"):
                row[key] = max(step.counts[key] for step in steps)
            row |= {key: sum(step.counts.get(key, 0) for step in steps) for key in TOTALS}
        offloader = self.race.runners[name].offloader
        if offloader is not None:
            report = offloader.report().to_dict()
            row["report"] = {key: report[key] for key in REPORTED}
        return row

    def keep(self) -> None:
        """Write the results so far."""
        write_json(self._options.result, self.found())


def _shape(options: argparse.Namespace) -> Shape:
    if options.tiny:
        return Shape(hidden=64, inner=224, heads=4, key_heads=2, layers=options.layers or 2)
    memory = torch.cuda.get_device_properties(0).total_memory if options.device == "cuda" else 4 * GIB
    return Shape(layers=options.layers or Shape().layers_for(KEEP_FITS_TOKENS, memory))


def main(argv: list[str] | None = None) -> int:
    parser = piece_parser(
        __doc__, seconds=(500.0, "for everything"), rounds=(7, "at most"), tokens=16384,
        layers=(int, "default: as many as fit with 32k tokens kept"),
        profile=(False, "and one step of each under the profiler"),
    )  # fmt: skip
    parser.add_argument("--ways", nargs="+", choices=[way.name for way in WAYS], help="default: all")
    options = parser.parse_args(argv)
    ends_s = time.monotonic() + options.seconds
    headline = Headline(options, ends_s)
    with headline.race:
        try:
            headline.enter()
            headline.run(1 if options.tiny else options.rounds)
            if options.profile:
                headline.profile()
            headline.meter()
        finally:
            headline.keep()
    return 0 if all(one.equal is not False for one in headline.entrants) else 1


if __name__ == "__main__":
    raise SystemExit(main())
