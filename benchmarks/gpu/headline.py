"""Step time and physical peak of Llama-3-8B's layers at one length, every way to train in turn, in one process.

All ways train one model. A step is forward, backward and SGD with a learning rate of 0, so that all of them must have
the same gradients, bit for bit. In a round each takes a turn, in a new random order; reported are medians over the
rounds of the ratios to keep's turn in the same round, or, where keep does not fit, to that of the first way that does.
Where there is no time for a round, they are those of one step, taken in order. The peak is what the device physically
holds, what was freed and a stream may still use included. A way that is not there, fails, does not fit or gets no turn
in time is a row with its reason.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import sys
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent), *map(str, Path(__file__).resolve().parents[1:3])]

import torch  # noqa: E402
from alternating import ALONE, free_port, rounds_of  # noqa: E402
from curves.device import Device  # noqa: E402
from curves.turns import Contender, Runner  # noqa: E402

from ds_tba.device.accelerator import available_bytes  # noqa: E402
from gpu.llama import GIB, WAYS, Room, Shape, Way, workload  # noqa: E402
from gpu.results import write_whole  # noqa: E402

KEEP_FITS_TOKENS = 32768
STEPS, MAX_STEPS_TO_A_PLAN, STEPS_AFTER_A_PLAN = 2, 12, 3
# torch's pinned memory comes in powers of two.
PINNED_TO_SAVED = 1.6
# What others than ours raise where they do not run here.
REFUSALS = (
    RuntimeError, ImportError, ValueError, TypeError, AttributeError, OSError, LookupError, AssertionError,
)  # fmt: skip
NO_TIME = "no time was left"


@dataclass
class Entrant:
    """A way to train, and what came of it.

    Attributes:
        state: "runs", "out of memory", "no host memory", "failed", "missing" or "no time".
        first_s: of one step when it entered, for want of rounds.
        turns: medians of the steps of each, by round.
        peaks: what is held between steps and what is held beyond that, in bytes.
    """

    way: Way
    runner: Runner | None = None
    state: str = "runs"
    reason: str = ""
    equal: bool | None = None
    first_s: float | None = None
    turns: list[float | None] = field(default_factory=list)
    peaks: list[tuple[int, int]] = field(default_factory=list)
    allocator: dict[str, int] = field(default_factory=dict)

    def fail(self, error: BaseException) -> None:
        """Out of the race, with the reason."""
        text = (str(error).strip().splitlines() or [""])[0]
        if isinstance(error, torch.OutOfMemoryError):
            self.state = "out of memory"
        else:
            self.state = "missing" if isinstance(error, ImportError) else "failed"
        self.reason = f"{type(error).__name__}: {text}"[:300]


class Headline:
    """All ways at one length.

    Args:
        ends_s: when time is up, on the monotonic clock.
    """

    def __init__(self, options: argparse.Namespace, ends_s: float) -> None:
        self._options, self._ends_s = options, ends_s
        self._device = Device(options.device)
        self.shape = _shape(options)
        self._workload = workload(self.shape, options.tokens, self._device.torch)
        self._gradients: list[torch.Tensor] | None = None
        self.equal_to = ""
        self.entrants = [Entrant(way) for way in WAYS]
        self.rounds = 0
        least = 4096 if options.tiny else 1 << 20
        self._block = {"nvme_path": str(options.nvme_path), "min_tensor_bytes": least}
        self._io = {"backend": "posix", "staging_bytes": (4 << 20) if options.tiny else GIB}
        self.room = self._room(self._kept_bytes())

    def _room(self, kept: int) -> Room:
        """Everything where it fits; of the drive and the host, each that plans has a part of what is left."""
        planning = sum(way.plans for way in WAYS)
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
        """What is saved with everything kept, by the line through the bytes at two short lengths."""
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
        """Each for the first time: warmed up, its gradients compared, and left out where it cannot run."""
        for number, entrant in enumerate(self.entrants):
            left_s = self._ends_s - time.monotonic()
            # What is left is shared among those to come and the rounds.
            until_s = time.monotonic() + left_s / (len(self.entrants) - number + 2)
            if left_s <= 0:
                entrant.state, entrant.reason = "no time", NO_TIME
                continue
            try:
                self._enter(entrant, until_s)
            except REFUSALS as error:
                entrant.fail(error)
            if entrant.state != "runs":
                self._drop(entrant)
            print(f"{entrant.way.name}: {entrant.state} {entrant.reason}", flush=True)
            self.keep()

    def _enter(self, entrant: Entrant, until_s: float) -> None:
        way = entrant.way
        if way.pins_all and PINNED_TO_SAVED * self.room.kept > available_bytes():
            entrant.state = "no host memory"
            entrant.reason = f"{PINNED_TO_SAVED * self.room.kept / GIB:.0f} GiB of host memory would be needed"
            return
        self._device.give_back()
        around = way.around(self._workload.model)
        limits: dict[str, Any] = {}
        if way.block is not None:
            limits = way.block(self.room)
            limits["io"] = {**self._io, **limits.get("io", {})}
        contender = Contender(way.name, "adaptive" if way.block else None, limits, around=around)
        entrant.runner = runner = Runner(contender, self._workload, self._device, self._block)
        entrant.equal = self._has_equal_gradients(entrant)
        for _ in range(MAX_STEPS_TO_A_PLAN if way.plans else 0):
            runner.step()
            if (runner.offloader is not None and runner.offloader.report().plans) or time.monotonic() >= until_s:
                break
        for _ in range(STEPS_AFTER_A_PLAN if way.plans else 0):
            if time.monotonic() < until_s:
                runner.step()
        entrant.first_s = self._measured(entrant, runner, 1)

    def _measured(self, entrant: Entrant, runner: Runner, steps: int) -> float:
        """The median of so many steps."""
        retries = self._device.alloc_retries()
        found = runner.turn(steps)
        if retries is not None:
            more = (self._device.alloc_retries() or 0) - retries
            entrant.allocator["alloc_retries"] = entrant.allocator.get("alloc_retries", 0) + more
            # Of its entry: later there is what others left cached.
            entrant.allocator.setdefault("reserved_peak_bytes", torch.cuda.memory_stats()["reserved_bytes.all.peak"])
        held = self._device.held_bytes() or 0
        entrant.peaks += [(held, one.device_peak_bytes) for one in found if one.device_peak_bytes is not None]
        return statistics.median(one.step_s for one in found)

    def _has_equal_gradients(self, entrant: Entrant) -> bool:
        """One step's, with those of the first that ran."""
        runner = entrant.runner
        if runner is None:
            raise RuntimeError(f"{entrant.way.name} does not run")
        runner._forward_and_backward()
        found = [one.grad for one in self._workload.parameters if one.grad is not None]
        if self._gradients is None:
            self._gradients, self.equal_to = [one.to("cpu", copy=True) for one in found], entrant.way.name
        bits = torch.int16
        equal = all(
            torch.equal(one.view(bits), other.to(one.device).view(bits))
            for one, other in zip(found, self._gradients, strict=True)
        )
        torch._foreach_zero_(found)
        if runner.offloader is not None:
            runner.offloader.note_step()
        return equal

    def _drop(self, entrant: Entrant) -> None:
        """It runs no more, and holds nothing."""
        if entrant.runner is not None and entrant.first_s is None:  # else others have wrapped the blocks after it
            entrant.runner.close()
            entrant.runner = None
        self._device.give_back()
        for parameter in self._workload.parameters:
            if parameter.grad is not None:
                parameter.grad.zero_()

    def run(self, most: int) -> None:
        """Rounds, as many as there is time for."""
        running = {entrant.way.name: entrant for entrant in self.entrants if entrant.state == "runs"}
        round_s = sum(entrant.first_s or 0 for entrant in running.values())
        steps = STEPS if time.monotonic() + 2 * STEPS * round_s < self._ends_s else 1
        if time.monotonic() + round_s >= self._ends_s:
            return  # a round in part has nothing to compare
        turn = partial(self._turn, running, steps)
        for _ in rounds_of(list(running), turn, most, self._ends_s, random.Random(0)):
            self.rounds += 1
            self.keep()

    def _turn(self, running: dict[str, Entrant], steps: int, name: str) -> None:
        entrant, took_s = running[name], None
        if entrant.state == "runs" and entrant.runner is not None and time.monotonic() < self._ends_s:
            try:
                if entrant.way.pins_all:
                    entrant.runner.step()  # pins anew
                took_s = self._measured(entrant, entrant.runner, steps)
            except REFUSALS as error:
                entrant.fail(error)
            # Out here, where no traceback holds the tensors of a step that failed.
            if entrant.state != "runs":
                self._drop(entrant)
            elif entrant.way.pins_all:
                self._device.give_back()
        entrant.turns.append(took_s)

    def meter(self) -> None:
        """On a CPU: the peak of one more step of each."""
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
        """What ratios are to: keep, or the first that runs."""
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
        row |= {"reason": entrant.reason, "equal": entrant.equal, **entrant.allocator}
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
                "recomputed_bytes", "fallbacks", "stall_s", "step_peak_saved_bytes", "budget_excess_bytes",
            )  # fmt: skip
            row["report"] = {key: report[key] for key in keys if key in report}
        return row

    def keep(self) -> None:
        """What there is so far, on disk."""
        write_whole(self._options.result, json.dumps(self.found()))

    def close(self) -> None:
        for entrant in reversed(self.entrants):  # each has wrapped the blocks as the one before left them
            if entrant.runner is not None:
                entrant.runner.close()


def workload_of(whole: Any, tokens: int) -> Any:
    """The same model with the first tokens only."""
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
    parser.add_argument("--rounds", type=int, default=7, help="at most")
    parser.add_argument("--seconds", type=float, default=500.0, help="for everything")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--nvme_path", type=Path, default=Path())
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--result", type=Path, required=True)
    options = parser.parse_args(argv)
    ends_s = time.monotonic() + options.seconds
    os.environ.update({"MASTER_PORT": str(free_port()), **ALONE})  # DeepSpeed's checkpointing wants a process group
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # else every tensor is written once more
    headline = Headline(options, ends_s)
    try:
        headline.enter()
        headline.run(1 if options.tiny else options.rounds)
        headline.meter()
    finally:
        headline.keep()
        headline.close()
    return 0 if all(one.equal is not False for one in headline.entrants) else 1


if __name__ == "__main__":
    raise SystemExit(main())
