"""A real device: what the double of ``late_device.py`` stands for elsewhere, checked on CUDA through the real classes.

    python -m pytest -m gpu tests/gpu/test_gpu.py

Where it makes sense the same test also runs over the double, so that the test itself is known to work.
"""

from __future__ import annotations

import functools
import importlib
import os
import random
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from conftest import StoreFactory, make_backend
from gpu_rig import Rig, shows_something
from planners import PLANNERS
from support import hazards
from support import planned_training as controlled
from support.doubles import wait_for_writes
from support.hazards import Scenario, mutations, scenarios
from support.late_stores import Make, failing_writes, in_host_memory, over_nvme, slow_reads, slow_writes
from support.stores import bytes_read, nothing_is_held
from torch.nn import functional

from ds_tba.config import AioConfig, OffloadConfig
from ds_tba.core.cache import TensorCache
from ds_tba.errors import BackendUnavailableError, IncompatibleError
from ds_tba.offloader import ActivationOffloader
from ds_tba.plan.agreement import Alone
from ds_tba.plan.plan import Planner
from ds_tba.remat.sites import Sites
from ds_tba.remat.store import RematStore
from ds_tba.storage.backends import IoBackend, PosixBackend
from ds_tba.storage.backends.kvikio import KvikioBackend
from ds_tba.storage.base import Store
from ds_tba.storage.host import HostStore
from ds_tba.storage.integrity import Integrity
from ds_tba.storage.nvme import NvmeStore
from ds_tba.storage.tiers import Selection

__all__ = ["shows_something"]
MIB = 1 << 20
TESTS = Path(__file__).parents[1]
has_cuda = torch.cuda.is_available()
gpu = [pytest.mark.gpu, pytest.mark.skipif(not has_cuda, reason="no CUDA device")]
CUDA = pytest.param("cuda", marks=gpu)
on_both = pytest.mark.parametrize("rig", ["late", CUDA], indirect=True)
on_cuda = pytest.mark.parametrize("rig", [CUDA], indirect=True)


@pytest.fixture
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    """Named before ``make_store`` in a test, so that stores are closed before their device ends."""
    rig = Rig(request.param)
    with rig.exact():
        yield rig
    rig.end()


def cache_over(rig: Rig, *stores: Store, again: bool = False) -> TensorCache:  # type: ignore[type-arg]
    """A cache on the rig's device.

    Args:
        again: outputs may be made again instead of being saved.
    """
    device = rig.accelerator.device()
    cache = TensorCache(stores, device, hazards.MIN_BYTES, wait_for_staging=True, accelerator=rig.accelerator)
    if again:
        cache.rematerialize(RematStore(cache, Sites(cache, rig.accelerator)))
    return cache


def check(rig: Rig, scenario: Scenario, cache: TensorCache) -> None:
    one, other = (hazards.run(scenario, nullcontext, rig.device) for _ in range(2))
    if not all(torch.equal(hazards._bits(a), hazards._bits(b)) for a, b in zip(one, other, strict=True)):
        warnings.warn(f"{scenario.__name__}: without the cache, too, two runs differ on this device", stacklevel=2)
        return
    if cache.rematerialization is None:
        hazards.check(scenario, cache, rig.device)
    else:
        hazards.check_made_again(scenario, cache, rig.device)


# ---- gradients ------------------------------------------------------------------------------------------------------


STORES: dict[str, tuple[Make, ...]] = {
    "moved": (over_nvme, slow_writes, slow_reads, failing_writes, in_host_memory),
    "made again": (over_nvme, in_host_memory),
}


@scenarios
@pytest.mark.parametrize(
    ("rig", "outputs", "make"),
    [
        # as test_ordering.py and test_late_rematerialization.py have them
        pytest.param("late", "moved", over_nvme, marks=pytest.mark.thorough),
        pytest.param("late", "made again", in_host_memory, marks=pytest.mark.thorough),
        *(pytest.param("cuda", outputs, make, marks=gpu) for outputs in STORES for make in STORES[outputs]),
    ],
    indirect=["rig"],
)
def test_gradients_are_exact(rig: Rig, make_store: StoreFactory, outputs: str, make: Make, scenario: Scenario) -> None:
    store = make(make_store, rig.accelerator)  # type: ignore[arg-type]
    check(rig, scenario, cache_over(rig, store, again=outputs == "made again"))
    if outputs == "moved":
        assert store.stats.offloaded_bytes > 0 or scenario in hazards.MOVE_NOTHING or make is slow_writes
        if isinstance(store, NvmeStore):
            nothing_is_held(store)
    store.close()


