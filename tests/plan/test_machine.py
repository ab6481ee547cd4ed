"""The resources that a plan is made from: copies, paths as they are now, and the slowest of several ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Closing
from support.doubles import Accelerator, Clock, EventAccelerator, wait_for_writes

from ds_tba.config import AioConfig, OffloadConfig
from ds_tba.device.accelerator import MemoryMeter
from ds_tba.plan.machine import LINK_FRACTION, TIMES, Machine, measure_copies
from ds_tba.plan.trace import Resources, slowest
from ds_tba.stats import KindMeter, PathMeter
from ds_tba.storage.nvme import NvmeStore
from ds_tba.storage.tiers import Tiers

MIB = 1 << 20
IO = {"backend": "posix", "staging_bytes": 8 << 20, "swap_file_bytes": 64 << 20}
COPIES = (3e9, 4e9)
MakeMachine = Callable[..., tuple[Machine, Any]]


@pytest.fixture
def make_machine(tmp_path: Path, closing: Closing) -> MakeMachine:
    """Make a machine of so many directories, and its NVMe store."""
    tiers_of = closing(Tiers)

    def make(paths: int = 1, *, is_synchronous: bool = True, **block: Any) -> tuple[Machine, NvmeStore | None]:
        directories = [str(tmp_path / f"nvme{number}") for number in range(paths)]
        for directory in directories:
            Path(directory).mkdir(exist_ok=True)
        config = OffloadConfig.model_validate({"nvme_path": directories or None, "io": IO, **block})
        device = Accelerator()
        tiers = tiers_of(config, AioConfig(), device, zero_paths=(), ranks_on_node=1)
        device.is_synchronous = is_synchronous  # to plans alone
        memory = MemoryMeter(device, lambda: 0)
        return Machine(config, tiers, COPIES, memory, device), tiers.nvme

    return make


class Paced(EventAccelerator):
    """Copies take so many seconds of a clock, one after the other, which pass when somebody waits for them."""

    def __init__(self, clock: Clock, *took_s: float) -> None:
        super().__init__()
        self.took_s, self.under_way_s = list(took_s), 0.0

        def synchronize() -> None:
            clock.now_s, self.under_way_s = clock.now_s + self.under_way_s, 0.0

        self.current_stream().synchronize = synchronize

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        super().copy(source, target)
        self.under_way_s += self.took_s.pop(0)


def test_the_best_copy_each_way_counts_and_has_ended_before_its_time_is_taken() -> None:
    clock = Clock()
    device = Paced(clock, 99.0, 4.0, 9.0, 3.0, 0.5, 2.0, 9.0, 5.0, 9.0, 6.0, 9.0)
    found = measure_copies(device, torch.zeros(MIB, dtype=torch.uint8), clock)
    assert found == (MIB / 2.0, MIB / 0.5)
    assert TIMES == 5 and not device.took_s


def measured(store: NvmeStore, index: int, *rates: float) -> Clock:
    """Give a path write and read rates in MiB/s; its clock."""
    clock = Clock()
    store.paths[index].meter = meter = PathMeter(1, 1, clock)
    for kind, rate in zip((meter.writes, meter.reads), rates, strict=False):
        move(meter, clock, kind, rate)
    return clock


def move(meter: PathMeter, clock: Clock, kind: KindMeter, rate: float) -> None:
    transfer = meter.start(kind, 64 * MIB)
    clock.now_s += 64 / rate
    meter.stop(transfer)


def rates_of(machine: Machine) -> tuple[float, float]:
    write, read = machine.tiers.rates()
    return write / MIB, read / MIB


def test_the_rates_are_those_of_all_paths_as_they_are_now(make_machine: MakeMachine) -> None:
    machine, store = make_machine(paths=2)
    measured(store, 0, 10, 20)
    second = measured(store, 1, 40, 80)
    assert rates_of(machine) == pytest.approx((50, 100))
    for _ in range(8):
        move(store.paths[1].meter, second, store.paths[1].meter.writes, 4.0)
    assert rates_of(machine) == pytest.approx((14, 100), rel=0.02)
    store.paths[0].fail("a write failed", OSError("Input/output error"))
    assert rates_of(machine) == pytest.approx((4, 80), rel=0.02)


def test_a_kind_that_has_moved_nothing_counts_as_the_other_and_before_both_is_a_guess(
    make_machine: MakeMachine,
) -> None:
    """As where backward got everything before it was written, or the host tier took it."""
    machine, store = make_machine()
    assert machine.tiers.rates() == pytest.approx((1e9, 1e9))
    measured(store, 0, 10)
    assert rates_of(machine) == pytest.approx((10, 10))


def test_lanes_take_of_the_kernels_on_a_cpu_and_copies_next_to_nothing_on_a_device(make_machine: MakeMachine) -> None:
    machine, store = make_machine()
    assert machine.resources().compute_s_per_byte == 0.0  # nothing has moved
    for _ in range(2):
        ticket = store.put(torch.ones(MIB, dtype=torch.uint8), wait=True)
        wait_for_writes(store)
        store.get(ticket, torch.device("cpu"))
        store.release(ticket)
    meter = store.paths[0].meter
    expected = meter.writes.lane_s / meter.writes.moved_bytes + meter.reads.lane_s / meter.reads.moved_bytes
    assert 0 < machine.resources().compute_s_per_byte == expected
    on_device, _ = make_machine(is_synchronous=False)
    assert on_device.resources().compute_s_per_byte == LINK_FRACTION / COPIES[0]


def test_without_nvme_there_are_no_paths(make_machine: MakeMachine) -> None:
    machine, _ = make_machine(0, placement="host", host_budget_bytes=MIB)
    found = machine.resources()
    assert found.write_bytes_per_s == found.read_bytes_per_s == 0.0
    assert found.staging_bytes == machine.config.io.ring_bytes
    assert (found.copy_out_bytes_per_s, found.copy_in_bytes_per_s) == (3e9, 4e9)
    assert found.is_synchronous and found.compute_s_per_byte == 0.0


# ---- of several ranks -----------------------------------------------------------------------------------------------


def machine(write: float = 0.0, read: float = 0.0, out: float = 10.0, into: float = 20.0) -> Resources:
    return Resources(write, read, out, into, 64)


def test_the_slowest_of_each_counts_and_where_one_has_no_drive_none_has() -> None:
    calm, busy = machine(9, 2, out=3.0), replace(machine(6, 4, into=2.0), staging_bytes=16, compute_s_per_byte=0.5)
    waits = replace(machine(20, 20), is_synchronous=True)
    assert slowest([calm, busy, waits]) == Resources(6, 2, 3.0, 2.0, 16, True, 0.5)
    assert slowest([calm, machine()]) == Resources(0.0, 0.0, 3.0, 20.0, 64)
    assert slowest([busy]) == busy


def test_what_is_compressed_counts_as_what_it_comes_to_in_limits_of_wear(make_machine: MakeMachine) -> None:
    machine, store = make_machine(ssd={"rated_endurance_tbw": 10.0, "min_life_days": 1.0})
    before = machine.limits(1.0)
    (path,) = store.paths
    path.meter.writes.moved_bytes, path.meter.writes.drive_bytes = 100 * MIB, 50 * MIB
    after = machine.limits(1.0)
    assert after.write_limit_bytes_per_step == 2 * before.write_limit_bytes_per_step > 0
