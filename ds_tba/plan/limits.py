"""What a plan may cost."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ds_tba.errors import ConfigError

TERABYTE = 10**12
DAY_S = 86400.0


@dataclass(frozen=True, slots=True)
class Limits:
    """What a plan may cost.

    Attributes:
        max_step_overhead: part of the step's time that may be added, where there is no budget.
        activation_budget_bytes: bound of the saved bytes in device memory; with it, time is what is made least.
        host_budget_bytes: bound of the host tier.
        write_limit_bytes_per_step: bound of what one step writes; see :func:`write_limit_bytes_per_step`.
        recompute: whether blocks may be recomputed.

    Raises:
        ConfigError: a limit is negative.
    """

    max_step_overhead: float = 0.02
    activation_budget_bytes: int | None = None
    host_budget_bytes: int = 0
    write_limit_bytes_per_step: float = math.inf
    recompute: bool = True

    def __post_init__(self) -> None:
        for name in ("max_step_overhead", "activation_budget_bytes", "host_budget_bytes", "write_limit_bytes_per_step"):
            value = getattr(self, name)
            if value is not None and not value >= 0:
                raise ConfigError(f"{name} is {value}: it must be 0 or more")


def write_limit_bytes_per_step(rated_endurance_tbw: float | None, min_life_days: float | None, step_s: float) -> float:
    """What a step of ``step_s`` may write so that drives rated for so many terabytes live for ``min_life_days``.

    Args:
        rated_endurance_tbw: terabytes (10^12 bytes) that all drives together are rated for, less what was written
            before, divided by the ranks that share them.

    Raises:
        ConfigError: a life is asked for and the rating is not known.
    """
    if min_life_days is None:
        return math.inf
    if rated_endurance_tbw is None:
        raise ConfigError(
            f'"ssd.min_life_days" is {min_life_days} without "ssd.rated_endurance_tbw": a life follows from the rating '
            "only; set it from the drive's data sheet."
        )
    return rated_endurance_tbw * TERABYTE / (min_life_days * DAY_S) * step_s
