"""Records one micro-step: the storages that autograd saves in each block, and when it saves, uses and frees them.

[Note: Pauses] Each call of a hook lies between two marks of the compute stream, and only the time outside of these
pauses counts: the trace shows the micro-step as if nothing had been moved, however long moving took. So a micro-step
may be recorded while everything goes to NVMe, which is the safe thing to do before the model's size is known.

[Note: Small tensors] Tensors below ``min_tensor_bytes`` have no record in the cache. They are one storage per scope
here, which may not be moved: their bytes count, and go with a block that is recomputed.

[Note: Guards] Code that ``torch.compile`` has compiled is compiled again when the hooks on modules change, also those
on all modules, and runs without compilation once that has happened too often. So recording puts no hooks on modules and
takes none off: which module runs is read from the call stack, when a storage is saved for the first time.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch

from ds_tba.autograd.discovery import RunningModule
from ds_tba.autograd.saved import (
    Hooks,
    ObservedCache,
    PassedThrough,
    ResidencyGuard,
    SavedCounted,
    SavedView,
    Site,
    StorageKey,
)
from ds_tba.autograd.tensors import Eligibility
from ds_tba.device.accelerator import Clock
from ds_tba.planner.trace import OUTSIDE, BlockTrace, Layout, Resources, StorageTrace, Trace

# Where two recordings of the same gap are further apart, the machine did something else in the longer one.
APART_S, APART_FACTOR = 0.001, 1.5
# Fraction of the time since the pause before.
HAIR = 2.0**-10
_NOTHING = -1
_WATCH = "_ds_tba_watch"


@dataclass(slots=True)
class _Storage:
    """A saved storage, or an input of a block that nobody saves; moments are numbers of pauses."""

    nbytes: int
    module: str
    packed: int
    left: int | None  # by forward: freed where it was moved (None: not yet), else saved for the last time
    is_movable: bool
    site: Site | None = None  # that could make it again, from ``sources``
    sources: tuple[int, ...] = ()
    passes: list[int] = field(default_factory=list)
    unpacked: int | None = None
    freed: int | None = None
    is_evicted: bool = False


@dataclass(slots=True)
class _Scope:
    """See [Note: Scopes] in ``ds_tba/planner/trace.py``."""

    number: int
    entered: int
    module: str = ""
    left: int = 0
    inputs: list[int] = field(default_factory=list)
    members: dict[int, None] = field(default_factory=dict)  # in order
    small: int = _NOTHING
    is_recomputable: bool = True

    @property
    def pass_number(self) -> int:
        """Of the pass; OUTSIDE between passes."""
        return self.number // 2 if self.number % 2 else OUTSIDE


@dataclass(slots=True)
class MicroStepRecord:
    """The raw data of one micro-step, filled in by :class:`Recorder`, and the trace made of them.

    Attributes:
        pauses: marks around all work of ours, during which the trace's clock stands still.
        forwards: the numbers of the next pause and the next storage when each forward began.
        uses: pause and scope of each unpack.
        hooks: marks around the cache's own hooks, within the pauses; only on a synchronous device.
        moves: marks around each storage that was moved.
        ended: mark of the end of backward.
    """

    clock: Clock
    pauses: list[tuple[Any, Any]] = field(default_factory=list)
    storages: list[_Storage] = field(default_factory=list)
    scopes: list[_Scope] = field(default_factory=list)
    forwards: list[tuple[int, int]] = field(default_factory=list)
    uses: list[tuple[int, int]] = field(default_factory=list)
    hooks: list[tuple[Any, Any]] = field(default_factory=list)
    moves: list[tuple[Any, Any]] = field(default_factory=list)
    ended: Any = None
    _alike: list[MicroStepRecord] = field(default_factory=list)

    def begin_forward(self) -> None:
        """A forward begins, the first or one more."""
        self.forwards.append((len(self.pauses), len(self.storages)))
        if self.scopes:
            self.scopes[-1].small = _NOTHING  # those of two forwards do not live equally long

    def freed(self, index: int) -> None:
        """Autograd has let go of a saved tensor. Safe in a finalizer."""
        if index != _NOTHING and self.ended is None and not self.storages[index].is_evicted:
            self.storages[index].freed = len(self.pauses)

    def evicted(self, index: int) -> None:
        """What was brought back is free again, though autograd may want it once more (``retain_graph``)."""
        if self.ended is None and not self.storages[index].is_evicted:
            self.storages[index].freed, self.storages[index].is_evicted = len(self.pauses), True

    def left(self, index: int) -> None:
        """Forward has let go of a storage that was moved. Safe in a finalizer."""
        if self.ended is None:
            self.storages[index].left = len(self.pauses)

    # ---- afterwards ---------------------------------------------------------------------------------------------

    @property
    def saved_bytes(self) -> int:
        """Of all storages together."""
        return sum(storage.nbytes for storage in self.storages)

    @property
    def is_complete(self) -> bool:
        """Whether there was a forward, and then its backward."""
        return bool(self.uses) and self.ended is not None

    def layout(self) -> Layout:
        """The places of the trace's storages."""
        return Layout(tuple(tuple(scope.members) for scope in self.scopes))

    def trace(self, resources: Resources, optimizer_s: float = 0.0, micro_steps: int = 1) -> Trace:
        """The trace of the micro-step; blocks the host until the device has reached its end.

        Args:
            resources: the machine.
            optimizer_s, micro_steps: see :class:`ds_tba.planner.trace.Trace`.
        """
        times, end_s = self._times()
        spans: dict[int, tuple[int, int]] = {}
        for place, (_, number) in enumerate(self.uses):
            spans[number] = (spans.get(number, (place,))[0], place)
        blocks = [self._block(scope, spans.get(scope.number), times) for scope in self.scopes if scope.number % 2]
        storages = [self._storage(index, blocks, times) for index in range(len(self.storages))]
        # Forwards whose backward is yet to come when the last of them is over make no pipeline.
        is_interleaved = any(self.uses[0][0] < pause for pause, _ in self.forwards)
        forwards = tuple(storage for _, storage in self.forwards) if is_interleaved else ()
        return Trace(tuple(storages), tuple(blocks), resources, end_s, optimizer_s, micro_steps, forwards=forwards)

    def confirm(self, earlier: MicroStepRecord) -> bool:
        """Have times come from both; False, and nothing changes, if ``earlier`` was of another kind of micro-step."""
        shape, other = ([(storage.nbytes, storage.module) for storage in record.storages] for record in (self, earlier))
        is_alike = len(earlier.pauses) == len(self.pauses) and shape == other
        if is_alike:
            self._alike.append(earlier)
        return is_alike

    def hooks_s(self) -> float:
        """The device time of the cache's hooks without moving; the cache must time its moves."""
        if not self.hooks:  # a device has none: its moves are not waited for
            return 0.0
        took_s = sum(self.clock.elapsed_s(*hook) for hook in self.hooks)
        return max(0.0, took_s - sum(self.clock.elapsed_s(*move) for move in self.moves))

    def _times(self) -> tuple[list[float], float]:
        """When each pause began, on the trace's clock, with the end of the micro-step as the last; and that end."""
        all_gaps = zip(self._gaps_s(), *(earlier._gaps_s() for earlier in self._alike), strict=True)
        times = list(accumulate(usual_s(gaps) for gaps in all_gaps))
        return times, times[-1]

    def _gaps_s(self) -> list[float]:
        """The times that the clock counts: before each pause, and after the last."""
        # The first pause opens the first scope: there the clock starts.
        last, gaps = self.pauses[0][0], []
        for before, after in self.pauses:
            gaps.append(max(0.0, self.clock.elapsed_s(last, before)))
            last = after
        gaps.append(0.0 if self.ended is None else max(0.0, self.clock.elapsed_s(last, self.ended)))
        return gaps

    def _block(self, scope: _Scope, span: tuple[int, int] | None, times: list[float]) -> BlockTrace:
        """A pass; ``span`` are the places in ``uses`` of the first and the last unpack of what it saved."""
        left_s, started_s, ended_s = times[scope.left], times[-1], times[-1]
        if span is not None:
            first, last = span
            started_s = max(left_s, times[self.uses[first][0]])
            after = [self.uses[last + 1][0]] if last + 1 < len(self.uses) else []
            after += [pause for pause, _ in self.forwards if pause > self.uses[last][0]][:1]
            if after:
                ended_s = max(started_s, times[min(after)])
        inputs = tuple(dict.fromkeys(scope.inputs))
        is_recomputable = scope.is_recomputable and span is not None
        return BlockTrace(scope.module, times[scope.entered], left_s, started_s, ended_s, inputs, is_recomputable)

    def _storage(self, index: int, blocks: list[BlockTrace], times: list[float]) -> StorageTrace:
        found = self.storages[index]
        packed_s, left_s, freed_s = times[found.packed], _before(times, found.left), _before(times, found.freed)
        used_s = freed_s if found.unpacked is None else times[found.unpacked]
        readers = [] if found.passes else [block for block in blocks if index in block.inputs]
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
            None if found.site is None else found.site.seconds,
            found.sources,
            found.unpacked is not None or bool(readers),
        )


