"""Random models in random training loops are the same bits with us as without; see ``trainings.py``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support import runs

from ds_tba.core.cache import TensorCache
from ds_tba.core.saved import SavedView
from programs import workers
from programs.running import Trainings, check
from programs.trainings import draw, smaller

# Some of ``make check``, the rest of the first 60 of ``make test``, the others of ``make test-all``.
SEEDS = [
    range(12),
    pytest.param(range(12, 60), marks=pytest.mark.long),
    *(pytest.param(range(first, first + 60), marks=pytest.mark.thorough) for first in range(60, 300, 60)),
]
JOBS = 2
ENGINE_SEEDS = range(6)

HANG = """
import time

import torch

torch.Tensor.backward = lambda *args, **options: time.sleep(600)
"""


@pytest.mark.parametrize("seeds", SEEDS, ids=lambda seeds: f"{seeds[0]}-{seeds[-1]}")
def test_random_programs_are_exact_and_bounded(seeds: range, tmp_path: Path) -> None:
    failed = [one for one in workers.run("trainings", Trainings(), seeds, str(tmp_path), JOBS) if one.failures]
    assert not failed, "\n\n".join(["", *map(str, failed), workers.summary(failed, 0)])


@pytest.mark.engine
def test_random_programs_are_exact_under_an_engine(tmp_path: Path) -> None:
    seeds = map(str, ENGINE_SEEDS)
    done = runs.run(None, tmp_path, str(tmp_path), *seeds, script=runs.SCRIPTS / "fuzzed.py", told_local_rank=False)
    told = done.lines("SEED")
    assert told == [f"SEED {seed} is exact" for seed in ENGINE_SEEDS], done.output[-6000:]


def test_a_seed_draws_one_program() -> None:
    programs = [draw(seed) for seed in range(50)]
    assert programs == [draw(seed) for seed in range(50)]
    assert len({program.describe() for program in programs}) == 50


def test_smaller_programs_are_others() -> None:
    program = draw(0)
    assert all(one != program and one.steps for one in smaller(program))


def test_a_wrong_gradient_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One byte of one reloaded storage is enough."""
    load, loaded = TensorCache._load, []

    def wrong(self: TensorCache, view: SavedView) -> torch.Tensor:
        data = load(self, view)
        if not view.is_lent:  # what is wrong in a comparison only is saved
            loaded.append(data.numel())
        if len(loaded) == 20 and not view.is_lent:
            data.numpy()[3] ^= 1
        return data

    monkeypatch.setattr(TensorCache, "_load", wrong)
    usual = replace(draw(0).steps[0], kind="usual", rows=64, micro_steps=1)
    program = replace(
        draw(0), blocks=(("Mlp",),) * 2, width=64, stem="linear", steps=(usual,) * 4, batches="fresh", device="cpu",
        placement="nvme", planner="adaptive", budget_part=None, host_bytes=0, collector="usual",
    )  # fmt: skip
    failures = check(program, str(tmp_path)).failures
    assert [one.kind for one in failures] == ["difference"], failures


def test_a_draw_that_hangs_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sitecustomize.py").write_text(HANG)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    [result] = workers.run("trainings", Trainings(), [7], str(tmp_path), jobs=1, limit_s=40)
    assert result.kinds == "hang" and "seed 7" in str(result) and "running.py" in str(result)