@on_both
def test_each_op_on_the_device_is_made_again_to_the_bit(rig: Rig) -> None:
    """Without any store: what is not made again is kept."""
    cache = cache_over(rig, again=True)
    weight = torch.randn(64, 64, device=rig.device, requires_grad=True)
    ops: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "silu": functional.silu,
        "gelu": functional.gelu,
        "sin": torch.sin,
        "layer_norm": lambda x: functional.layer_norm(x, (64,)),
        "mul": lambda x: x * x,
    }
    for name, op in ops.items():
        made_in: list[int] = []
        for _ in range(4):
            made_bytes = cache.stats.rematerialized_bytes
            found = []
            for saving in (nullcontext, cache.saving):
                torch.manual_seed(5)
                with saving():
                    y = op(torch.randn(64, 64, device=rig.device) @ weight)
                    loss = (y.square() + y.sin()).sum()
                del y  # or backward would get it from there
                loss.backward()
                found += [loss.detach(), weight.grad]
                weight.grad = None
                del loss
            cache.end_micro_step()
            cache.rematerialization.sites.step += 1
            assert torch.equal(found[0], found[2]) and torch.equal(found[1], found[3]), name
            made_in.append(cache.stats.rematerialized_bytes - made_bytes)
        assert made_in[-1] > 0, name
    assert not cache.rematerialization.sites.summary()["refused_sites"].get("it differs when recomputed")


