"""Tells what fills the device of a run: the peaks, who holds saved bytes, and the one change that helps most.

Loaded where somebody asks, and where memory ran out: then the error says where an allocation failed. Knows torch's
modules and optimizers, and that DeepSpeed puts its optimizer around the user's; not DeepSpeed's engine.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from traceback import walk_tb
from typing import NamedTuple, TypeAlias

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from ds_tba.config import BLOCK, OffloadConfig
from ds_tba.device.accelerator import Accelerator
from ds_tba.explain.sample import StepSamples
from ds_tba.holders import GRADIENTS, PARAMETERS, REMEDIES, SAVED, STATES, TEMPORARY, ModelMemory
from ds_tba.report import table
from ds_tba.stats import CacheStats, readable

_ASKED = re.compile(r"tried to allocate ([\d.]+) (\w+)", re.IGNORECASE)
_UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


ModelMeter: TypeAlias = Callable[[], ModelMemory]
"""Counts what a training holds beside activations now."""


def memory_of(model: nn.Module, optimizer: object, device: torch.device) -> ModelMemory:
    """Return what a model and its optimizer hold on a device.

    Args:
        optimizer: None where there is none; one around another, in its attribute ``optimizer``, counts with that.
    """
    parameters, seen = list(model.parameters()), set[int]()

    def taken(value: object) -> int:
        """Return the bytes of the storages in a value that were not counted yet."""
        nbytes = 0
        for one in tree_leaves(value):
            if isinstance(one, torch.Tensor) and one.device.type == device.type and one.layout is torch.strided:
                storage = one.untyped_storage()
                # Tied weights and views in ZeRO's flat buffers would count once for each name.
                nbytes += 0 if storage.data_ptr() in seen else storage.nbytes()
                seen.add(storage.data_ptr())
        return nbytes

    shards = [getattr(one, "ds_tensor", None) for one in parameters]  # of ZeRO-3
    held, gradients = taken([parameters, shards, list(model.buffers())]), taken([one.grad for one in parameters])
    states = 0
    while optimizer is not None:
        # Under ZeRO gradients are in buffers of its own.
        gradients += sum(taken(value) for key, value in vars(optimizer).items() if "grad" in key)
        states += sum(taken(value) for value in vars(optimizer).values())
        optimizer = vars(optimizer).get("optimizer")
    return ModelMemory({PARAMETERS: held, GRADIENTS: gradients, STATES: states})


class Failure(NamedTuple):
    """An allocation that failed: in which phase of a step, and how large it was, as far as that is known."""

    phase: str = ""
    asked_bytes: int = 0


def one_change(config: OffloadConfig, memory: ModelMemory, peak_bytes: int, failure: Failure) -> str:
    """Return the one change that helps most where saved tensors hold ``peak_bytes`` of device memory."""
    if failure.phase == "optimizer step":
        return REMEDIES[STATES]
    if memory.nbytes > max(peak_bytes, failure.asked_bytes):
        return REMEDIES[max(memory.always, key=memory.always.__getitem__)]
    if failure.asked_bytes > peak_bytes:
        return f"give that line less at a time: scaled_dot_product_attention for scores, {REMEDIES[TEMPORARY]}"
    if config.placement not in ("adaptive", "keep"):
        return REMEDIES[SAVED]
    keys: dict[str, object] = {} if config.nvme_paths else {"nvme_path": "/local_nvme"}
    budget_mib = (config.activation_budget_bytes or peak_bytes) // 2 >> 20
    keys |= {"placement": "adaptive", "activation_budget_bytes": max(1, budget_mib) << 20}
    return f"{json.dumps({BLOCK: keys})} in ds_config.json"


def explained(
    where: str,
    config: OffloadConfig,
    stats: CacheStats,
    accelerator: Accelerator,
    samples: StepSamples,
    meter: ModelMeter | None,
    error: BaseException | None = None,
) -> str:
    """Return what fills the device at ``where``, a rank and a step, and what would help; ``error`` if it ran out."""
    failure = failure_of(error)
    memory = ModelMemory() if meter is None else meter()
    now_bytes, peak_bytes = stats.resident.now, stats.resident.peak
    helps = one_change(config, memory, peak_bytes, failure)
    if min(samples.earlier_bytes, now_bytes) > now_bytes / 2:
        helps = "most is of earlier steps, whose loss or output the program still holds: keep loss.item(), or detach()"
    holders, is_running = samples.now()
    ended = f"saved at the end of the last forward looked at, in step {samples.holders_step}:"
    first = [where, *([f"in the {failure.phase}"] if error else [])]
    first += [f"{readable(failure.asked_bytes)} more did not fit"] if failure.asked_bytes else []
    held = {"saved tensors hold": now_bytes, "at their peak": peak_bytes, "without ds_tba": stats.saved.peak}
    held |= memory.always
    if not accelerator.is_synchronous:
        held["in use in all"] = accelerator.levels().in_use_bytes
    lines = [
        f"{', '.join(first)}.",
        f"In memory: {', '.join(f'{name} {readable(nbytes)}' for name, nbytes in held.items())}.",
        *(["saved so far in this forward:" if is_running else ended, *table(holders)] if holders else []),
        f"What would help: {helps}.",
    ]
    return "\n".join(lines)


def failure_of(error: BaseException | None) -> Failure:
    """Read from an error where an allocation failed, and how large it was."""
    if error is None:
        return Failure()
    frames = [(frame.f_code.co_name, str(frame.f_globals.get("__name__"))) for frame, _ in walk_tb(error.__traceback__)]
    # The outermost call that says it: DeepSpeed's backward reduces gradients after autograd's.
    calls = [name for name, room in frames if room.startswith(("torch.optim.", "deepspeed.runtime."))]
    called = next((name for name in calls if name in ("forward", "backward", "step")), "")
    in_autograd = any(name == "_engine_run_backward" for name, _ in frames)
    phase = "optimizer step" if called == "step" else "backward" if in_autograd or called == "backward" else "forward"
    asked = _ASKED.search(str(error))
    return Failure(phase, int(float(asked[1]) * _UNITS.get(asked[2], 0)) if asked else 0)
