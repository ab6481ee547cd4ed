"""The rates of a path: whose time counts, fading, a lane without work; and wear."""

from __future__ import annotations

import math
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import StoreFactory
from support.doubles import Clock, EventAccelerator, ScriptedBackend, wait_for_writes

from ds_tba.stats import (
    KindMeter,
    PathMeter,
    PathWear,
    Transfer,
    drive_of,
    write_limit_bytes_per_step,
)
from ds_tba.storage.nvme import Lanes
from ds_tba.storage.space import SwapTicket

MIB = 1 << 20


class Drive:
    """A meter and its clock."""

    def __init__(self, lanes: int = 1) -> None:
        self.clock = Clock()
        self.meter = PathMeter(lanes, lanes, self.clock)
        self.writes, self.reads = self.meter.writes, self.meter.reads

    def wait(self, seconds: float) -> None:
        self.clock.now_s += seconds

    def move(self, kind: KindMeter, mib: float, seconds: float, *, times: int = 1) -> None:
        """One transfer after the other."""
        for _ in range(times):
            transfer = self.meter.start(kind, int(mib * MIB))
            self.wait(seconds)
            self.meter.stop(transfer)

    def mib_per_s(self, kind: KindMeter) -> float:
        return kind.recent.bytes_per_s / MIB


def test_idle_time_does_not_count_and_failures_are_no_rate() -> None:
    drive = Drive()
    assert drive.mib_per_s(drive.writes) == 0.0
    for _ in range(5):
        drive.move(drive.writes, 2, 0.5)
        drive.wait(1000.0)
    failed = drive.meter.start(drive.writes, 64 * MIB)
    drive.wait(1e-6)
    drive.meter.stop(failed, moved=False)
    assert drive.mib_per_s(drive.writes) == pytest.approx(4.0) and drive.meter.writes.moved_bytes == 10 * MIB
    assert drive.mib_per_s(drive.reads) == 0.0


@pytest.mark.parametrize("lag_s", [0.0, 1.0])
def test_the_rate_is_that_of_all_lanes_whatever_the_order_in_which_they_end(lag_s: float) -> None:
    """Two lanes, each with 8 MiB in 2 s: 8 MiB/s, where bytes and time between two ends would say anything."""
    drive = Drive(lanes=2)
    under_way: list[Transfer] = []
    for step in range(40):
        if step >= 2:
            drive.wait(2.0 - lag_s if step % 2 == 0 else lag_s)
            drive.meter.stop(under_way.pop(0))
        under_way.append(drive.meter.start(drive.writes, 8 * MIB))
        if step == 0:
            drive.wait(lag_s)
    assert drive.mib_per_s(drive.writes) == pytest.approx(8.0, rel=0.01)


def test_a_drive_that_gets_slower_is_seen_within_some_hundred_mib_and_what_is_not_measured_stays() -> None:
    drive = Drive()
    drive.move(drive.writes, 1, 0.001, times=1000)
    drive.move(drive.reads, 1, 0.001, times=1000)
    drive.move(drive.writes, 1, 0.010, times=128)
    assert 100.0 < drive.mib_per_s(drive.writes) < 150.0
    drive.move(drive.writes, 1, 0.010, times=128)
    assert drive.mib_per_s(drive.writes) == pytest.approx(100.0, rel=0.1)
    assert drive.mib_per_s(drive.reads) == pytest.approx(1000.0)
    drive.move(drive.writes, 1, 0.001, times=512)
    assert drive.mib_per_s(drive.writes) == pytest.approx(1000.0, rel=0.1)


def test_a_lane_without_work_says_no_more_than_a_range() -> None:
    """One of two lanes at 5 MiB/s: the path has from 5 to 10."""
    for known, found in ((8.0, 8.0), (40.0, 10.0), (1.0, 5.0)):
        drive = Drive(lanes=2)
        for _ in range(100):
            both = [drive.meter.start(drive.writes, MIB) for _ in range(2)]
            drive.wait(2 / known)
            for transfer in both:
                drive.meter.stop(transfer)
        assert drive.mib_per_s(drive.writes) == pytest.approx(known)
        drive.move(drive.writes, 1, 0.2, times=800)
        assert drive.mib_per_s(drive.writes) == pytest.approx(found, rel=0.01)


# ---- in a store -----------------------------------------------------------------------------------------------------


def test_the_copy_into_staging_is_not_the_time_of_the_drive(make_store: StoreFactory) -> None:
    copied, taken, clock = threading.Event(), threading.Event(), Clock()
    device = EventAccelerator(copied)
    wait = device.new_event.synchronize

    def synchronize(event: Any) -> None:
        """A lane waits here for the copy."""
        taken.set()
        wait(event)

    def script(verb: str, number: int) -> None:
        """The clock moves inside of transfers, too."""
        clock.now_s += 0.5

    device.new_event.synchronize = synchronize  # type: ignore[method-assign]
    store = make_store(ScriptedBackend(script), lanes=Lanes(1, 1), accelerator=device)
    store.paths[0].meter = PathMeter(1, 1, clock)
    assert isinstance(store.put(torch.zeros(MIB, dtype=torch.uint8), wait=True), SwapTicket)
    assert taken.wait(30)
    clock.now_s += 100.0
    copied.set()
    wait_for_writes(store)
    assert store.paths[0].meter.writes.recent.bytes_per_s == pytest.approx(2 * MIB)


# ---- wear -----------------------------------------------------------------------------------------------------------


def test_life_is_rated_endurance_over_the_measured_rate(tmp_path: Path) -> None:
    wear = PathWear.of(tmp_path, 10**12, 43200.0, 600)
    assert wear.written_bytes_per_day == pytest.approx(2e12) and wear.life_days == pytest.approx(300) == wear.days()
    shared = PathWear.of(tmp_path, 2 * 10**12, 86400.0, 600, sharers=4)
    assert shared.life_days == pytest.approx(75) == shared.days() and shared.all_bytes_per_day == pytest.approx(8e12)
    assert shared.in_words() == "8.00 TB a day of 4 ranks (75 days to 600 TBW)"
    assert write_limit_bytes_per_step(600.0 / 4, shared.life_days, 86400.0) == pytest.approx(2e12)


def test_without_a_rating_or_a_write_life_is_unknown_and_days_are_by_an_assumption(tmp_path: Path) -> None:
    for written, elapsed_s, days in ((0, 10.0, math.inf), (10, 0.0, math.inf)):
        wear = PathWear.of(tmp_path, written, elapsed_s, 600.0)
        assert wear.life_days is None and wear.days() == days
    unrated = PathWear.of(tmp_path, 10**12, 86400.0, None)
    assert unrated.life_days is None and unrated.days() == pytest.approx(600)
    assert unrated.in_words().endswith("600 TBW assumed)")


def test_directories_are_on_one_drive_by_their_file_system(tmp_path: Path) -> None:
    assert drive_of(tmp_path) == drive_of(tmp_path / "to be made" / "of a run") != drive_of(Path("/proc"))
