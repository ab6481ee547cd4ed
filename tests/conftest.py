"""Fixtures: a store in a temporary directory for each backend that this machine has."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from doubles import CpuAccelerator

from ds_tba.config import AioConfig
from ds_tba.io import aio
from ds_tba.io.base import IoBackend
from ds_tba.io.posix import PosixBackend
from ds_tba.store.nvme import Lanes, NvmeStore
from ds_tba.store.swap_file import SwapFile
from ds_tba.transfer import StagingRing

StoreFactory = Callable[..., NvmeStore]


def make_backend(name: str) -> IoBackend:
    if name == "posix":
        return PosixBackend()
    if not aio.is_built():
        pytest.skip("DeepSpeed's aio op is not built: make aio")
    return aio.AioBackend(AioConfig())


@pytest.fixture(params=["posix", pytest.param("aio", marks=pytest.mark.aio)])
def backend(request: pytest.FixtureRequest) -> IoBackend:
    return make_backend(request.param)


@pytest.fixture
def make_store(tmp_path: Path) -> Iterator[StoreFactory]:
    stores: list[NvmeStore] = []

    def make(
        backend: IoBackend | None = None,
        *,
        staging_bytes: int = 32 << 20,
        swap_file_bytes: int = 256 << 20,
        lanes: Lanes = Lanes(2, 2),  # noqa: B008 - frozen
        integrity: str = "sampled",
        paths: int = 1,
        accelerator: CpuAccelerator | None = None,
    ) -> NvmeStore:
        backend = backend or PosixBackend()
        files = []
        for index in range(paths):
            directory = tmp_path / f"nvme{len(stores)}.{index}"
            directory.mkdir()
            files.append(SwapFile(directory, swap_file_bytes))
        ring = StagingRing(accelerator or CpuAccelerator(), backend, staging_bytes)
        store = NvmeStore(files, backend, ring, lanes, integrity)
        stores.append(store)
        return store

    yield make
    for store in stores:
        store.close()
