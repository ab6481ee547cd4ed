"""Records micro-steps: the storages that autograd saves in each block, and when it saves, uses and frees them.

It cannot see what saves outside of the hooks, nor which of two micro-steps is the usual one.

[Note: Pauses] Each call of a hook lies between two marks of the compute stream, and only the time outside of these
pauses counts: the trace shows the micro-step as if nothing had been moved, however long moving took. So a micro-step
may be recorded while everything goes to NVMe, which is the safe thing to do before the model's size is known.

[Note: Excluded by name] The bytes of a storage that a module keeps stay in memory, also where another module that has
saved it would let them leave: moving them, or making them again, frees nothing.

[Note: Guards] Code that ``torch.compile`` has compiled is compiled again when the hooks on modules change, also those
on all modules, and runs without compilation once that has happened too often. So recording puts no hooks on modules and
takes none off: which module runs is read from the call stack, when a storage is saved for the first time.

[Note: Two recordings] One recording alone holds whatever else the machine did: on two cores a pause of 40 ms in a gap
of 5 ms is not rare. Of two recordings that save as much, the shorter one counts; else the one that saves more, as a
plan for it holds for smaller micro-steps, too. With gradient accumulation both are of one step, else of two.

[Note: Unusual steps] A step in which something was compiled shows how long that took, and not how long steps take; one
in which a forward raised has a micro-step too many. What was recorded in it is dropped, and a later step is recorded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Protocol

import torch

from ds_tba.core.accounts import Ends, Notice
from ds_tba.core.hooks import NO_BACKWARD
from ds_tba.core.saved import Held, Hooks, Origin, PassedThrough, SavedCounted, SavedExcluded, SavedView, StorageKey
from ds_tba.core.tensors import Eligibility
from ds_tba.device.accelerator import MemoryMeter
from ds_tba.plan.trace import OUTSIDE, BlockTrace, Resources, StorageTrace, Trace
from ds_tba.remat.where import RunningModule

RECORDINGS = 2
# Steps that are recorded at most until there are so many.
MAX_RECORDED_STEPS = 5
# Fraction of the time since the pause before.
HAIR = 2.0**-10


class Clock(Protocol):
    """Time as the stream of kernels sees it: marks, and the seconds between two."""

    def mark(self) -> Any: ...
    def elapsed_s(self, earlier: Any, later: Any) -> float: ...


@dataclass(frozen=True, slots=True)
class Scene:
    """The surroundings of a recording."""

    eligibility_of: Callable[[torch.Tensor], Eligibility]  # the cache's
    clock: Clock  # of the training device
    running: RunningModule
    memory: MemoryMeter | None = None  # sampled while the trace's clock stands still
    # The device is the host. Elsewhere a copy holds the tensor until the host sees that the copy is done, which says
    # nothing about when forward releases the tensor.
    is_synchronous: bool = True


class _Ended(Notice):
    """Tells the end of a saved tensor, which autograd has released, or of a storage that left, which forward has."""

    __slots__ = ("in_forward", "storage")

    storage: _Storage
    in_forward: bool


@dataclass(slots=True, eq=False)
class _Storage:
    """A saved storage, or an input of a block that nobody saves; moments are numbers of pauses."""

    index: int
    nbytes: int
    module: str
    packed: int
    left: int | None  # by forward: freed where it was moved (None: not yet), else saved for the last time
    is_movable: bool
    is_asked: bool = True
    origin: Origin | None = None  # how it could be rematerialized, from ``sources``
    sources: tuple[int, ...] = ()
    passes: list[int] = field(default_factory=list)
    unpacked: int | None = None
    freed: int | None = None  # by autograd, for the last time so far


@dataclass(slots=True)
class _Pass:
    """A pass through a block; moments are numbers of pauses."""

    module: str
    entered: int
    inputs: list[int]
    left: int = 0
    uses: list[int] = field(default_factory=list)  # unpacks of what it saved


def _before(times: list[float], moment: int | None) -> float:
    """Return the time just before a pause, as what is freed in it is gone when it begins; for None the end."""
    if moment is None or moment >= len(times):
        return times[-1]
    at_s, before_s = times[moment], times[max(0, moment - 1)]
    return at_s - (at_s - before_s) * HAIR  # not the next smaller number: that is the same number after scaling


@dataclass(eq=False)
class Recorded:
    """The object that autograd holds in place of one saved tensor of a recorded micro-step."""

    __slots__ = ("__weakref__", "held", "pass_number", "storage")

    held: Held
    storage: _Storage | None
    pass_number: int


class Recorder:
    """The hooks that record one micro-step, and the trace of it."""

    def __init__(self, scene: Scene) -> None:
        self.pauses: list[tuple[object, object]] = []  # marks around all work of ours
        self.storages: list[_Storage] = []
        self.forwards: list[tuple[int, int]] = []  # the numbers of the next pause and storage when each began
        self.first_use = math.inf  # pause of the first unpack
        self.ended: object = None  # mark of the end of backward
        self.is_whole = False  # backward was there, and no error has ended it before its end
        self._backward = NO_BACKWARD
        self._passes: list[_Pass] = []
        # Acted on at both ends of each pause, so that an end in between has the number of the next pause.
        self._ends = Ends(self._note)
        self._scene = scene
        self._hooks: Hooks  # of the cache; set by around()
        self._by_key: dict[Hashable, _Storage] = {}
        self._pass_number = OUTSIDE

    def around(self, hooks: Hooks) -> Hooks:
        """Return the hooks that record what those of the cache do, for a forward that begins."""
        self._hooks = hooks
        if not self.forwards:
            with self._pause():
                pass
        self.forwards.append((len(self.pauses), len(self.storages)))
        return self.pack, self.unpack

    @contextmanager
    def passing(self, path: str, inputs: Sequence[torch.Tensor]) -> Iterator[None]:
        """Note a pass through a block; one inside of another is a part of it."""
        if self._pass_number != OUTSIDE:
            yield
            return
        with self._pause():
            found: list[int] = []
            for tensor in inputs:
                why = self._scene.eligibility_of(tensor)
                if why in (Eligibility.ELIGIBLE, Eligibility.SPARSE_VIEW):
                    key = StorageKey.of(tensor)
                    found.append(self._storage_of(key, key.nbytes, why is Eligibility.ELIGIBLE).index)
            self._pass_number = len(self._passes)
            self._passes.append(_Pass(path, len(self.pauses), found))
        try:
            yield
        finally:
            with self._pause():
                self._passes[-1].left = len(self.pauses)
                self._pass_number = OUTSIDE

    def pack(self, tensor: torch.Tensor) -> Recorded:
        with self._pause():
            held = self._hooks[0](tensor)
            storage = None if isinstance(held, PassedThrough) else self._saved(held, tensor)
            recorded = Recorded(held, storage, self._pass_number)
            if storage is not None:
                self._watch(recorded, storage, in_forward=False)
            return recorded

    def unpack(self, recorded: Recorded) -> torch.Tensor:
        if self.ended is not None:  # a graph that outlives its micro-step has no times in the trace
            return self._hooks[1](recorded.held)
        backward = torch._C._current_graph_task_id()
        if backward not in (NO_BACKWARD, self._backward):  # another one, also inside of the one before
            self._backward = backward
            self.is_whole = False
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)  # not called after an error
        with self._pause():
            tensor = self._hooks[1](recorded.held)
            now = len(self.pauses)
            self.first_use = min(self.first_use, now)
            if recorded.pass_number != OUTSIDE:
                self._passes[recorded.pass_number].uses.append(now)
            storage = recorded.storage
            if storage is not None and storage.unpacked is None:
                storage.unpacked = now
                held = recorded.held
                if isinstance(held, SavedView) and held.held is not None:
                    # A plan cannot move what has no graph and is in use elsewhere.
                    storage.is_movable &= held.record.has_graph or not held.record.refusal
            return tensor

    def _end_backward(self) -> None:
        self.is_whole = True

    def end(self) -> None:
        """End the recording: backward is over. Idempotent."""
        self._ends.act()
        if self.ended is None:
            self.ended = self._scene.clock.mark()

    @contextmanager
    def _pause(self) -> Iterator[None]:
        """Stop the trace's clock for work of ours; see [Note: Pauses]."""
        self._ends.act()
        before = self._scene.clock.mark()
        yield
        if self._scene.memory is not None:
            self._scene.memory.sample()
        self._ends.act()
        self.pauses.append((before, self._scene.clock.mark()))

    def _saved(self, held: SavedCounted | SavedView, tensor: torch.Tensor) -> _Storage:
        """Return the storage behind a saved tensor."""
        if isinstance(held, SavedExcluded):
            key = StorageKey.of(tensor)
            storage = self._storage_of(key, key.nbytes, False)
            storage.is_movable, storage.is_asked = False, storage.is_asked and bool(storage.passes)
        elif isinstance(held, SavedCounted):
            # One for each forward: if only the first had it, the forwards of a pipeline would not be alike.
            storage = self._storage_of((held.memory, len(self.forwards)), max(1, held.nbytes), False)
            storage.is_asked = False
        else:
            key = held.record.key
            storage = self._storage_of(key, key.nbytes, True)  # else there were no view of it
            storage.is_asked, origin = True, held.record.origin
            if origin is not None and storage.origin is None:
                found = {self._by_key[key].index for key in origin.sources if key in self._by_key}
                storage.origin, storage.sources = origin, tuple(sorted(found))
        storage.left = len(self.pauses)
        if self._scene.is_synchronous and isinstance(held, SavedView) and (held.held is None or held.record.is_leaving):
            storage.left = None
            self._watch(tensor.untyped_storage(), storage, in_forward=True)
        if self._pass_number not in storage.passes:  # once: a storage of two passes has no owner
            storage.passes.append(self._pass_number)
        return storage

    def _storage_of(self, key: Hashable, nbytes: int, is_movable: bool) -> _Storage:
        if key not in self._by_key:
            now, index = len(self.pauses), len(self.storages)
            found = _Storage(index, nbytes, self._scene.running.path(), now, now, is_movable)
            self._by_key[key] = found
            self.storages.append(found)
        return self._by_key[key]

    def _watch(self, watched: object, storage: _Storage, *, in_forward: bool) -> None:
        """Note the end of an object as an end of a storage."""
        notice = _Ended(watched, self._ends.tell)
        notice.storage, notice.in_forward = storage, in_forward
        self._ends.watch(notice)

    def _note(self, notice: _Ended) -> None:
        if self.ended is not None:
            return
        if notice.in_forward:
            notice.storage.left = len(self.pauses)
        else:
            notice.storage.freed = len(self.pauses)

    # ---- afterwards ---------------------------------------------------------------------------------------------

    def trace(self, resources: Resources, optimizer_s: float = 0.0, micro_steps: int = 1) -> Trace:
        """Return the trace of the micro-step; blocks the host until the device has reached its end."""
        times = self._times()
        blocks = [self._block(number, one, times) for number, one in enumerate(self._passes)]
        storages = [self._row(one, blocks, times) for one in self.storages]
        # Forwards whose backward is yet to come when the last of them is over make no pipeline.
        is_interleaved = any(self.first_use < pause for pause, _ in self.forwards)
        forwards = tuple(storage for _, storage in self.forwards) if is_interleaved else ()
        return Trace(tuple(storages), tuple(blocks), resources, times[-1], optimizer_s, micro_steps, forwards)

    def _times(self) -> list[float]:
        """Return the begin of each pause on the trace's clock, and the end of the micro-step as the last."""
        # The first pause is at the begin of forward: there the clock starts.
        last, at_s, times = self.pauses[0][0], 0.0, []
        for before, after in (*self.pauses, (self.ended, None)):
            at_s += max(0.0, self._scene.clock.elapsed_s(last, before))
            times.append(at_s)
            last = after
        return times

    def _block(self, number: int, found: _Pass, times: list[float]) -> BlockTrace:
        left_s = times[found.left]
        started_s = ended_s = times[-1]
        if found.uses:
            started_s = max(left_s, times[found.uses[0]])
            ended_s = max(started_s, times[found.uses[-1]])
        inputs = tuple(dict.fromkeys(found.inputs))
        is_own = any(one.passes == [number] and one.index not in inputs for one in self.storages)
        frees = bool(found.uses) and is_own  # else the model checkpoints the block itself
        return BlockTrace(found.module, times[found.entered], left_s, started_s, ended_s, inputs, frees)

    def _row(self, found: _Storage, blocks: list[BlockTrace], times: list[float]) -> StorageTrace:
        packed_s, left_s, freed_s = times[found.packed], _before(times, found.left), _before(times, found.freed)
        used_s = freed_s if found.unpacked is None else times[found.unpacked]
        # Saved ones have times of their own, and may be free before a reader's backward ends.
        readers = [] if found.passes else [block for block in blocks if found.index in block.inputs]
        if readers:
            used_s = min(block.backward_start_s for block in readers)
            freed_s = max(block.backward_end_s for block in readers)
        used_s = max(packed_s, used_s)
        return StorageTrace(
            found.nbytes,
            found.module,
            tuple(found.passes),
            packed_s,
            min(max(packed_s, left_s), used_s),
            used_s,
            max(used_s, freed_s),
            found.is_movable,
            None if found.origin is None or not found.is_movable else found.origin.seconds,
            found.sources,
            found.unpacked is not None or bool(readers),
            found.is_asked,
        )


