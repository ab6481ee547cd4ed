"""Random chains of ops are the same bits with rematerialization as without; see ``chains.py``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ds_tba.core.cache import TensorCache
from ds_tba.errors import RematerializationError
from ds_tba.remat.sites import Sites
from programs.chains import KINDS, USABLE, Cached, Chain, Course, check
from programs.kind import check_all, part_of
from programs.ops import MIXED

DRAWS = 60
# The first, whose cheap programs have most rules, is a part of every run of the tests, the others of ``make test-all``.
FIRST = 0
CHUNKS = [FIRST, *(pytest.param(chunk, marks=pytest.mark.thorough) for chunk in range(1, 5))]

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chunk", CHUNKS)
def test_random_programs_are_the_same_bits(chunk: int, kind: str, tmp_path: Path) -> None:
    tally = check_all(KINDS[kind], chunk, DRAWS, tmp_path)
    # Otherwise it would prove nothing.
    assert tally["made again"] > 0.4 * DRAWS
    if kind == "mixed":
        assert {op.__name__ for op in MIXED} <= set(part_of(tally, "op"))
        return
    rules = set(part_of(tally, "rule"))
    assert len(rules) > (0.7 if chunk == FIRST else 0.6) * len(USABLE), USABLE - rules
    assert tally["finite"] > 0.9 * DRAWS
    assert part_of(tally, "bytes").total() > 1 << 20
    assert {"modified", "freed", *(["Boom"] if chunk == FIRST else [])} <= set(part_of(tally, "error"))
    assert {"an input of the model", "saved by hooks of the user"} <= set(part_of(tally, "refused"))


# ---- the generator itself -------------------------------------------------------------------------------------------


def is_used(program: Chain, directory: Path) -> bool:
    outcome = check(program, str(directory))
    is_plain = (program.step.kind == "usual" or program.step.how == "at once") and program.dtype == torch.float32
    return is_plain and not program.may_be_found_later and not outcome.failures and outcome.tally["bytes: mul"] > 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_bit_that_is_made_wrong_is_found(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = next(one for one in map(KINDS[kind].draw, range(DRAWS)) if is_used(one, tmp_path))
    make = Sites.make
    monkeypatch.setattr(Sites, "make", lambda self, recipe: make(self, recipe).bitwise_xor_(1))
    assert "difference" in check(program, str(tmp_path)).kinds


@pytest.mark.parametrize("ends", [True, False])
def test_what_is_found_later_is_an_error(ends: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Changes that begin late may be wrong for a while; not to the end."""
    saving, note, forwards = TensorCache.saving, Course._note_grads, []

    def checked(cache: TensorCache, **options: Any) -> Any:
        forwards.append(cache)
        if ends and len(forwards) > 40:
            raise RematerializationError
        return saving(cache, **options)

    def wrong(course: Course) -> None:
        note(course)
        if isinstance(course._side, Cached):
            course._tape.note("a gradient", "wrong")

    programs = map(KINDS["mixed"].draw, range(DRAWS))
    program = next(one for one in programs if "late_change" in {line.name for line in one.lines})
    monkeypatch.setattr(TensorCache, "rematerialize", lambda *_: None)
    monkeypatch.setattr(Course, "_note_grads", wrong)
    monkeypatch.setattr(TensorCache, "saving", checked)
    outcome = check(program, str(tmp_path))
    assert bool(outcome.failures) is not ends
    assert outcome.tally["found later"] == ends
    assert len(forwards) >= 64
