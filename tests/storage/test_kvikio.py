"""The backend ``kvikio`` over stand-ins of its modules, from device memory and from host memory."""

from __future__ import annotations

import errno
import os
import re
import sys
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import StoreFactory
from contracts.backend import MIB, BackendContract, DeviceStagingContract
from support.cuda_doubles import CompatMode, FakeKvikio
from support.doubles import EventAccelerator, raising
from support.stores import CPU, noise, stored

from ds_tba.errors import BackendUnavailableError, TransferError
from ds_tba.storage.backends import IoBackend, IoHandle
from ds_tba.storage.backends import kvikio as module
from ds_tba.storage.backends.kvikio import KvikioBackend
from ds_tba.storage.path import SwapFile


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeKvikio:
    fake = FakeKvikio()
    fake.install(monkeypatch)
    return fake


class TestFromDeviceMemory(DeviceStagingContract):
    @pytest.fixture
    def backend(self, fake: FakeKvikio) -> IoBackend:
        backend = KvikioBackend(4, "cuda")
        assert backend.stages_on_device
        return backend

    @pytest.fixture
    def registered(self, fake: FakeKvikio) -> dict[int, int]:
        return fake.registered

    @pytest.mark.parametrize("verb", ["write", "read"])
    @pytest.mark.parametrize(
        ("script", "said"),
        [
            (lambda what, number: "short", "at offset 0 was short: 524288 of 1048576 bytes"),
            (raising(OSError(errno.EIO, os.strerror(errno.EIO))),
             "of 1048576 bytes at offset 0 failed: .*Input/output error"),
        ],
        ids=["short", "failed"],
    )  # fmt: skip
    def test_what_goes_wrong_is_told(
        self, fake: FakeKvikio, handle: IoHandle, staging: torch.Tensor, verb: str, script: Any, said: str
    ) -> None:
        fake.script = script
        with pytest.raises(TransferError, match=f"{verb} {said}"):
            getattr(handle, verb)(staging[:MIB], 0)
        assert fake.busy == 0, "the memory is still being used"

    def test_a_file_that_cannot_be_opened_names_the_mode_and_the_way_out(self, backend: Any, file: SwapFile) -> None:
        backend._kvikio.CuFile = raising(RuntimeError("cuFile error: file descriptor is not registered"))
        with pytest.raises(BackendUnavailableError, match=r"GPUDirect Storage.*not registered.*KVIKIO_COMPAT_MODE=ON"):
            backend.open_handle(file.fd)
        assert list(file.directory.iterdir()) == []

    def test_staging_that_cannot_be_registered_names_the_number(self, backend: IoBackend, fake: FakeKvikio) -> None:
        fake.registrable_bytes = MIB
        with pytest.raises(BackendUnavailableError, match=r"staging \(2097152 bytes .*Set io.staging_bytes to less"):
            backend.allocate_staging(2 * MIB)

    def test_a_library_that_does_not_let_go_is_no_error_at_the_end(self, backend: Any) -> None:
        backend._kvikio.memory_deregister = raising(RuntimeError("cuFile error"))
        backend.free_staging(backend.allocate_staging(MIB))


class TestFromHostMemory(BackendContract):
    @pytest.fixture
    def backend(self, fake: FakeKvikio) -> IoBackend:
        fake.change({"compat_mode": CompatMode.ON})
        backend = KvikioBackend(4, "cuda")
        assert not backend.stages_on_device
        return backend

    def test_reads_can_overtake_a_long_transfer(self, backend: IoBackend, fake: FakeKvikio, handle: IoHandle) -> None:
        staging = backend.allocate_staging(40 * MIB)
        staging[:] = torch.randint(0, 256, (40 * MIB,), dtype=torch.uint8)
        wanted = staging.clone()
        handle.write(staging, 4096)
        assert fake.requests == [("write", 16 * MIB), ("write", 16 * MIB), ("write", 8 * MIB)]
        staging.zero_()
        handle.read(staging, 4096)
        assert torch.equal(staging, wanted)


# ---- which mode, and why --------------------------------------------------------------------------------------------


def test_real_gds_is_demanded_and_not_hoped_for(fake: FakeKvikio, monkeypatch: pytest.MonkeyPatch) -> None:
    """AUTO falls back for each file by itself, cuFile for each file system, and both say nothing."""
    backend = KvikioBackend(4, "cuda")
    assert backend.stages_on_device and "straight to the file" in backend.remark
    assert fake.settings["compat_mode"] is CompatMode.OFF
    assert os.environ["CUFILE_ALLOW_COMPAT_MODE"] == "false"
    assert fake.settings["auto_direct_io_read"] and fake.settings["auto_direct_io_write"]
    assert fake.settings["num_threads"] == 4
    KvikioBackend(9, "cuda")  # as many as there are lanes
    assert fake.settings["num_threads"] == 9


