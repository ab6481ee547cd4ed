"""The resources that a plan is made from: copies, paths as they are now, and the slowest of several ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from conftest import StoreFactory
from doubles import CpuAccelerator, EventAccelerator
from late_device import LateDevice
from test_path_meter import Clock

from ds_tba.errors import StateError, TraceError
from ds_tba.plan.resources import scaled, slowest
from ds_tba.planner.trace import PathRates, Resources, Trace, Traffic
from ds_tba.profile.copies import COPY_BYTES, TIMES, measure_copies
from ds_tba.profile.rates import MOST_SHOWN, PART_TAKES_MORE, Rates
from ds_tba.storage.nvme import NvmeStore
from ds_tba.storage.staging import StagingRing
from ds_tba.telemetry.bandwidth import Kind, PathMeter

MIB = 1 << 20


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
    found = measure_copies(device, torch.zeros(MIB, dtype=torch.uint8), clock)
    assert (found.out_bytes_per_s, found.in_bytes_per_s) == (MIB / 2.0, MIB / 0.5)
    assert TIMES == 5 and not device.took_s


def test_an_asynchronous_copy_has_ended_before_its_time_is_taken() -> None:
    clock = Clock()

    class Accelerator(EventAccelerator):
        """A copy takes its time when somebody waits for it."""

        def __init__(self) -> None:
            super().__init__()
            self.copied = 0
            owner = self

            class Event:
                def __init__(self) -> None:
                    self.copied = 0

                def record(self, stream: object) -> None:
                    self.copied = owner.copied

                def synchronize(self) -> None:
                    clock.now_s += 0.25 * self.copied
                    owner.copied -= self.copied

                def query(self) -> bool:
                    return False

            self.new_event = Event

        def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
            super().copy(source, target)
            self.copied += 1

    found = measure_copies(Accelerator(), torch.zeros(MIB, dtype=torch.uint8), clock)
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
    assert found.is_synchronous is device.is_synchronized_device() and found.prefetches_from_backward_start
    Trace((), (), found, 1.0)  # consistent


@pytest.mark.parametrize("make_device", [CpuAccelerator, LateDevice])
def test_copies_are_measured_through_the_ring_and_leave_it_free(
    make_store: StoreFactory, make_device: type[CpuAccelerator], monkeypatch: pytest.MonkeyPatch
) -> None:
    device = make_device()
    store = make_store(accelerator=device)
    real, looks = StagingRing.view, []
    monkeypatch.setattr(StagingRing, "view", lambda ring, slot: looks.append(slot.nbytes) or real(ring, slot))
    Rates(store, device, 32 * MIB).measure()
    assert looks == [COPY_BYTES] and store.ring.slots.used_bytes == 0
    with store.space.changed:
        store.ring.slots.allocate(32 * MIB)
    Rates(store, device, 32 * MIB).measure()  # staging is in use: beside it
    assert looks == [COPY_BYTES] and store.ring.slots.used_bytes == 32 * MIB


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
    rates = Rates(store, device, 32 * MIB)
    found = rates.resources((Traffic(0.0, 1.0, 3.0, 4.0),))
    assert [rates_of(path) for path in found.paths] == [pytest.approx((10, 20, 5, 8)), pytest.approx((40, 80, 30, 30))]
    assert found.traffic == (Traffic(0.0, 1.0, 3.0, 4.0),)
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
    found = Rates(store, CpuAccelerator(), MIB).resources()
    assert rates_of(found.paths[0]) == pytest.approx((10, 20, 10, 20))
    store.paths[0].meter = meter = PathMeter(1, 1, clock)
    read = meter.start(Kind.READ, 64 * MIB)
    move(meter, clock, Kind.WRITE, 4.0)
    meter.stop(read)
    assert rates_of(Rates(store, CpuAccelerator(), MIB).resources().paths[0]) == pytest.approx((4, 4, 4, 4))


def test_a_path_that_nobody_measured_is_no_figure(make_store: StoreFactory) -> None:
    rates = Rates(make_store(), CpuAccelerator(), MIB)
    with pytest.raises(StateError, match="was not measured before a plan was asked for"):
        rates.resources()


# ---- of several ranks -----------------------------------------------------------------------------------------------


def machine(*paths: PathRates, out: float = 10.0, into: float = 20.0, staging: int = 64) -> Resources:
    return Resources(paths, out, into, staging)


def test_the_slowest_is_taken_path_by_path() -> None:
    found = slowest(
        [
            machine(PathRates(9, 2, 8, 1), PathRates(5, 5, 5, 5), out=3.0, staging=64),
            machine(PathRates(1, 7, 1, 6), PathRates(6, 4, 6, 4), into=2.0, staging=16),
        ]
    )
    assert found == machine(PathRates(1, 2, 1, 1), PathRates(5, 4, 5, 4), out=3.0, into=2.0, staging=16)


def test_unequal_numbers_of_paths_are_compared_by_their_sums() -> None:
    two, one = machine(PathRates(3, 4, 2, 3), PathRates(3, 4, 2, 3)), machine(PathRates(7, 5, 3, 5))
    assert slowest([two, one]).paths == slowest([one, two]).paths == (PathRates(6, 5, 3, 5),)


def test_where_one_has_no_path_none_has() -> None:
    assert slowest([machine(PathRates(1, 1, 1, 1)), machine()]).paths == ()


def test_one_alone_is_itself_and_none_is_refused() -> None:
    alone = replace(machine(PathRates(1, 2, 1, 2)), is_synchronous=True, traffic=(Traffic(0.0, 1.0, 5.0),))
    assert slowest([alone]) == alone
    with pytest.raises(TraceError, match="no resources"):
        slowest([])


def test_the_traffic_of_the_busiest_and_what_all_can_do() -> None:
    calm = replace(machine(), traffic=(Traffic(0.0, 1.0, 100.0),))
    busy = replace(machine(), traffic=(Traffic(0.0, 9.0, 10.0, 10.0), Traffic(9.0, 10.0, 1.0)))
    waits = replace(machine(), is_synchronous=True, prefetches_from_backward_start=False)
    found = slowest([calm, busy, waits])
    assert found.traffic == busy.traffic and found.is_synchronous and not found.prefetches_from_backward_start


def test_a_machine_that_is_trusted_less_is_slower_and_has_less_staging() -> None:
    machine = Resources((PathRates(8.0, 6.0, 4.0, 2.0),), 20.0, 10.0, 1000)
    assert scaled(machine, 0.5) == Resources((PathRates(4.0, 3.0, 2.0, 1.0),), 10.0, 5.0, 500)
    assert scaled(machine, 2.0).staging_bytes == 1000 and scaled(machine, 1e-9).staging_bytes == 1


def moved(rates: Rates, store: NvmeStore, mib: int, took_s: float, waited_s: float = 0.0) -> float:
    """The rate of copies out after a step in which so much was moved in so much time."""
    store.stats.offloaded_bytes += mib * MIB
    store.stats.stall_s += waited_s
    rates.learn(rates._learned_until[1] + took_s)
    return rates.resources().copy_out_bytes_per_s


def measured_rates(store: NvmeStore, device: CpuAccelerator) -> Rates:
    """With lanes that take nothing of the processor."""
    (path,) = store.paths
    extent = path.reserve(64 * MIB)  # the file grows: there is something to measure
    assert extent is not None
    path.extents.free(extent)
    rates = Rates(store, device, 32 * MIB)
    rates.measure()
    rates._lane_s_per_byte = 0.0
    return rates


def test_what_lanes_take_of_the_processor_counts_where_kernels_run_on_it(make_store: StoreFactory) -> None:
    store = make_store()
    rates = measured_rates(store, CpuAccelerator())
    alone_s = 1 / rates.resources().copy_out_bytes_per_s
    rates._lane_s_per_byte = 1e-8
    assert rates.resources().copy_out_bytes_per_s == pytest.approx(1 / (alone_s + 2e-8))
    rates.note_step()
    assert rates.moved_bytes() == rates._moved_bytes() > 0
    assert rates.taken_s(rates.moved_bytes()) == pytest.approx(1e-8 * rates.moved_bytes())
    rates.note_step()
    assert rates.moved_bytes() == 0


def out_s_per_byte(rates: Rates) -> float:
    return 1 / rates.resources().copy_out_bytes_per_s


def test_what_steps_show_of_the_lanes_counts_instead_of_what_was_measured_alone(make_store: StoreFactory) -> None:
    rates = measured_rates(make_store(), CpuAccelerator())
    rates._lane_s_per_byte = 0.02 / MIB
    rates.learn_taken(0.2, 0.0, 1000)  # too few to tell
    assert rates.taken_s(10 * MIB) == pytest.approx(0.2)
    rates.learn_taken(0.2, 0.1, 20 * MIB)
    assert rates.taken_s(10 * MIB) == pytest.approx(0.1)
    rates._lane_s_per_byte = 0.001 / MIB
    assert rates.taken_s(10 * MIB) == pytest.approx(10 * MOST_SHOWN * 0.001)  # what is more is something else's
    rates.learn_taken(-1.0, 0.0, 20 * MIB)
    assert rates.taken_s(10 * MIB) == 0.0


def test_a_plan_is_made_for_what_lanes_may_take_at_most(make_store: StoreFactory) -> None:
    rates = measured_rates(make_store(), CpuAccelerator())
    alone_s = out_s_per_byte(rates)
    rates._lane_s_per_byte = 0.02 / MIB
    assert out_s_per_byte(rates) == pytest.approx(alone_s + 2 * 0.02 / MIB)
    rates.learn_taken(0.2, 0.1, 20 * MIB)
    assert out_s_per_byte(rates) == pytest.approx(alone_s + 2 * PART_TAKES_MORE * 0.015 / MIB)
    rates._lane_s_per_byte = 0.001 / MIB
    assert out_s_per_byte(rates) == pytest.approx(alone_s + 2 * MOST_SHOWN * 0.001 / MIB)


def test_what_steps_under_a_plan_show_of_the_lanes_counts_in_plans_until_drives_are_measured(
    make_store: StoreFactory,
) -> None:
    rates = measured_rates(make_store(), CpuAccelerator())
    alone_s = out_s_per_byte(rates)
    rates._lane_s_per_byte = 0.01 / MIB
    for count, more_s in enumerate((0.005, 0.01, 0.015, 0.02, 0.02), 1):
        rates.learn_excess(0.1, 20 * MIB)
        assert out_s_per_byte(rates) == pytest.approx(alone_s + 2 * (0.01 + more_s) / MIB), count
    assert rates.learn_excess(0.1, 20 * MIB) == pytest.approx(0.1)  # lanes cannot have taken more
    assert rates.learn_excess(-0.1, 20 * MIB) == pytest.approx(0.0)
    assert out_s_per_byte(rates) == pytest.approx(alone_s + 2 * 0.025 / MIB)
    assert rates.taken_s(MIB) == pytest.approx(0.01)  # a step that moves all takes what it took
    rates.measure()
    rates._lane_s_per_byte = 0.01 / MIB
    assert rates._excess_s_per_byte == 0.0 and rates._planned_s_per_byte() == pytest.approx(0.01 / MIB)


def test_plans_count_no_less_than_what_steps_that_move_everything_have_shown(make_store: StoreFactory) -> None:
    rates = measured_rates(make_store(), CpuAccelerator())
    rates._lane_s_per_byte = 0.01 / MIB
    rates.learn_excess(-0.1, 20 * MIB)
    assert rates._planned_s_per_byte() == pytest.approx(0.01 / MIB)  # nothing was shown: there is no margin
    rates.learn_taken(0.2, 0.1, 20 * MIB)
    for excess_s in (-0.05, -0.1, -0.1, -0.1):
        left_s = rates.learn_excess(excess_s, 20 * MIB)
    assert left_s == pytest.approx(-0.075)  # (0.01 + 0.005) * 1.25 less 0.35 / 20, and no less than 0.005
    assert rates.learn_excess(-0.1, 20 * MIB) == pytest.approx(-0.1) and rates.learn_excess(-0.1, 0) == -0.1
    assert rates._planned_s_per_byte() == pytest.approx(0.005 / MIB)  # less the error of what was shown
    rates.learn_excess(0.02, 20 * MIB)
    assert rates._planned_s_per_byte() == pytest.approx(0.006 / MIB)


def test_on_a_device_lanes_take_nothing_of_the_kernels(make_store: StoreFactory) -> None:
    rates = measured_rates(make_store(accelerator=EventAccelerator()), EventAccelerator())
    rates.measure()
    before_s = out_s_per_byte(rates)
    rates.learn_taken(0.2, 0.1, 20 * MIB)
    rates.learn_excess(0.2, 20 * MIB)
    assert rates.taken_s(10 * MIB) == 0.0 and out_s_per_byte(rates) == before_s


def test_the_lanes_share_is_measured_on_a_cpu_and_nothing_on_a_device(make_store: StoreFactory) -> None:
    for device in (CpuAccelerator(), EventAccelerator()):
        store = make_store(accelerator=device)
        measured_rates(store, device)
        rates = Rates(store, device, 32 * MIB)
        rates.measure()
        assert (rates._lane_s_per_byte > 0) is device.is_synchronized_device()


@pytest.fixture
def learning(make_store: StoreFactory) -> tuple[Rates, NvmeStore]:
    store = make_store()
    return measured_rates(store, CpuAccelerator()), store


def test_what_moving_takes_of_a_step_counts_where_it_is_more_than_the_copies(
    learning: tuple[Rates, NvmeStore],
) -> None:
    rates, store = learning
    alone = rates.resources().copy_out_bytes_per_s
    assert moved(rates, store, 100, 1e-9) == alone
    assert moved(rates, store, 100, 10.0) == alone  # one of two: the first step of all has its pages to fill
    assert moved(rates, store, 100, 10.0) == pytest.approx(10 * MIB)


def test_waiting_for_a_drive_is_no_cost_of_copies(learning: tuple[Rates, NvmeStore]) -> None:
    rates, store = learning
    assert moved(rates, store, 100, 10.0, waited_s=9.0) == pytest.approx(100 * MIB)


def test_a_few_bytes_and_a_step_without_moves_tell_nothing(learning: tuple[Rates, NvmeStore]) -> None:
    rates, store = learning
    alone = rates.resources().copy_out_bytes_per_s
    assert moved(rates, store, 3, 10.0) == moved(rates, store, 0, 10.0) == alone
    assert moved(rates, store, 100, 10.0, waited_s=11.0) == alone


def test_on_a_device_copies_are_not_in_the_training_thread(make_store: StoreFactory) -> None:
    device = EventAccelerator()
    store = make_store(accelerator=device)
    rates = measured_rates(store, device)
    alone = rates.resources().copy_out_bytes_per_s
    assert moved(rates, store, 100, 10.0) == alone
