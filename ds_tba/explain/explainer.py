"""What fills the device of this run? Puts the answer into words for a user and for the log.

Loaded where somebody asks, and where memory ran out. Brings together who holds saved bytes (``sample.py``), what the
model holds, and the judgement (``out_of_memory.py``); cannot see DeepSpeed's engine.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ds_tba.config import OffloadConfig
from ds_tba.core.cache import TensorCache
from ds_tba.device.accelerator import Accelerator
from ds_tba.explain.model_memory import ModelMeter
from ds_tba.explain.out_of_memory import Diagnosis, Failure, ModelMemory
from ds_tba.explain.sample import StepSamples, failure_of
from ds_tba.holders import table
from ds_tba.stats import readable


@dataclass(frozen=True)
class Explainer:
    """Says what fills the device.

    Attributes:
        config: the block.
        cache: whose saved tensors count.
        accelerator: the device.
        samples: who holds saved bytes.
        meter: counts what the model holds; None where nobody does.
    """

    config: OffloadConfig
    cache: TensorCache
    accelerator: Accelerator
    samples: StepSamples
    meter: ModelMeter | None

    def explain(self, where: str, error: BaseException | None = None) -> str:
        """Return what fills the device, and which key or call would help.

        Args:
            where: the rank and the step, for the first line.
            error: by which memory ran out, if it did.
        """
        failure = Failure() if error is None else failure_of(error, self.samples.running, self.accelerator.device())
        model = ModelMemory() if self.meter is None else self.meter.memory()
        found = self._diagnosis(failure, model)
        lines = [
            f"{where}{f', {failure}' if failure.phase else ''}.",
            f"What fills it: {found.verdict()}.",
            "",
            self._in_memory(found),
            *self._holders(),
            "What would help, the most useful first:",
            *(f"  {number}. {one}" for number, one in enumerate(found.remedies(), 1)),
        ]
        return "\n".join(lines)

    def _diagnosis(self, failure: Failure, model: ModelMemory) -> Diagnosis:
        stats, is_host = self.cache.stats, self.accelerator.is_synchronized_device()
        return Diagnosis(
            self.config,
            self.samples.now(),
            stats.kept_bytes,
            saved_bytes=stats.resident.now,
            peak_bytes=stats.resident.peak,
            earlier_bytes=min(self.samples.earlier_bytes, stats.resident.now),
            in_use_bytes=0 if is_host else self.accelerator.memory.levels().in_use_bytes,
            is_host=is_host,
            model=model,
            failure=failure,
        )

    def _in_memory(self, found: Diagnosis) -> str:
        stats, model = self.cache.stats, found.model
        in_use = "" if found.is_host else f"; {readable(found.in_use_bytes)} are in use in all"
        return (
            f"In memory: saved tensors hold {readable(found.saved_bytes)} ({readable(found.peak_bytes)} at their "
            f"peak, {readable(stats.saved.peak)} without ds_tba), parameters {readable(model.parameters)}, gradients "
            f"{readable(model.gradients)}, optimizer states {readable(model.states)}{in_use}."
        )

    def _holders(self) -> Iterator[str]:
        holders = self.samples.now()
        if not holders:
            return
        if holders is self.samples.holders:
            yield f"saved at the end of the last forward looked at, in step {self.samples.holders_step}:"
        else:
            yield "saved so far in this forward:"
        yield from table(holders)
