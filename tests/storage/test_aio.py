"""The aio backend: the contract, and what the kernel and the op refuse."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from contracts.backend import MIB, BackendContract
from support.machines import run_python

from ds_tba.config import AioConfig
from ds_tba.device.accelerator import huge_page_memory
from ds_tba.errors import BackendUnavailableError, TransferError
from ds_tba.storage.backends import IoBackend
from ds_tba.storage.backends.aio import AioBackend


@pytest.mark.aio
class TestAio(BackendContract):
    @pytest.fixture
    def backend(self, needs_aio: None) -> IoBackend:
        return AioBackend(AioConfig())

    def test_the_op_locks_no_copy_of_memory_outside_staging(self, handle: Any, staging: torch.Tensor) -> None:
        """It aborts where that would be more than the process may lock."""
        staging[:MIB].fill_(6)
        handle.write(staging[:MIB], 0)
        handle._handle = None
        target = huge_page_memory(MIB)
        handle.read_plainly(target, 0)
        assert bool((target == 6).all())

    def test_what_the_op_cannot_begin_plain_calls_do(self, handle: Any, staging: torch.Tensor) -> None:
        handle._name = "/nowhere/file"  # the op opens by name; at the limit of files it cannot
        staging[:MIB].fill_(4)
        handle.write(staging[:MIB], MIB)
        staging[:MIB].zero_()
        handle.read(staging[:MIB], MIB)
        assert bool((staging[:MIB] == 4).all())
        with pytest.raises(TransferError, match="short: 4096 of 8192 bytes"):
            handle.read(staging[:8192], 64 * MIB - 4096)

    def test_contexts_that_the_kernel_did_not_give_are_missed(self) -> None:
        """As where other ranks took the last requests in the moment before: the op says nothing, and aborts later."""
        program = """
from ds_tba.config import AioConfig
from ds_tba.errors import BackendUnavailableError
from ds_tba.storage.backends.aio import AioBackend
from support.machines import forbid
AioBackend(AioConfig(), 4)
forbid("io_setup", code=11)
try:
    AioBackend(AioConfig(), 4)
except BackendUnavailableError as error:
    print(error)
"""
        done = run_python(program)
        assert "the kernel gave 0 of 10 contexts" in done.stdout, done.stdout + done.stderr
        assert "fs.aio-max-nr=1048576" in done.stdout

    def test_a_first_write_that_cannot_begin_is_told(self, backend: IoBackend) -> None:
        with pytest.raises(BackendUnavailableError, match=r"cannot open the swap file.*ulimit -n.*posix"):
            backend.open_handle(1 << 20)


@pytest.mark.aio
def test_the_first_writes_of_two_lanes_do_not_deadlock(tmp_path: Path, needs_aio: None) -> None:
    """DeepSpeed's op logs a warning under a once flag at the first write; see AioBackend._write_once."""
    program = f"""
import logging, time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from deepspeed.utils import logger
class Slow(logging.Handler):
    def emit(self, record):
        time.sleep(1.0)  # lets the GIL go, as every handler may
logger.addHandler(Slow())
from ds_tba.config import AioConfig
from ds_tba.storage.backends.aio import AioBackend
from ds_tba.storage.path import SwapFile
backend, file = AioBackend(AioConfig()), SwapFile(Path({str(tmp_path)!r}), 1 << 20)
file.grow(1 << 20)
staging = backend.allocate_staging(1 << 20)
handles = [backend.open_handle(file.fd) for _ in range(2)]
with ThreadPoolExecutor(2) as pool:
    list(pool.map(lambda handle, at: handle.write(staging[:8192], at), handles, (0, 8192)))
print("good")
"""
    done = run_python(program, timeout_s=60)
    assert done.stdout.endswith("good\n"), done.stdout + done.stderr
