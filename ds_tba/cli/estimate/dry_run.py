"""One micro-step of a model without its memory: on the meta device, through the real cache and the real recorder.

Eligibility, views, deduplication and blocks are those of a run, because the same code decides them. The clock is one of
operations (``OpClock``). Only a model under ``torch_autocast`` runs on the CPU, with the memory that this takes: the
meta device casts nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ds_tba.adaptive.recorder import Recorder
from ds_tba.autograd.blocks import Block, Blocks, find_blocks
from ds_tba.autograd.cache import TensorCache
from ds_tba.autograd.tensors import mark_owned
from ds_tba.cli.estimate.hardware import OpClock, PeakMeter
from ds_tba.cli.estimate.kernels import Attention, device_kernels
from ds_tba.cli.estimate.subject import Recipe, Subject, loss_of
from ds_tba.errors import ModelError
from ds_tba.planner.trace import Resources, Trace


@dataclass(frozen=True, slots=True)
class Settings:
    """How a model is trained.

    Attributes:
        device: the training device, ``"cuda"`` or ``"cpu"``.
        dtype: of parameters and buffers; None leaves them as the model has them.
        autocast: the dtype of ``torch.autocast``, where it is on.
        min_tensor_bytes, blocks: of the config's block.
        flops_per_s, memory_bytes_per_s: what the device reaches.
        micro_steps: of one step.
    """

    device: str
    dtype: torch.dtype | None
    autocast: torch.dtype | None
    min_tensor_bytes: int
    blocks: list[str] | None
    flops_per_s: float
    memory_bytes_per_s: float
    micro_steps: int = 1


@dataclass(frozen=True, slots=True)
class DryRun:
    """What one micro-step showed.

    Attributes:
        runs_on: ``"meta"`` or ``"cpu"``.
        peak_saved_bytes: most bytes of saved tensors at once, as the cache counts them.
        parameters, parameter_bytes: how many, and how large.
        temporary_bytes: see ``ds_tba/cli/estimate/hardware.py``.
        attention: the kernels it took.
        notes: what the reader must know.
    """

    trace: Trace
    runs_on: str
    peak_saved_bytes: int
    packed_tensors: int
    parameters: int
    parameter_bytes: int
    temporary_bytes: int
    attention: frozenset[Attention]
    notes: tuple[str, ...] = ()

    @property
    def saved_bytes(self) -> int:
        """Of all saved storages."""
        return sum(storage.nbytes for storage in self.trace.storages if storage.blocks)


def dry_run(recipe: Recipe, batch: int, sequence: int, settings: Settings, resources: Resources) -> DryRun:
    """Run one micro-step.

    Args:
        resources: for the trace.

    Raises:
        ModelError: it does not run, or needs values, which the meta device does not have.
    """
    if settings.autocast is not None:
        note = "torch_autocast: the model runs on the CPU, which casts nearly the same operations as CUDA does"
        run = _run(recipe, batch, sequence, settings, resources, "cpu")
        return replace(run, notes=(note, *run.notes))
    return _run(recipe, batch, sequence, settings, resources, "meta")


def _run(recipe: Recipe, batch: int, sequence: int, settings: Settings, resources: Resources, runs_on: str) -> DryRun:
    clock = OpClock(settings.flops_per_s, settings.memory_bytes_per_s)
    doing = "making the model"
    try:
        with torch.device(runs_on):
            subject = recipe(batch, sequence).to(runs_on, settings.dtype)
        doing = "forward and backward"
        with device_kernels(settings.device, runs_on) as attention:
            micro_step = _MicroStep(subject, settings, runs_on, clock)
            micro_step.run()  # blocks show in a first forward whether they can be recomputed
            recorder = micro_step.run()
    except ModelError:
        raise
    except Exception as error:  # the user's model may raise anything
        where = f" in {clock.last_operation}" if clock.last_operation else ""
        what = f"{doing} failed{where}: {type(error).__name__}: {_first_line(error)}"
        if runs_on == "meta":
            what += ". It runs on shapes alone here: its forward may not ask for the values of tensors"
        raise ModelError(what) from error
    stats, notes = micro_step.cache.stats, tuple(micro_step.notes())
    trace = recorder.record.trace(resources, micro_steps=settings.micro_steps)
    parameters = list(subject.model.parameters())
    return DryRun(
        trace,
        runs_on,
        stats.saved.peak,
        stats.packed_tensors,
        sum(one.numel() for one in parameters),
        sum(one.numel() * one.element_size() for one in parameters),
        micro_step.temporary_bytes,
        frozenset(attention),
        notes,
    )


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "")


class _MicroStep:
    """Runs a subject, and has its passes recorded."""

    def __init__(self, subject: Subject, settings: Settings, runs_on: str, clock: OpClock) -> None:
        self._subject = subject
        self._settings = settings
        self._runs_on = runs_on
        self._clock = clock
        self._answers = Answers()
        self._paths = {id(module): path for path, module in subject.model.named_modules()}
        self._blocks = Blocks(find_blocks(subject.model, settings.blocks), self)
        self.temporary_bytes = 0
        self._new_recording()

    def _new_recording(self) -> None:
        self.cache = TensorCache([], self._runs_on, self._settings.min_tensor_bytes)
        self._recorder = Recorder(self.cache, self._clock, self._paths)

    def run(self) -> Recorder:
        """One forward, one backward."""
        self._new_recording()
        recorder, model = self._recorder, self._subject.model
        _mark_owned(model)
        model.zero_grad(set_to_none=False)  # gradients are there, as in all micro-steps but the first
        gradients = [one.grad for one in model.parameters() if one.grad is not None]
        held = [one.untyped_storage() for one in (*model.parameters(), *gradients)]
        temporaries = PeakMeter(held, lambda: self.cache.stats.saved.now)
        self._blocks.install()
        try:
            with self._clock, self._answers if self._runs_on == "meta" else nullcontext(), temporaries:
                with (
                    recorder.watching(),
                    self.cache.saving(around=recorder.around),
                    self._blocks.listening(),
                    self._autocast(),
                ):
                    output = self._subject.forward()
                loss = loss_of(output)
                del output
                loss.backward()  # type: ignore[no-untyped-call]
                recorder.end()
        finally:
            self._blocks.uninstall()
        self.temporary_bytes = temporaries.peak_bytes
        self.cache.settle()
        return recorder

    def notes(self) -> list[str]:
        """What the passes showed."""
        notes = []
        if self._answers.given:
            notes.append("where the model asks whether all or any elements of a mask are true: all are, none is")
        if not self._blocks.all:
            return [*notes, 'no repeated layers were found, so that nothing is recomputed: name them in "blocks"']
        obstacles: dict[str, str] = {}
        for block in self._blocks.all:
            why = self._blocks.obstacle(block)
            if why is not None:
                obstacles.setdefault(why, block.path)
        return notes + [
            f"{path} and others like it are not recomputed: {why}"
            + ("; for a model of transformers set use_cache to False in its config" if "Cache" in why else "")
            for why, path in obstacles.items()
        ]

    def _autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast("cpu", self._settings.autocast) if self._settings.autocast else nullcontext()

    # ---- what blocks tell ---------------------------------------------------------------------------------------

    def enter(self, block: Block, inputs: Sequence[torch.Tensor]) -> None:
        """A pass begins; none is recomputed."""
        self._recorder.enter(block.path, inputs, is_recomputable=self._blocks.leaves_no_trace(block))

    def leave(self, block: Block) -> None:
        """The pass is over."""
        self._recorder.leave()

    def recompute(self, mark: Any) -> None:
        """Never called, because :meth:`enter` asks for nothing."""

    def recomputed(self, mark: Any) -> None:
        """Never called either."""


def _mark_owned(model: nn.Module) -> None:
    for module in model.modules():
        mark_owned(module)


_ANSWER = "_ds_tba_answer"
_OF_ALL = {"aten::all": True, "aten::any": False}


class Answers(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """For meta tensors inside.

    Attributes:
        given: how many.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.given = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = func._schema.name
        if name == "aten::_local_scalar_dense":
            answer = getattr(args[0], _ANSWER, None)
            if answer is not None:
                self.given += 1
                return answer
        result = func(*args, **(kwargs or {}))
        if name in _OF_ALL and isinstance(result, torch.Tensor):
            setattr(result, _ANSWER, _OF_ALL[name])
        return result
