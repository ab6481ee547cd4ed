"""Decorators that run a test over every hazard of ``hazards.py``, and the cache that such a test trains with."""

from __future__ import annotations

import pytest

from ds_tba.core.cache import TensorCache
from ds_tba.storage.nvme import NvmeStore
from support import hazards
from support.hazards import Scenario as Scenario

scenarios = pytest.mark.parametrize(
    "scenario",
    [
        pytest.param(one, marks=[pytest.mark.moves_nothing] if one in hazards.MOVE_NOTHING else [], id=one.__name__)
        for one in hazards.SCENARIOS
    ],
)
mutations = pytest.mark.parametrize("mutation", hazards.MUTATIONS, ids=lambda one: one.__name__)


def cache_over(store: NvmeStore | None, *, wait: bool = False) -> TensorCache:
    return TensorCache([] if store is None else [store], "cpu", hazards.MIN_BYTES, wait_for_staging=wait)
