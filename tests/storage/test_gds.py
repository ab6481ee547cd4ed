"""The backend ``gds`` over a stand-in of DeepSpeed's op, and the proof that comes before it, in real processes."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import hazards
import pytest
import torch
from conftest import StoreFactory
from cuda_doubles import FakeGdsOp, ProcessExit
from doubles import EventAccelerator, Gate
from test_backends import MIB, DeviceStagingContract
from test_hazards import Scenario, cache_over, scenarios, store_is_empty
from test_store import CPU, noise, put, stored

from ds_tba.config import AioConfig
from ds_tba.errors import ActivationCorruptionError, BackendUnavailableError, TransferError
from ds_tba.storage.backends import gds
from ds_tba.storage.backends.base import IoBackend
from ds_tba.storage.backends.gds import GdsBackend
from ds_tba.storage.swap_file import SwapFile


@pytest.fixture
def op(monkeypatch: pytest.MonkeyPatch) -> FakeGdsOp:
    op = FakeGdsOp()
    op.install(monkeypatch)
    return op


def backend_in(directory: Path, intra_op_parallelism: int = 1) -> GdsBackend:
    return GdsBackend(AioConfig(intra_op_parallelism=intra_op_parallelism), [str(directory)], MIB, "cuda")


class TestGds(DeviceStagingContract):
    @pytest.fixture
    def backend(self, op: FakeGdsOp, tmp_path: Path) -> IoBackend:
        return backend_in(tmp_path)

    @pytest.fixture
    def registered(self, op: FakeGdsOp) -> dict[int, int]:
        return op.registered


def test_a_long_transfer_is_cut_so_that_others_get_the_gil(op: FakeGdsOp, tmp_path: Path) -> None:
    """Also where each of the op's threads must get an equal and aligned part."""
    backend = backend_in(tmp_path, intra_op_parallelism=3)
    file = SwapFile(tmp_path, 64 * MIB)
    file.grow(64 * MIB)
    staging = backend.allocate_staging(3 * 12 * MIB)
    staging[:] = torch.randint(0, 256, (staging.numel(),), dtype=torch.uint8)
    wanted = staging.clone()
    handle = backend.open_handle(file.fd)
    op.requests.clear()
    handle.write(staging, 0)
    longest = max(nbytes for _, nbytes in op.requests)
    assert len(op.requests) == 3 and longest <= 16 * MIB and longest % (3 * 4096) == 0
    staging.zero_()
    handle.read(staging, 0)
    assert torch.equal(staging, wanted)
    file.close()


@pytest.mark.parametrize("verb", ["write", "read"])
def test_what_the_op_refuses_is_an_error(op: FakeGdsOp, tmp_path: Path, verb: str) -> None:
    backend = backend_in(tmp_path)
    file = SwapFile(tmp_path, MIB)
    file.grow(MIB)
    staging = backend.allocate_staging(MIB)
    handle = backend.open_handle(file.fd)
    op.script = lambda what, number: "refuse"
    with pytest.raises(TransferError, match=rf"the {verb} of 1048576 bytes at offset 0 \(it returned -1\)"):
        getattr(handle, verb)(staging, 0)
    file.close()


def test_memory_beside_staging_is_registered_for_its_transfer(
    make_store: StoreFactory, op: FakeGdsOp, tmp_path: Path
) -> None:
    """The op would take the nearest registered address below it, and cuFile would end the process."""
    backend = backend_in(tmp_path)
    store = make_store(backend, staging_bytes=4 * MIB, accelerator=EventAccelerator())
    data = noise(3 * MIB)
    ticket = stored(store, data)
    gate = Gate()
    op.script = lambda verb, number: gate(verb, number)  # type: ignore[func-returns-value]
    filler = [put(store, noise(MIB)) for _ in range(4)]
    assert torch.equal(store.get(ticket, CPU).data, data)  # no room in staging
    assert len(op.registered) == 1
    gate.opened.set()
    del filler


