"""What fills the device of this run? Puts the answer into words for a user and for the log.

Loaded where somebody asks, and where memory ran out: then it reads from the error where an allocation failed. Brings
together who holds saved bytes (``sample.py``), what the model holds, and the judgement (``out_of_memory.py``); cannot
see DeepSpeed's engine.
"""

from __future__ import annotations

import linecache
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from traceback import walk_tb
from types import FrameType

import torch

from ds_tba.config import OffloadConfig
from ds_tba.core.cache import TensorCache
from ds_tba.core.tensors import form_of, held_bytes, is_parameter
from ds_tba.device.accelerator import Accelerator
from ds_tba.explain.out_of_memory import Diagnosis, Failure, ModelMemory
from ds_tba.explain.sample import StepSamples, frames_from, is_library
from ds_tba.holders import table
from ds_tba.remat.where import RunningModule
from ds_tba.stats import readable

_ASKED = re.compile(r"(?:[Tt]ried to allocate|you tried to allocate) ([\d.]+) (\w+)")
_UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


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
    stats, is_host = cache.stats, accelerator.is_synchronized_device()
    failure = Failure() if error is None else failure_of(error, samples.running, accelerator.device())
    found = Diagnosis(
        config,
        samples.now(),
        stats.kept_bytes,
        saved_bytes=stats.resident.now,
        peak_bytes=stats.resident.peak,
        earlier_bytes=min(samples.earlier_bytes, stats.resident.now),
        in_use_bytes=0 if is_host else accelerator.memory.levels().in_use_bytes,
        is_host=is_host,
        model=model,
        failure=failure,
    )
    in_use = "" if is_host else f"; {readable(found.in_use_bytes)} are in use in all"
    lines = [
        f"{where}{f', {failure}' if failure.phase else ''}.",
        f"What fills it: {found.verdict()}.",
        "",
        f"In memory: saved tensors hold {readable(found.saved_bytes)} ({readable(found.peak_bytes)} at their peak, "
        f"{readable(stats.saved.peak)} without ds_tba), parameters {readable(model.parameters)}, gradients "
        f"{readable(model.gradients)}, optimizer states {readable(model.states)}{in_use}.",
        *_holders(samples),
        "What would help, the most useful first:",
        *(f"  {number}. {one}" for number, one in enumerate(found.remedies(), 1)),
    ]
    return "\n".join(lines)


def _holders(samples: StepSamples) -> Iterator[str]:
    holders = samples.now()
    if not holders:
        return
    if holders is samples.holders:
        yield f"saved at the end of the last forward looked at, in step {samples.holders_step}:"
    else:
        yield "saved so far in this forward:"
    yield from table(holders)


def _runs_again(frame: FrameType) -> bool:
    """Return whether a frame runs a pass again; nothing does where the room is not loaded."""
    room = sys.modules.get("ds_tba.recompute.checkpoint")
    return room is not None and frame.f_code is room.RecomputedPass.run_again.__code__


def failure_of(error: BaseException, running: RunningModule, device: torch.device) -> Failure:
    """Read from an error where an allocation on a device failed, and how large it was."""
    frames = list(walk_tb(error.__traceback__))
    names = [(str(frame.f_globals.get("__name__")), frame.f_code.co_name) for frame, _ in frames]
    backward = next((at for at, (_, name) in enumerate(names) if name == "_engine_run_backward"), len(frames))
    module, ran_at, is_ours = "", -1, False
    for at, (frame, _) in enumerate(frames):
        path = running.path_of(frame)
        if _runs_again(frame):
            path, is_ours = frame.f_locals["self"].path, True
        module, ran_at = (module, ran_at) if path is None else (path, at)
    # The outermost call that says it: DeepSpeed's backward reduces gradients after autograd's.
    calls = [name for room, name in names if room.startswith(("torch.optim.", "deepspeed.runtime."))]
    called = next((name for name in calls if name in ("forward", "backward", "step")), "")
    phase = "backward" if called == "backward" or (backward < len(frames) and called != "step") else called or "forward"
    line, local, local_bytes = "", "", 0
    running_now = set(frames_from(sys._getframe(1)))  # not ours, which would hold itself, and the error
    for frame, number in frames:
        # A running frame keeps the locals that it was asked for: with them the error, and all that its frames hold.
        if is_library(frame) or frame in running_now:
            continue
        file = frame.f_code.co_filename
        line = f"{Path(file).name}:{number}: {linecache.getline(file, number).strip()}"
        for name, value in frame.f_locals.items():
            nbytes = held_bytes(value, device) if isinstance(value, torch.Tensor) and not is_parameter(value) else 0
            if nbytes > local_bytes:
                local, local_bytes = f"{name} {form_of(value)} of {Path(file).name}:{number}", nbytes
    asked = _ASKED.search(str(error))
    return Failure(
        phase="optimizer step" if phase == "step" else phase,
        asked_bytes=int(float(asked[1]) * _UNITS.get(asked[2], 0)) if asked else 0,
        module=module,
        line=line,
        is_again=ran_at > backward,
        is_ours=is_ours,
        local=local,
        local_bytes=local_bytes,
    )
