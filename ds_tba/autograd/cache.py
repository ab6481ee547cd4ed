"""The tensor cache: autograd's pack and unpack (TBA section 3.2), with one record for each saved storage.

Knows autograd, storages and a store's contract; does not know DeepSpeed, files or staging. ``budget.py`` moves the
bytes, and holds those in device memory within their budget.

[Note: Records] Every saved tensor becomes a ``SavedView``, the object that autograd holds in its place. Views of one
storage share a ``SavedStorage``, found by the stamps of storage and version counter and by the version: the storage is
written once, and every view is rebuilt from it. A record lives as long as one of its views. Records are shared within
one forward only: bytes that change without a version bump between two forwards (a buffer that numpy refills) are saved
again.

[Note: Versions] Autograd does not compare version counters for hooked tensors, so unpack does, for every view, kept or
offloaded. A kept tensor is held as a detached alias: the tensor itself would close a reference cycle through its own
graph node.

[Note: Finalizers] A view's ``__del__`` may run anywhere: in any thread, and also while its own thread holds the lock,
because every allocation inside a critical section may start the garbage collector. So it neither waits for the lock nor
takes it twice; it defers itself (``ds_tba/storage/finalizers.py``). Whoever takes the lock acts on deferred finalizers
first, so that their memory is free, and after letting go of it acts on those that found the lock taken.

[Note: Order of locks] The cache's lock is taken before a store's, never after: stores do not know the cache. But a
finalizer may run inside a store's critical section, take the cache's lock if that is free, and give a ticket back. So
``Store.release`` waits for no lock, and defers itself in turn.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from ds_tba.autograd.budget import Residency, Transfers
from ds_tba.autograd.saved import (
    NO_INDEX,
    Finalized,
    Hooks,
    MicroStep,
    PassedThrough,
    Phase,
    RecordState,
    ResidencyGuard,
    SavedCounted,
    SavedStorage,
    SavedView,
    StorageKey,
    nbytes_of,
    unmodified,
)
from ds_tba.autograd.tensors import (
    Eligibility,
    eligibility,
    has_plain_storage,
    held_bytes,
    is_parameter,
    is_under_a_mode,
    keep_originals,
    uncompiled_hooks,
)
from ds_tba.device.accelerator import Accelerator
from ds_tba.storage.base import Always, Policy, Store, Ticket
from ds_tba.storage.finalizers import DeferredFinalizers
from ds_tba.telemetry.stats import CacheStats

# Passed through: they hold no memory of the training device.
_FOREIGN = frozenset({Eligibility.NO_STORAGE, Eligibility.OTHER_DEVICE})


class TensorCache:
    """Moves saved tensors into a store during forward and back during backward.

    Args:
        stores: where eligible storages go in a micro-step without a policy of its own, in order of preference; without
            any, everything is kept and measured.
        device: the training device, with its index.
        min_tensor_bytes: storages smaller than this are kept.
        wait_for_staging: wait for room in staging instead of keeping the tensor, likewise.
        accelerator: of that device, where it is asynchronous: streams matter then, and what is read ahead takes device
            memory before backward asks for it.
    """

    def __init__(
        self,
        stores: Sequence[Store[Any]],
        device: torch.device | str,
        min_tensor_bytes: int,
        *,
        wait_for_staging: bool = False,
        accelerator: Accelerator | None = None,
    ) -> None:
        self.stats = CacheStats()
        self._stores = tuple(stores)
        self._device = torch.device(device)
        self._min_tensor_bytes = min_tensor_bytes
        self._default_policy: Policy = Always(stores, wait=wait_for_staging)
        self.transfers = Transfers(self.stats, self._stores, self._device)
        self.records = Records(self.stats, self._default_policy, self.transfers, accelerator)
        self._lock = self.records.lock
        self._finalizers = self.records.finalizers

    # ---- the contract with autograd -----------------------------------------------------------------------------

    @contextmanager
    def saving(
        self,
        policy: Policy | None = None,
        around: Callable[[Hooks], Hooks] | None = None,
        lead: Sequence[int] = (),
        *,
        continues: bool = False,
    ) -> Iterator[None]:
        """A forward: what autograd saves inside goes through the cache.

        Args:
            policy: where it goes.
            around: makes the hooks that autograd calls from ours, which they call.
            lead: see ``Plan.prefetch_distance``.
            continues: the forward belongs to the micro-step of the last one; see [Note: Micro-steps].
        """
        if not torch.is_grad_enabled():
            yield
            return
        with self._lock:
            self._finalizers.act()
            step = self.records.forward.micro_step
            if not (continues or step.is_interleaved):
                step = MicroStep()
                self.stats.micro_steps += 1
            step.begin_forward(lead)
            self.records.forward = Forward(step, policy or self._default_policy)
        hooks: Hooks = (self.pack, partial(self.records.unpack, step))
        try:
            with uncompiled_hooks(*(hooks if around is None else around(hooks))):
                yield
        finally:
            step.phase = Phase.WAITING

    @contextmanager
    def interleaving(self) -> Iterator[None]:
        """Forwards and backwards of several micro-batches: one micro-step; see [Note: Micro-steps]."""
        with self._lock:
            self._finalizers.act()
            self.records.forward.micro_step = MicroStep(is_interleaved=True)
            self.stats.micro_steps += 1
        try:
            yield
        finally:
            self.end_micro_step()

    def pack(self, tensor: torch.Tensor) -> PassedThrough | SavedCounted | SavedView:
        """Autograd's pack hook: the object to hold in place of ``tensor``."""
        self.stats.packed_tensors += 1
        why = self.eligibility_of(tensor)
        if why is Eligibility.PARAMETER:
            self.stats.passed_through_tensors += 1
            return PassedThrough(tensor)
        if why in _FOREIGN:
            self.stats.kept_bytes[why.value] += nbytes_of(tensor)
            return PassedThrough(tensor)
        if why is Eligibility.ELIGIBLE:
            return self.records.save(tensor)
        small = why is Eligibility.SMALL
        nbytes = tensor.untyped_storage().nbytes() if small else held_bytes(tensor, self._device)
        return SavedCounted(self.records, tensor, nbytes, why.value)

    def eligibility_of(self, tensor: torch.Tensor) -> Eligibility:
        """Whether a tensor may leave device memory."""
        if self._stores and torch._C._len_torch_dispatch_stack() and is_under_a_mode():
            return Eligibility.PARAMETER if is_parameter(tensor) else Eligibility.UNDER_A_MODE
        return eligibility(tensor, self._device, self._min_tensor_bytes)

    # ---- for the offloader and the controller -------------------------------------------------------------------

    @property
    def expects_forward(self) -> bool:
        """Whether one more forward belongs to the last micro-step; see [Note: Micro-steps]."""
        with self._lock:
            self._finalizers.act()
            return self.records.forward.micro_step.expects_forward

    def end_micro_step(self) -> None:
        """The micro-step is over, whatever is still saved: the next forward begins another."""
        with self._lock:
            self._finalizers.act()
            self.records.forward.micro_step = MicroStep()
        self._finalizers.act_if_free()

    def settle(self) -> None:
        """Act on every deferred finalizer, and let go of what finished copies still hold."""
        with self._lock:
            self._finalizers.act()
        for store in self._stores:  # under their own locks
            store.settle()
        self._finalizers.act_if_free()

    def take_moves(self) -> list[tuple[Any, Any]]:
        """Clock marks before and after each move since the last call; see ``Transfers.clock``."""
        with self._lock:
            return self.transfers.take_times()

    def forget_order(self) -> None:
        """Forget the order in which backward wanted what was moved: from now on other storages are."""
        with self._lock:
            self.records.learned_order = []

    def count_recomputed(self, nbytes: int) -> None:
        """Count what a block's recomputation holds from now on, in place of what another's did."""
        with self._lock:
            self._finalizers.act()
            self.records.residency.count_recomputed(nbytes)
        self._finalizers.act_if_free()

    def limit_resident(self, nbytes: int | None, name: str = "") -> None:
        """Hold saved tensors in device memory within a budget from now on; see :meth:`Budget.limit`."""
        with self._lock:
            self.records.residency.budget.limit(nbytes, name)

    @property
    def live_records(self) -> int:
        """Saved storages that some graph still holds."""
        return self.records.live


