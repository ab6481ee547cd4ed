"""The tensor cache: autograd's pack and unpack (TBA section 3.2), with one record for each saved storage.

Knows autograd, storages and a store's contract; does not know DeepSpeed, files or staging. ``records.py`` has the
records and says what becomes of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from ds_tba.autograd.budget import Transfers
from ds_tba.autograd.prefetch import MicroStep, Phase
from ds_tba.autograd.records import Forward, Records
from ds_tba.autograd.saved import Hooks, PassedThrough, Rematerialization, SavedCounted, SavedView, nbytes_of
from ds_tba.autograd.tensors import (
    Eligibility,
    eligibility,
    has_plain_storage,
    held_bytes,
    is_parameter,
    is_under_a_mode,
    uncompiled_hooks,
)
from ds_tba.device.accelerator import Accelerator
from ds_tba.storage.base import Always, Policy, Store
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
        released_bytes: without a budget, the bound of the device memory that backward has let go of and the device has
            not: see [Note: The budget].
    """

    def __init__(
        self,
        stores: Sequence[Store[Any]],
        device: torch.device | str,
        min_tensor_bytes: int,
        *,
        wait_for_staging: bool = False,
        accelerator: Accelerator | None = None,
        released_bytes: int = 256 << 20,
    ) -> None:
        self.stats = CacheStats()
        self._stores = tuple(stores)
        self._device = torch.device(device)
        self._min_tensor_bytes = min_tensor_bytes
        self._default_policy: Policy = Always(stores, wait=wait_for_staging, rematerialize=True)
        self.transfers = Transfers(self.stats, self._stores, self._device)
        self.records = Records(self.stats, self._default_policy, self.transfers, accelerator, released_bytes)
        self._lock = self.records.lock
        self._accelerator = accelerator
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
        is_recorded: bool = False,
    ) -> Iterator[None]:
        """A forward: what autograd saves inside goes through the cache.

        Args:
            policy: where it goes.
            around: makes the hooks that autograd calls from ours, which they call.
            lead: see ``Plan.prefetch_distance``.
            continues: the forward belongs to the micro-step of the last one; see [Note: Micro-steps].
            is_recorded: the micro-step is being recorded.
        """
        if not torch.is_grad_enabled():
            yield
            return
        if self.records.sites is not None:
            self.records.sites.begin_forward()
        with self._lock:
            self._finalizers.act()
            step = self.records.forward.micro_step
            if not (continues or step.is_interleaved):
                step = MicroStep()
                self.stats.micro_steps += 1
            step.begin_forward(lead)
            self.records.forward = Forward(step, policy or self._default_policy, is_recorded)
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
        counted = SavedCounted(self.records, tensor, nbytes, why.value)
        if self.records.sites is not None and why is not Eligibility.OF_GRAPH:
            self.records.sites.note(tensor, counted)
        return counted

    def eligibility_of(self, tensor: torch.Tensor) -> Eligibility:
        """Whether a tensor may leave device memory."""
        acts = self._stores or self.records.sites is not None
        if acts and torch._C._len_torch_dispatch_stack() and is_under_a_mode():
            return Eligibility.PARAMETER if is_parameter(tensor) else Eligibility.UNDER_A_MODE
        why = eligibility(tensor, self._device, self._min_tensor_bytes)
        accelerator = self._accelerator
        # Moving the memory of a graph frees nothing, and its next run writes there whoever has saved it.
        if (
            why is Eligibility.ELIGIBLE
            and accelerator is not None
            and (accelerator.is_capturing() or accelerator.is_of_graph(tensor.untyped_storage()))
        ):
            return Eligibility.OF_GRAPH
        return why

    def rematerialize(self, sites: Rematerialization | None) -> None:
        """Make storages again from others in backward instead of saving them, where that is proven; None: never."""
        self.records.sites = sites

    # ---- for the offloader and the controller -------------------------------------------------------------------

    @property
    def expects_forward(self) -> bool:
        """Whether one more forward belongs to the last micro-step; see [Note: Micro-steps]."""
        with self._lock:
            self._finalizers.act()
            return self.records.forward.micro_step.expects_forward

    def end_micro_step(self) -> None:
        """The micro-step is over, whatever is still saved: the next forward begins another.

        Raises:
            RematerializationError: what was made again in earlier steps is no longer what forward makes.
        """
        with self._lock:
            self._finalizers.act()
            self.records.forward.micro_step = MicroStep()
        self.records.read_comparisons(wait=True)
        self.records.keep_cheaper()
        self._finalizers.act_if_free()

    def settle(self) -> None:
        """Act on every deferred finalizer, and let go of what finished copies still hold."""
        with self._lock:
            self._finalizers.act()
            self.records.residency.releases.settle()
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

    def has_room(self, nbytes: int) -> bool:
        """Whether so many bytes more fit the budget, once room was made for them."""
        return self.records.has_room(nbytes)

    def count_again(self, tensor: torch.Tensor) -> None:
        """Count a tensor that a forward saves which runs again in backward, until it is free or backward is over."""
        if is_parameter(tensor) or not has_plain_storage(tensor):
            return
        self.records.wait_for_room(nbytes := held_bytes(tensor, self._device))
        with self._lock:
            self._finalizers.act()
            self.records.residency.count_again(tensor.untyped_storage(), nbytes)
        self._finalizers.act_if_free()

    def end_recomputations(self) -> None:
        """Backward is over, or has raised; see :meth:`Residency.end_recomputations`."""
        with self._lock:
            self._finalizers.act()
            self.records.residency.end_recomputations()
        self._finalizers.act_if_free()

    def limit_resident(self, nbytes: int | None, name: str = "") -> None:
        """Hold saved tensors in device memory within a budget from now on; see :meth:`Budget.limit`."""
        with self._lock:
            self.records.residency.budget.limit(nbytes, name)

    @property
    def live_records(self) -> int:
        """Saved storages that some graph still holds."""
        return self.records.live
