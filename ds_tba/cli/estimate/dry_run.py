"""One micro-step of a model without its memory: on the meta device, through the cache and the recorder of a real run.

The same code as in a run decides eligibility, views, deduplication and blocks. Time is that of ``OpClock``. A model
under ``torch_autocast`` runs on the CPU instead, and takes its memory there: the meta device casts nothing.

What could be rematerialized is found as in a run, and taken as proven; nothing is made again here.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ds_tba.adaptive.recorder import Recorder
from ds_tba.autograd import sites
from ds_tba.autograd.blocks import Block, Blocks, find_blocks
from ds_tba.autograd.cache import TensorCache
from ds_tba.autograd.saved import Keeper, nbytes_of
from ds_tba.autograd.tensors import mark_inputs, mark_owned
from ds_tba.cli.estimate.hardware import OpClock
from ds_tba.cli.estimate.kernels import Attention, device_kernels
from ds_tba.cli.estimate.subject import Recipe, Subject, loss_of
from ds_tba.device.accelerator import CpuAccelerator
from ds_tba.errors import ModelError
from ds_tba.planner.trace import Resources, Trace
from ds_tba.storage.base import Always


@dataclass(frozen=True, slots=True)
class Settings:
    """How the model is trained.

    Attributes:
        device: the training device, ``"cuda"`` or ``"cpu"``.
        dtype: of parameters and buffers; None leaves them as the model has them.
        autocast: the dtype of ``torch.autocast``, if it is on.
        min_tensor_bytes, blocks: of the config's block.
        flops_per_s, memory_bytes_per_s: rates of the device.
        micro_steps: of one step.
        rematerialize, exclude: whether outputs of ops may be made again, and of which they may not.
    """

    device: str
    dtype: torch.dtype | None
    autocast: torch.dtype | None
    min_tensor_bytes: int
    blocks: list[str] | None
    flops_per_s: float
    memory_bytes_per_s: float
    micro_steps: int = 1
    rematerialize: bool = True
    exclude: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class DryRun:
    """The result of one micro-step.

    Attributes:
        runs_on: ``"meta"`` or ``"cpu"``.
        peak_saved_bytes: peak of saved tensors, as the cache counts them.
        parameters, parameter_bytes: number and size of all parameters.
        temporary_bytes: peak of other tensors; see :class:`PeakMeter`.
        attention: the attention kernels that ran.
        ops: of each storage of the trace, the op that could make it again; empty where there is none.
        notes: limitations of this result, for the reader.
    """

    trace: Trace
    runs_on: str
    peak_saved_bytes: int
    packed_tensors: int
    parameters: int
    parameter_bytes: int
    temporary_bytes: int
    attention: frozenset[Attention]
    ops: tuple[str, ...]
    notes: tuple[str, ...] = ()

    @property
    def saved_bytes(self) -> int:
        """Bytes of all saved storages."""
        return sum(storage.nbytes for storage in self.trace.storages if storage.blocks)


def dry_run(recipe: Recipe, batch: int, sequence: int, settings: Settings, resources: Resources) -> DryRun:
    """Run one micro-step.

    Args:
        resources: for the trace.

    Raises:
        ModelError: the model does not run, or needs values, which the meta device does not have.
    """
    runs_on = "meta" if settings.autocast is None else "cpu"
    clock = OpClock(settings.flops_per_s, settings.memory_bytes_per_s)
    doing = "making the model"
    try:
        with torch.device(runs_on):
            subject = recipe(batch, sequence).to(runs_on, settings.dtype)
        doing = "forward and backward"
        with device_kernels(settings.device, runs_on) as attention:
            micro_step = _MicroStep(subject, settings, runs_on, clock)
            micro_step.run()  # a first forward shows which blocks can be recomputed
            recorder = micro_step.run()
    except ModelError:
        raise
    except Exception as error:  # the user's model may raise anything
        where = f" in {clock.last_operation}" if clock.last_operation else ""
        (first_line, *_) = str(error).splitlines() or [""]
        what = f"{doing} failed{where}: {type(error).__name__}: {first_line}"
        if runs_on == "meta":
            what += ". The model runs on shapes alone here: its forward may not read the values of tensors"
        raise ModelError(what) from error
    stats = micro_step.cache.stats
    parameters = list(subject.model.parameters())
    return DryRun(
        recorder.record.trace(resources, micro_steps=settings.micro_steps),
        runs_on,
        stats.saved.peak,
        stats.packed_tensors,
        sum(one.numel() for one in parameters),
        sum(one.numel() * one.element_size() for one in parameters),
        micro_step.temporary_bytes,
        frozenset(attention),
        tuple(one.site.kind.op if isinstance(one.site, sites.Site) else "" for one in recorder.record.storages),
        tuple(micro_step.notes()),
    )


class _MicroStep:
    """Runs a subject and records its passes through blocks."""

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
        settings = self._settings
        if settings.rematerialize and sites.is_supported():
            self.cache.rematerialize(AssumedSites(self.cache, settings.exclude, self._clock))
        self._recorder = Recorder(self.cache, self._clock, self._paths)

    def run(self) -> Recorder:
        """One forward, one backward."""
        self._new_recording()
        recorder, model = self._recorder, self._subject.model
        for module in model.modules():
            mark_owned(module)
        mark_inputs(self._subject.inputs)
        model.zero_grad(set_to_none=False)  # gradients exist, as in all micro-steps but the first
        gradients = [one.grad for one in model.parameters() if one.grad is not None]
        held = [one.untyped_storage() for one in (*model.parameters(), *gradients)]
        temporaries = PeakMeter(held, lambda: self.cache.stats.saved.now)
        self._blocks.install()
        try:
            with self._clock, self._answers if self._runs_on == "meta" else nullcontext(), temporaries:
                with (
                    self.cache.saving(Always((), wait=False), recorder.around, is_recorded=True),
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
        """Limitations that the passes showed."""
        notes = []
        if self._settings.autocast is not None:
            notes.append("torch_autocast: the model ran on the CPU, which casts nearly the same operations as CUDA")
        if self._settings.rematerialize and not sites.is_supported():
            notes.append(f"nothing is rematerialized: PyTorch {torch.__version__} does not show what its graph holds")
        if self._answers.given:
            notes.append(
                "where the model asks whether all or any elements of a mask are true: all() is true, any() is false"
            )
        if not self._blocks.all:
            return [*notes, 'no repeated layers were found, so nothing is recomputed: name the layers in "blocks"']
        obstacles: dict[str, str] = {}
        for path, why in self._blocks.left_out().items():
            obstacles.setdefault(why, path)
        return notes + [f"{path} and others like it are not recomputed: {why}" for why, path in obstacles.items()]

    def _autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast("cpu", self._settings.autocast) if self._settings.autocast else nullcontext()

    # ---- called by the blocks -----------------------------------------------------------------------------------

    def enter(self, block: Block, inputs: Sequence[torch.Tensor]) -> None:
        """Record that a pass begins; no pass is recomputed here."""
        self._recorder.enter(block.path, inputs, is_recomputable=self._blocks.is_recomputable(block))

    def leave(self, block: Block) -> None:
        """Record that the pass is over."""
        self._blocks.note_saves(block, has_saved=self._recorder.leave())

    def recompute(self, mark: Any) -> None:
        """Never called: :meth:`enter` asks for no recomputation."""


class AssumedSites(sites.Sites):
    """Sites of a dry run: found as in a run, and taken as proven; nothing is made."""

    def __init__(self, cache: Keeper, exclude: frozenset[str], clock: OpClock) -> None:
        super().__init__(cache, CpuAccelerator(), exclude)
        self._clock = clock

    def site_of(self, recipe: sites.Recipe) -> sites.Site:
        """With the time that the bytes of its ops take on the device."""
        kind = sites.Kind(recipe.steps[-1].rule.op)
        kind.add_time(self._clock.moving_s(_moved_bytes(recipe)))
        return sites.Site(kind, 0, equal_in=self.step)


def _moved_bytes(recipe: sites.Recipe) -> int:
    """Bytes that an op and the steps between read and write."""
    return sum(
        _output_bytes(step)
        + sum(_output_bytes(recipe.steps[one]) if isinstance(one, int) else _nbytes(one) for one in step.operands)
        for step in recipe.steps
        if not step.rule.is_view
    )


def _output_bytes(step: sites.Step) -> int:
    return step.output.shape.numel() * step.output.dtype.itemsize


def _nbytes(one: sites.Held | torch.Tensor | None) -> int:
    tensor = one if one is None or isinstance(one, torch.Tensor) else one.held
    return 0 if tensor is None else nbytes_of(tensor)


class PeakMeter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Peak bytes of the storages that the operations inside read or make, as an allocator counts them.

    Takes time at every operation, so a step under this meter must not be timed. On a CPU a tensor that was read back
    lies in a slot of staging; its storage counts, as it would in device memory.

    Args:
        ignored: storages that existed before.
        excluded_bytes: bytes that do not count at this moment, such as those of saved tensors. Then inputs, buffers,
            logits and the gradients of logits and activations are left.

    Attributes:
        peak_bytes: the peak so far.
        observes_only: activations go where they go without the meter; see ``ds_tba.autograd.tensors.is_under_a_mode``.
    """

    observes_only = True

    def __init__(self, ignored: Iterable[torch.UntypedStorage], excluded_bytes: Callable[[], int] = lambda: 0) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak_bytes = 0
        self._excluded_bytes = excluded_bytes
        self._now_bytes = 0
        self._freed: deque[tuple[int, int]] = deque()  # left by finalizers, which run in any thread
        self._ignored = list(ignored)
        self._seen: dict[int, weakref.ref[torch.UntypedStorage] | None] = {id(one): None for one in self._ignored}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        while self._freed:
            key, nbytes = self._freed.popleft()
            del self._seen[key]
            self._now_bytes -= nbytes
        for one in tree_leaves((args, kwargs, result)):
            if isinstance(one, torch.Tensor):
                self._see(one.untyped_storage())
        self.peak_bytes = max(self.peak_bytes, self._now_bytes - self._excluded_bytes())
        return result

    def _see(self, storage: torch.UntypedStorage) -> None:
        key, nbytes = id(storage), storage.nbytes()
        if key not in self._seen:
            self._seen[key] = weakref.ref(storage, lambda _: self._freed.append((key, nbytes)))
            self._now_bytes += nbytes


_ANSWER = "_ds_tba_answer"
_OF_ALL = {"aten::all": True, "aten::any": False}


class Answers(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Answers ``all()`` with true and ``any()`` with false for meta tensors inside, so that masks do not stop a model.

    Attributes:
        given: number of answers so far.
    """

    observes_only = True  # to the cache: what is saved is as in a run without it

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
