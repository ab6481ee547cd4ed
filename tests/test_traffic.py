"""What others move on our drives: counters of the kernel less our own, never too much, on the caller's clock."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ds_tba.errors import StateError
from ds_tba.planner.trace import Traffic
from ds_tba.telemetry import traffic as traffic_module
from ds_tba.telemetry.bandwidth import Kind, PathMeter, Transfer
from ds_tba.telemetry.drive_health import sysfs_device
from ds_tba.telemetry.traffic import OthersTraffic

MIB = 1 << 20
W, R = Kind.WRITE, Kind.READ


class Machine:
    """A sysfs in which ``directory`` is on the second partition of a drive, and the drive's counters."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.sysfs = directory / "sys"
        number = os.stat(directory).st_dev
        self.drive = self.sysfs / "devices" / "nvme0n1"
        partition = self.drive / "nvme0n1p2"
        partition.mkdir(parents=True)
        (partition / "partition").touch()
        (partition / "stat").write_text("0 0 0 0 0 0 0 0 0 0 0\n")  # the neighbours on the drive count too
        links = self.sysfs / "dev" / "block"
        links.mkdir(parents=True)
        (links / f"{os.major(number)}:{os.minor(number)}").symlink_to(partition)
        self.written_bytes, self.read_bytes = 777 * MIB, 555 * MIB
        self.count()

    def count(self, write_mib: float = 0.0, read_mib: float = 0.0) -> None:
        self.written_bytes += int(write_mib * MIB)
        self.read_bytes += int(read_mib * MIB)
        stat = f"{5:8d} 6 {self.read_bytes // 512} 7 8 9 {self.written_bytes // 512} 10 11 12 13 14 15 16 17 18 19\n"
        (self.drive / "stat").write_text(stat)

    def watch(self, *meters: PathMeter, ranks: int = 1) -> OthersTraffic:
        found = OthersTraffic([(self.directory, meter) for meter in meters], ranks, self.sysfs)
        found.begin()
        return found


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def begun(meter: PathMeter, kind: Kind, mib: int) -> Transfer:
    return meter.start(kind, mib * MIB)


def test_rates_of_others_on_the_clock_of_the_caller(machine: Machine) -> None:
    others = machine.watch(PathMeter(1, 1))
    others.begin(10.0)
    machine.count(write_mib=8)
    others.sample(12.0)
    others.sample(13.0)
    machine.count(write_mib=2, read_mib=6)
    others.sample(14.0)
    assert others.traffic() == (Traffic(10.0, 12.0, 4 * MIB, 0.0), Traffic(13.0, 14.0, 2 * MIB, 6 * MIB))
    others.begin(0.0)
    assert others.traffic() == ()
    others.sample(1.0)
    assert others.traffic() == ()


def test_our_own_bytes_on_all_paths_of_a_drive_are_taken_off_once(machine: Machine) -> None:
    meters = [PathMeter(1, 1), PathMeter(1, 1)]
    meters[0].stop(begun(meters[0], W, 100))
    others = machine.watch(*meters)
    for meter in meters:
        meter.stop(begun(meter, W, 3))
        meter.stop(begun(meter, R, 2))
    machine.count(write_mib=3 + 3 + 1, read_mib=2 + 2 + 5)
    others.sample(1.0)
    assert others.traffic() == (Traffic(0.0, 1.0, 1 * MIB, 5 * MIB),)


@pytest.mark.parametrize("seen_mib", [0, 20, 64])
def test_what_we_have_under_way_is_not_taken_for_others(machine: Machine, seen_mib: int) -> None:
    meter = PathMeter(1, 1)
    others = machine.watch(meter)
    transfer = begun(meter, W, 64)
    machine.count(write_mib=seen_mib)
    others.sample(1.0)
    assert others.traffic() == ()
    machine.count(write_mib=64 - seen_mib + 1)
    meter.stop(transfer)
    others.sample(2.0)
    assert others.traffic() == (Traffic(1.0, 2.0, 1 * MIB, 0.0),)


