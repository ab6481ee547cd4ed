"""Stand-ins for what needs an NVIDIA driver: kvikio's modules, torch's. Host memory plays the device's.

They keep to what the originals do where our code could go wrong: requests end late and in another thread, a future
knows addresses only and answers once, submodules must be imported by name.
"""

from __future__ import annotations

import ctypes
import enum
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partialmethod
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from ds_tba.device.accelerator import aligned_memory
from ds_tba.storage.backends import kvikio as kvikio_backend

Script = Callable[[str, int], str | None]


CompatMode = enum.IntEnum("CompatMode", ["OFF", "ON", "AUTO"], start=0)


class IOFuture:
    """A future whose ``get`` returns the number of bytes, blocks, and may be called once."""

    def __init__(self, inner: Future[int]) -> None:
        self._inner: Future[int] | None = inner

    def get(self) -> int:
        inner, self._inner = self._inner, None
        if inner is None:
            raise RuntimeError("std::future_error: No associated state")
        return inner.result()


class FakeKvikio:
    """The three modules, put in the place of the real ones.

    Args:
        script: called with the verb and the number of the request; returns "short" to move half and say so, or raises.
    """

    def __init__(
        self, script: Script = lambda verb, number: None, *, nvidia_fs: bool = True, udev: bool = True
    ) -> None:
        self.script = script
        self.nvidia_fs = nvidia_fs
        self.udev = udev
        self.settings: dict[str, Any] = {
            "compat_mode": CompatMode.AUTO, "num_threads": 1, "task_size": 4 << 20, "auto_direct_io_read": False,
            "auto_direct_io_write": True,
        }  # fmt: skip
        self.registered: dict[int, int] = {}
        self.requests: list[tuple[str, int]] = []
        self.open_files = 0
        self.busy = 0
        self.registrable_bytes = 1 << 40
        self.lock = threading.Lock()
        self.pool = ThreadPoolExecutor(4)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        kvikio, defaults, driver = (ModuleType(name) for name in ("kvikio", "kvikio.defaults", "kvikio.cufile_driver"))
        kvikio.__dict__.update(
            __version__="26.10.0",
            __path__=[],
            CompatMode=CompatMode,
            CuFile=lambda path, flags="r": FakeCuFile(self, path, flags),
            memory_register=self.register,
            memory_deregister=lambda memory: self.registered.pop(memory.data_ptr()),
        )
        defaults.__dict__.update(
            get=self.settings.__getitem__, set=self.change, is_compat_mode_preferred=self.is_compat_mode_preferred
        )
        driver.__dict__.update(get={"is_gds_available": self.nvidia_fs}.__getitem__)
        for module in (kvikio, defaults, driver):
            monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setattr(kvikio_backend, "driver_obstacle", lambda: None)
        monkeypatch.setattr(kvikio_backend, "aligned_memory", lambda nbytes, device: aligned_memory(nbytes, "cpu"))
        monkeypatch.setenv("CUFILE_ALLOW_COMPAT_MODE", "to be restored")
        monkeypatch.delenv("CUFILE_ALLOW_COMPAT_MODE")

    def change(self, settings: dict[str, Any]) -> None:
        if not settings.keys() <= self.settings.keys():
            raise KeyError(settings.keys() - self.settings.keys())
        self.settings.update(settings)

    def is_compat_mode_preferred(self) -> bool:
        mode = self.settings["compat_mode"]
        return mode is CompatMode.ON or (mode is CompatMode.AUTO and not self.udev)

    def register(self, memory: torch.Tensor) -> None:
        if memory.numel() > self.registrable_bytes:
            raise RuntimeError("cuFile error at: buffer.cpp:24: device memory pinning failure")
        self.registered[memory.data_ptr()] = memory.numel()


