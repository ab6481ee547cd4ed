"""The posix backend: the contract, and its errors."""

from __future__ import annotations

import os

import pytest
import torch
from contracts.backend import MIB, BackendContract

from ds_tba.errors import TransferError
from ds_tba.storage.backends import IoBackend, IoHandle, PosixBackend
from ds_tba.storage.path import SwapFile


class TestPosix(BackendContract):
    @pytest.fixture
    def backend(self) -> IoBackend:
        return PosixBackend()

    def test_the_kernels_error_is_told(self, backend: IoBackend, file: SwapFile, staging: torch.Tensor) -> None:
        read_only = os.open(f"/proc/self/fd/{file.fd}", os.O_RDONLY | os.O_DIRECT)
        try:
            with pytest.raises(TransferError, match="write of 4096 bytes at offset 8192 failed"):
                backend.open_handle(read_only).write(staging[:4096], 8192)
        finally:
            os.close(read_only)

    def test_a_short_read_is_an_error_with_both_counts(self, handle: IoHandle, staging: torch.Tensor) -> None:
        with pytest.raises(TransferError, match="short: 4096 of 8192 bytes"):
            handle.read(staging[:8192], 64 * MIB - 4096)
