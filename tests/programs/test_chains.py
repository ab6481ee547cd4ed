"""Random chains of ops are the same bits with rematerialization as without; see ``chains.py``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from ds_tba.core.cache import TensorCache
from ds_tba.errors import DsTbaError
from ds_tba.remat.rules import RULES
from ds_tba.remat.sites import Sites
from programs.__main__ import main
from programs.chains import USABLE, Chain, Chains, CheapChains, MixedChains, Watch, draw_cheap, draw_mixed, smaller
from programs.kind import part_of, shrink
from programs.ops import MIXED

DRAWS = 60
# The first is a part of every run of the tests, the others of ``make test-all``.
CHUNKS = [0, *(pytest.param(chunk, marks=pytest.mark.thorough) for chunk in range(1, 5))]
SHOWN = 5  # of those that fail

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module", params=[CheapChains, MixedChains])
def chains(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chains]:
    found = request.param()
    found.open(str(tmp_path_factory.mktemp("nvme")))
    yield found
    found.close()


cheap = pytest.mark.parametrize("chains", [CheapChains], indirect=True)
mixed = pytest.mark.parametrize("chains", [MixedChains], indirect=True)


@pytest.mark.parametrize("chunk", CHUNKS)
def test_random_programs_are_the_same_bits(chunk: int, chains: Chains) -> None:
    tally, failed = Counter[str](), []
    for seed in range(chunk * DRAWS, (chunk + 1) * DRAWS):
        program = chains.draw(seed)
        outcome = chains.check(program)
        tally += outcome.tally
        if outcome.failures:
            failed.append("\n".join([program.describe(), *(f"  {one}" for one in outcome.failures)]))
    assert not failed, "\n\n".join([f"{len(failed)} of {DRAWS} draws", *failed[:SHOWN]])
    # Otherwise it would prove nothing.
    if isinstance(chains, MixedChains):
        assert tally["made again"] > 10 * DRAWS
        assert set(MIXED.ops) <= set(part_of(tally, "op"))
        return
    assert len(part_of(tally, "rule")) > (0.6 if chunk else 0.75) * len(USABLE), USABLE - set(part_of(tally, "rule"))
    assert tally["finite"] > 0.9 * DRAWS
    assert part_of(tally, "bytes").total() > 1 << 20
    assert {"modified", "freed", *([] if chunk else ["boom"])} <= set(part_of(tally, "error"))
    assert {"an input of the model", "saved by hooks of the user"} <= set(part_of(tally, "refused"))


# ---- the generator itself -------------------------------------------------------------------------------------------


@mixed
def test_without_rematerialization_nothing_fails(chains: Chains, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a watch says is wrong is wrong because of rematerialization."""
    monkeypatch.setattr(TensorCache, "rematerialize", lambda *_: None)
    for seed in range(DRAWS):
        program = draw_mixed(seed)
        assert not chains.check(program).failures, program.describe()


def is_used(chains: Chains, program: Chain) -> bool:
    outcome = chains.check(program)
    is_plain = program.backward in ("plain", "at once") and program.dtype == torch.float32
    return is_plain and not outcome.failures and outcome.tally["bytes: mul"] > 0


def test_a_bit_that_is_made_wrong_is_found_and_made_smaller(chains: Chains, monkeypatch: pytest.MonkeyPatch) -> None:
    program = next(one for one in map(chains.draw, range(DRAWS)) if is_used(chains, one))
    make = Sites.make
    monkeypatch.setattr(Sites, "make", lambda self, recipe: make(self, recipe).bitwise_xor_(1))
    kinds = chains.check(program).kinds
    assert kinds & {"difference", "tensor"}
    found = shrink(chains, program, kinds)
    assert chains.check(found).kinds & kinds and len(found.lines) < len(program.lines)


def test_smaller_programs_are_others() -> None:
    for program in (draw_cheap(1), draw_mixed(1)):
        assert all(one != program and len(one.lines) <= len(program.lines) for one in smaller(program))


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
def test_a_watch_sees_a_bit(comes_back: Any, wrong: int) -> None:
    watch = Watch()
    pack, unpack = watch.around((lambda tensor: tensor, comes_back))
    unpack(pack(torch.zeros(3, 5)))
    assert len(watch.wrong) == wrong


class RematerializationError(DsTbaError):
    """Named as the one that checks in turn raise."""


@mixed
@pytest.mark.parametrize("ends", [True, False])
def test_what_is_found_later_is_an_error(ends: bool, chains: Chains, monkeypatch: pytest.MonkeyPatch) -> None:
    """Changes that begin late may be wrong for a while; not to the end."""
    saving, forwards = TensorCache.saving, []

    def checked(cache: TensorCache, **options: Any) -> Any:
        forwards.append(cache)
        if ends and len(forwards) > 40:
            raise RematerializationError
        return saving(cache, **options)

    programs = map(draw_mixed, range(DRAWS))
    program = next(one for one in programs if "late_change" in {line.name for line in one.lines})
    monkeypatch.setattr(TensorCache, "rematerialize", lambda *_: None)
    monkeypatch.setattr(Watch, "look", lambda watch, saved, found: watch.wrong.append("a tensor"))
    monkeypatch.setattr(TensorCache, "saving", checked)
    outcome = chains.check(program)
    assert bool(outcome.failures) is not ends
    assert outcome.tally["found later"] == ends
    assert len(forwards) == 41 if ends else len(forwards) >= 64


@mixed
def test_a_node_that_is_wrong_is_in_the_smallest_program(chains: Chains, monkeypatch: pytest.MonkeyPatch) -> None:
    def look(watch: Watch, saved: Any, found: Tensor) -> None:
        if "Sigmoid" in saved.node:
            watch.wrong.append("a sigmoid")

    monkeypatch.setattr(Watch, "look", look)
    programs = map(draw_mixed, range(DRAWS))
    program = next(one for one in programs if not one.may_be_found_later and chains.check(one).failures)
    found = shrink(chains, program, {"tensor"})
    assert chains.check(found).failures and len(found.lines) <= len(program.lines)


@pytest.mark.parametrize(("kind", "draw"), [("cheap", draw_cheap), ("mixed", draw_mixed)])
def test_a_program_follows_from_its_seed(kind: str, draw: Any, capsys: pytest.CaptureFixture[str]) -> None:
    first = draw(7).describe()
    torch.manual_seed(2)
    assert draw(7).describe() == first
    assert main([kind, "--describe", "--seed", "7", "--draws", "1"]) == 0
    assert capsys.readouterr().out.strip() == first
    assert set(USABLE) < set(RULES)
