"""What fills the device of this run? Puts the answer into words for a user and for the log.

Loaded where somebody asks, and where memory ran out. Brings together who holds saved bytes (``sample.py``), what the
model holds, and the judgement (``out_of_memory.py``); cannot see DeepSpeed's engine.
"""

from __future__ import annotations

from collections.abc import Iterator

from ds_tba.config import OffloadConfig
from ds_tba.core.cache import TensorCache
from ds_tba.device.accelerator import Accelerator
from ds_tba.explain.out_of_memory import Diagnosis, Failure, ModelMemory
from ds_tba.explain.sample import StepSamples, failure_of
from ds_tba.holders import table
from ds_tba.stats import readable


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
