"""Stores for tests of the order of copies: each on a device that is late, with drives that are slow or fail."""

from __future__ import annotations

from collections.abc import Callable

from conftest import StoreFactory

from ds_tba.storage.base import Store
from ds_tba.storage.host import HostStore
from ds_tba.storage.nvme import NvmeStore
from support.doubles import DeviceBackend, ScriptedBackend, fails, slow
from support.late_device import LateDevice

KIB, MIB = 1 << 10, 1 << 20
Make = Callable[[StoreFactory, LateDevice], Store]  # type: ignore[type-arg]


def over_nvme(make_store: StoreFactory, device: LateDevice) -> NvmeStore:
    return make_store(accelerator=device, staging_bytes=MIB)


def slow_writes(make_store: StoreFactory, device: LateDevice) -> NvmeStore:
    """Most is handed over from staging, beside the write or instead of it."""
    return make_store(ScriptedBackend(slow(0.01)), accelerator=device, staging_bytes=2 * MIB)


def slow_reads(make_store: StoreFactory, device: LateDevice) -> NvmeStore:
    return make_store(ScriptedBackend(slow(0.003, "read")), accelerator=device, staging_bytes=MIB)


def failing_writes(make_store: StoreFactory, device: LateDevice) -> NvmeStore:
    return make_store(ScriptedBackend(fails("write", first=20)), accelerator=device, staging_bytes=2 * MIB)


def device_staging(make_store: StoreFactory, device: LateDevice) -> NvmeStore:
    return make_store(DeviceBackend(), accelerator=device, staging_bytes=MIB)


def pieces(make_store: StoreFactory, device: LateDevice) -> NvmeStore:
    return make_store(accelerator=device, staging_bytes=256 * KIB)


def in_host_memory(make_store: StoreFactory, device: LateDevice) -> HostStore:
    return HostStore(device, 2 * MIB, ahead_bytes=256 * KIB)
