"""A model's own storages are told from activations, also after the model has changed; some tensors stay in memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import StoreFactory
from support import hazards
from support.hazards import cache_over
from torch import Tensor, nn

from ds_tba.core.tensors import Eligibility, Gate, attributes_of, is_owned, mark_all_owned, mark_owned, stamp_of
from ds_tba.device.accelerator import Accelerator


def test_what_replaces_a_parameter_or_a_buffer_is_marked_too() -> None:
    model: Any = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2, bias=False)))

    def change() -> None:
        model[0].weight, model[1][1].bias = (nn.Parameter(torch.randn(size)) for size in ((2, 2), 2))
        model[1][0].running_mean = torch.randn(2)
        model[1][0].weight.data = torch.randn(2)
        model[1].append(nn.Linear(2, 2))

    for _ in range(2):
        mark_all_owned(model)
        assert all(map(is_owned, (*model.parameters(), *model.buffers())))
        change()
        assert not all(map(is_owned, (*model.parameters(), *model.buffers())))


@pytest.mark.parametrize("budget_bytes", [None, 1 << 20])
def test_autocasts_copies_of_parameters_stay_where_there_is_no_budget(
    make_store: StoreFactory, budget_bytes: int | None
) -> None:
    """Autocast holds them until it exits, so that moving them frees nothing and wears the drive."""
    cache = cache_over(make_store(), wait=True)
    cache.limit(budget_bytes)
    hazards.check(hazards.autocast, cache)
    cast_bytes = cache.stats.kept_bytes["a parameter in another dtype"]
    # Else the plan says what leaves.
    assert cast_bytes == 0 if budget_bytes else cast_bytes >= 2 * 2 * 4 * hazards.SIDE * hazards.SIDE


def test_attributes_are_the_user_s_and_no_stamp_of_ours() -> None:
    made = torch.zeros(4, requires_grad=True) * 2
    stamp_of(made)
    assert attributes_of(made, is_of_function=False) is None
    made.scale = 2.0  # type: ignore[attr-defined]
    assert attributes_of(made, is_of_function=False) == attributes_of(made, is_of_function=True) == {"scale": 2.0}
    assert attributes_of(torch.zeros(4), is_of_function=False) is None


# ---- why a saved tensor stays in device memory, by tensors that have each reason ------------------------------------


E = Eligibility


def _owned() -> Tensor:
    module = nn.BatchNorm1d(64)
    mark_owned(module)
    return module.running_mean


CASES: dict[str, tuple[Callable[[], Tensor], Eligibility]] = {
    "an activation": (lambda: torch.randn(64).requires_grad_().exp(), E.ELIGIBLE),
    "a parameter": (lambda: nn.Parameter(torch.randn(64)), E.PARAMETER),
    "the transpose of a parameter": (lambda: nn.Linear(8, 8).weight.t(), E.PARAMETER),
    "a buffer of the model": (_owned, E.PARAMETER),
    "a subclass": (lambda: torch.randn(64).as_subclass(type("Subclass", (Tensor,), {})), E.SUBCLASS),
    "a sparse tensor": (lambda: torch.eye(64).to_sparse(), E.NOT_DENSE),
    "a conjugate": (lambda: torch.randn(64, dtype=torch.complex64).conj(), E.NOT_DENSE),
    "a tensor of inference mode": (lambda: torch.inference_mode()(torch.randn)(64), E.NOT_DENSE),
    "zeros without memory": (lambda: torch._efficientzerotensor(64), E.NO_STORAGE),
    "no elements": (lambda: torch.empty(0), E.NO_STORAGE),
    "another device": (lambda: torch.empty(64, device="meta"), E.OTHER_DEVICE),
    "few bytes": (lambda: torch.randn(8), E.SMALL),
    "a slice of much": (lambda: torch.randn(1024)[:64], E.SPARSE_VIEW),
    "autocast's copy of a parameter": (lambda: nn.Parameter(torch.randn(64)).to(torch.bfloat16), E.CAST_OF_PARAMETER),
}


@pytest.mark.parametrize(("make", "expected"), CASES.values(), ids=CASES)
def test_what_may_leave(make: Callable[[], Tensor], expected: Eligibility) -> None:
    assert Gate(torch.device("cpu"), 128, Accelerator()).judge(make(), acts=True, casts_stay=True) is expected