def test_nothing_is_written_into_the_current_directory(
    op: FakeGdsOp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    backend_in(tmp_path)
    assert Path.cwd() == tmp_path and list(tmp_path.iterdir()) == []


def test_the_first_write_is_made_before_any_lane(op: FakeGdsOp, tmp_path: Path) -> None:
    """It logs a warning under a once flag, with the GIL: two lanes would deadlock there, as with aio."""
    backend = backend_in(tmp_path)
    op.requests.clear()
    file = SwapFile(tmp_path, MIB)
    file.grow(MIB)
    for _ in range(3):
        backend.open_handle(file.fd)
    assert op.requests == [("write", 4096)]
    file.close()


@scenarios
def test_gradients_are_exact(make_store: StoreFactory, op: FakeGdsOp, tmp_path: Path, scenario: Scenario) -> None:
    store = make_store(backend_in(tmp_path), staging_bytes=8 * MIB, accelerator=EventAccelerator())
    hazards.check(scenario, cache_over(store, wait=True))
    assert store_is_empty(store)
    store.close()
    assert not op.registered


def test_the_swap_file_has_a_name_as_long_as_its_handles_are_open(
    make_store: StoreFactory, op: FakeGdsOp, tmp_path: Path
) -> None:
    store = make_store(backend_in(tmp_path), accelerator=EventAccelerator())
    assert len(files_in(tmp_path)) == 1
    store.close()
    assert files_in(tmp_path) == []


def files_in(directory: Path) -> list[Path]:
    return [path for path in directory.rglob("*") if path.is_file()]


def test_a_write_that_the_op_lost_is_seen(make_store: StoreFactory, op: FakeGdsOp, tmp_path: Path) -> None:
    store = make_store(backend_in(tmp_path), accelerator=EventAccelerator())
    op.script = lambda verb, number: "drop" if verb == "write" else None
    ticket = stored(store, noise(MIB))
    with pytest.raises(ActivationCorruptionError):
        store.get(ticket, CPU)


# ---- what is missing ------------------------------------------------------------------------------------------------


def test_another_device_than_cuda_is_refused(op: FakeGdsOp, tmp_path: Path) -> None:
    with pytest.raises(BackendUnavailableError, match="it moves CUDA memory, and the training device is cpu"):
        GdsBackend(AioConfig(), [str(tmp_path)], MIB, "cpu")


# ---- the proof ------------------------------------------------------------------------------------------------------


def task(directory: Path) -> str:
    parts = {"config": AioConfig().model_dump(), "directories": [str(directory)], "staging_bytes": MIB, "device": "cpu"}
    return json.dumps(parts)


def test_the_proof_writes_and_reads_registered_memory(
    op: FakeGdsOp, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gds.main(task(tmp_path))
    assert op.requests == [("write", 4096), ("read", 4096)] and not op.registered
    assert gds._PROVEN in capsys.readouterr().out and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("verb", ["write", "read"])
@pytest.mark.parametrize("action", ["drop", "refuse"])
def test_the_proof_fails_where_bytes_do_not_come_back(op: FakeGdsOp, tmp_path: Path, verb: str, action: str) -> None:
    op.script = lambda what, number: action if what == verb else None
    with pytest.raises(TransferError, match="did not come back as it was written"):
        gds.main(task(tmp_path))


def test_the_backend_is_not_built_without_its_proof(op: FakeGdsOp, tmp_path: Path) -> None:
    op.script = lambda verb, number: "exit"
    with pytest.raises(ProcessExit):
        backend_in(tmp_path)
    assert op.handles == 1  # the proof's own


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (
            "import sys; print('loading', flush=True); sys.stderr.write('buffer register failed: x\\n'); sys.exit(1)",
            "ended with status 1; its last words: buffer register failed: x",
        ),
        ("import os; os._exit(0)", "ended with status 0; its last words: none"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "ended with status -11"),
        ("raise ImportError('libcufile.so.0: cannot open shared object file')", "ImportError: libcufile.so.0: cannot"),
    ],
)
def test_a_process_that_exits_is_an_obstacle_with_its_last_words(code: str, words: str) -> None:
    with pytest.raises(BackendUnavailableError) as raised:
        gds.run_proof([sys.executable, "-S", "-c", code], limit_s=60)
    assert words in str(raised.value) and '"backend": "kvikio"' in str(raised.value)


def test_a_process_that_proves_it_is_good() -> None:
    gds.run_proof([sys.executable, "-S", "-c", f"print({gds._PROVEN!r})"], limit_s=60)


def test_a_process_that_hangs_is_ended_with_all_its_own(tmp_path: Path) -> None:
    code = f"""
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
open({str(tmp_path / "pid")!r}, "w").write(str(child.pid))
print("nvcc is running", flush=True)
time.sleep(600)
"""
    with pytest.raises(BackendUnavailableError, match=r"was not done after 3 s; its last words: nvcc is running"):
        gds.run_proof([sys.executable, "-S", "-c", code], limit_s=3)
    pid = int((tmp_path / "pid").read_text())
    deadline = time.monotonic() + 30
    while running(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not running(pid)


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.engine
def test_the_real_proof_says_what_this_machine_lacks(tmp_path: Path) -> None:
    """The whole command, in a process that must find us and DeepSpeed; without a GPU it fails there, and not here."""
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    before = os.getcwd()
    with pytest.raises(BackendUnavailableError, match=r"ended with status 1; its last words: \w*Error"):
        gds.prove(AioConfig(), [str(tmp_path)], MIB, "cpu")
    assert os.getcwd() == before