@pytest.mark.parametrize(
    ("device", "environment", "settings", "hidden", "words"),
    [
        ("cuda", {}, {}, {"nvidia_fs": False}, "the kernel module nvidia-fs is not loaded"),
        ("cuda", {}, {}, {"udev": False}, "/run/udev is not"),
        ("cuda", {}, {"compat_mode": CompatMode.ON}, {}, "KVIKIO_COMPAT_MODE"),
        ("cuda", {"PYTORCH_CUDA_ALLOC_CONF": "a:1,expandable_segments:True"}, {}, {}, "expandable segments"),
        ("cpu", {}, {}, {}, "the training device is cpu"),
    ],
)
def test_compatibility_mode_says_that_it_is_and_why(
    monkeypatch: pytest.MonkeyPatch, device: str, environment: Any, settings: Any, hidden: Any, words: str
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    fake = FakeKvikio(**hidden)
    fake.install(monkeypatch)
    fake.change(settings)
    backend = KvikioBackend(4, device)
    assert not backend.stages_on_device and fake.settings["compat_mode"] is CompatMode.ON
    assert backend.remark.startswith("compatibility mode, through host memory: ") and words in backend.remark
    if "nvidia_fs" not in hidden:  # if it cannot do without, cuFile says so when it opens the file
        fake.change({"compat_mode": CompatMode.AUTO, **settings})
        with pytest.raises(BackendUnavailableError, match=f'gds reaches .* cannot be: .*{re.escape(words)}.* "kvikio"'):
            KvikioBackend(4, device, direct=True)


def test_what_the_user_chose_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeKvikio(nvidia_fs=False)
    fake.install(monkeypatch)
    monkeypatch.setenv("CUFILE_ALLOW_COMPAT_MODE", "true")
    fake.change({"compat_mode": CompatMode.OFF, "num_threads": 64})
    assert KvikioBackend(4, "cuda").stages_on_device
    assert fake.settings["num_threads"] == 64 and os.environ["CUFILE_ALLOW_COMPAT_MODE"] == "true"


# ---- what is missing ------------------------------------------------------------------------------------------------


def test_without_a_driver_kvikio_is_not_even_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    real = module.driver_obstacle
    monkeypatch.setattr(module, "driver_obstacle", lambda: real("libnothing.so.1"))
    monkeypatch.setattr(module, "import_module", lambda name: pytest.fail(f"{name} was imported"))
    said = r"kvikio: there is no NVIDIA driver here \(libnothing.so.1 does not load\).*posix"
    with pytest.raises(BackendUnavailableError, match=said):
        KvikioBackend(4, "cuda")


@pytest.mark.parametrize(
    ("code", "devices", "said"), [(0, 0, "finds no device"), (100, 0, "CUDA error 100"), (0, 2, "None")]
)
def test_a_driver_without_a_device_is_told(tmp_path: Path, code: int, devices: int, said: str) -> None:
    source, library = tmp_path / "cuda.c", tmp_path / "libcuda.so.1"
    source.write_text(
        f"int cuInit(unsigned f) {{ return {code}; }} int cuDeviceGetCount(int *n) {{ *n = {devices}; return 0; }}"
    )
    if os.system(f"cc -shared -fPIC -o {library} {source} 2>/dev/null"):
        pytest.skip("no C compiler")
    assert said in str(module.driver_obstacle(str(library)))


def test_what_is_wrong_with_kvikio_is_told(fake: FakeKvikio, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(import_module("kvikio"), "__version__", "26.8.0")
        assert module.obstacle() == 'kvikio 26.8.0 is older than 26.10: pip install -U "ds_tba[gds]"'
    with monkeypatch.context() as patch:
        patch.delitem(sys.modules, "kvikio")
        patch.syspath_prepend(str(tmp_path))
        assert module.obstacle() == "kvikio is not installed (No module named 'kvikio'): pip install \"ds_tba[gds]\""
        (tmp_path / "kvikio.py").write_text("raise RuntimeError('Failure finding\\n libcufile.so.0')")
        assert "does not load (Failure finding libcufile.so.0)" in str(module.obstacle())
    assert module.obstacle() is None


def test_a_file_that_cannot_be_named_is_told_with_the_way_out(tmp_path: Path) -> None:
    """As the swap file where the file system has no O_TMPFILE: unlinked, and linked by no one again."""
    fd, name = tempfile.mkstemp(dir=tmp_path)
    Path(name).unlink()
    with pytest.raises(BackendUnavailableError, match=r'gds: cuFile opens .*without O_TMPFILE.*"backend": "aio"'):
        module.named(fd, "gds").__enter__()
    os.close(fd)
    assert list(tmp_path.iterdir()) == []


def test_the_swap_file_has_a_name_only_while_cufile_opens_it_and_no_disk_space_then(
    make_store: StoreFactory, fake: FakeKvikio, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A run that is killed while the file has a name leaves an empty file at most."""
    sizes, named = list[int](), module.named

    def watched(fd: int, backend: str) -> object:
        sizes.append(os.fstat(fd).st_blocks)
        return named(fd, backend)

    monkeypatch.setattr(module, "named", watched)
    store, data = make_store(KvikioBackend(4, "cuda"), accelerator=EventAccelerator(), paths=2), noise(MIB)
    for times in (1, 2):
        ticket = stored(store, data)
        assert sizes == [0, 0] * times and fake.open_files == 2
        assert not [path for path in tmp_path.rglob("*") if path.is_file()]
        assert torch.equal(store.get(ticket, CPU).data, data)
        store.release(ticket)
        assert store.give_back()
        assert not fake.registered and fake.open_files == fake.busy == 0
