"""The contract of an I/O backend: a class of tests, which every backend passes. A subclass gives ``backend``."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch

from ds_tba.device.accelerator import huge_page_memory
from ds_tba.storage.backends import IoBackend, IoHandle
from ds_tba.storage.path import SwapFile
from ds_tba.storage.tiers import DESCRIPTORS_OF_LANE

MIB = 1 << 20


class BackendContract:
    """The promises of a backend that the store relies on. A subclass gives the fixture ``backend``."""

    @pytest.fixture
    def file(self, tmp_path: Path) -> Iterator[SwapFile]:
        file = SwapFile(tmp_path, 64 * MIB)
        file.grow(64 * MIB)
        yield file
        file.close()

    @pytest.fixture
    def handle(self, backend: IoBackend, file: SwapFile) -> Iterator[IoHandle]:
        with closing(backend.open_handle(file.fd)) as handle:
            yield handle

    @pytest.fixture
    def staging(self, backend: IoBackend) -> Iterator[torch.Tensor]:
        staging = backend.allocate_staging(16 * MIB)
        yield staging
        backend.free_staging(staging)

    def test_staging_is_aligned_touched_and_exact(self, staging: torch.Tensor) -> None:
        assert staging.data_ptr() % 4096 == 0
        assert staging.dtype is torch.uint8 and staging.numel() == 16 * MIB
        assert not staging.any()

    @pytest.mark.parametrize("nbytes", [4096, 12288, MIB, 5 * MIB + 4096])
    @pytest.mark.parametrize("offset", [0, 4096, 32 * MIB])
    def test_bytes_come_back(self, handle: IoHandle, staging: torch.Tensor, nbytes: int, offset: int) -> None:
        data = staging[:nbytes]
        data.copy_(torch.randint(0, 256, (nbytes,), dtype=torch.uint8))
        wanted = data.clone()
        handle.write(data, offset)
        data.zero_()
        handle.read(data, offset)
        assert torch.equal(data, wanted)

    def test_staging_is_kept_from_forked_children_only_while_it_is_staging(self, backend: IoBackend) -> None:
        """Direct I/O needs the first half; malloc, which gets the op's memory back, needs the second."""

        def kept_from_children() -> int:
            flags = [line for line in Path("/proc/self/smaps").read_text().splitlines() if line.startswith("VmFlags")]
            return sum(" dc" in line for line in flags)

        gc.collect()
        before = kept_from_children()
        staging = backend.allocate_staging(65536)  # small enough that malloc keeps it at free
        assert kept_from_children() > before
        backend.free_staging(staging)
        del staging
        assert kept_from_children() == before

    def test_neighbours_are_left_alone(self, handle: IoHandle, staging: torch.Tensor) -> None:
        staging[: 3 * MIB].fill_(7)
        handle.write(staging[: 3 * MIB], 0)
        staging[:MIB].fill_(9)
        handle.write(staging[:MIB], MIB)
        handle.read(staging[: 3 * MIB], 0)
        assert [int(staging[at]) for at in (MIB - 1, MIB, 2 * MIB - 1, 2 * MIB)] == [7, 9, 9, 7]

    def test_memory_outside_staging_can_be_read_into(self, handle: IoHandle, staging: torch.Tensor) -> None:
        staging[:MIB].fill_(5)
        handle.write(staging[:MIB], 0)
        target = huge_page_memory(MIB)
        handle.read_plainly(target, 0)
        assert bool((target == 5).all())

    def test_descriptors_of_a_handle_are_counted(self, backend: IoBackend, file: SwapFile, tmp_path: Path) -> None:
        with closing(SwapFile(tmp_path, MIB)) as other:
            other.grow(MIB)
            backend.open_handle(other.fd).close()  # whatever is opened once
            before = len(os.listdir("/proc/self/fd"))
            handles = [backend.open_handle(file.fd) for _ in range(3)]
            assert len(os.listdir("/proc/self/fd")) - before <= 3 * DESCRIPTORS_OF_LANE
            for handle in handles:
                handle.close()
            assert len(os.listdir("/proc/self/fd")) == before


class DeviceStagingContract(BackendContract):
    """The promises of one that stages in device memory; ``registered`` has each address that its library knows."""

    # Device memory is no memory of the process, so there is nothing to keep from its children.
    test_staging_is_kept_from_forked_children_only_while_it_is_staging = None  # type: ignore[assignment]

    def test_staging_is_registered_while_it_is_staging(self, backend: IoBackend, registered: dict[int, int]) -> None:
        staging = backend.allocate_staging(MIB)
        assert registered == {staging.data_ptr(): MIB}
        backend.free_staging(staging)
        assert not registered
