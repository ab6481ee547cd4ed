"""Decorators that run a test over every hazard of ``hazards.py``, and the cache that such a test trains with."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from conftest import Factory, freeze_garbage_collector
from torch import Tensor

from ds_tba.core.cache import TensorCache
from ds_tba.storage.nvme import NvmeStore
from support import hazards

Scenario = Callable[[hazards.Saving], list[Tensor]]
Test = Callable[..., None]


def over_each(name: str, cases: Sequence[Callable[..., Any]]) -> Callable[[Test], Test]:
    """A decorator: one test goes through all cases, given as the argument ``name``; the error names the case.

    Factories of stores and devices among the fixtures close what they have made after each case, the last one first.
    """

    def decorate(test: Test) -> Test:
        @functools.wraps(test)
        def all_cases(**fixtures: Any) -> None:
            for case in cases:
                freeze_garbage_collector()  # again, as a case may import what none before it needed
                try:
                    test(**fixtures, **{name: case})
                except BaseException as error:
                    error.add_note(f"{name}: {case.__name__}")
                    raise
                for fixture in reversed(fixtures.values()):
                    if isinstance(fixture, Factory):
                        fixture.close()

        signature = inspect.signature(test)
        rest = [parameter for parameter in signature.parameters.values() if parameter.name != name]
        all_cases.__signature__ = signature.replace(parameters=rest)  # type: ignore[attr-defined]
        return all_cases

    return decorate


scenarios = over_each("scenario", hazards.SCENARIOS)


mutations = over_each("mutation", hazards.MUTATIONS)


def cache_over(store: NvmeStore | None, *, wait: bool = False) -> TensorCache:
    return TensorCache([] if store is None else [store], "cpu", hazards.MIN_BYTES, wait_for_staging=wait)
