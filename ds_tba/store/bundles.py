"""Small storages share a slot, an extent and an I/O request: one request for each would cost most of the drive's rate.

[Note: Bundles] A small storage is copied into the open bundle, behind the others. When the next one does not fit, the
bundle is committed: written, read ahead and read as one storage of the NVMe store. Backward wants the members one after
the other, so what was read stays until each of them was handed out once. To hand one out again is to read again,
because its holder may have changed the bytes. The last bundle of a forward is still open when backward begins, and is
handed over from staging.
"""

from __future__ import annotations

import threading

import torch

from ds_tba.device.accelerator import Arrival
from ds_tba.errors import StateError
from ds_tba.storage.base import Loaded, Refusal, Store, Ticket
from ds_tba.storage.finalizers import FinalizerNotes
from ds_tba.storage.nvme import NvmeStore
from ds_tba.storage.ticket import SwapTicket

BUNDLE_BYTES = 4 << 20
BUNDLE_PART_OF_STAGING = 0.125
LARGEST_MEMBER_BYTES = 1 << 20
# What the allocators of accelerators guarantee; kernels may count on it.
MEMBER_ALIGNMENT_BYTES = 512


class Bundle:
    """Storages that share one ticket of the NVMe store. Changed only under the bundling store's lock."""

    __slots__ = ("arrival", "is_only_copy", "is_open", "members", "reading", "ticket", "used_bytes")

    def __init__(self, ticket: SwapTicket) -> None:
        self.ticket = ticket
        self.used_bytes = 0
        self.is_open = True
        self.members: list[MemberTicket] = []
        self.arrival: Arrival | None = None
        self.is_only_copy = False
        self.reading = 0  # how often the bytes were brought back

    @property
    def is_handed_out(self) -> bool:
        """Whether every member was handed out since the bytes were last brought back."""
        return all(member.handed_out_in == self.reading for member in self.members)


class MemberTicket(Ticket):
    """One small storage in a bundle."""

    __slots__ = ("bundle", "handed_out_in", "offset")

    def __init__(self, nbytes: int, store: BundlingStore, bundle: Bundle, offset: int) -> None:
        super().__init__(nbytes, store)
        self.bundle = bundle
        self.offset = offset
        self.handed_out_in = 0