class FakeCuFile:
    def __init__(self, kvikio: FakeKvikio, path: str, flags: str) -> None:
        if flags != "r+":
            raise ValueError("any other flag would not do for a swap file")
        self._kvikio = kvikio
        try:
            self._fds = [os.open(path, os.O_RDWR | os.O_CLOEXEC | direct) for direct in (os.O_DIRECT, 0)]
        except OSError as error:
            raise RuntimeError(f"Unable to open file: {error.strerror}") from None
        # cuFile opens once more, by its path, what it is given: that file must have a name.
        is_found = Path(f"/proc/self/fd/{self._fds[0]}").readlink().exists()
        if kvikio.settings["compat_mode"] is not CompatMode.ON and not is_found:
            raise RuntimeError("cuFile error at: compat_mode_manager.cpp:80: failed to obtain new file descriptor")
        kvikio.open_files += 1

    def close(self) -> None:
        for fd in self._fds:
            os.close(fd)
        self._kvikio.open_files -= 1

    def _submit(self, verb: str, memory: Any, size: int, file_offset: int, task_size: int) -> IOFuture:
        kvikio = self._kvikio
        address = self._address(memory)
        with kvikio.lock:
            number = sum(one == verb for one, _ in kvikio.requests)
            kvikio.requests.append((verb, size))

        def task() -> int:
            with kvikio.lock:
                kvikio.busy += 1
            try:
                time.sleep(0.001)
                action = kvikio.script(verb, number)
                nbytes = size // 2 // 4096 * 4096 if action == "short" else size
                call = os.pwritev if verb == "write" else os.preadv
                moved: int = call(self._fds[0], [(ctypes.c_char * nbytes).from_address(address)], file_offset)
                if verb == "read" and moved < nbytes:
                    raise RuntimeError("POSIX error on pread: EOF")
            except OSError as error:
                raise RuntimeError(f"POSIX error on p{verb}: {error.strerror}") from None
            finally:
                with kvikio.lock:
                    kvikio.busy -= 1
            return moved

        return IOFuture(kvikio.pool.submit(task))

    pwrite, pread = partialmethod(_submit, "write"), partialmethod(_submit, "read")

    def _address(self, memory: Any) -> int:
        if self._kvikio.settings["compat_mode"] is CompatMode.ON:
            return ctypes.addressof(ctypes.c_char.from_buffer(memory))  # TypeError without the buffer protocol
        if not isinstance(memory, torch.Tensor):
            raise ValueError("Non-CUDA buffers not supported")
        return memory.data_ptr()


class Devices:
    """A module of torch with two devices; the current one is that of the thread, at first device 0, as CUDA's is."""

    def __init__(self) -> None:
        self._local = threading.local()
        self.contexts: dict[int, set[str]] = {}  # for each device, the names of the threads that touched it
        self.blocking: list[bool] = []  # for each event, whether who waits for it sleeps
        devices = self

        class Stream:
            def __init__(self, device: int) -> None:
                self.device = device

            def wait_event(self, event: Event) -> None:
                pass

            def synchronize(self) -> None:
                with devices.stream(self):
                    devices.touch()

        class Event:
            """Is not done before somebody waits for it. Asked from any thread, it touches that one's current device."""

            def __init__(self, enable_timing: bool = False, blocking: bool = False) -> None:
                self._is_done = False
                devices.blocking.append(blocking)

            def record(self, stream: Stream) -> None:
                with devices.stream(stream):
                    devices.touch()

            def query(self) -> bool:
                devices.touch()
                return self._is_done

            def synchronize(self) -> None:
                devices.touch()
                self._is_done = True

        self.Stream, self.Event = Stream, Event
        self._default_streams = [Stream(0), Stream(1)]

    def touch(self) -> None:
        self.contexts.setdefault(self.current_device(), set()).add(threading.current_thread().name)

    def memory_stats(self, index: int) -> dict[str, int]:
        return {}

    def current_device(self) -> int:
        return getattr(self._local, "device", 0)

    def set_device(self, index: int) -> None:
        self._local.device = index

    def current_stream(self, index: int) -> Any:
        return self._default_streams[index]

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        before = self.current_device()
        self.set_device(stream.device)
        yield
        self.set_device(before)
