"""The time model: against a table that was calculated by hand, and against what must hold of any such model.

The table is that of the study this feature began with: seconds for 1e9 parameters in bf16, PCIe 5 at 55 GB/s in each
direction, copies from pageable memory at 10 GB/s, CPUAdam at 1e9/s for each core, no clipping. There the host's chunks
went up as fp32 (4 bytes for each parameter, cast on the device); here the host casts them (2 bytes up, and 2 + 2 bytes
of host memory instead of 4). So host memory has the same traffic, and all columns whose limit it is must agree to the
last printed digit. Where the link is a limit, too, shares are 0.01 to 0.06 higher than in the table, as fewer bytes
go up, and the time is lower by less than a printed digit.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from ds_tba.update.time_model import (
    STOCK,
    Rates,
    Variant,
    Work,
    best_share,
    compute_s,
    gradient_transfer_s,
    interleaved_update_s,
    iteration_s,
    predict,
    stock_update_s,
)

N = 1e9
PRINTED = 0.0055  # the table has two decimals; and what the link gains, 0.0005 s at most


def rates(cores: int, gb_per_s: float) -> Rates:
    return Rates.of(cores, gb_per_s * 1e9, 55e9, 3350e9)


# cores, GB/s: stock, share 0, best (share), best with gradients on the device (share)
TABLE = [
    (16, 120, 0.55, 0.27, (0.77, 0.24), (0.91, 0.21)),
    (96, 450, 0.29, 0.07, (0.07, 0.07), (None, 0.07)),
    (24, 100, 0.62, 0.32, (0.96, 0.28), (None, 0.24)),
    (12, 50, 1.04, 0.64, (1.0, 0.56), (None, 0.48)),
]


@pytest.mark.parametrize(("cores", "gb_per_s", "stock_s", "host_s", "best", "kept"), TABLE)
def test_the_table_of_the_study(
    cores: int,
    gb_per_s: float,
    stock_s: float,
    host_s: float,
    best: tuple[float, float],
    kept: tuple[float | None, float],
) -> None:
    machine = rates(cores, gb_per_s)
    assert stock_update_s(N, machine) == pytest.approx(stock_s, abs=PRINTED)
    assert interleaved_update_s(N, machine, 0.0) == pytest.approx(host_s, abs=PRINTED)
    for device_gradients, (share, least_s) in ((0.0, best), (1.0, kept)):
        found = best_share(N, machine, device_gradients=device_gradients)
        if share is not None:
            assert share - 0.005 <= found <= share + 0.065
        found_s = interleaved_update_s(N, machine, found, device_gradients=device_gradients)
        assert found_s == pytest.approx(least_s, abs=PRINTED)


# ---- each term ------------------------------------------------------------------------------------------------------

FAST = Rates(*(math.inf,) * 6)


@pytest.mark.parametrize(
    ("rate", "share", "options", "units"),
    [
        ("host_adam_per_s", 0.25, {}, 0.75),
        ("dram_bytes_per_s", 0.0, {}, 28 + 2 + 2),
        ("dram_bytes_per_s", 0.0, {"clipped": True}, 28 + 2 + 2 + 4),
        ("dram_bytes_per_s", 0.0, {"parameter_bytes": 4}, 28 + 4 + 4),
        ("dram_bytes_per_s", 1.0, {}, 16 + 12),
        ("dram_bytes_per_s", 1.0, {"clipped": True}, 16 + 16),
        ("dram_bytes_per_s", 1.0, {"device_gradients": 1.0}, 12 + 12),
        ("up_bytes_per_s", 0.0, {}, 2),
        ("up_bytes_per_s", 0.0, {"parameter_bytes": 4}, 4),
        ("up_bytes_per_s", 1.0, {}, 16),
        ("up_bytes_per_s", 1.0, {"device_gradients": 1.0}, 12),
        ("up_bytes_per_s", 0.5, {"device_gradients": 0.25}, 0.5 * 2 + 0.25 * 12 + 0.25 * 16),
        ("down_bytes_per_s", 0.0, {"clipped": True}, 0),
        ("down_bytes_per_s", 1.0, {}, 12),
        ("down_bytes_per_s", 1.0, {"clipped": True}, 16),
        ("down_bytes_per_s", 1.0, {"clipped": True, "device_gradients": 1.0}, 12),
        ("device_adam_per_s", 0.25, {}, 0.25),
    ],
)
def test_each_limit_has_its_bytes(rate: str, share: float, options: dict[str, float], units: float) -> None:
    """With all other rates infinite, one is the limit."""
    machine = replace(FAST, **{rate: 10.0})
    assert interleaved_update_s(1000, machine, share, **options) == pytest.approx(100 * units)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("rate", "parameter_bytes", "units"),
    [
        ("host_adam_per_s", 2, 1),
        ("dram_bytes_per_s", 2, 8 + 28 + 6),
        ("dram_bytes_per_s", 4, 8 + 28),
        ("pageable_bytes_per_s", 2, 2),
        ("pageable_bytes_per_s", 4, 4),
        ("up_bytes_per_s", 2, 0),
    ],
)
def test_stock_goes_over_everything_in_turn(rate: str, parameter_bytes: int, units: float) -> None:
    machine = replace(FAST, **{rate: 10.0})
    assert stock_update_s(1000, machine, parameter_bytes=parameter_bytes) == pytest.approx(100 * units)


def test_one_chunk_is_added_to_fill_and_drain() -> None:
    machine = Rates(1e9, 1e11, 2e10, 1e10, 1e10)
    without = interleaved_update_s(N, machine, 0.5)
    one_s = 1e6 * (16 / 2e10 + 12 / 1e10 + 1 / 1e10)
    assert interleaved_update_s(N, machine, 0.5, chunk_elements=10**6) == pytest.approx(without + one_s)
    # Nothing is added where the device has nothing, and no more than it has.
    assert interleaved_update_s(N, machine, 0.0, chunk_elements=10**6) == interleaved_update_s(N, machine, 0.0)
    whole = interleaved_update_s(1000, machine, 0.5, chunk_elements=10**6)
    assert whole == interleaved_update_s(1000, machine, 0.5, chunk_elements=500)


# ---- the best share -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk_elements", [0, 1 << 24])
@pytest.mark.parametrize("clipped", [False, True])
@pytest.mark.parametrize("device_gradients", [0.0, 0.3, 1.0])
def test_no_share_of_a_grid_is_better(device_gradients: float, clipped: bool, chunk_elements: int) -> None:
    options = {"device_gradients": device_gradients, "clipped": clipped, "chunk_elements": chunk_elements}
    for cores, gb_per_s, *_ in TABLE:
        for up in (11e9, 25e9, 55e9):
            machine = replace(rates(cores, gb_per_s), up_bytes_per_s=up)
            best = best_share(N, machine, **options)  # type: ignore[arg-type]
            best_s = interleaved_update_s(N, machine, best, **options)  # type: ignore[arg-type]
            grid = [interleaved_update_s(N, machine, x / 200, **options) for x in range(201)]  # type: ignore[arg-type]
            assert 0 <= best <= 1 and best_s <= min(grid) * (1 + 1e-9)


def test_where_host_and_upload_alone_are_limits_the_share_has_a_formula() -> None:
    """Both take the same time: (1 - x) / C = (16 x + 2 (1 - x)) / B."""
    host, up = 4e9, 55e9
    machine = replace(FAST, host_adam_per_s=host, up_bytes_per_s=up)
    assert best_share(N, machine) == pytest.approx((up / host - 2) / (up / host + 16 - 2), abs=1e-6)


def test_a_device_without_use_gets_nothing() -> None:
    assert best_share(N, replace(rates(16, 120), up_bytes_per_s=1e9, down_bytes_per_s=1e6)) < 0.001
    # Eight cores of a small model: the first and the last copy cost more than the split gains.
    assert best_share(1e6, rates(96, 450), chunk_elements=1 << 24) == 0.0


# ---- the iteration --------------------------------------------------------------------------------------------------


def test_gradients_on_the_link() -> None:
    machine = replace(FAST, up_bytes_per_s=10.0, down_bytes_per_s=20.0)
    assert gradient_transfer_s(1000, machine) == pytest.approx(1000 * (6 / 20 + 2 / 10))
    assert gradient_transfer_s(1000, machine, micro_steps=3) == pytest.approx(1000 * (10 / 20 + 6 / 10))
    assert gradient_transfer_s(1000, machine, direct=True) == pytest.approx(1000 * 4 / 20)
    assert gradient_transfer_s(1000, machine, direct=True, device_gradients=0.75) == pytest.approx(1000 / 20)
    assert gradient_transfer_s(1000, machine, direct=True, micro_steps=2) == gradient_transfer_s(
        1000, machine, micro_steps=2
    )


def test_compute_counts_each_parameter_of_each_token() -> None:
    assert compute_s(7e9, 2048, 400e12) == pytest.approx(6 * 7e9 * 2048 / 400e12)
    assert compute_s(7e9, 2048, 400e12, recomputes=True) == pytest.approx(8 * 7e9 * 2048 / 400e12)


def test_gradients_hide_behind_backward_and_behind_nothing_else() -> None:
    assert iteration_s(3.0, 1.5, 4.0) == pytest.approx(7.0)
    assert iteration_s(3.0, 2.5, 4.0) == pytest.approx(7.5)
    assert iteration_s(3.0, 1.5, 4.0, overlapped=False) == pytest.approx(8.5)


@pytest.mark.parametrize(
    ("parameters", "ranks", "machine", "stock_s", "ours_s"),
    [
        (7e9, 1, rates(16, 120), 5.2, 2.5),
        (7e9, 1, rates(96, 450), 3.4, 1.3),
        (20e9, 4, rates(24, 100), 4.7, 2.6),
    ],
)
def test_the_iterations_of_the_study(
    parameters: float, ranks: int, machine: Rates, stock_s: float, ours_s: float
) -> None:
    """At 2048 tokens, 400 TFLOP/s, with recomputation, gradients not hidden, one gradient transfer.

    With gradients that stay on the device the study has 2.0 s where this model has 1.8 (7B, 16 cores): it still lets
    2 bytes of each gradient go, and here only those of the host's share do, with 4. The study added rounded terms.
    """
    elements, computing_s = parameters / ranks, compute_s(parameters, 2048, 400e12, recomputes=True)
    stock = gradient_transfer_s(elements, machine), stock_update_s(elements, machine)
    assert iteration_s(computing_s, *stock, overlapped=False) == pytest.approx(stock_s, abs=0.06)
    update_s = interleaved_update_s(elements, machine, best_share(elements, machine))
    ours = gradient_transfer_s(elements, machine, direct=True), update_s
    assert iteration_s(computing_s, *ours, overlapped=False) == pytest.approx(ours_s, abs=0.06)


def test_at_long_sequences_compute_dominates() -> None:
    for parameters, ranks, machine in ((7e9, 1, rates(16, 120)), (7e9, 1, rates(96, 450)), (20e9, 4, rates(24, 100))):
        work = Work(parameters / ranks, compute_s(parameters, 32768, 400e12, recomputes=True))
        assert 1.05 < predict(work, machine)[2].iteration_faster < 1.5
        few = replace(work, computing_s=work.computing_s / 16)
        assert predict(few, machine)[2].iteration_faster > 1.7


# ---- predictions ----------------------------------------------------------------------------------------------------


def test_predictions_stand_beside_stock() -> None:
    machine, work = rates(16, 120), Work(3e9, 0.5, chunk_elements=1 << 24)
    stock, host, best, kept = predict(work, machine)
    assert stock.name == STOCK and stock.device_share is None and stock.update_faster == stock.iteration_faster == 1
    assert stock.update_s == stock_update_s(3e9, machine) and host.device_share == 0.0
    assert stock.update_s > host.update_s > best.update_s > kept.update_s
    assert best.update_faster == stock.update_s / best.update_s
    assert best.iteration_faster == stock.iteration_s / best.iteration_s
    assert kept.device_share is not None and kept.device_gradient_bytes == 2 * kept.device_share * 3e9
    assert best.device_gradient_bytes == 0


def test_as_configured() -> None:
    machine, work = rates(16, 120), Work(3e9, 0.5)
    _, given = predict(work, machine, [Variant("given", 0.5, 0.25, direct=False)])
    assert given.device_share == 0.5 and given.device_gradient_bytes == 2 * 0.25 * 3e9
    assert given.update_s == interleaved_update_s(3e9, machine, 0.5, device_gradients=0.25)
    assert given.iteration_s == iteration_s(0.5, 0.75 * gradient_transfer_s(3e9, machine), given.update_s)


def test_gradients_of_several_micro_steps_are_not_moved_where_they_stay() -> None:
    machine = rates(16, 120)
    stock, *_, best, kept = predict(Work(3e9, 0.0, micro_steps=4), machine)
    moved_s = stock.iteration_s - stock.update_s
    assert moved_s == pytest.approx(3e9 * (4 * 2 + 4 * 2 + 4) / 55e9)
    assert best.iteration_s - best.update_s == pytest.approx(moved_s)
    assert kept.device_share is not None and kept.device_gradient_bytes > 0
    assert kept.iteration_s - kept.update_s == pytest.approx((1 - kept.device_share) * moved_s)
