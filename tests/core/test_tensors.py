"""Which storages are a model's own is known in every forward, whatever became of the model since the last one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from conftest import StoreFactory
from torch import Tensor, nn

from ds_tba.core.cache import TensorCache
from ds_tba.core.tensors import attributes_of, is_owned, mark_all_owned, stamp_of


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
    store, x = make_store(), torch.randn(8, 256)
    model = nn.Sequential(nn.Linear(256, 256), nn.SiLU(), nn.Linear(256, 256))
    cache = TensorCache([store], "cpu", 1024, wait_for_staging=True)
    cache.limit(budget_bytes)

    def gradients(saving: Callable[[], Any]) -> list[Tensor]:
        model.zero_grad()
        with saving(), torch.autocast("cpu", torch.bfloat16):
            loss = model(x).float().square().sum()
        loss.backward()
        return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]

    expected, found = gradients(nullcontext), gradients(cache.saving)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    copies_bytes = 2 * 256 * 256 * 2
    if budget_bytes is None:
        assert cache.stats.kept_bytes["a parameter in another dtype"] >= copies_bytes / 2
        assert store.stats.offloaded_bytes < 256 * 256
    else:  # the plan says what leaves
        assert cache.stats.kept_bytes["a parameter in another dtype"] == 0


def test_attributes_are_the_user_s_and_no_stamp_of_ours() -> None:
    made = torch.zeros(4, requires_grad=True) * 2
    stamp_of(made)
    assert attributes_of(made, is_of_function=False) is None
    made.scale = 2.0  # type: ignore[attr-defined]
    assert attributes_of(made, is_of_function=False) == attributes_of(made, is_of_function=True) == {"scale": 2.0}
    assert attributes_of(torch.zeros(4), is_of_function=False) is None
