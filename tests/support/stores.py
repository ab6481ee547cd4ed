"""Bytes, and tickets of an NVMe store, with the states that tests wait for."""

from __future__ import annotations

import torch

from ds_tba.storage.nvme import NvmeStore
from ds_tba.storage.space import PartState, SwapTicket
from support.disks import until

MIB = 1 << 20
CPU = torch.device("cpu")


def bytes_read(store: NvmeStore) -> int:
    return sum(path.meter.reads.drive_bytes for path in store.paths)


def noise(nbytes: int) -> torch.Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8)


def slots_in_use(store: NvmeStore) -> int:
    with store.lock:
        store.settle_copies()
        return store.ring.slots.used_bytes


def put(store: NvmeStore, data: torch.Tensor, *, wait: bool = False, item_bytes: int = 1) -> SwapTicket:
    ticket = store.put(data, wait=wait, item_bytes=item_bytes)
    assert isinstance(ticket, SwapTicket), ticket
    return ticket


def stored(store: NvmeStore, data: torch.Tensor, item_bytes: int = 1) -> SwapTicket:
    ticket = put(store, data, item_bytes=item_bytes)
    until(lambda: all(part.state is PartState.STORED for part in ticket.parts), "stored")
    return ticket


def nothing_is_held(store: NvmeStore) -> None:
    """Check that nothing is, once lanes are done with what nobody wants any more."""

    def is_at_rest() -> bool:
        store.settle()
        ahead = store.read_ahead
        held = (ahead.prefetched_bytes, ahead.unwritten_bytes, store.writes, store.ring.slots.used_bytes)
        return not any(held) and not any(path.extents.used_bytes for path in store.paths)

    until(is_at_rest, "nothing is held")
