"""The resources that a plan is made from: copies, paths as they are now, and the slowest of several ranks."""

from __future__ import annotations

import threading
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import StoreFactory
from support.doubles import Clock, CpuAccelerator, EventAccelerator
from support.late_device import LateDevice
from support.modelled_drive import ModelledDrive

from ds_tba.config import AioConfig, OffloadConfig
from ds_tba.device.accelerator import MemoryMeter
from ds_tba.device.copies import Copies
from ds_tba.errors import StateError
from ds_tba.offloader import _measure_together
from ds_tba.plan.agreement import Alone, Value
from ds_tba.plan.rates import LINK_FRACTION, MEASURING_FRACTION, Machine, Rates
from ds_tba.plan.trace import PathRates, Resources, slowest
from ds_tba.stats import Kind, PathMeter
from ds_tba.storage.codec import BlockIo, Codec
from ds_tba.storage.nvme import NvmeStore
from ds_tba.storage.probe import DriveProbe
from ds_tba.storage.staging import TIMES, measure_copies
from ds_tba.storage.tiers import Tiers

MIB = 1 << 20
IO = {"backend": "posix", "staging_bytes": 8 << 20, "swap_file_bytes": 64 << 20}


def drives_of(store: NvmeStore) -> DriveProbe:
    return DriveProbe(store, store.io)


class Paced(CpuAccelerator):
    """Copies take so many seconds of a clock, one after the other."""

    def __init__(self, clock: Clock, *took_s: float) -> None:
        self.clock = clock
        self.took_s = list(took_s)

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        super().copy(source, target)
        self.clock.now_s += self.took_s.pop(0)


def test_the_best_copy_each_way_counts() -> None:
    clock = Clock()
    device = Paced(clock, 99.0, 4.0, 3.0, 2.0, 5.0, 6.0, 9.0, 0.5, 9.0, 9.0, 9.0)
    found = measure_copies(device, Copies(device), torch.zeros(MIB, dtype=torch.uint8), clock)
    assert (found.out_bytes_per_s, found.in_bytes_per_s) == (MIB / 2.0, MIB / 0.5)
    assert TIMES == 5 and not device.took_s


def test_an_asynchronous_copy_has_ended_before_its_time_is_taken() -> None:
    clock = Clock()

    class Accelerator(EventAccelerator):
        """A copy takes its time when somebody waits for it."""

        def __init__(self) -> None:
            super().__init__(threading.Event())
            self.under_way = 0
            self.new_event.synchronize = lambda _: self.end()  # type: ignore[method-assign]

        def end(self) -> None:
            clock.now_s += 0.25 * self.under_way
            self.under_way = 0

        def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
            super().copy(source, target)
            self.under_way += 1

    device = Accelerator()
    found = measure_copies(device, Copies(device), torch.zeros(MIB, dtype=torch.uint8), clock)
    assert (found.out_bytes_per_s, found.in_bytes_per_s) == (4 * MIB, 4 * MIB)


@pytest.mark.parametrize("make_device", [CpuAccelerator, EventAccelerator, lambda: LateDevice(late_compute=True)])
@pytest.mark.parametrize("staging_bytes", [MIB, 32 * MIB])
def test_a_machine_without_nvme(make_device: type[CpuAccelerator], staging_bytes: int) -> None:
    device = make_device()
    rates = Rates(None, device, staging_bytes)
    rates.measure()
    found = rates.resources()
    assert found.paths == () and found.staging_bytes == staging_bytes
    assert found.copy_out_bytes_per_s > 0 and found.copy_in_bytes_per_s > 0
    assert found.is_synchronous is device.is_synchronous


def test_measuring_again_makes_no_more_streams() -> None:
    device = LateDevice()
    rates = Rates(None, device, MIB)
    for _ in range(20):
        rates.measure()
    assert len(device.streams) == 2
    device.end()