class Recording:
    """The recordings of micro-steps from which one trace is made. Does not decide when to record."""

    def __init__(self, scene: Scene, wanted: int = RECORDINGS) -> None:
        self._scene = scene
        self.wanted = wanted  # how many; without any, nothing is recorded
        self._done: list[Recorder] = []
        self._before_step = 0  # how many were done before this step
        self._backward_ended: object = None
        self._optimizer_steps: list[tuple[object, object]] = []
        self.current: Recorder | None = None  # of the running micro-step, if that is recorded
        self.steps = 0  # of the optimizer, since it began

    @property
    def is_over(self) -> bool:
        """True if no more need be recorded, or enough steps were tried."""
        return len(self._done) >= self.wanted or self.steps >= MAX_RECORDED_STEPS

    def begin(self) -> None:
        """Begin a micro-step, with a recorder if it is to be recorded."""
        self._keep()
        self.current = Recorder(self._scene) if len(self._done) < self.wanted else None

    def end_micro_step(self) -> None:
        """Note that backward is over."""
        self._keep()
        self._backward_ended = self._scene.clock.mark() if self.wanted else None

    def _keep(self) -> None:
        """Keep the recorder of the last micro-step, whose end a loop need not tell, if it had a whole backward."""
        recorder, self.current = self.current, None
        if recorder is not None:
            recorder.end()
            if recorder.is_whole:
                self._done.append(recorder)

    def end_step(self, ended: object, *, is_usual: bool = True) -> None:
        """End the step, at a mark of the clock; ``is_usual``: see [Note: Unusual steps]."""
        self.steps += 1
        self._keep()
        if not is_usual:  # or the plan would promise steps as long as the compiler takes
            del self._done[self._before_step :]
        elif self._backward_ended is not None:
            self._optimizer_steps.append((self._backward_ended, ended))
        self._before_step = len(self._done)
        self._backward_ended = None

    def trace(self, resources: Resources, micro_steps: int) -> Trace | None:
        """Return the trace of the recording that counts, if there is any; the host waits for the device."""
        took_s = [max(0.0, self._scene.clock.elapsed_s(*marks)) for marks in self._optimizer_steps]
        optimizer_s = median(took_s or [0.0])
        traces = [one.trace(resources, optimizer_s, micro_steps) for one in self._done]
        return max(traces, key=lambda trace: (trace.saved_bytes, -trace.end_s), default=None)