def test_what_is_under_way_at_the_beginning_is_ours_too(machine: Machine) -> None:
    meter = PathMeter(1, 1)
    transfer = begun(meter, R, 8)
    machine.count(read_mib=3)
    others = machine.watch(meter)
    machine.count(read_mib=5)
    meter.stop(transfer)
    others.sample(1.0)
    assert others.traffic() == ()


def test_our_transfers_that_the_drive_counts_late_are_no_debt_nor_credit(machine: Machine) -> None:
    """Without O_DIRECT, or where the drive's counters lag: clamped at 0, and even at the end."""
    meter = PathMeter(1, 1)
    others = machine.watch(meter)
    meter.stop(begun(meter, W, 16))
    others.sample(1.0)
    machine.count(write_mib=16)
    others.sample(2.0)
    machine.count(write_mib=4)
    others.sample(3.0)
    assert others.traffic() == (Traffic(2.0, 3.0, 4 * MIB, 0.0),)


def test_ranks_that_share_the_drive_are_not_others(machine: Machine) -> None:
    meter = PathMeter(1, 1)
    others = machine.watch(meter, ranks=4)
    meter.stop(begun(meter, W, 5))
    machine.count(write_mib=4 * 5 + 2)
    others.sample(1.0)
    assert others.traffic() == (Traffic(0.0, 1.0, 2 * MIB, 0.0),)


def test_short_intervals_are_merged_and_lose_nothing(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traffic_module, "LEAST_S", 1.0)
    others = machine.watch(PathMeter(1, 1))
    for at_s in (0.0, 0.25, 0.5, 0.75, 1.5, 2.5, 2.75, 2.75):
        machine.count(write_mib=1)
        others.sample(at_s)
    found = others.traffic()
    assert [(one.start_s, one.end_s) for one in found] == [(0.0, 1.5), (1.5, 2.75)]
    assert sum((one.end_s - one.start_s) * one.write_bytes_per_s for one in found) == pytest.approx(8 * MIB)


def test_an_unknown_drive_has_no_traffic(machine: Machine, tmp_path: Path) -> None:
    others = OthersTraffic([(tmp_path, PathMeter(1, 1)), (tmp_path / "gone", PathMeter(1, 1))], sysfs=tmp_path / "no")
    others.begin()
    others.sample(1.0)
    assert others.traffic() == ()


@pytest.mark.parametrize("content", [None, "", "1 2 3", "a b c d e f g h"])
def test_counters_that_go_away_are_no_error(machine: Machine, content: str | None) -> None:
    others = machine.watch(PathMeter(1, 1))
    machine.count(write_mib=1)
    others.sample(1.0)
    (machine.drive / "stat").unlink()
    if content is not None:
        (machine.drive / "stat").write_text(content)
    others.sample(2.0)
    assert others.traffic() == (Traffic(0.0, 1.0, MIB, 0.0),)


def test_time_that_goes_back_is_refused(machine: Machine) -> None:
    others = machine.watch(PathMeter(1, 1))
    others.sample(5.0)
    with pytest.raises(StateError, match=r"sampled at 5.0 s and then at 4.0 s: begin anew"):
        others.sample(4.0)


def test_the_kernel_counts_what_somebody_else_writes(tmp_path: Path) -> None:
    if sysfs_device(tmp_path) is None:
        pytest.skip("sysfs does not know the drive of the temporary directory")
    others = OthersTraffic([(tmp_path, PathMeter(1, 1))])
    others.begin()
    with (tmp_path / "file").open("wb") as file:
        file.write(os.urandom(8 * MIB))
        file.flush()
        os.fsync(file.fileno())
    others.sample(1.0)
    (found,) = others.traffic()
    assert found.write_bytes_per_s >= 8 * MIB
