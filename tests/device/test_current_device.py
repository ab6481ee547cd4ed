"""The current device belongs to a thread: ours have that of their rank, and touch no other."""

from __future__ import annotations

import ast
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import StoreFactory
from support.doubles import DeviceBackend, ScriptedBackend, wait_for_writes

from ds_tba.config import AioConfig, OffloadConfig
from ds_tba.device.accelerator import CudaAccelerator, huge_page_memory
from ds_tba.offloader import ActivationOffloader

MIB = 1 << 20
PACKAGE = Path(__file__).parents[2] / "ds_tba"
RANK_DEVICE = 1


class Devices:
    """A module of torch with two devices; the current one is that of the thread, at first device 0, as CUDA's is.

    Attributes:
        contexts: for each device, the names of the threads that touched it.
    """

    def __init__(self) -> None:
        self._local = threading.local()
        self.contexts: dict[int, set[str]] = {}
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


class InHostMemory(CudaAccelerator):
    """As it is, but for tensors: those are in host memory, which knows no streams."""

    def __init__(self, devices: Devices) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "get_device_module", lambda kind: devices)
            super().__init__()

    def device(self) -> torch.device:
        return torch.device("cpu")

    def is_capturing(self) -> bool:
        return False

    def pinned(self, nbytes: int) -> torch.Tensor:
        return huge_page_memory(nbytes)

    def share(self, tensor: torch.Tensor, stream: Any) -> None:
        pass


@pytest.fixture
def api() -> Devices:
    """In the thread of the script, which has set its device."""
    api = Devices()
    api.set_device(RANK_DEVICE)
    return api


@pytest.mark.parametrize("backend", [lambda: ScriptedBackend(lambda verb, number: None), DeviceBackend])
def test_lanes_touch_the_device_of_their_rank_alone(api: Devices, backend: Any, make_store: StoreFactory) -> None:
    store = make_store(backend(), accelerator=InHostMemory(api))
    data = [torch.full((MIB,), number, dtype=torch.uint8) for number in range(4)]
    tickets = [store.put(one, wait=True) for one in data]
    wait_for_writes(store)
    for ticket, one in zip(tickets, data, strict=True):
        assert store.prefetch(ticket)  # type: ignore[arg-type]
        assert torch.equal(store.get(ticket, one.device).arrival.join(), one)  # type: ignore[arg-type]
    store.close()
    assert api.contexts.keys() == {RANK_DEVICE}
    assert {"ds_tba-write-0", "ds_tba-read-0"} <= api.contexts[RANK_DEVICE]


@pytest.mark.parametrize("placement", ["nvme", "host", "keep"])
def test_closing_touches_the_device_of_its_rank_alone(api: Devices, placement: str, tmp_path: Path) -> None:
    config = OffloadConfig(
        nvme_path=str(tmp_path), placement=placement, host_budget_bytes=8 * MIB, io={"staging_bytes": 4 * MIB}
    )
    offloader = ActivationOffloader(config, AioConfig(), InHostMemory(api))
    event = api.Event()
    event.record(api.current_stream(RANK_DEVICE))
    offloader.on_close(event.synchronize)
    offloader.close()
    assert event.query()
    assert api.contexts.keys() == {RANK_DEVICE}
    assert "ds_tba-close" in api.contexts[RANK_DEVICE]


def test_the_thread_that_closes_leaves_the_script_its_device(api: Devices, tmp_path: Path) -> None:
    """A script may change its device later; ours stay."""
    offloader = ActivationOffloader(OffloadConfig(nvme_path=str(tmp_path)), AioConfig(), InHostMemory(api))
    api.set_device(0)
    offloader.on_close(api.touch)
    offloader.close()
    assert api.current_device() == 0
    assert "ds_tba-close" in api.contexts[RANK_DEVICE] and "ds_tba-close" not in api.contexts.get(0, set())


def test_threads_are_made_where_their_device_is_set() -> None:
    """In ``new_thread``."""
    makers = {"Thread", "Timer", "ThreadPoolExecutor", "start_new_thread"}
    places = [
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", None)) in makers
    ]
    assert places == ["device/accelerator.py"]
