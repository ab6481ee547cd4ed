"""Which storages are a model's own, whatever became of the model since the last forward; and which tensors stay."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from conftest import StoreFactory
from support import hazards
from support.hazards import cache_over
from torch import Tensor, nn

from ds_tba.core.tensors import Eligibility, Gate, attributes_of, is_owned, mark_all_owned, mark_owned, stamp_of
from ds_tba.device.accelerator import Accelerator


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2, bias=False)))


def all_owned(model: nn.Module) -> bool:
    return all(is_owned(one) for one in (*model.parameters(), *model.buffers()))


def swap(data: nn.Module) -> None:
    for parameter in data.parameters():
        parameter.data = parameter.data.clone()


def there_and_back(data: nn.Module) -> None:
    for parameter in data.parameters():
        parameter.data = torch.empty(0)
        parameter.data = torch.randn(2, 2) if parameter.dim() > 1 else torch.randn(2)


CHANGES: dict[str, Callable[[nn.Module], object]] = {
    "another parameter": lambda model: setattr(model[0], "weight", nn.Parameter(torch.randn(2, 2))),
    "another parameter in the table": lambda model: model[0]._parameters.update(weight=nn.Parameter(torch.randn(2, 2))),
    "another table": lambda model: setattr(model[0], "_parameters", {"weight": nn.Parameter(torch.randn(2, 2))}),
    "another buffer": lambda model: setattr(model[1][0], "running_mean", torch.randn(2)),
    "one more module": lambda model: model[1].add_module("more", nn.Linear(2, 2)),
    "another module": lambda model: model[1].__setitem__(1, nn.Linear(2, 2)),
    "one more parameter": lambda model: model[1].register_parameter("gain", nn.Parameter(torch.ones(2))),
    "a parameter in place of None": lambda model: setattr(model[1][1], "bias", nn.Parameter(torch.ones(2))),
    "other storages": swap,
    "other storages at the old addresses, perhaps": there_and_back,
    "another dtype": lambda model: model.double(),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_after_a_change_all_are_marked(change: Callable[[nn.Module], object]) -> None:
    changed = model()
    mark_all_owned(changed)
    assert all_owned(changed)
    change(changed)
    mark_all_owned(changed)
    assert all_owned(changed)


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
