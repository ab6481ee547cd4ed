"""Rematerialization as a store that keeps no bytes: it takes storages that are proven to follow from others.

Knows the cache, sites and recipes; cannot see plans. A ticket has the recipe, which holds views of its own (lent) of
its operands; ``get`` runs it, and ``release`` drops them.

[Note: Pending comparisons] A storage is compared before its bytes are released (``sites.py``). A device answers late,
and nobody waits for it: until then the ticket holds the bytes as a pending copy does, beside ``MAX_UNREAD_BYTES`` of
others at most. What comes while there are more is saved, and compared another time. Bytes that turn out to differ go to
the next store, as those of a failed write do, or stay where none takes them.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import suppress

import torch

from ds_tba.core.cache import TensorCache
from ds_tba.core.saved import SavedCounted, SavedStorage, SavedView
from ds_tba.core.tensor_store import TensorStore
from ds_tba.core.tensors import unmodified, whole_storage
from ds_tba.device.accelerator import moment
from ds_tba.device.copies import Arrival, PendingCopy
from ds_tba.device.memory import is_out_of_memory
from ds_tba.errors import ActivationModifiedError, StateError
from ds_tba.remat.recipe import Comparison, Makeable, Recipe
from ds_tba.remat.search import note
from ds_tba.remat.sites import Sites
from ds_tba.storage.base import Loaded, Ticket

# Bytes of storages that are held until a device has answered their comparison; one may be larger.
MAX_UNREAD_BYTES = 256 << 20


class RecipeTicket(Ticket):
    """One storage that is rematerialized, or about to be. Changed only under the store's lock.

    Attributes:
        recipe: makes the bytes; None once the cache holds them, or nobody wants them any more.
        held: the bytes, until the device has answered their comparison.
        record: of the cache, from its first view on.
    """

    __slots__ = ("held", "recipe", "record")

    def __init__(self, nbytes: int, store: RematStore, recipe: Recipe, held: Arrival | None) -> None:
        super().__init__(nbytes, store)
        self.recipe: Recipe | None = recipe
        self.held = held
        self.record: SavedStorage | None = None

    @property
    def new_bytes(self) -> int:
        return 0 if self.held is not None else self.nbytes

    @property
    def load_bytes(self) -> int:
        recipe = self.recipe
        return 0 if self.held is not None or recipe is None else recipe.work_bytes


class PendingComparison(PendingCopy):
    """A comparison that the device may not have answered. Holds the bytes that wait for the answer, if any do.

    Attributes:
        ticket: storage whose bytes wait; None if the site was proven before.
    """

    __slots__ = ("_store", "comparison", "ticket")

    def __init__(self, store: RematStore, comparison: Comparison, ticket: RecipeTicket | None) -> None:
        self._store = store
        self.comparison = comparison
        self.ticket = ticket
        self.nbytes = 0 if ticket is None else ticket.nbytes

    def wait(self) -> None:
        """Read this answer, and all before it."""
        self._store.read_answers(until=self)


class RematStore(TensorStore[RecipeTicket]):
    """The store.

    Args:
        cache: owner of the saved views that are operands, and of the stores that are next.
        sites: find recipes, and prove that they give the same bytes.
    """

    def __init__(self, cache: TensorCache, sites: Sites) -> None:
        self.sites = sites
        self._cache = cache
        self._accelerator = sites.accelerator
        self._pending: deque[PendingComparison] = deque()
        self._differed: deque[RecipeTicket] = deque()
        self._lock = threading.Lock()

    # ---- in forward ---------------------------------------------------------------------------------------------

    def begin_forward(self) -> None:
        self.sites.begin_forward()

    def note(self, tensor: torch.Tensor, held: SavedCounted | SavedView) -> None:
        note(tensor, held)
        if isinstance(held, SavedView) and isinstance(held.record.ticket, RecipeTicket):
            held.record.ticket.record = held.record

    def take(self, tensor: torch.Tensor, *, is_wanted: bool) -> tuple[Makeable | None, RecipeTicket | None]:
        recipe = self.sites.recipe(tensor)
        if recipe is None:
            return None, None
        origin = Makeable(recipe.site, recipe.depth, recipe.sources)
        return origin, self._proven(tensor, recipe) if is_wanted else None

    def _proven(self, tensor: torch.Tensor, recipe: Recipe) -> RecipeTicket | None:
        """Take the storage of a tensor if its recipe gives the same bytes, by a comparison where one is due."""
        site, was_proven = recipe.site, recipe.site.is_proven
        own = self._own(recipe) if self._may_prove(tensor, recipe) else None
        if own is None:
            return None
        if not site.is_due:
            self.sites.left_out(own)  # from now on a difference is an error
            return self._new_ticket(own, None)
        comparison = self._compare(own, tensor)
        if comparison is None:  # refused, or no room to compare: what is due and unseen is saved
            return None
        if comparison.is_done:
            return self._new_ticket(own, None) if self.sites.read(comparison) else None
        if was_proven:  # nothing of this forward waits for the answer
            self.sites.left_out(own)
        ticket = self._new_ticket(own, None if was_proven else tensor)
        self._pending.append(PendingComparison(self, comparison, None if was_proven else ticket))
        return ticket

    def _may_prove(self, tensor: torch.Tensor, recipe: Recipe) -> bool:
        """Return whether there is room for a comparison now, and it is likely to be worth that."""
        site, nbytes = recipe.site, tensor.untyped_storage().nbytes()
        if 2 * recipe.work_bytes > self._cache.limit_bytes:
            return False
        unread_bytes = sum(one.nbytes for one in self.copies_out())
        if not site.is_proven and unread_bytes and unread_bytes + nbytes > MAX_UNREAD_BYTES:
            return False
        return site.visits > 1 or not any(one.load_bytes for one in _leaves(recipe))  # a length may never recur

    def _own(self, recipe: Recipe) -> Recipe | None:
        """Return the recipe with operands of its own: the graph may go, or be used up by another backward."""
        cache = self._cache
        try:
            recipe = recipe.copied(cache)  # of parameters: their owner may change them at any time
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            return None
        with cache.lock:
            return recipe.bound()

    def _compare(self, recipe: Recipe, tensor: torch.Tensor) -> Comparison | None:
        needed_bytes, operands = 2 * recipe.steps[-1].nbytes + recipe.scratch_bytes, set(recipe.records())
        if not self._cache.wait_for(needed_bytes + sum(one.load_bytes for one in operands), operands):
            return None
        try:
            with self._cache.scratch(needed_bytes):
                return self.sites.compare(recipe, tensor)
        finally:
            self._cache.end_early()  # what was loaded to compare would stay until backward

    def _new_ticket(self, recipe: Recipe, source: torch.Tensor | None) -> RecipeTicket:
        """Take a storage, whose bytes are held where a comparison is not answered yet."""
        held = None if source is None else self._arrival(whole_storage(source))
        ticket = RecipeTicket(recipe.steps[-1].nbytes, self, recipe, held)
        if held is None:
            self._add(ticket)
        return ticket

    def _add(self, ticket: RecipeTicket) -> None:
        """Count a storage whose bytes are not saved."""
        with self._lock:
            if ticket.recipe is not None:  # else it was released before the answer came
                ticket.held = None
                # Not stats: it acts on ends, which release tickets of this store under its lock.
                self._cache.meter.rematerialized_bytes += ticket.nbytes

    def _arrival(self, data: torch.Tensor) -> Arrival:
        """Bytes that the calling thread's current stream makes; the next consumer may be on another one."""
        device = self._accelerator
        if device.is_synchronous:
            return Arrival.done(data)
        return Arrival(device, data, moment(device), device.current_stream())  # other consumers wait for the op

    # ---- answers of the device ----------------------------------------------------------------------------------

    def settle(self) -> None:
        self.read_answers(until=None)
        while self._differed:
            with self._lock:
                ticket = self._differed.popleft() if self._differed else None  # another thread may have taken it
            record = None if ticket is None else ticket.record
            if ticket is None or record is None:
                continue
            with suppress(ActivationModifiedError):  # raised again where backward wants it
                self._cache.hold(record)
                self.release(ticket)

    def read_answers(self, until: PendingComparison | None) -> None:
        """Read the answers that have come, and wait for those up to ``until``. May be called under the cache's lock.

        Raises:
            RematerializationError: what was rematerialized in earlier steps is no longer what forward makes.
        """
        while True:
            with self._lock:
                is_wanted = until is not None and until in self._pending  # another thread may have read it
                if not self._pending or not (is_wanted or self._pending[0].comparison.is_done):
                    return
                pending = self._pending.popleft()
            is_equal, ticket = self.sites.read(pending.comparison), pending.ticket  # without the lock: it may wait
            if ticket is not None and is_equal:
                self._add(ticket)
            elif ticket is not None:
                with self._lock:
                    ticket.recipe = None
                    self._differed.append(ticket)

    def copies_out(self) -> list[PendingCopy]:
        with self._lock:
            waiting = [one for one in self._pending if one.ticket is not None and one.ticket.held is not None]
            return list[PendingCopy](waiting)

    def wait_for_answers(self) -> None:
        while self._pending:
            self.read_answers(until=self._pending[-1])
        self.settle()

    # ---- in backward --------------------------------------------------------------------------------------------

    def get(self, ticket: RecipeTicket, device: torch.device) -> Loaded:
        with self._lock:
            held, recipe = ticket.held, ticket.recipe
        if held is not None:
            unmodified(held.join(), held.version)  # it is the user's memory still, and may have been changed
            return Loaded(held, stored=True)
        if recipe is None:
            raise StateError("a storage was to be made after it was given up; this is a bug in ds_tba")
        with self._cache.scratch(recipe.scratch_bytes):
            return Loaded(self._arrival(self.sites.make(recipe)), stored=True)

    def release(self, ticket: RecipeTicket) -> None:
        with self._lock:
            ticket.recipe = ticket.held = ticket.record = None


def _leaves(recipe: Recipe) -> Iterator[SavedStorage]:
    """Yield the storages with bytes of their own that a storage is made of, however often it takes them."""
    for one in recipe.records():
        inner = one.ticket.recipe if isinstance(one.ticket, RecipeTicket) and one.ticket.held is None else None
        yield from (one,) if inner is None or one.loaded is not None else _leaves(inner)
