"""Which tiers and which backend a run has; with host memory first and a drive behind it nothing is lost or kept."""

from __future__ import annotations

import errno
import os
import re
import resource
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.cuda_doubles import FakeKvikio
from support.doubles import raising
from support.machines import KILLED, run_python
from support.offloaders import finished
from support.stores import MIB
from torch.utils import cpp_extension

from ds_tba.config import AioConfig, OffloadConfig
from ds_tba.errors import BackendUnavailableError, ConfigError
from ds_tba.storage.backends import aio
from ds_tba.storage.tiers import Selection, select_backend


@pytest.mark.parametrize("budget_bytes", [MIB, None], ids=["a budget", "half of the free memory"])
@pytest.mark.parametrize("placement", ["host", "adaptive", "nvme"])
def test_the_drive_takes_what_a_small_host_tier_cannot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, placement: str, budget_bytes: int | None
) -> None:
    """The random trainings draw such a tier, and compare gradients."""
    for user in ("host", "tiers"):
        monkeypatch.setattr(f"ds_tba.storage.{user}.available_bytes", lambda: 3 * MIB)
    block: dict[str, Any] = {"placement": placement, "host_budget_bytes": budget_bytes, "rematerialize": False}
    offloader, most_bytes = finished(tmp_path, 3, written_first=True, **block), budget_bytes or 3 * MIB // 2
    report, host, line = offloader.report(), offloader._tiers.host, offloader.start_line()
    assert report.written_bytes > 0 and "no room in host_budget_bytes" not in report.kept_bytes_by_reason
    assert line.startswith("activations go to host memory") == (placement != "nvme")
    if placement == "nvme":  # which has room for all of it
        assert report.host_bytes == 0
    else:
        assert f"host memory, up to {most_bytes} bytes per rank" in line
        assert report.host_bytes > 0 and host is not None and MIB <= host.taken_bytes <= most_bytes


# ---- the backend ----------------------------------------------------------------------------------------------------