def measured(store: NvmeStore, index: int, *rates: float) -> Clock:
    """Give a path write, read, write beside and read beside rates in MiB/s; its clock."""
    clock = Clock()
    store.paths[index].meter = meter = PathMeter(1, 1, clock)
    for kind, other, beside, rate in zip(
        [Kind.WRITE, Kind.READ] * 2, [Kind.READ, Kind.WRITE] * 2, (False, False, True, True), rates, strict=False
    ):
        neighbour = meter.start(other, MIB) if beside else None
        move(meter, clock, kind, rate)
        if neighbour is not None:
            meter.stop(neighbour, moved=False)
    return clock


def move(meter: PathMeter, clock: Clock, kind: Kind, rate: float) -> None:
    transfer = meter.start(kind, 64 * MIB)
    clock.now_s += 64 / rate
    meter.stop(transfer)


def rates_of(path: PathRates) -> tuple[float, ...]:
    return tuple(
        rate / MIB
        for rate in (
            path.write_bytes_per_s,
            path.read_bytes_per_s,
            path.write_beside_read_bytes_per_s,
            path.read_beside_write_bytes_per_s,
        )
    )


def test_the_paths_are_as_they_are_now(make_store: StoreFactory) -> None:
    store, device = make_store(paths=2), CpuAccelerator()
    first, second = measured(store, 0, 10, 20, 5, 8), measured(store, 1, 40, 80, 30, 30)
    rates = Rates(drives_of(store), device, 32 * MIB)
    found = rates.resources()
    assert [rates_of(path) for path in found.paths] == [pytest.approx((10, 20, 5, 8)), pytest.approx((40, 80, 30, 30))]
    for _ in range(3):
        move(store.paths[1].meter, second, Kind.WRITE, 4.0)
    now = rates.resources().paths
    assert rates_of(now[1]) == pytest.approx((4, 80, 4, 30), rel=0.01)  # beside a read it cannot be faster
    assert now[0] == found.paths[0]
    store.paths[0].fail(OSError("Input/output error"))
    assert rates.resources().paths == now[1:]
    assert first.now_s > 0


def test_what_was_seen_beside_only_counts_for_both(make_store: StoreFactory) -> None:
    store = make_store()
    clock = measured(store, 0, 10, 20)
    found = Rates(drives_of(store), CpuAccelerator(), MIB).resources()
    assert rates_of(found.paths[0]) == pytest.approx((10, 20, 10, 20))
    store.paths[0].meter = meter = PathMeter(1, 1, clock)
    read = meter.start(Kind.READ, 64 * MIB)
    move(meter, clock, Kind.WRITE, 4.0)
    meter.stop(read)
    assert rates_of(Rates(drives_of(store), CpuAccelerator(), MIB).resources().paths[0]) == pytest.approx((4, 4, 4, 4))


def test_a_path_that_nobody_measured_is_no_figure(make_store: StoreFactory) -> None:
    rates = Rates(drives_of(make_store()), CpuAccelerator(), MIB)
    with pytest.raises(StateError, match="was not measured before its rates were asked for"):
        rates.resources()


# ---- of several ranks -----------------------------------------------------------------------------------------------


def machine(*paths: PathRates, out: float = 10.0, into: float = 20.0, staging: int = 64) -> Resources:
    return Resources(paths, out, into, staging)


def test_the_slowest_is_taken_of_all_paths_together() -> None:
    found = slowest(
        [
            machine(PathRates(9, 2, 8, 1), PathRates(5, 5, 5, 5), out=3.0, staging=64),
            machine(PathRates(1, 7, 1, 6), PathRates(6, 4, 6, 4), into=2.0, staging=16),
            machine(PathRates(20, 20, 20, 20)),
        ]
    )
    assert found == machine(PathRates(7, 7, 7, 6), out=3.0, into=2.0, staging=16)


def test_where_one_has_no_path_none_has() -> None:
    assert slowest([machine(PathRates(1, 1, 1, 1)), machine()]).paths == ()


