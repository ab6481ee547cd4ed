"""The cost of one placement for everything, as the rows of ``ds_tba plan`` have it."""

from __future__ import annotations

from ds_tba.cli.plan.rows import assign
from ds_tba.config import Placement
from ds_tba.plan.plan import Prediction
from ds_tba.plan.replay import Replay
from ds_tba.plan.trace import Trace


def fixed(trace: Trace, placement: Placement = Placement.KEEP, *, recompute: bool = False) -> Prediction:
    """Return the cost where everything that it is possible for has this placement."""
    return Replay(*assign(trace, placement, recompute=recompute)).cost
