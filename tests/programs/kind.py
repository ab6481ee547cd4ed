"""A kind of random programs: draws one from a seed and checks it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

SHOWN = 5  # of the programs that fail


class Failure(NamedTuple):
    """One thing that is wrong about a program: one word to sort by, and the rest."""

    kind: str
    text: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"


@dataclass
class Outcome:
    """The result of a check."""

    failures: list[Failure] = field(default_factory=list)
    tally: Counter[str] = field(default_factory=Counter)  # what was exercised, as "of what: which" with how often

    @property
    def kinds(self) -> set[str]:
        return {one.kind for one in self.failures}


class Kind(NamedTuple):
    """A kind of random programs."""

    draw: Callable[[int], Any]  # returns the program of a seed, always the same one
    # Runs a program without us and with us, in a directory on a drive, and compares.
    check: Callable[[Any, str], Outcome]


def shown(program: object, outcome: Outcome) -> str:
    return "\n  ".join([str(program), *map(str, outcome.failures)])


def check_all(kind: Kind, chunk: int, draws: int, directory: Path) -> Counter[str]:
    """Check the programs of a chunk of so many seeds, of which none may fail; return what was exercised."""
    tally, failed = Counter[str](), []
    for seed in range(chunk * draws, (chunk + 1) * draws):
        program = kind.draw(seed)
        outcome = kind.check(program, str(directory))
        tally += outcome.tally
        if outcome.failures:
            failed.append(shown(program, outcome))
    assert not failed, "\n\n".join([f"{len(failed)} of {draws} draws", *failed[:SHOWN]])
    return tally


def part_of(tally: Counter[str], name: str) -> Counter[str]:
    """Return the counts whose names begin with "``name``: "."""
    start = f"{name}: "
    return Counter({key.removeprefix(start): count for key, count in tally.items() if key.startswith(start)})


def named(name: str, counts: Iterable[str] | Counter[str]) -> Counter[str]:
    """Return counts for a tally, each as "``name``: key"."""
    return Counter({f"{name}: {key}": count for key, count in Counter(counts).items()})
