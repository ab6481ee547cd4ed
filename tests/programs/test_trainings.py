"""Random models in random training loops are the same bits with us as without; see ``trainings.py``."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support import runs

from ds_tba.core.cache import TensorCache
from ds_tba.core.saved import SavedView
from ds_tba.core.tensors import as_uint8
from programs.running import check
from programs.trainings import Program, Step

# Some of ``make check`` and ``make test``, the others of ``make test-all``.
DRAWS = 12
SEEDS = [0, *(pytest.param(first, marks=pytest.mark.thorough) for first in range(DRAWS, 300, DRAWS))]
HANG_S = 300.0  # of a draw, on a machine that has much else to do


@pytest.mark.parametrize("first", SEEDS)
def test_random_programs_are_exact_and_bounded(first: int, tmp_path: Path) -> None:
    """In a process of their own, which ends itself with its stacks when it hangs."""
    draws = ["--seed", str(first), "--draws", str(DRAWS), "--nvme_path", str(tmp_path), "--limit_s", str(HANG_S)]
    done = runs.python("-m", "programs", "trainings", *draws, timeout_s=(DRAWS + 1) * HANG_S)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_wrong_gradient_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One byte of one reloaded storage is enough."""
    load, loaded = TensorCache.load, []

    def wrong(self: TensorCache, view: SavedView) -> torch.Tensor:
        data = load(self, view)
        if not view.state.is_lent:  # what is wrong in a comparison only is saved
            loaded.append(data.numel())
        if len(loaded) == 20 and not view.state.is_lent:
            as_uint8(data.untyped_storage())[3] ^= 1
        return data

    monkeypatch.setattr(TensorCache, "load", wrong)
    steps = (Step("usual", rows=64),) * 4
    program = Program(0, blocks=(("Mlp",),) * 2, steps=steps, placement="nvme", rematerialize=True)
    failures = check(program, str(tmp_path)).failures
    assert [one.kind for one in failures] == ["difference"], failures
