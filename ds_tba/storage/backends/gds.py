"""DeepSpeed's ``gds_handle``: from device memory straight to the file, through cuFile.

References are to ``csrc/gds/py_lib`` of DeepSpeed 0.19.8. Its hazards, and how they are met here:

- Every error calls ``exit``. So the op first writes and reads staging in a process of its own (:func:`prove`), on the
  very directories. A drive that fails later still ends the training process: prefer kvikio.
- No call lets the GIL go, so transfers are cut into pieces, between which other threads run.
- The first handle writes ``local_cufile.json`` into the current directory: for that moment there is another one. It
  also points ``CUFILE_ENV_PATH_JSON`` at the literal name ``$PWD/local_cufile.json``, which cuFile does not find: only
  ``/etc/cufile.json`` counts.
- Memory is found by the nearest registered address below it, so memory outside staging is registered for its transfer.
- cuFile wants a name on disk for each transfer (``cufile.py``), so that the swap file has one as long as its handles
  are open, also beyond a process that was killed: the next run takes that file away.
- Short transfers are not seen, except by ``io.integrity``.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ds_tba.config import IO_ALIGNMENT_BYTES, AioConfig
from ds_tba.device.memory import aligned_memory
from ds_tba.errors import BackendUnavailableError, TransferError
from ds_tba.storage.backends import aio
from ds_tba.storage.backends.base import IoBackend, IoHandle
from ds_tba.storage.backends.cufile import Shared, driver_obstacle, lasting_name, move_cufile_log, named
from ds_tba.telemetry.stats import expanded

OP = "gds"
PROOF_LIMIT_S = 120.0
BUILD_LIMIT_S = 1800.0
LONGEST_REQUEST_BYTES = 16 << 20  # a few milliseconds without the GIL
_PROVEN = "ds_tba: gds wrote and read every directory"
_INSTEAD = 'set "io": {"backend": "kvikio"}, "aio" or "posix", or leave it out'
_PROOF = "import sys; sys.path.append(sys.argv[1]); from ds_tba.storage.backends import gds; gds.main(sys.argv[2])"


class GdsBackend(IoBackend):
    """DeepSpeed's GDS op, on a device of its own memory.

    Args:
        config: DeepSpeed's ``"aio"`` block.
        directories: those of ``nvme_path``, on which the op is proven first.
        staging_bytes: device memory that it must be able to register.
        device: the training device, such as ``"cuda"``.

    Raises:
        BackendUnavailableError: no driver, or the op cannot be built, or it did not move the bytes.
    """

    name = "gds"
    stages_on_device = True
    descriptors_per_handle = 1  # the op opens the file anew for every transfer
    remark = "DeepSpeed's op ends the process when a transfer fails; kvikio does not"

    def __init__(self, config: AioConfig, directories: Sequence[str], staging_bytes: int, device: str) -> None:
        problem = obstacle(device)
        if problem is not None:
            raise BackendUnavailableError(f"io.backend gds: {problem}; or {_INSTEAD}.")
        move_cufile_log()
        prove(config, directories, staging_bytes, current_device(device))
        self._config = config
        self._device = device
        self.alignment_bytes = IO_ALIGNMENT_BYTES * config.intra_op_parallelism
        self.request_bytes = max(LONGEST_REQUEST_BYTES // self.alignment_bytes, 1) * self.alignment_bytes
        self.block_bytes = min(config.block_size, self.request_bytes)
        self._op = _load_op()
        with _elsewhere():
            # Kept for ever: cuFile's driver closes with the last handle.
            self._owner = new_handle(self._op, config)
        self._staging: torch.Tensor | None = None
        self._names: dict[int, Shared[Path]] = {}
        self._wrote = False

    def open_handle(self, fd: int) -> IoHandle:
        name = self._names.get(fd)
        if name is None or not name.in_use:
            name = self._names[fd] = lasting_name(fd, self.name)
        name.join()
        if not self._wrote:
            self._write_once(str(name.resource))
        return _GdsHandle(self, new_handle(self._op, self._config), name)

    def allocate_staging(self, nbytes: int) -> torch.Tensor:
        self._staging = aligned_memory(nbytes, self._device)
        self._owner.pin_device_tensor(self._staging)
        return self._staging

    def free_staging(self, staging: torch.Tensor) -> None:
        if self._staging is not None:
            self._owner.unpin_device_tensor(staging)
            self._staging = None

    @contextmanager
    def registered(self, data: torch.Tensor) -> Iterator[None]:
        """Have ``data`` registered with cuFile: as a part of staging, or for this transfer."""
        if self._holds(data):
            yield
            return
        self._owner.pin_device_tensor(data)
        try:
            yield
        finally:
            self._owner.unpin_device_tensor(data)

    def _holds(self, data: torch.Tensor) -> bool:
        if self._staging is None:
            return False
        start = data.data_ptr() - self._staging.data_ptr()
        return start >= 0 and start + data.numel() <= self._staging.numel()

    def _write_once(self, name: str) -> None:
        """Make the op's first write before any lane; see ``AioBackend._write_once``, whose once flag is this one's."""
        data = aligned_memory(self.alignment_bytes, self._device)
        with self.registered(data):
            self._owner.sync_pwrite(data, name, 0)
        self._wrote = True


class _GdsHandle(IoHandle):
    def __init__(self, backend: GdsBackend, handle: Any, name: Shared[Path]) -> None:
        self._backend = backend
        self._handle = handle
        self._name = name

    def write(self, data: torch.Tensor, offset: int) -> None:
        self._move("write", self._handle.sync_pwrite, data, offset)

    def read(self, data: torch.Tensor, offset: int) -> None:
        self._move("read", self._handle.sync_pread, data, offset)

    def close(self) -> None:
        if self._handle is not None:
            self._handle = None
            self._name.leave()

    def _move(self, verb: str, call: Any, data: torch.Tensor, offset: int) -> None:
        with self._backend.registered(data):
            for start in range(0, data.numel(), self._backend.request_bytes):
                piece = data[start : start + self._backend.request_bytes]
                completed = call(piece, str(self._name.resource), offset + start)
                if completed != 1:
                    raise TransferError(
                        f"DeepSpeed's gds did not complete the {verb} of {piece.numel()} bytes at offset "
                        f"{offset + start} (it returned {completed})"
                    )


def obstacle(device: str) -> str | None:
    """The reason why the op cannot run here, with the repair; None if none is found without trying it."""
    problem = driver_obstacle()
    if problem is not None:
        return f"{problem}: install the driver"
    if device != "cuda":
        return f"it moves CUDA memory, and the training device is {device}"
    return None


def current_device(device: str) -> str:
    """The device with its number."""
    return f"{device}:{torch.cuda.current_device()}" if device == "cuda" else device


def new_handle(op: Any, config: AioConfig) -> Any:
    """A handle of the op."""
    return op.gds_handle(
        config.block_size,
        config.queue_depth,
        config.single_submit,
        config.overlap_events,
        config.intra_op_parallelism,
    )


@contextmanager
def _elsewhere() -> Iterator[None]:
    """Another current directory, taken away at the end."""
    here = os.open(".", os.O_RDONLY | os.O_DIRECTORY)
    try:
        with tempfile.TemporaryDirectory(prefix="ds_tba-") as directory:
            os.chdir(directory)
            try:
                yield
            finally:
                os.fchdir(here)
    finally:
        os.close(here)


def _load_op() -> Any:
    from deepspeed.ops.op_builder import GDSBuilder

    builder = GDSBuilder()
    if not aio.is_built(OP) and not builder.is_compatible(verbose=False):
        raise BackendUnavailableError(
            f"io.backend gds: DeepSpeed's {OP} op cannot be built here: install the CUDA toolkit with cuFile "
            f"(libcufile-dev), libaio-dev, g++ and ninja; or {_INSTEAD}."
        )
    return builder.load(verbose=False)


# ---- the proof, in a process of its own -----------------------------------------------------------------------------


def prove(config: AioConfig, directories: Sequence[str], staging_bytes: int, device: str) -> None:
    """Let another process build or load the op, register staging, and write and read a block in every directory.

    Raises:
        BackendUnavailableError: it failed, ended, or took too long; with the last line that it said.
    """
    task = {
        "config": config.model_dump(),
        "directories": [str(expanded(directory)) for directory in directories],
        "staging_bytes": staging_bytes,
        "device": device,
    }
    root = str(Path(__file__).parents[2])
    limit_s = PROOF_LIMIT_S if aio.is_built(OP) else BUILD_LIMIT_S
    run_proof([sys.executable, "-c", _PROOF, root, json.dumps(task)], limit_s)


def run_proof(command: Sequence[str], limit_s: float) -> None:
    """Run a proof and judge it by its exit status and by its last word.

    Raises:
        BackendUnavailableError: see :func:`prove`.
    """
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,  # so that compilers end with it
    ) as process:
        try:
            output, _ = process.communicate(timeout=limit_s)
            outcome = f"ended with status {process.returncode}"
        except subprocess.TimeoutExpired:
            outcome = f"was not done after {limit_s:g} s"
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    if process.returncode == 0 and _PROVEN in lines:
        return
    raise BackendUnavailableError(
        f"io.backend gds: DeepSpeed's op was tried in a process of its own, which {outcome}; its last words: "
        f"{lines[-1].rstrip('.') if lines else 'none'}. Repair that (gdscheck -p tells more), or {_INSTEAD}."
    )


def main(task: str) -> None:
    """Entry point of that process.

    Raises:
        TransferError: other bytes came back than were written.
    """
    parts = json.loads(task)
    config = AioConfig.model_validate(parts["config"])
    if parts["device"].startswith("cuda"):
        torch.cuda.set_device(parts["device"])
    op = _load_op()
    with _elsewhere():
        owner = new_handle(op, config)
    for directory in parts["directories"]:
        prove_on(owner, Path(directory), config, parts["staging_bytes"], parts["device"])
    sys.stdout.write(f"{_PROVEN}\n")


def prove_on(owner: Any, directory: Path, config: AioConfig, staging_bytes: int, device: str) -> None:
    """Write and read one block of registered memory in a directory.

    Raises:
        TransferError: other bytes came back than were written.
    """
    nbytes = IO_ALIGNMENT_BYTES * config.intra_op_parallelism
    staging = aligned_memory(-(-max(staging_bytes, 1) // nbytes) * nbytes, device)
    wanted = torch.arange(nbytes, device=device).remainder_(251).to(torch.uint8)
    block = staging[-nbytes:]
    owner.pin_device_tensor(staging)
    try:
        with _nameless(directory) as fd, named(fd, GdsBackend.name) as path:
            os.posix_fallocate(fd, 0, nbytes)
            name = str(path)
            block.copy_(wanted)
            _wait(device)
            written = owner.sync_pwrite(block, name, 0)
            block.zero_()
            _wait(device)
            read = owner.sync_pread(block, name, 0)
            if (written, read) != (1, 1) or not torch.equal(block, wanted):
                raise TransferError(f"{directory}: a block of {nbytes} bytes did not come back as it was written")
    finally:
        owner.unpin_device_tensor(staging)


@contextmanager
def _nameless(directory: Path) -> Iterator[int]:
    """A file as the swap file is, to be written and thrown away."""
    fd = os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        yield fd
    finally:
        os.close(fd)


def _wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)