class Recorded:
    """The object that autograd holds in place of one saved tensor of a recorded micro-step."""

    __slots__ = ("_record", "held", "index", "scope")

    def __init__(
        self, record: MicroStepRecord, held: PassedThrough | SavedCounted | SavedView, index: int, scope: int
    ) -> None:
        self._record = record
        self.held = held
        self.index = index
        self.scope = scope

    def __del__(self) -> None:
        self._record.freed(self.index)


class _Watch:
    """Finalizer on memory that holds a storage; reports when the memory is free.

    Either that of a storage that was moved, of which forward lets go, or that in which its bytes came back.
    """

    __slots__ = ("_index", "_report")

    def __init__(self, report: Callable[[int], None], index: int) -> None:
        self._report = report
        self._index = index

    def __del__(self) -> None:
        self._report(self._index)


class _StorageIndex:
    """Finds the index of a storage in a record, and adds those that are new."""

    def __init__(self, record: MicroStepRecord, module: RunningModule) -> None:
        self._record = record
        self._module = module
        self._by_key: dict[StorageKey, int] = {}
        self._small: weakref.WeakKeyDictionary[ResidencyGuard, int] = weakref.WeakKeyDictionary()

    def of(self, key: StorageKey, is_movable: bool) -> int:
        """The index of a storage that has a record in the cache, or is an input."""
        index = self._by_key.get(key)
        if index is None:
            index = self._by_key[key] = self._add(key.nbytes, is_movable)
        return index

    def of_all(self, keys: Sequence[StorageKey]) -> tuple[int, ...]:
        """The indices of storages, as far as they have one."""
        found = (self._by_key.get(key) for key in keys)
        return tuple(sorted({index for index in found if index is not None}))

    def of_small(self, held: SavedCounted, scope: _Scope) -> int:
        """See [Note: Small tensors]."""
        index = self._small.get(held.guard)  # a storage that is saved many times takes its memory once
        if index is not None:
            return index
        if scope.small == _NOTHING:
            scope.small = self._add(0, False)
        self._small[held.guard] = scope.small
        self._record.storages[scope.small].nbytes += max(1, held.nbytes)
        return scope.small

    def _add(self, nbytes: int, is_movable: bool) -> int:
        storages, now = self._record.storages, len(self._record.pauses)
        storages.append(_Storage(nbytes, self._module.path(), now, now, is_movable))
        return len(storages) - 1


