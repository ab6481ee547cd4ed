"""What a CUDA device asks for beyond DeepSpeed's accelerator API; doubles stand for device, driver and torch."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import Closing
from support.late_device import LateDevice, LateEvent
from torch import Tensor

from ds_tba.config import AioConfig, OffloadConfig
from ds_tba.core.cache import TensorCache
from ds_tba.device import accelerator as module
from ds_tba.device.accelerator import Accelerator
from ds_tba.device.copies import Copies
from ds_tba.errors import ConfigError
from ds_tba.offloader import ActivationOffloader
from ds_tba.storage.backends import PosixBackend
from ds_tba.storage.host import HostStore
from ds_tba.storage.staging import StagingRing

MIB = 1 << 20


class Api:
    """Torch's module for CUDA devices."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []

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


def adapted(api: Api) -> Accelerator:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "get_device_module", lambda kind: api)
        return module.accelerator_of("cuda")


def test_memory_is_pinned_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []
    empty = torch.empty

    def pinned(nbytes: int, **options: Any) -> Tensor:
        asked.append(options)
        return empty(nbytes, dtype=torch.uint8)

    monkeypatch.setattr(torch, "empty", pinned)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: pytest.fail("pinned as a copy"))
    assert adapted(Api()).pinned(3).numel() == 3
    assert asked == [{"dtype": torch.uint8, "device": "cpu", "pin_memory": True}]


def test_pinned_memory_goes_back_where_pytorch_can_do_that(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else that of a closed engine stays pinned to the end of the process."""
    gone: list[str] = []
    monkeypatch.setattr(torch._C, "_host_emptyCache", lambda: gone.append("back"), raising=False)
    adapted(Api()).give_pinned_back()
    monkeypatch.delattr(torch._C, "_host_emptyCache")
    adapted(Api()).give_pinned_back()
    assert gone == ["back"]


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
def device(request: pytest.FixtureRequest, closing: Closing) -> Graphs:
    return closing(Graphs, LateDevice.end)(capturing=request.param)


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


@pytest.mark.parametrize("budget_bytes", [None, 40_000])
def test_no_event_is_asked_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch, budget_bytes: int | None) -> None:
    """In forward, or where the garbage collector comes upon an older graph: it would spoil the capture."""
    device = Graphs(capturing=False)
    store = HostStore(device, 8 * MIB)
    cache = TensorCache([store], "cpu", 1024, accelerator=device)
    cache.limit(budget_bytes, "the budget")
    x = torch.randn(64, 64, requires_grad=True)
    asked: list[str] = []
    for name in ("query", "synchronize"):
        usual = getattr(LateEvent, name)

        def watched(event: LateEvent, name: str = name, usual: Callable[[LateEvent], Any] = usual) -> Any:
            if device.capturing and "late-stream" not in threading.current_thread().name:
                asked.append(name)
            return usual(event)

        monkeypatch.setattr(LateEvent, name, watched)
    with cache.saving():
        y = x
        for _ in range(6):
            y = y.sin()
        device.capturing = True
        z = x[:8]
        for _ in range(4):
            z = z.cos()  # small ones, and larger ones
        w = x.exp().sin()
        del y
    device.capturing = False
    assert not asked
    del z, w
    device.synchronize()
    cache.settle()
    store.close()
    device.end()


def test_a_device_without_memory_is_not_asked_ahead_of_need_until_somebody_has_got_some(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its allocator gives back all that it caches before it says no."""
    device = LateDevice()
    store, cpu = HostStore(device, 8 * MIB), torch.device("cpu")
    tickets = [store.put(torch.zeros(4096, dtype=torch.uint8), wait=False) for _ in range(4)]
    asked: list[int] = []

    def allocate(nbytes: int, _device: torch.device) -> torch.Tensor:
        asked.append(nbytes)
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(device, "allocate", allocate)
        assert not any(store.prefetch(ticket) for ticket in tickets for _ in range(3))  # type: ignore[arg-type]
        assert len(asked) == 1
    assert not store.prefetch(tickets[1])  # type: ignore[arg-type]
    store.get(tickets[0], cpu)  # type: ignore[arg-type]
    assert store.prefetch(tickets[1])  # type: ignore[arg-type]
    assert all(torch.equal(store.get(ticket, cpu).data, torch.zeros(4096, dtype=torch.uint8)) for ticket in tickets)  # type: ignore[arg-type]
    device.synchronize()
    store.close()
    device.end()


def test_pinned_memory_that_no_drive_takes_is_refused() -> None:
    """As PyTorch's is with ``pinned_use_cuda_host_register:True``."""
    device = LateDevice()
    device.pinned = lambda nbytes: torch.empty(nbytes + 64, dtype=torch.uint8)[1:]  # type: ignore[method-assign]
    with pytest.raises(ConfigError, match="pinned_use_cuda_host_register"):
        StagingRing(device, PosixBackend(), MIB)
    device.end()


def test_closing_gives_pinned_memory_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else PyTorch keeps it for the next engine, which asks for another size."""
    device, order = LateDevice(), list[str]()
    monkeypatch.setattr(device, "give_pinned_back", lambda: order.append("pinned"))
    block = {"nvme_path": str(tmp_path), "placement": "nvme", "io": {"backend": "posix", "staging_bytes": 4 * MIB}}
    offloader = ActivationOffloader(OffloadConfig.model_validate(block), AioConfig(), device)
    nvme = offloader._tiers.nvme
    assert nvme is not None
    monkeypatch.setattr(nvme, "close", lambda close=nvme.close: (close(), order.append("store")))
    offloader.close()
    assert order == ["store", "pinned"]
    device.end()
