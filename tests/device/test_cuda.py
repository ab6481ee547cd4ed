"""What a CUDA device asks for beyond DeepSpeed's accelerator API; doubles stand for device, driver and torch."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.late_device import LateDevice
from torch import Tensor

from ds_tba.autograd.cache import TensorCache
from ds_tba.device import accelerator as module
from ds_tba.device.accelerator import Copies, CudaAccelerator, DeviceAccelerator, adapted, new_thread
from ds_tba.storage.host import HostStore

MIB = 1 << 20


class Api:
    """DeepSpeed's accelerator."""

    def __init__(self, name: str = "cuda") -> None:
        self._name = name
        self.events: list[dict[str, Any]] = []

    def device_name(self) -> str:
        return self._name

    def is_synchronized_device(self) -> bool:
        return False

    def current_device(self) -> int:
        return 1

    def set_device(self, index: int) -> None:
        pass

    def Event(self, **options: Any) -> Any:
        self.events.append(options)
        return SimpleNamespace(record=lambda stream: None)

    def Stream(self, device: int) -> Any:
        return SimpleNamespace(wait_event=lambda event: None)

    def current_stream(self, index: int) -> Any:
        return self.Stream(index)

    def stream(self, stream: Any) -> Any:
        return nullcontext()

    def pin_memory(self, tensor: Tensor) -> Tensor:
        raise AssertionError("with DS_PIN_MEMORY_BACKEND=native this is not registered with CUDA")


def test_other_devices_are_as_deepspeed_has_them() -> None:
    assert type(adapted(Api("xpu"))) is DeviceAccelerator and type(adapted(Api())) is CudaAccelerator


def test_threads_of_ours_spoil_no_capture_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    modes: dict[str, int] = {}

    def exchange(mode: Any) -> None:
        modes[threading.current_thread().name] = mode._obj.value

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(module.ctypes, "CDLL", lambda name: SimpleNamespace(cuThreadExchangeStreamCaptureMode=exchange))
    threads = [new_thread(adapted(Api()), lambda: None, f"ours-{number}") for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert modes == {"ours-0": 2, "ours-1": 2}  # and not that of the script


def test_a_driver_without_such_modes_ends_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(module, "CUDA_DRIVER", "libnothing.so.1")
    ran: list[int] = []
    thread = new_thread(adapted(Api()), lambda: ran.append(1), "ours")
    thread.start()
    thread.join()
    assert ran == [1]


def test_memory_is_pinned_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor + 1)
    assert adapted(Api()).pin_memory(torch.zeros(1)).item() == 1


def test_whoever_waits_for_an_event_sleeps() -> None:
    api = Api()
    Copies(adapted(api)).out(torch.zeros(8, dtype=torch.uint8), torch.zeros(8, dtype=torch.uint8))
    assert api.events and all(event == {"blocking": True} for event in api.events)


def test_the_pool_of_compiled_graphs_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    name, inside, outside = "torch._inductor.cudagraph_trees", torch.zeros(1), torch.zeros(1)
    accelerator = adapted(Api())
    monkeypatch.delitem(sys.modules, name, raising=False)
    assert not accelerator.is_of_graph(inside.untyped_storage())
    managers: dict[int, Any] = {}
    trees = SimpleNamespace(get_manager=lambda index, create_if_none_exists: managers.get(index))
    monkeypatch.setitem(sys.modules, name, trees)  # type: ignore[arg-type]
    assert not accelerator.is_of_graph(inside.untyped_storage())
    live = [inside.untyped_storage()._cdata]
    managers[1] = SimpleNamespace(live_cudagraph_pool_storages_in_curr_execution=lambda: live)
    assert accelerator.is_of_graph(inside.untyped_storage()) and not accelerator.is_of_graph(outside.untyped_storage())


def test_torch_still_has_what_is_asked() -> None:
    """Names of torch that are not public."""
    from torch._inductor import cudagraph_trees

    assert cudagraph_trees.get_manager.__code__.co_varnames[:2] == ("device_index", "create_if_none_exists")
    assert hasattr(cudagraph_trees.CUDAGraphTreeManager, "live_cudagraph_pool_storages_in_curr_execution")


class Graphs(LateDevice):
    """Memory of some storages belongs to a graph; or a graph is being captured."""

    def __init__(self, *, capturing: bool) -> None:
        super().__init__()
        self.capturing = capturing
        self.of_graph: set[int] = set()

    def is_capturing(self) -> bool:
        return self.capturing

    def is_of_graph(self, storage: torch.UntypedStorage) -> bool:
        return storage.data_ptr() in self.of_graph


@pytest.fixture(params=[False, True], ids=["in the pool", "while capturing"])
def device(request: pytest.FixtureRequest) -> Iterator[Graphs]:
    device = Graphs(capturing=request.param)
    yield device
    device.end()


def test_what_belongs_to_a_graph_is_kept(device: Graphs) -> None:
    store = HostStore(device, 8 * MIB)
    cache = TensorCache([store], "cpu", 1024, accelerator=device)
    x, y = (torch.randn(64, 64, requires_grad=True) for _ in range(2))
    inner = y.exp()
    device.of_graph.add(inner.untyped_storage().data_ptr())
    with cache.saving():
        loss = ((x.exp() * 2).sin() + inner.sin()).sum()
    moved_bytes = 0 if device.capturing else 2 * x.nbytes
    assert store.stats.offloaded_bytes == moved_bytes
    assert cache.stats.kept_bytes["of a CUDA graph"] == 3 * x.nbytes - moved_bytes
    loss.backward()
    found, x.grad = x.grad, None
    (x.exp() * 2).sin().sum().backward()
    assert found is not None and x.grad is not None and torch.equal(found, x.grad)
    device.capturing = False
    store.close()