class Recorder:
    """The hooks that record one micro-step.

    Args:
        cache: does the saving.
        clock: of the training device.
        paths: for each module (by ``id``) its path in the model.
        is_synchronous: whether the device is the host. Elsewhere a copy holds the tensor until the host sees that the
            copy is done, which says nothing about when forward lets go of the tensor; and hooks take no device time.
        look: called at each hook, while the trace's clock stands still.
    """

    def __init__(
        self,
        cache: ObservedCache,
        clock: Clock,
        paths: dict[int, str],
        *,
        is_synchronous: bool = True,
        look: Callable[[], None] = lambda: None,
    ) -> None:
        self.record = MicroStepRecord(clock)
        self._cache = cache
        self._look = look
        self._pack: Callable[[torch.Tensor], Any]  # set by around()
        self._unpack: Callable[[Any], torch.Tensor]
        self._clock = clock
        self._is_synchronous = is_synchronous
        self._module = RunningModule(paths)
        self._index = _StorageIndex(self.record, self._module)
        self._depth = 0

    def around(self, hooks: Hooks) -> Hooks:
        """The hooks that record what those of the cache do, for a forward that begins."""
        self._pack, self._unpack = hooks
        if not self.record.scopes:  # else one more forward of the same micro-step
            self._cache.take_moves()
            self._pause(lambda: self._open_scope(""))
        self.record.begin_forward()
        return self.pack, self.unpack

    def enter(self, module: str, inputs: Sequence[torch.Tensor], *, is_recomputable: bool) -> None:
        """A pass through a block begins."""
        self._depth += 1
        if self._depth == 1:
            self._pause(lambda: self._open_pass(module, inputs, is_recomputable))

    def leave(self) -> None:
        """The pass is over."""
        self._depth -= 1
        if self._depth == 0:
            self._pause(lambda: self._open_scope(""))

    def pack(self, tensor: torch.Tensor) -> Recorded:
        """Autograd's pack hook."""
        before = self._clock.mark()
        held = self._pack(tensor)
        if self._is_synchronous:
            self.record.hooks.append((before, self._clock.mark()))
        self._look()
        scope = self.record.scopes[-1]
        recorded = Recorded(self.record, held, self._saved(held, tensor, scope), scope.number)
        self.record.pauses.append((before, self._clock.mark()))
        return recorded

    def unpack(self, recorded: Recorded) -> torch.Tensor:
        """Autograd's unpack hook."""
        record = self.record
        if record.ended is not None:
            return self._unpack(recorded.held)
        before = self._clock.mark()
        tensor = self._unpack(recorded.held)
        if self._is_synchronous:
            record.hooks.append((before, self._clock.mark()))
        self._look()
        now = len(record.pauses)
        record.uses.append((now, recorded.scope))
        if recorded.index != _NOTHING and record.storages[recorded.index].unpacked is None:
            record.storages[recorded.index].unpacked = now
            if isinstance(recorded.held, SavedView) and recorded.held.is_offloaded:
                setattr(tensor.untyped_storage(), _WATCH + "_back", _Watch(record.evicted, recorded.index))
        record.pauses.append((before, self._clock.mark()))
        return tensor

    def end(self) -> None:
        """Backward is over. Idempotent."""
        if self.record.ended is None:
            self.record.ended = self._clock.mark()
            self.record.moves = self._cache.take_moves()

    def _pause(self, work: Callable[[], object]) -> None:
        """Do something of ours while the trace's clock stands still."""
        before = self._clock.mark()
        work()
        self.record.pauses.append((before, self._clock.mark()))

    def _open_scope(self, module: str) -> _Scope:
        scopes, now = self.record.scopes, len(self.record.pauses)
        if scopes:
            scopes[-1].left = now
        scopes.append(_Scope(len(scopes), now, module))
        return scopes[-1]

    def _open_pass(self, module: str, inputs: Sequence[torch.Tensor], is_recomputable: bool) -> None:
        scope = self._open_scope(module)
        scope.is_recomputable = is_recomputable
        for tensor in inputs:
            why = self._cache.eligibility_of(tensor)
            if why in (Eligibility.ELIGIBLE, Eligibility.SPARSE_VIEW):
                scope.inputs.append(self._index.of(StorageKey.of(tensor), why is Eligibility.ELIGIBLE))

    def _saved(self, held: PassedThrough | SavedCounted | SavedView, tensor: torch.Tensor, scope: _Scope) -> int:
        """The index of the storage behind a saved tensor."""
        if isinstance(held, PassedThrough):
            return _NOTHING
        if isinstance(held, SavedCounted):
            index = self._index.of_small(held, scope)
        else:
            index = self._index.of(held.record.key, self._cache.eligibility_of(tensor) is Eligibility.ELIGIBLE)
            scope.members[index] = None
            makeable = held.record.makeable
            if makeable is not None and self.record.storages[index].site is None:
                self.record.storages[index].site = makeable.site
                self.record.storages[index].sources = self._index.of_all(makeable.sources)
        storage = self.record.storages[index]
        storage.left = len(self.record.pauses)
        if self._is_synchronous and isinstance(held, SavedView) and held.is_offloaded:
            storage.left = None
            setattr(tensor.untyped_storage(), _WATCH, _Watch(self.record.left, index))
        if scope.pass_number not in storage.passes:
            storage.passes.append(scope.pass_number)
        return index


def usual_s(times_s: Sequence[float]) -> float:
    """One time from several measurements: their mean, or the least where they are far apart."""
    least, most = min(times_s), max(times_s)
    is_apart = most - least > APART_S and most > APART_FACTOR * least
    return least if is_apart else sum(times_s) / len(times_s)


def _before(times: list[float], moment: int | None) -> float:
    """Just before the pause of that number: a storage freed in the pause is gone when it begins. None is the end."""
    if moment is None or moment >= len(times):
        return times[-1]
    at_s, before_s = times[moment], times[max(0, moment - 1)]
    return at_s - (at_s - before_s) * HAIR  # not the next smaller number: that is the same number after scaling
