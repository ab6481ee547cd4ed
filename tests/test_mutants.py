"""The list of mutants is of this code; ``make mutants`` runs it, which takes minutes."""

from __future__ import annotations

import pytest
from mutants import MUTANTS, ROOT, Mutant


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_code_that_is_taken_out_is_there_once(mutant: Mutant) -> None:
    assert (ROOT / mutant.file).read_text().count(mutant.code) == 1
    assert all((ROOT / test).is_file() for test in mutant.tests.split())


def test_names_are_unique() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
