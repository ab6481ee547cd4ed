"""Random programs of cheap ops are the same bits with rematerialization as without; see ``fuzz_rematerialize.py``."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fuzz_rematerialize import USABLE, Program, Stores, Tally, check, draw, drawing, main, smaller

from ds_tba.remat.rules import RULES
from ds_tba.remat.sites import Sites

DRAWS = 60
# The first is a part of every run of the tests, the others of ``make test-all``.
CHUNKS = [0, *(pytest.param(chunk, marks=pytest.mark.thorough) for chunk in range(1, 5))]


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stores]:
    with drawing(str(tmp_path_factory.mktemp("nvme"))) as found:
        yield found


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("chunk", CHUNKS)
def test_random_programs_are_the_same_bits(chunk: int, stores: Stores) -> None:
    tally, failed = Tally(), []
    for seed in range(chunk * DRAWS, (chunk + 1) * DRAWS):
        program = draw(seed)
        failures = check(program, stores, tally)
        if failures:
            failed.append("\n".join([program.describe(), *(f"  {one.kind}: {one.text}" for one in failures)]))
    print(tally)
    assert not failed, "\n\n".join(["", *failed])
    # Else it would prove nothing.
    assert len(tally.rules) > (0.6 if chunk else 0.75) * len(USABLE), sorted(USABLE - set(tally.rules))
    assert tally.finite > 0.9 * DRAWS
    assert sum(tally.nbytes.values()) > 1 << 20
    assert {"modified", "freed", *([] if chunk else ["boom"])} <= set(tally.errors)
    assert {"an input of the model", "saved by hooks of the user"} <= set(tally.refused)


def wrong(made: torch.Tensor) -> torch.Tensor:
    return made.bitwise_xor_(1)


@pytest.mark.usefixtures("one_thread")
def test_what_is_made_wrong_is_found_and_made_smaller(stores: Stores, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fuzz itself: it sees a bit, and its smaller programs are smaller."""
    program = next(one for one in map(draw, range(DRAWS)) if uses(one, stores))
    make = Sites.make
    monkeypatch.setattr(Sites, "make", lambda self, recipe: wrong(make(self, recipe)))
    assert "difference" in {one.kind for one in check(program, stores, Tally())}
    assert all(len(one.lines) <= len(program.lines) for one in smaller(program))


def uses(program: Program, stores: Stores) -> bool:
    tally = Tally()
    is_plain = program.backward == "plain" and program.dtype == torch.float32
    return is_plain and not check(program, stores, tally) and tally.nbytes["mul"] > 0


def test_a_program_follows_from_its_seed(capsys: Any, tmp_path: Path) -> None:
    random.seed(1)
    first = draw(7).describe()
    random.seed(2)
    assert draw(7).describe() == first
    assert main(["--describe", "--seed", "7", "--draws", "1"]) == 0
    assert capsys.readouterr().out.strip() == first
    assert set(USABLE) < set(RULES)