@pytest.fixture
def lock(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The lock of a just-in-time build of the op, which is there."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(aio, "_is_installed", lambda op: False)
    monkeypatch.setattr(cpp_extension, "FileBaton", object, raising=False)  # as before PyTorch 2.14
    monkeypatch.setattr(aio, "LOADING_S", 0.5)
    lock = tmp_path / aio.OP / "lock"
    lock.parent.mkdir()
    lock.touch()
    return lock


CALLS, CODES = ("io_setup", "io_submit", "io_pgetevents"), (1, 11, 38, KILLED)


@pytest.fixture(scope="module")
def forbidden(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What is selected and what the doctor says where a filter refuses a call, by call and error number."""
    directory = str(tmp_path_factory.mktemp("nvme"))
    refused = [(call, code) for call in CALLS for code in CODES]
    program = f"""
import logging, os, sys
from types import SimpleNamespace
import deepspeed
from ds_tba.cli import main
from ds_tba.config import AioConfig, OffloadConfig
from ds_tba.errors import BackendUnavailableError
from ds_tba.storage.backends import aio
from ds_tba.storage.tiers import select_backend
from support.machines import forbid

def select(call, code):
    forbid(call, code=code)
    for backend, zero in ((None, False), ("aio", False), (None, True)):
        config = OffloadConfig(nvme_path={directory!r}, io={{"staging_bytes": 1 << 20, "backend": backend}})
        try:
            chosen = select_backend(config, AioConfig(), zero_uses_nvme=zero, pinned=True)
            print("NULL", chosen.backend.name, chosen.reason)
        except BackendUnavailableError as error:
            print("NAMED", error)
    print("DOCTOR", main(["doctor", "--nvme-path", {directory!r}]))

aio.is_offered, aio.is_built, aio.AioBackend = lambda: True, lambda: True, lambda *_: SimpleNamespace(name="loaded")
logging.basicConfig(stream=sys.stdout, format="%(message)s", force=True)
for call, code in {[*refused, ("io_getevents", 1)]!r}:
    print(f"=== {{call}} {{code}}", flush=True)
    if os.fork() == 0:
        select(call, code)
        sys.stdout.flush()
        os._exit(0)
    os.wait()
"""
    done = run_python(program, timeout_s=600)
    assert done.returncode == 0, done.stdout + done.stderr
    parts = [part.partition("\n") for part in done.stdout.split("=== ")[1:]]
    return {name: said for name, _, said in parts}


def loaded(*_: object) -> SimpleNamespace:
    """Plays DeepSpeed's op, which takes minutes to build."""
    return SimpleNamespace(name="loaded")


@pytest.fixture
def op_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a program that trains under DeepSpeed, as far as the selection asks."""
    monkeypatch.setattr(aio, "is_offered", lambda: True)
    monkeypatch.setattr(aio, "is_built", lambda: True)


def select(*, zero: bool = False, pinned: bool = True, **io: object) -> Selection:
    config = OffloadConfig.model_validate({"nvme_path": ["/x", "/y"], "io": {"staging_bytes": MIB, **io}})
    return select_backend(config, AioConfig(), zero_uses_nvme=zero, pinned=pinned, device="cuda")


def test_null_is_posix_in_a_program_that_does_not_import_deepspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looking for its op would import it, which takes seconds."""
    monkeypatch.setattr(aio, "is_offered", lambda: False)
    monkeypatch.setattr(aio, "is_built", lambda: pytest.fail("asked DeepSpeed for its op"))
    chosen = select()
    assert chosen.backend.name == "posix" and "does not import DeepSpeed" in chosen.reason


def test_null_is_aio_where_zero_uses_it_or_it_is_built_else_posix(
    op_is_built: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(aio, "AioBackend", loaded)
    assert "is built" in select().reason
    monkeypatch.setattr(aio, "is_built", lambda: False)
    assert "ZeRO" in select(zero=True).reason
    chosen = select()
    assert chosen.backend.name == "posix" and "not built" in chosen.reason


def test_a_lock_that_stays_rules_aio_out_unless_it_is_named(
    op_is_built: None, monkeypatch: pytest.MonkeyPatch, lock: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """torch waits for that of a killed build for ever, and says nothing."""
    chosen = select()
    assert chosen.backend.name == "posix" and f"would wait for {lock}: delete that file if no" in chosen.reason
    assert not caplog.messages
    monkeypatch.setattr("deepspeed.ops.op_builder.AsyncIOBuilder.load", lambda self, verbose: "the op")
    assert aio._load_op() == "the op"
    (said,) = caplog.messages
    assert said.startswith(f"{lock} is there: another process builds") and "delete that file" in said


def test_another_rank_that_only_loads_is_waited_for(lock: Path) -> None:
    loading = threading.Timer(0.2, lock.unlink)
    loading.start()
    assert aio.lock_that_stays() is None and not lock.exists()
    loading.join()


def test_only_locks_of_builds_at_run_time_before_pytorch_2_14_count(
    monkeypatch: pytest.MonkeyPatch, lock: Path
) -> None:
    """Since then the kernel frees that of a killed build, and the file stays after each."""
    assert aio.build_locks() == [lock]
    with monkeypatch.context() as patch:
        patch.setattr(aio, "_is_installed", lambda op: True)  # it came with DeepSpeed's installation
        assert aio.build_locks() == []
    monkeypatch.delattr(cpp_extension, "FileBaton")
    assert aio.build_locks() == [] and lock.exists()


def test_memory_that_cannot_be_locked_rules_aio_out(op_is_built: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of staging where nothing pins it, and the page of the first write."""
    limit = [MIB]
    monkeypatch.setattr("ds_tba.storage.tiers.can_lock", lambda nbytes: nbytes <= limit[0])
    monkeypatch.setattr(aio, "AioBackend", loaded)
    chosen = select(pinned=False)
    assert chosen.backend.name == "posix" and "1052672 bytes" in chosen.reason
    assert select().backend.name == "loaded"
    with pytest.raises(BackendUnavailableError, match="ulimit -l unlimited"):
        select(backend="aio", pinned=False)
    limit[0] += 4096
    assert select(pinned=False).backend.name == "loaded"
    limit[0] = 0
    assert select().backend.name == "posix"


@pytest.mark.parametrize("name", ["gds", "kvikio"])
def test_gds_is_kvikio_that_never_goes_through_the_host(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    FakeKvikio(nvidia_fs=False).install(monkeypatch)  # which newer drivers do without
    chosen = select(backend=name)
    assert chosen.backend.name == name and chosen.backend.stages_on_device is (name == "gds")
    mode = "GPUDirect Storage" if name == "gds" else "compatibility mode, through host memory: "
    assert chosen.reason.startswith(f"named in io.backend; {mode}")


@pytest.mark.parametrize(("backend", "lanes", "needed"), [("posix", 64, 546), ("kvikio", 1, 42), ("kvikio", 64, 546)])
def test_descriptors_are_counted_first(monkeypatch: pytest.MonkeyPatch, backend: str, lanes: int, needed: int) -> None:
    FakeKvikio().install(monkeypatch)
    present = len(os.listdir("/proc/self/fd"))
    limits = [present + needed - 1, 1 << 20]
    monkeypatch.setattr("ds_tba.storage.tiers.resource.getrlimit", lambda which: tuple(limits))
    said = (
        rf"2 path\(s\) with {lanes} write and {lanes} read lanes need up to {needed} file descriptors \("
        rf".*{present} are open, .*may have {limits[0]}: .*ulimit -n {present + needed}\)"
    )
    with pytest.raises(ConfigError, match=said):
        select(backend=backend, write_lanes=lanes, read_lanes=lanes)
    for limits[0] in (present + needed, resource.RLIM_INFINITY):
        assert select(backend=backend, write_lanes=lanes, read_lanes=lanes).backend.name == backend


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("code", CODES)
def test_a_kernel_that_forbids_aio_is_found_before_the_op_runs(forbidden: dict[str, str], call: str, code: int) -> None:
    """With it the process would abort at its first write, or hang; see aio.py [Note: Asking the kernel]."""
    said = forbidden[f"{call} {code}"]
    why = "ends processes" if code == KILLED else rf"refuses {call}.*\({re.escape(os.strerror(code))}\)"
    assert re.search(rf"^NULL posix .*{why}.*seccomp profile allow io_setup", said, re.MULTILINE), said
    assert re.search(rf'^NAMED io.backend: .*{why}.*, or set "backend": "posix"', said, re.MULTILINE), said
    assert re.search(rf"^--    io.backend aio, .* would fail; null means posix: .*{why}", said, re.MULTILINE), said
    assert re.search(rf"^ZeRO's NVMe offload needs DeepSpeed's aio op, which .*{why}", said, re.MULTILINE), said
    assert "DOCTOR 0" in said


def test_calls_that_the_op_does_not_make_may_be_forbidden(forbidden: dict[str, str]) -> None:
    assert "NULL loaded" in forbidden["io_getevents 1"]


@pytest.mark.parametrize(
    ("fails", "error", "said"),
    [
        ("ds_tba.storage.backends.aio.AioBackend.__init__",
         BackendUnavailableError("backend aio: the kernel gave 8 of 10 contexts."), "gave 8 of 10 contexts"),
        ("deepspeed.ops.op_builder.AsyncIOBuilder.load", OSError(errno.EROFS, "Read-only file system"),
         r"Read-only file system.*Set TORCH_EXTENSIONS_DIR.*or set.*posix"),
    ],
    ids=["no context is left", "another user has built it"],
)  # fmt: skip
def test_an_op_that_cannot_be_had_means_posix(
    op_is_built: None, monkeypatch: pytest.MonkeyPatch, fails: str, error: Exception, said: str
) -> None:
    """Loading takes a lock in the cache: containers have one that root has made."""
    monkeypatch.setattr(fails, raising(error))
    chosen = select()
    assert chosen.backend.name == "posix" and re.search(said, chosen.reason)
    with pytest.raises(BackendUnavailableError, match=said):
        select(backend="aio")


def test_an_op_that_does_not_build_names_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aio, "is_built", lambda: False)
    monkeypatch.setattr("deepspeed.ops.op_builder.AsyncIOBuilder.is_compatible", lambda self, verbose: False)
    with pytest.raises(BackendUnavailableError, match=r'libaio-dev.*"backend": "posix"'):
        select(backend="aio")