def test_one_alone_is_itself() -> None:
    alone = replace(machine(PathRates(1, 2, 1, 2)), is_synchronous=True)
    assert slowest([alone]) == alone


def test_what_moving_takes_of_kernels_is_most_anywhere_and_what_all_can_do() -> None:
    calm, busy = machine(), replace(machine(), compute_s_per_byte=0.5)
    waits = replace(machine(), is_synchronous=True)
    found = slowest([calm, busy, waits])
    assert found.compute_s_per_byte == 0.5 and found.is_synchronous


def measured_rates(store: NvmeStore, device: CpuAccelerator) -> Rates:
    (path,) = store.paths
    path.file.reserve_first(64 * MIB)  # else there is nothing to measure
    path.extents.grow(path.file.size_bytes)
    rates = Rates(drives_of(store), device, 32 * MIB)
    rates.measure()
    return rates


def test_lanes_take_of_the_kernels_on_a_cpu_and_copies_next_to_nothing_on_a_device(make_store: StoreFactory) -> None:
    for device in (CpuAccelerator(), EventAccelerator()):
        rates = measured_rates(make_store(accelerator=device), device)
        found = rates.resources()
        of_copies = LINK_FRACTION / found.copy_out_bytes_per_s
        assert (found.compute_s_per_byte == of_copies) is not device.is_synchronous
        assert found.compute_s_per_byte > 0


