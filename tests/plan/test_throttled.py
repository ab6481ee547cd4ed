"""Drives of a half, a tenth and a hundredth of their speed, from the beginning, in mid-run, and fast again."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from conftest import Closing
from support.modelled_drive import ModelledDrive
from support.offloaders import watching
from support.planned_training import FIRST_PLAN, Model, controller_of, model, steps
from support.stepping import assert_same_steps

from ds_tba.offloader import ActivationOffloader
from ds_tba.storage.tiers import Selection

pytestmark = pytest.mark.usefixtures("one_thread")
ROWS = 2048  # 0.5 MiB, and 2 MiB in the middle of a block: too large to share a request
FULL = 800e6  # bytes per second
STAGING_BYTES = 4 << 20  # a quarter of what moves to a fast drive
ENOUGH_STEPS = FIRST_PLAN + 20  # for the monitor to have come to an end
Make = Callable[..., tuple[Model, ActivationOffloader]]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, closing: Closing) -> Make:
    # Neither may take the drive's place.
    made = closing(partial(watching, tmp_path, max_step_overhead=0.5, recompute=False, rematerialize=False))

    def make(
        backend: ModelledDrive, *zero_paths: str, staging_bytes: int = 16 << 20
    ) -> tuple[Model, ActivationOffloader]:
        monkeypatch.setattr("ds_tba.storage.tiers.select_backend", lambda *_, **__: Selection(backend, "the test's"))
        ours, io = model(), {"staging_bytes": staging_bytes, "swap_file_bytes": 128 << 20}
        return ours, made(ours, io=io, zero_paths=zero_paths)

    return make


def moved_bytes(offloader: ActivationOffloader) -> int:
    plan = offloader.report().plan
    assert plan is not None
    return int(plan["bytes"].get("nvme", 0))


@pytest.mark.parametrize("part", [2, 10, 100])
def test_where_a_drive_becomes_slower_in_mid_run_results_are_exact(make: Make, part: int) -> None:
    backend, plain = ModelledDrive(FULL), model()
    ours, offloader = make(backend)
    for count in (FIRST_PLAN, ENOUGH_STEPS):
        assert_same_steps(steps(plain, None, [ROWS] * count), steps(ours, offloader, [ROWS] * count))
        backend.throttle(FULL / part, FULL / part)
    report = offloader.report()
    assert report.plans >= 1 and 0 < report.step_peak_saved_bytes <= report.peak_saved_bytes_without


@pytest.mark.thorough
def test_a_drive_that_is_fast_again_is_used_again(make: Make) -> None:
    """Staging holds a part of what moves, however slow the drive is: more than that goes to a fast one only."""
    backend = ModelledDrive(FULL)
    ours, offloader = make(backend, staging_bytes=STAGING_BYTES)

    def train_until(is_used: bool) -> None:
        for _ in range(1500):  # plans come ever more rarely
            steps(ours, offloader, [ROWS])
            if offloader.report().plans and (moved_bytes(offloader) > STAGING_BYTES) is is_used:
                return
        raise AssertionError(f"moves {moved_bytes(offloader)} bytes")

    train_until(True)
    backend.throttle(FULL / 100, FULL / 100)
    train_until(False)
    steps(ours, offloader, [ROWS] * 2)
    peak = offloader.report().step_peak_saved_bytes
    backend.throttle(FULL, FULL)
    train_until(True)
    steps(ours, offloader, [ROWS] * 2)
    assert offloader.report().step_peak_saved_bytes < peak


@pytest.mark.parametrize("is_shared", [True, False])
def test_the_first_plan_counts_the_rates_that_steps_leave_of_a_drive_and_a_second_one_is_advised(
    make: Make, tmp_path: Path, is_shared: bool
) -> None:
    left = 16e6
    backend = ModelledDrive(FULL)
    # Staging is so small that backward reads from the drive, and takes nothing from writes that wait.
    zero_path = str(tmp_path / "zero") if is_shared else "/proc/zero"
    ours, offloader = make(backend, zero_path, staging_bytes=1 << 20)
    backend.throttle(left, left)
    steps(ours, offloader, [256] * (FIRST_PLAN + 3))
    followed = controller_of(offloader).in_force
    assert followed is not None
    machine = followed.trace.resources
    assert 0 < max(machine.write_bytes_per_s, machine.read_bytes_per_s) < 2.5 * left  # a lane alone could be half
    assert followed.limits.movable_share == (0.25 if is_shared else 1.0)
    advice = "begin with a quarter of the bytes, and offload more in the same time with either of them on a second"
    assert (advice in offloader.start_line()) is is_shared
