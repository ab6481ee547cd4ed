"""Random programs of what may be right in one step and wrong in another; see ``fuzz_mixed.py``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from fuzz_mixed import MIXED, Program, Tally, Watch, again, check, draw, drawing, main, shrink
from fuzz_rematerialize import Stores
from torch import Tensor

from ds_tba.core.cache import TensorCache
from ds_tba.errors import DsTbaError

DRAWS = 60
# The first is a part of every run of the tests, the others of ``make test-all``.
CHUNKS = [0, *(pytest.param(chunk, marks=pytest.mark.thorough) for chunk in range(1, 5))]
SHOWN = 5  # of those that fail

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stores]:
    with drawing(str(tmp_path_factory.mktemp("nvme"))) as found:
        yield found


@pytest.mark.parametrize("chunk", CHUNKS)
def test_backward_gets_what_was_saved(chunk: int, stores: Stores) -> None:
    tally, failed = Tally(), []
    for seed in range(chunk * DRAWS, (chunk + 1) * DRAWS):
        program = draw(seed)
        failures = check(program, stores, tally)
        if failures:
            failed.append("\n".join([program.describe(), *(f"  {one}" for one in failures), again(seed)]))
    print(tally)
    assert not failed, "\n\n".join([f"{len(failed)} of {DRAWS} draws", *failed[:SHOWN]])
    # Else it would prove nothing.
    assert tally.made_again > 10 * DRAWS
    assert set(MIXED) <= set(tally.ops)


def test_without_rematerialization_nothing_fails(stores: Stores, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fuzz itself: what it says is wrong is wrong because of rematerialization."""
    monkeypatch.setattr(TensorCache, "rematerialize", lambda *_: None)
    for seed in range(DRAWS):
        program = draw(seed)
        assert not check(program, stores, Tally()), program.describe()


@pytest.mark.parametrize(
    ("comes_back", "wrong"),
    [
        (lambda held: held, 0),
        (lambda held: held.clone(), 0),
        (lambda held: held.clone().view(torch.int32).bitwise_xor_(1).view(torch.float32), 1),
        (lambda held: -held.clone() * 0, 1),  # 0 and -0 are other bits
        (lambda held: held.double(), 1),
    ],
)
def test_a_bit_is_seen(comes_back: Any, wrong: int) -> None:
    watch = Watch()
    pack, unpack = watch.around((lambda tensor: tensor, comes_back))
    unpack(pack(torch.zeros(3, 5)))
    assert len(watch.wrong) == wrong


class RematerializationError(DsTbaError):
    """Named as the one that checks in turn raise."""


@pytest.mark.parametrize("ends", [True, False])
def test_what_is_found_later_is_an_error(ends: bool, stores: Stores, monkeypatch: pytest.MonkeyPatch) -> None:
    """Changes that begin late may be wrong for a while; not to the end."""
    saving, forwards = TensorCache.saving, []

    def checked(cache: TensorCache, **options: Any) -> Any:
        forwards.append(cache)
        if ends and len(forwards) > 40:
            raise RematerializationError
        return saving(cache, **options)

    program = next(one for one in map(draw, range(DRAWS)) if "late_change" in {line.name for line in one.lines})
    monkeypatch.setattr(TensorCache, "rematerialize", lambda *_: None)
    monkeypatch.setattr(Watch, "look", lambda watch, saved, found: watch.wrong.append("a tensor"))
    monkeypatch.setattr(TensorCache, "saving", checked)
    tally = Tally()
    assert bool(check(program, stores, tally)) is not ends
    assert tally.found_later == ends
    assert len(forwards) == 41 if ends else len(forwards) >= 64


def test_smaller_programs_fail_as_well(stores: Stores, monkeypatch: pytest.MonkeyPatch) -> None:
    def look(watch: Watch, saved: Any, found: Tensor) -> None:
        if "Sigmoid" in saved.node:
            watch.wrong.append("a sigmoid")

    monkeypatch.setattr(Watch, "look", look)
    program = next(one for one in map(draw, range(DRAWS)) if not one.may_be_found_later and check(one, stores, Tally()))
    found: Program = shrink(program, stores)
    assert check(found, stores, Tally())
    assert [one.name for one in found.lines].count("nothing") >= [one.name for one in program.lines].count("nothing")


def test_a_program_follows_from_its_seed(capsys: Any) -> None:
    first = draw(7).describe()
    torch.manual_seed(2)
    assert draw(7).describe() == first
    assert main(["--describe", "--seed", "7", "--draws", "1"]) == 0
    assert capsys.readouterr().out.strip() == first