class BundlingStore(Store[MemberTicket]):
    """Puts small storages into bundles, and passes all others on.

    Args:
        nvme: holds the bundles and the other storages; closed with this store.
    """

    def __init__(self, nvme: NvmeStore) -> None:
        self._nvme = nvme
        slots = nvme.ring.slots
        part = int(slots.capacity_bytes * BUNDLE_PART_OF_STAGING)
        self._bundle_bytes = min(BUNDLE_BYTES, part - part % slots.alignment_bytes)
        self._largest_bytes = min(LARGEST_MEMBER_BYTES, self._bundle_bytes // 2)
        self._notes: FinalizerNotes[MemberTicket] = FinalizerNotes(threading.Lock(), self._act_on_release)
        self._open: Bundle | None = None

    # ---- the contract -------------------------------------------------------------------------------------------

    def put(self, data: torch.Tensor, *, wait: bool) -> Ticket | Refusal:  # type: ignore[override]
        """As :meth:`Store.put`; the ticket of a large storage is the NVMe store's own."""
        nbytes = data.numel()
        if nbytes <= self._largest_bytes:
            with self._notes.locked():
                return self._put_member(data, nbytes, wait)
        if wait and self._nvme.staging_is_short_of(nbytes):
            self.commit()  # or it would wait for room that only we could free
        return self._nvme.put(data, wait=wait)

    def prefetch(self, ticket: MemberTicket) -> bool:
        with self._notes.locked():
            bundle = ticket.bundle
            here = bundle.is_open or (bundle.arrival is not None and ticket.handed_out_in != bundle.reading)
            return here or bundle.is_only_copy or self._nvme.prefetch(bundle.ticket)

    def get(self, ticket: MemberTicket, device: torch.device) -> Loaded:
        with self._notes.locked():
            bundle = ticket.bundle
            if bundle.is_open:
                arrival = self._nvme.peek(bundle.ticket, ticket.offset, ticket.nbytes, device)
            else:
                arrival = Arrival.done(self._part(self._brought_back(ticket, device), ticket))
                ticket.handed_out_in = bundle.reading
                self._let_go_if_handed_out(bundle)
        return Loaded(arrival, stored=True)

    def release(self, ticket: MemberTicket) -> None:
        self._notes.leave(ticket)

    def commit(self) -> None:
        """Write the open bundle now instead of when it is full."""
        with self._notes.locked():
            self._commit()

    def settle(self) -> None:
        self._notes.act_if_free()
        self._nvme.settle()

    def close(self) -> None:
        with self._notes.locked():
            self._open = None  # nothing can be added to it any more
        self._nvme.close()

    # ---- under the lock -----------------------------------------------------------------------------------------

    def _put_member(self, data: torch.Tensor, nbytes: int, wait: bool) -> MemberTicket | Refusal:
        if self._open is not None and self._open.used_bytes + nbytes > self._bundle_bytes:
            self._commit()
        if self._open is None:
            opened = self._nvme.open(self._bundle_bytes, data.device, wait=wait)
            if isinstance(opened, Refusal):
                return opened
            self._open = Bundle(opened)
        bundle = self._open
        member = MemberTicket(nbytes, self, bundle, bundle.used_bytes)
        # First of all the room: a copy that fails half-way may still be under way on the device.
        bundle.used_bytes += -(-nbytes // MEMBER_ALIGNMENT_BYTES) * MEMBER_ALIGNMENT_BYTES
        try:
            self._nvme.fill(bundle.ticket, member.offset, data)
        except BaseException:
            self._end_if_empty(bundle)
            raise
        bundle.members.append(member)
        return member

    def _commit(self) -> None:
        bundle, self._open = self._open, None
        if bundle is not None:
            bundle.is_open = False
            self._nvme.commit(bundle.ticket, bundle.used_bytes)

    def _brought_back(self, ticket: MemberTicket, device: torch.device) -> Bundle:
        bundle = ticket.bundle
        again = ticket.handed_out_in == bundle.reading
        if bundle.arrival is None or (again and not bundle.is_only_copy):
            bundle.arrival = None  # before the next reading, or two would lie in memory
            loaded = self._nvme.get(bundle.ticket, device)
            bundle.arrival, bundle.is_only_copy = loaded.arrival, not loaded.stored
            bundle.reading += 1
        return bundle

    def _part(self, bundle: Bundle, ticket: MemberTicket) -> torch.Tensor:
        """A member's bytes as a tensor of its own storage."""
        if bundle.arrival is None:
            raise StateError("a bundle that was brought back has no bytes; this is a bug in ds_tba")
        part = bundle.arrival.join()[ticket.offset : ticket.offset + ticket.nbytes]
        if self._nvme.ring.lends and not bundle.is_only_copy:
            return self._nvme.ring.as_tensor(part, ticket.nbytes)
        return self._nvme.ring.copies.clone(part)

    @staticmethod
    def _let_go_if_handed_out(bundle: Bundle) -> None:
        if bundle.is_handed_out and not bundle.is_only_copy:
            bundle.arrival = None

    def _act_on_release(self, ticket: MemberTicket) -> None:
        bundle = ticket.bundle
        bundle.members.remove(ticket)
        self._end_if_empty(bundle)
        if bundle.members:
            self._let_go_if_handed_out(bundle)

    def _end_if_empty(self, bundle: Bundle) -> None:
        if bundle.members:
            return
        if bundle.is_open:
            self._commit()  # the store gives a queued ticket up when its copies are done, and cancels the write
        bundle.arrival = None
        self._nvme.release(bundle.ticket)