def test_drives_are_measured_again_but_not_all_the_time(
    make_store: StoreFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = {"s": 1000.0}
    monkeypatch.setattr("ds_tba.plan.rates.time.monotonic", lambda: now["s"])
    rates = Rates(drives_of(make_store()), CpuAccelerator(), MIB)
    monkeypatch.setattr("ds_tba.plan.rates.measure_copies", lambda *_: now.update(s=1002.0) or rates.copies)
    rates.measure()
    for at_s, expected in ((1100.0, False), (1002.0 + 1.99 / MEASURING_FRACTION, False), (1203.0, True)):
        now["s"] = at_s
        assert rates.may_measure() is expected
    assert not Rates(None, CpuAccelerator(), MIB).may_measure()


def test_ranks_measure_the_same_at_the_same_time() -> None:
    told: list[str] = []

    class Ranks(Alone):
        def all_gather(self, value: Value) -> list[Value]:
            told.append("together")
            return super().all_gather(value)

    class Drives:
        def measure_plain(self) -> None:
            told.append("plain")

        def measure(self) -> None:
            told.append("as they are")

        def drop_codec(self) -> bool:
            return drops.pop()

        def rates(self) -> list[tuple[float, float, float, float]]:
            return []

        def moved_bytes(self) -> int:
            return 0

    drops = [False, True]
    _measure_together(Rates(Drives(), CpuAccelerator(), MIB), Ranks())
    as_they_are = ["together", "as they are", "together"]
    assert told == ["together", "plain", "together", *as_they_are, "together", *as_they_are]
    told.clear()
    _measure_together(Rates(Drives(), CpuAccelerator(), MIB), Ranks())
    assert told == ["together", "plain", "together", *as_they_are, "together"]


class SlowCodec(Codec):
    """Takes so many seconds for a block, each way."""

    def __init__(self, block_s: float) -> None:
        super().__init__("lz4")
        self._block_s = block_s

    def compress(self, data: torch.Tensor, into: torch.Tensor, item_bytes: int) -> int:
        time.sleep(self._block_s)
        return super().compress(data, into, item_bytes)

    def decompress(self, packed: torch.Tensor, into: torch.Tensor) -> None:
        time.sleep(self._block_s)
        super().decompress(packed, into)


class Halving(Codec):
    """Takes no time, and leaves a half: what it is given comes back only where that is noise of the same numbers."""

    def __init__(self) -> None:
        super().__init__("lz4")

    def compress(self, data: torch.Tensor, into: torch.Tensor, item_bytes: int) -> int:
        return data.numel() // 2

    def decompress(self, packed: torch.Tensor, into: torch.Tensor) -> None:
        pass


@pytest.mark.parametrize("makes_slower", [True, False])
def test_a_codec_that_makes_drives_slower_is_advised_against_and_plans_see_its_rates(
    make_store: StoreFactory, makes_slower: bool
) -> None:
    backend = ModelledDrive(100e6)
    drives = drives_of(make_store(backend, codec=SlowCodec(0.5) if makes_slower else Halving()))
    (path,) = drives._store.paths
    path.file.reserve_first(64 * MIB)
    path.extents.grow(path.file.size_bytes)
    rates = Rates(drives, CpuAccelerator(), MIB)
    _measure_together(rates, Alone())
    (found,) = rates.resources().paths
    assert (found.write_bytes_per_s < 60e6) is makes_slower and (found.read_bytes_per_s > 120e6) is not makes_slower
    advice, plain = drives.advice(), drives._plain_bytes_per_s
    assert ("Leave it out" in advice and '"lz4"' in advice) is makes_slower and bool(advice) is makes_slower
    rates.measure_plain()
    assert drives._plain_bytes_per_s == plain  # without it they are measured once
    assert not drives_of(make_store()).advice()


@pytest.mark.parametrize("may_drop", [True, False])
@pytest.mark.parametrize("packed_rate", [4.0, 16.0])
def test_a_codec_that_makes_drives_slower_is_left_off_once_and_for_all(
    make_store: StoreFactory, monkeypatch: pytest.MonkeyPatch, may_drop: bool, packed_rate: float
) -> None:
    store = make_store(codec=Halving())
    drives = DriveProbe(store, store.io, may_drop_codec=may_drop)
    seen: list[bool] = []

    def measure(_: object, io: BlockIo) -> None:
        seen.append(io.compresses)
        clock = Clock()
        store.paths[0].meter = meter = PathMeter(1, 1, clock)
        for kind in Kind:
            move(meter, clock, kind, packed_rate if io.compresses else 8.0)

    monkeypatch.setattr("ds_tba.storage.probe.measure_drives", measure)
    rates = Rates(drives, CpuAccelerator(), MIB)
    _measure_together(rates, Alone())
    is_dropped = may_drop and packed_rate < 8
    assert seen == [False, True, *[False] * is_dropped] and store.io.compresses is not is_dropped
    assert rates_of(rates.resources().paths[0])[:2] == pytest.approx([8.0 if is_dropped else packed_rate] * 2)
    advice = drives.advice()
    assert ("is left off in this run" in advice) is is_dropped and bool(advice) is (packed_rate < 8)
    packed_rate = 100.0 / packed_rate  # under other load the other way is the faster one
    _measure_together(rates, Alone())
    assert seen[-1] is not is_dropped and store.io.compresses is not is_dropped and drives.advice() == advice


def test_what_is_compressed_counts_as_what_it_comes_to_in_limits_of_wear(tmp_path: Path) -> None:
    config = OffloadConfig.model_validate(
        {"nvme_path": str(tmp_path), "ssd": {"rated_endurance_tbw": 10.0, "min_life_days": 1.0}, "io": IO}
    )
    tiers = Tiers(config, AioConfig(), CpuAccelerator(), zero_paths=(), rank=0, ranks_on_node=1)
    with closing(tiers):
        memory = MemoryMeter(tiers._accelerator.memory, lambda: 0)
        machine = Machine(config, tiers, Rates(None, CpuAccelerator(), MIB), memory, CpuAccelerator().clock)
        before = machine.limits(1.0)
        (path,) = tiers.paths
        path.tensor_bytes, path.stored_bytes = 100 * MIB, 50 * MIB
        after = machine.limits(1.0)
    assert (before.stored_share, after.stored_share) == (1.0, 0.5)
    assert after.write_limit_bytes_per_step == 2 * before.write_limit_bytes_per_step
    assert after.endurance_tbw == before.endurance_tbw
