"""The current device belongs to a thread: ours have that of their rank, and touch no other."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import StoreFactory
from support.cuda_doubles import Devices
from support.doubles import DeviceBackend, ScriptedBackend, wait_for_writes
from support.offloaders import make

from ds_tba.device.accelerator import CudaAccelerator, huge_page_memory

MIB = 1 << 20
PACKAGE = Path(__file__).parents[2] / "ds_tba"
RANK_DEVICE = 1


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
    offloader = make(tmp_path, InHostMemory(api), placement=placement, host_budget_bytes=8 * MIB)
    event = api.Event()
    event.record(api.current_stream(RANK_DEVICE))
    offloader.on_close(event.synchronize)
    api.set_device(0)  # a script may change its device later; ours stay
    offloader.close()
    assert api.contexts.keys() == {RANK_DEVICE} and api.current_device() == 0
    assert "ds_tba-close" in api.contexts[RANK_DEVICE]
    assert event.query()


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
