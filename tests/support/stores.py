"""Bytes, and tickets of an NVMe store, with the states that tests wait for."""

from __future__ import annotations

import threading

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


def put(store: NvmeStore, data: torch.Tensor, *, wait: bool = False) -> SwapTicket:
    ticket = store.put(data, wait=wait)
    assert isinstance(ticket, SwapTicket), ticket
    return ticket


def stored(store: NvmeStore, data: torch.Tensor) -> SwapTicket:
    ticket = put(store, data)
    until(lambda: all(part.state is PartState.STORED for part in ticket.parts), "stored")
    return ticket


def nothing_is_held(store: NvmeStore) -> None:
    until(lambda: slots_in_use(store) == 0, "staging to be free")
    until(lambda: not any(path.extents.used_bytes for path in store.paths), "extents to be free")
    assert all(path.extents.used_bytes == 0 for path in store.paths)
    ahead = store.read_ahead
    assert ahead.prefetched_bytes == ahead.unwritten_bytes == 0 and not store.writes


def store_is_empty(store: NvmeStore) -> bool:
    for _ in range(10_000):  # lanes may still be busy with what nobody wants any more
        with store.lock:
            store.settle_copies()
            if not any(path.extents.used_bytes for path in store.paths) and not store.ring.slots.used_bytes:
                return True
        threading.Event().wait(0.001)
    return False
