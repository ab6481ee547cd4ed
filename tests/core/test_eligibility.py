"""Each reason for which a saved tensor stays in device memory, by a tensor that has it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ds_tba.core.tensors import Eligibility, Gate, mark_owned
from ds_tba.device.accelerator import Accelerator

E = Eligibility
CPU = torch.device("cpu")


class _Subclass(torch.Tensor):
    pass


def _owned() -> Tensor:
    module = nn.BatchNorm1d(64)
    mark_owned(module)
    return module.running_mean


def _inference() -> Tensor:
    with torch.inference_mode():
        return torch.randn(64)


CASES: dict[str, tuple[Callable[[], Tensor], Eligibility]] = {
    "an activation": (lambda: torch.randn(64).requires_grad_().exp(), E.ELIGIBLE),
    "a parameter": (lambda: nn.Parameter(torch.randn(64)), E.PARAMETER),
    "the transpose of a parameter": (lambda: nn.Linear(8, 8).weight.t(), E.PARAMETER),
    "a buffer of the model": (_owned, E.PARAMETER),
    "a subclass": (lambda: torch.randn(64).as_subclass(_Subclass), E.SUBCLASS),
    "a sparse tensor": (lambda: torch.eye(64).to_sparse(), E.NOT_DENSE),
    "a conjugate": (lambda: torch.randn(64, dtype=torch.complex64).conj(), E.NOT_DENSE),
    "a tensor of inference mode": (_inference, E.NOT_DENSE),
    "zeros without memory": (lambda: torch._efficientzerotensor(64), E.NO_STORAGE),
    "no elements": (lambda: torch.empty(0), E.NO_STORAGE),
    "another device": (lambda: torch.empty(64, device="meta"), E.OTHER_DEVICE),
    "few bytes": (lambda: torch.randn(8), E.SMALL),
    "a slice of much": (lambda: torch.randn(1024)[:64], E.SPARSE_VIEW),
    "autocast's copy of a parameter": (lambda: nn.Parameter(torch.randn(64)).to(torch.bfloat16), E.CAST_OF_PARAMETER),
}


@pytest.mark.parametrize(("make", "expected"), CASES.values(), ids=CASES)
def test_what_may_leave(make: Callable[[], Tensor], expected: Eligibility) -> None:
    assert Gate(CPU, 128, Accelerator()).judge(make(), acts=True, casts_stay=True) is expected


def test_with_a_budget_the_plan_says_which_casts_leave() -> None:
    cast = nn.Parameter(torch.randn(64)).to(torch.bfloat16)
    assert Gate(CPU, 128, Accelerator()).judge(cast, acts=True, casts_stay=False) is E.ELIGIBLE


def test_under_a_mode_that_may_not_understand_us_all_stays_if_anything_would_leave() -> None:
    tensor = torch.ones(64)
    with TorchDispatchMode():  # type: ignore[no-untyped-call]
        judged = [Gate(CPU, 128, Accelerator()).judge(tensor, acts=acts, casts_stay=True) for acts in (True, False)]
    assert judged == [E.UNDER_A_MODE, E.ELIGIBLE]


def test_modules_are_excluded_by_more_than_a_tensor_shows() -> None:
    gate, activation = Gate(CPU, 128, Accelerator()), torch.randn(64).requires_grad_().exp()
    for excluded_by, expected in (("", E.ELIGIBLE), ("its module", E.EXCLUDED)):
        gate.excluded_by = lambda excluded_by=excluded_by: excluded_by
        assert gate.judge(activation, acts=True, casts_stay=True) is expected