@on_both
@pytest.mark.parametrize("planner", PLANNERS.values(), ids=PLANNERS)
def test_gradients_are_exact_under_every_plan(
    rig: Rig, tmp_path: Path, planner: Planner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ds_tba.storage.tiers.select_backend", lambda *_, **__: Selection(PosixBackend(), "the test's"))
    expected = controlled.steps(controlled.model().to(rig.device), None, [controlled.ROWS] * controlled.STEPS)
    block = {"nvme_path": str(tmp_path), "host_budget_bytes": 4 * MIB, "min_tensor_bytes": 4096}
    block |= {"io": {"staging_bytes": 4 * MIB, "swap_file_bytes": 64 * MIB}, "activation_budget_bytes": 30 << 14}
    block |= {"recompute": True}
    offloader = ActivationOffloader(OffloadConfig.model_validate(block), AioConfig(), rig.accelerator)
    ours = controlled.model().to(rig.device)
    offloader.watch(ours, Alone(), planner)
    found = controlled.steps(ours, offloader, [controlled.ROWS] * controlled.STEPS)
    for one, other in zip(expected, found, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    report = offloader.report()
    assert report.plans >= 1 and report.offloaded_bytes + report.rematerialized_bytes + report.recomputed_bytes > 0
    offloader.close()


@pytest.mark.moves_nothing  # not each of them
@on_both
@mutations
@pytest.mark.parametrize("make", [over_nvme, in_host_memory])
def test_a_mutation_after_the_save_raises(
    rig: Rig, make_store: StoreFactory, make: Make, mutation: Callable[[hazards.Saving], torch.Tensor]
) -> None:
    store = make(make_store, rig.accelerator)  # type: ignore[arg-type]
    hazards.check_mutation(mutation, cache_over(rig, store), rig.device)
    store.close()


def kvikio_backend(*, from_device: bool, direct: bool = False) -> IoBackend:
    """Without GPUDirect Storage, transfers from the device go through cuFile's own compatibility mode, but for gds."""
    defaults = pytest.importorskip("kvikio.defaults")
    modes = importlib.import_module("kvikio").CompatMode
    defaults.set({"compat_mode": modes.OFF if from_device else modes.ON})
    backend = KvikioBackend(4, "cuda", direct=direct)
    assert backend.stages_on_device == from_device
    return backend


def aio_backend() -> IoBackend:
    pytest.importorskip("deepspeed")
    return make_backend("aio")


@pytest.mark.moves_nothing  # where the backend is not there
@on_cuda
@scenarios
@pytest.mark.parametrize("name", ["aio", "gds", "kvikio through the host", "kvikio from the device"])
def test_gradients_are_exact_over_other_backends(
    rig: Rig, make_store: StoreFactory, name: str, scenario: Scenario
) -> None:
    make = {
        "aio": aio_backend,
        "gds": functools.partial(kvikio_backend, from_device=True, direct=True),
        "kvikio through the host": functools.partial(kvikio_backend, from_device=False),
        "kvikio from the device": functools.partial(kvikio_backend, from_device=True),
    }[name]
    try:
        store = make_store(make(), accelerator=rig.accelerator, staging_bytes=4 * MIB, integrity="full")
    except BackendUnavailableError as error:
        pytest.skip(str(error))
    check(rig, scenario, cache_over(rig, store))
    assert store.stats.offloaded_bytes > 0 or scenario in hazards.MOVE_NOTHING
    nothing_is_held(store)


EXPANDABLE = "expandable_segments:True"


@pytest.mark.moves_nothing
@pytest.mark.parametrize(
    ("rig", "setting"),
    [
        pytest.param("late", EXPANDABLE, marks=pytest.mark.thorough),
        *(pytest.param("cuda", one, marks=gpu) for one in (EXPANDABLE, "backend:cudaMallocAsync")),
    ],
    indirect=["rig"],
)
def test_gradients_are_exact_in_a_process_with_another_allocator(rig: Rig, setting: str) -> None:
    """The setting counts before CUDA starts; the double has no such allocator, but the same program.

    What the program runs over the double ``test_gradients_are_exact_on_a_late_device`` runs in this process.
    """
    here = [str(TESTS), str(TESTS.parent / "benchmarks"), str(TESTS.parent)]
    paths = os.pathsep.join([*here, os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, str(TESTS / "gpu_rig.py"), "cuda" if rig.is_cuda else "late"],
        env={**os.environ, "PYTHONPATH": paths, "PYTORCH_CUDA_ALLOC_CONF": setting},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert f"{len(hazards.SCENARIOS)} scenarios and {len(hazards.MUTATIONS)} mutations are exact" in done.stdout


# ---- ordering -------------------------------------------------------------------------------------------------------


def one_step(rig: Rig, saving: hazards.Saving, seed: int) -> list[torch.Tensor]:
    """Several forwards, each in a stream of its own, and their backwards at once, each in a thread of its own."""
    chance, leaves, losses = random.Random(seed), [], []
    torch.manual_seed(seed)
    side = hazards.SIDE
    for stream in rig.streams():
        with stream:
            x = torch.randn(chance.choice((16, 200, 1000, 4000)), side, device=rig.device, requires_grad=True)
            weight = (torch.randn(side, side, device=rig.device) / 8).requires_grad_()
            with saving():
                y = x
                for _ in range(chance.randrange(2, 7)):
                    y = (y @ weight).tanh() + y.sin()
                losses.append(y.pow(2).sum())
            leaves += [x, weight]
            del y
    rig.join()
    with ThreadPoolExecutor(len(losses)) as threads:
        list(threads.map(lambda loss: loss.backward(), losses))
    rig.synchronize()
    return [leaf.grad.cpu() for leaf in leaves if leaf.grad is not None]


@on_both
@pytest.mark.parametrize("again", [False, True], ids=["moved", "made again"])
def test_many_steps_of_random_sizes_on_several_streams_and_threads(
    rig: Rig, make_store: StoreFactory, again: bool
) -> None:
    store = make_store(accelerator=rig.accelerator, staging_bytes=8 * MIB)
    cache = cache_over(rig, store, again=again)
    for seed in range(500 if rig.is_cuda else 12):
        expected, got = (one_step(rig, saving, seed) for saving in (nullcontext, cache.saving))
        assert len(got) == 6
        for index, (one, other) in enumerate(zip(expected, got, strict=True)):
            assert torch.equal(one, other), f"step {seed}: gradient {index} differs"
        cache.end_micro_step()
    assert bytes_read(store) > 0 and store.stats.offloaded_bytes > (6 if again else 12) * MIB
    assert (cache.stats.rematerialized_bytes > 0) is again
    hazards.check_nothing_is_left(cache, "the soak")
    nothing_is_held(store)


@on_cuda
def test_the_host_waits_for_nothing_on_the_device(rig: Rig, make_store: StoreFactory) -> None:
    store = make_store(accelerator=rig.accelerator, staging_bytes=64 * MIB)
    cache = cache_over(rig, store)
    x = torch.randn(512, 512, device="cuda", requires_grad=True)
    torch.cuda.set_sync_debug_mode("error")
    try:
        with cache.saving():
            y = x
            for _ in range(20):
                y = (y @ y).tanh()
            loss = y.sum()
        torch.cuda.set_sync_debug_mode("default")
        wait_for_writes(store)
        torch.cuda.set_sync_debug_mode("error")
        loss.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert bytes_read(store) > 0


# ---- memory ---------------------------------------------------------------------------------------------------------


@on_cuda
@pytest.mark.parametrize("tier", ["nvme", "host"])
def test_device_memory_is_free_within_the_forward(rig: Rig, make_store: StoreFactory, tier: str) -> None:
    """16 tensors of 8 MiB; at most 16 MiB of them may be on their way at once."""
    if tier == "nvme":
        store: NvmeStore | HostStore = make_store(accelerator=rig.accelerator, staging_bytes=16 * MIB)
    else:
        store = HostStore(rig.accelerator, 256 * MIB, ahead_bytes=16 * MIB)
    cache = cache_over(rig, store)
    x = torch.randn(2 * MIB, device="cuda", requires_grad=True)

    def forward() -> torch.Tensor:
        y = x
        for _ in range(17):
            y = y.sin()
        return y.sum()

    found = []
    for saving in (nullcontext, cache.saving):
        rest = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        with saving():
            loss = forward()
        found.append(torch.cuda.max_memory_allocated() - rest)
        if saving is not nullcontext:
            torch.cuda.synchronize()
            store.put(torch.zeros(4096, dtype=torch.uint8, device="cuda"), wait=True)  # lets go of what was copied
            assert torch.cuda.memory_allocated() - rest <= MIB
        loss.backward()
        found.append(x.grad.cpu())  # type: ignore[union-attr]
        x.grad, loss = None, None
    kept, expected, offloaded, got = found
    assert kept >= 16 * 8 * MIB and offloaded <= (16 + 3 * 8) * MIB and torch.equal(expected, got)
    store.close()


# ---- the rest -------------------------------------------------------------------------------------------------------


@pytest.mark.moves_nothing
@on_cuda
def test_a_capture_into_a_graph_is_refused(rig: Rig, tmp_path: Path) -> None:
    io = {"backend": "posix", "staging_bytes": MIB, "swap_file_bytes": 4 * MIB}
    config = OffloadConfig.model_validate({"nvme_path": str(tmp_path), "io": io, "min_tensor_bytes": 4096})
    offloader = ActivationOffloader(config, AioConfig(), rig.accelerator)
    x = torch.zeros(1, device="cuda")
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        x.add_(1)
        with pytest.raises(IncompatibleError, match="captured into a graph"):
            offloader.saving()
    with offloader.saving():
        x.add_(1)
    offloader.close()


@pytest.mark.moves_nothing
@on_both
@pytest.mark.parametrize("mode", ["sampled", "full"])
@pytest.mark.parametrize("pages", [1, 3, 2500])
def test_the_checksums_of_the_device_are_those_of_the_host(rig: Rig, pages: int, mode: str) -> None:
    data = torch.randint(0, 256, (pages * 4096,), dtype=torch.uint8)
    block_bytes = PosixBackend().block_bytes
    found = Integrity(mode, block_bytes, on_device=True).digest(data.to(rig.device))
    assert found == Integrity(mode, block_bytes).digest(data)