@dataclass(eq=False)
class Forward:
    """The forward under way, or the last one.

    Attributes:
        by_key: records of the storages saved in it; those of earlier forwards are found no more, but live on.
    """

    micro_step: MicroStep
    policy: Policy
    by_key: dict[StorageKey, SavedStorage] = field(default_factory=dict)


class Records:
    """The saved storages, from the first view of each to the end of its last.

    Attributes:
        lock: of everything that the cache changes; not reentrant.
        finalizers: deferred until somebody has the lock; see [Note: Finalizers].
        learned_order: of first uses, in the last backward that used all.
        live: records that some graph still holds.
    """

    def __init__(
        self, stats: CacheStats, policy: Policy, transfers: Transfers, accelerator: Accelerator | None
    ) -> None:
        self.lock = threading.Lock()
        self.finalizers: DeferredFinalizers[Finalized] = DeferredFinalizers(self.lock, self._act_on)
        self.residency = Residency(stats.resident, transfers, self.finalizers.act, self, accelerator)
        self.forward = Forward(MicroStep(), policy)
        self.learned_order: list[int] = []
        self.live = 0
        self._stats = stats
        self._transfers = transfers
        self._empties: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}
        self._originals = keep_originals()

    def save(self, tensor: torch.Tensor) -> SavedView:
        """The object to hold in place of an eligible tensor."""
        with self.lock:
            self.finalizers.act()
            record = self._record(tensor)
            offloaded = record.state is not RecordState.KEPT
            record.views += 1
            record.pending += offloaded
        self.finalizers.act_if_free()
        view = SavedView(self, record, tensor, offloaded=offloaded)
        # Without the lock: a view that is not listed yet keeps its bytes, even if the record is evicted meanwhile.
        if not offloaded and self.residency.budget.is_set:
            record.kept_views.append(weakref.ref(view))
        return view

    def unpack(self, micro_step: MicroStep, held: PassedThrough | SavedCounted | SavedView) -> torch.Tensor:
        """Autograd's unpack hook: the tensor for which ``held`` stands.

        Raises:
            ActivationModifiedError: it was modified in place after it was saved.
            ActivationLostError: its bytes could not be read back.
            ActivationCorruptionError: the bytes read back are not the bytes written.
        """
        tensor = held.restore()  # first of all: backward waits for this read, and for no read ahead
        self._originals.add(tensor, tensor is held.held)
        if micro_step.phase is Phase.WAITING:
            with self.lock:
                self.finalizers.act()
                micro_step.read_ahead(self.learned_order, self.residency.prefetch)
            self.finalizers.act_if_free()
        return tensor

    # ---- for the objects that autograd holds --------------------------------------------------------------------

    def load(self, record: SavedStorage, *, first_time: bool) -> torch.Tensor:
        """The bytes of a record on its device (uint8, 1-D), for the calling thread's current stream."""
        with self.lock:
            self.finalizers.act()
            reloaded = record.reloaded
            if reloaded is None:
                reloaded = self.residency.reload(record)
                if record.index != NO_INDEX:
                    record.micro_step.add_use(record.index)
            data = reloaded.arrival.join()  # every consumer waits for the copy, each in its own stream
            unmodified(data, reloaded.version)
            if first_time:
                record.pending -= 1
            self._evict_if_unpacked(record)  # the record lets go of the memory, and the caller's ``data`` holds it
            record.micro_step.read_ahead(self.learned_order, self.residency.prefetch, after=record.index)
        self.finalizers.act_if_free()
        return data

    def count_kept(self, tensor: torch.Tensor, nbytes: int, reason: str) -> ResidencyGuard:
        """Count a tensor that is kept, without a record, as ``nbytes`` of its storage."""
        with self.lock:
            self.finalizers.act()
            self.residency.make_room(nbytes)
            self._stats.kept_bytes[reason] += nbytes
            self._stats.saved.add(nbytes)
            guard = self.residency.count(tensor.untyped_storage() if has_plain_storage(tensor) else None, nbytes)
        self.finalizers.act_if_free()
        return guard

    def defer(self, finalized: Finalized) -> None:
        """Have a finalizer's work done by whoever holds the lock next. Never blocks; see [Note: Finalizers]."""
        self.finalizers.leave(finalized)

    def empty_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """An empty tensor of the same dtype and device, for version witnesses."""
        key = (tensor.dtype, tensor.device)
        empty = self._empties.get(key)
        if empty is None:
            empty = self._empties[key] = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return empty

    # ---- under the lock -----------------------------------------------------------------------------------------

    def _record(self, tensor: torch.Tensor) -> SavedStorage:
        """The record of a tensor's storage at its present version, made and offloaded at first sight."""
        key = StorageKey.of(tensor)
        forward = self.forward
        choice = forward.policy.choose(key, key.nbytes)
        record = forward.by_key.get(key)
        if record is not None:
            if record.state is not RecordState.KEPT:
                self._stats.deduplicated_bytes += nbytes_of(tensor)
            return record
        self.residency.make_room(key.nbytes)
        record = SavedStorage(key, forward.micro_step)
        taken = self._transfers.offload(tensor, choice)
        if isinstance(taken, Ticket):
            record.ticket = taken
            record.state = RecordState.OFFLOADED
            record.index = record.micro_step.add(record)
            self.residency.add_moved(record, tensor.untyped_storage())
        else:
            self._stats.kept_bytes[taken] += record.nbytes
            self.residency.add_kept(record, tensor.untyped_storage())
        forward.by_key[key] = record
        self.live += 1
        record.micro_step.saved += 1
        self._stats.saved.add(record.nbytes)
        return record

    def _evict_if_unpacked(self, record: SavedStorage) -> None:
        """A second backward reads again instead of holding the memory until then."""
        if record.pending == 0 and record.state is RecordState.RELOADED:
            self.residency.evict(record)

    def _act_on(self, finalized: Finalized) -> None:
        if isinstance(finalized, int):
            self._stats.resident.add(-finalized)
            return
        gone, count = finalized
        if isinstance(gone, ResidencyGuard):
            self._stats.saved.add(-count)
            self._stats.resident.add(-gone.leave())
            return
        gone.views -= 1
        gone.pending -= count
        if gone.views == 0:
            self._forget(gone)
        else:
            self._evict_if_unpacked(gone)

    def _forget(self, record: SavedStorage) -> None:
        self.residency.remove(record)
        record.move(RecordState.DROPPED)
        record.reloaded = None
        self._stats.saved.add(-record.nbytes)
        self.live -= 1
        if self.forward.by_key.get(record.key) is record:
            del self.forward.by_key[record.key]
        if record.ticket is not None:
            record.ticket.store.release(record.ticket)  # see [Note: Order of locks]
        record.micro_step.saved -= 1
        if record.index != NO_INDEX:
            self.learned_order = record.micro_step.remove(record.index) or self.learned_order
