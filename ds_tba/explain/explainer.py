"""What fills the device of this run? The peaks, who holds saved bytes, and one key that helps, in words for the log.

Loaded where somebody asks, and where memory ran out: then it reads from the error where an allocation failed.
"""

from __future__ import annotations

import linecache
import re
from pathlib import Path
from traceback import walk_tb
from typing import NamedTuple

from ds_tba.config import OffloadConfig
from ds_tba.core.cache import TensorCache
from ds_tba.device.accelerator import Accelerator
from ds_tba.explain.out_of_memory import ModelMemory, remedy
from ds_tba.explain.sample import StepSamples, is_library
from ds_tba.holders import table
from ds_tba.stats import readable

_ASKED = re.compile(r"tried to allocate ([\d.]+) (\w+)", re.IGNORECASE)
_UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


class Failure(NamedTuple):
    """An allocation that failed: in which phase and line of the program, and how large it was, as far as known."""

    phase: str = ""
    line: str = ""
    asked_bytes: int = 0

    def __str__(self) -> str:
        asked = f", {readable(self.asked_bytes)} more did not fit" if self.asked_bytes else ""
        return f", in the {self.phase}{asked}{self.line and f' ({self.line})'}" if self.phase else ""


def explained(
    where: str,
    config: OffloadConfig,
    cache: TensorCache,
    accelerator: Accelerator,
    samples: StepSamples,
    model: ModelMemory,
    error: BaseException | None = None,
) -> str:
    """Return what fills the device, and which key or call would help.

    Args:
        where: the rank and the step, for the first line.
        cache: whose saved tensors count.
        samples: who holds saved bytes.
        error: by which memory ran out, if it did.
    """
    stats, is_host = cache.stats, accelerator.is_synchronous
    failure, now_bytes, peak_bytes = failure_of(error), stats.resident.now, stats.resident.peak
    in_use = "" if is_host else f"; {readable(accelerator.memory.levels().in_use_bytes)} are in use in all"
    helps = remedy(config, model, peak_bytes, failure.asked_bytes, in_step=failure.phase == "optimizer step")
    if min(samples.earlier_bytes, now_bytes) > now_bytes / 2:
        helps = "most is of earlier steps, whose loss or output the program still holds: keep loss.item(), or detach()"
    holders, title = samples.now(), "saved so far in this forward:"
    if holders is samples.holders:
        title = f"saved at the end of the last forward looked at, in step {samples.holders_step}:"
    lines = [
        f"{where}{failure}.",
        f"In memory: saved tensors hold {readable(now_bytes)} ({readable(peak_bytes)} at their peak, "
        f"{readable(stats.saved.peak)} without ds_tba), parameters {readable(model.parameters)}, gradients "
        f"{readable(model.gradients)}, optimizer states {readable(model.states)}{in_use}.",
        *([title, *table(holders)] if holders else []),
        f"What would help: {helps}.",
    ]
    return "\n".join(lines)


def failure_of(error: BaseException | None) -> Failure:
    """Read from an error where an allocation failed, and how large it was."""
    if error is None:
        return Failure()
    frames = [(frame, str(frame.f_globals.get("__name__")), at) for frame, at in walk_tb(error.__traceback__)]
    # The outermost call that says it: DeepSpeed's backward reduces gradients after autograd's.
    calls = [one.f_code.co_name for one, room, _ in frames if room.startswith(("torch.optim.", "deepspeed.runtime."))]
    called = next((name for name in calls if name in ("forward", "backward", "step")), "")
    in_autograd = any(one.f_code.co_name == "_engine_run_backward" for one, *_ in frames)
    phase = "optimizer step" if called == "step" else "backward" if in_autograd or called == "backward" else "forward"
    ours = [(frame.f_code.co_filename, at) for frame, _, at in frames if not is_library(frame)]
    line = f"{Path(ours[-1][0]).name}:{ours[-1][1]}: {linecache.getline(*ours[-1]).strip()}" if ours else ""
    asked = _ASKED.search(str(error))
    return Failure(phase, line, int(float(asked[1]) * _UNITS.get(asked[2], 0)) if asked else 0)
