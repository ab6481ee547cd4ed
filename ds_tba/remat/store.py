"""Rematerialization as a store that keeps no bytes: it takes storages that are proven to follow from others.

Knows the cache, sites and recipes; cannot see plans. A ticket has the recipe, which holds views of its own (lent) of
its operands; ``get`` runs it, and ``release`` drops them.

[Note: Pending comparisons] A storage is compared before its bytes are released (``sites.py``). A device answers late,
and nobody waits for it: until then the storage stays, beside ``MAX_UNREAD_BYTES`` of others at most, and counts as one
that a copy holds. What comes while there are more is saved, and compared another time. A storage that turns out to
differ goes to the next store, or stays where none takes it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import torch

from ds_tba.core.cache import TensorCache
from ds_tba.core.saved import SavedCounted, SavedStorage, SavedView, TensorStore
from ds_tba.device.accelerator import Arrival, PendingCopy, is_out_of_memory, moment
from ds_tba.errors import StateError
from ds_tba.remat.recipe import Comparison, Makeable, Recipe, note
from ds_tba.remat.sites import Sites
from ds_tba.storage.base import Loaded, Ticket

# Bytes of storages that are held until a device has answered their comparison; one may be larger.
MAX_UNREAD_BYTES = 256 << 20


class RecipeTicket(Ticket):
    """One storage that is rematerialized, or about to be."""

    __slots__ = ("comparison", "recipe")

    def __init__(self, store: RematStore, recipe: Recipe, comparison: Comparison | None = None) -> None:
        super().__init__(recipe.nbytes, store)
        # Makes the bytes; None once nobody wants them, or they were found to differ. Changed under the cache's lock.
        self.recipe: Recipe | None = recipe
        # One that the device had not answered as the storage was taken; the bytes stay until it has.
        self.comparison = comparison

    @property
    def load_bytes(self) -> int:
        recipe = self.recipe
        return 0 if recipe is None else recipe.work_bytes


class PendingComparison(PendingCopy):
    """A comparison that the device may not have answered."""

    __slots__ = ("_queue", "comparison", "record", "ticket")

    def __init__(
        self,
        queue: deque[PendingComparison],
        comparison: Comparison,
        record: SavedStorage | None = None,
        ticket: RecipeTicket | None = None,
    ) -> None:
        self._queue = queue
        self.comparison = comparison
        self.record = record  # stays until the answer; None if the site was proven before
        self.ticket = ticket  # of the record
        self.nbytes, self.storage = 0 if record is None else record.nbytes, None

    def wait(self) -> None:
        """Wait for this answer, and for those before it: :meth:`RematStore.copies_out` reads them in order."""
        waiting = (*self._queue,)  # another thread adds and reads
        for pending in waiting[: waiting.index(self) + 1] if self in waiting else ():
            pending.comparison.done.synchronize()


class RematStore(TensorStore[RecipeTicket]):
    """The store. Its pending comparisons are read under the cache's lock."""

    def __init__(self, cache: TensorCache, sites: Sites) -> None:
        self.sites = sites
        self._cache = cache  # owner of the saved views that are operands, and of the stores that are next
        self._pending: deque[PendingComparison] = deque()

    # ---- in forward ---------------------------------------------------------------------------------------------

    def begin_forward(self) -> None:
        self.sites.begin_forward()

    def note(self, tensor: torch.Tensor, held: SavedCounted | SavedView) -> None:
        note(tensor, held)

    def take(self, tensor: torch.Tensor, *, is_wanted: bool) -> tuple[Makeable | None, RecipeTicket | None]:
        recipe = self.sites.recipe(tensor)
        if recipe is None:
            return None, None
        origin = Makeable(recipe.site, recipe.depth, recipe.sources)
        try:
            return origin, self._proven(tensor, recipe) if is_wanted else None
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            return origin, None  # there may be room another time

    def _proven(self, tensor: torch.Tensor, recipe: Recipe) -> RecipeTicket | None:
        """Take the storage of a tensor if its recipe gives the same bytes, by a comparison where one is due."""
        site, was_proven = recipe.site, recipe.site.is_proven
        if not self._may_prove(tensor, recipe):
            return None
        own = recipe.owned(self._cache)  # the graph may go, or be used up by another backward
        if not site.is_due:
            self.sites.left_out(own)  # from now on a difference is an error
            return RecipeTicket(self, own)
        comparison = self._compare(own, tensor)
        if comparison is None:  # refused, or no room to compare: what is due and unseen is saved
            return None
        if comparison.done.query():
            return RecipeTicket(self, own) if self.sites.read(comparison) else None
        if not was_proven:
            return RecipeTicket(self, own, comparison)
        self.sites.left_out(own)  # nothing of this forward waits for the answer
        self._pending.append(PendingComparison(self._pending, comparison))
        return RecipeTicket(self, own)

    def _may_prove(self, tensor: torch.Tensor, recipe: Recipe) -> bool:
        """Return whether there is room for a comparison now, and it is likely to be worth that."""
        site, nbytes = recipe.site, tensor.untyped_storage().nbytes()
        if 2 * recipe.work_bytes > self._cache.limit_bytes:
            return False
        unread_bytes = sum(one.nbytes for one in (*self._pending,))  # backward in another thread reads answers
        if not site.is_proven and unread_bytes and unread_bytes + nbytes > MAX_UNREAD_BYTES:
            return False
        return site.visits > 1 or not any(one.load_bytes for one in _leaves(recipe))  # a length may never recur

    def _compare(self, recipe: Recipe, tensor: torch.Tensor) -> Comparison | None:
        needed_bytes, operands = 2 * recipe.nbytes + recipe.scratch_bytes, set(recipe.records)
        if not self._cache.wait_for(needed_bytes + sum(one.load_bytes for one in operands), operands):
            return None
        try:
            with self._cache.scratch(needed_bytes):
                return self.sites.compare(recipe, tensor)
        finally:
            self._cache.end_early()  # what was loaded to compare would stay until backward

    def admit(self, record: SavedStorage, ticket: RecipeTicket) -> None:
        if ticket.comparison is None:
            self._give(record, ticket)
        else:
            self._pending.append(PendingComparison(self._pending, ticket.comparison, record, ticket))

    def _give(self, record: SavedStorage, ticket: RecipeTicket) -> None:
        self._cache.place(record, ticket)
        self._cache.meter.rematerialized_bytes += ticket.nbytes

    # ---- answers of the device ----------------------------------------------------------------------------------

    def settle(self) -> None:
        if self._pending:
            with self._cache.lock:
                self.copies_out()

    def copies_out(self) -> list[PendingCopy]:
        """Read the answers that have come; list the comparisons for whose answers a storage stays. Under the lock.

        Raises:
            RematerializationError: what was rematerialized in earlier steps is no longer what forward makes.
        """
        # In order, or a site's later answer would hide that an earlier one differs.
        while self._pending and self._pending[0].comparison.done.query():
            pending = self._pending.popleft()
            is_equal, record, ticket = self.sites.read(pending.comparison), pending.record, pending.ticket
            if record is None or ticket is None:
                continue
            if is_equal and record.is_kept:
                self._give(record, ticket)
                continue
            self.release(ticket)
            if record.is_kept:  # else nobody wants it any more
                self._cache.place(record)
        return [one for one in (*self._pending,) if one.record is not None and one.record.is_kept]

    def wait_for_answers(self) -> None:
        for pending in (*self._pending,):
            pending.comparison.done.synchronize()
        self.settle()

    # ---- in backward --------------------------------------------------------------------------------------------

    def get(self, ticket: RecipeTicket, device: torch.device) -> Loaded:
        recipe, accelerator = ticket.recipe, self.sites.accelerator
        if recipe is None:
            raise StateError("a storage was to be made after it was given up; this is a bug in ds_tba")
        with self._cache.scratch(recipe.scratch_bytes):
            made = self.sites.make(recipe)
        # The next consumer may be on another stream, and waits for the op.
        return Loaded(Arrival(accelerator, made, moment(accelerator), accelerator.current_stream()), stored=True)

    def release(self, ticket: RecipeTicket) -> None:
        ticket.recipe = None


def _leaves(recipe: Recipe) -> Iterator[SavedStorage]:
    """Yield the storages with bytes of their own that a storage is made of, however often it takes them."""
    for one in recipe.records:
        inner = one.ticket.recipe if isinstance(one.ticket, RecipeTicket) else None
        yield from (one,) if inner is None or one.loaded is not None else _leaves(inner)
