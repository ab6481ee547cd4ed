"""The pieces of a run, in the order of what they are worth: five of eight minutes together, then longer ones."""

from __future__ import annotations

import json
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpu.results import ROOT

LIMIT_S = 570.0
TOKENS = (4096, 8192, 16384, 32768, 65536, 131072)
PARAMETERS = (1e9, 3e9)
BENCHMARKS = ROOT / "benchmarks"
OWN = BENCHMARKS / "gpu"
# The ways of the headline, the most telling first; the longer pieces have all.
WAYS = ("keep", "checkpointing", "rematerialize", "host", "adaptive 2 %", "adaptive 0.5", "checkpointing + nvme")


def _json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def _curve(_: Path, scratch: Path) -> Any:
    return _json(scratch / "curve.json")


@dataclass(frozen=True)
class Piece:
    """One piece of a run.

    Attributes:
        part: part of the table.
        argv: program and arguments; ``RESULT`` stands for a file to write, ``SCRATCH`` for a directory to work in, and
            ``SECONDS`` for how long.
        read: reads what it found, from these two.
        limit_s: seconds after which it is ended; what it had written until then counts.
        is_quick: True for a piece of the eight minutes.
    """

    name: str
    part: str
    argv: Sequence[str]
    read: Callable[[Path, Path], Any] = field(default=lambda result, _: _json(result))
    limit_s: float = LIMIT_S
    is_quick: bool = False

    @property
    def least_s(self) -> float:
        """Seconds without which it is not begun."""
        return 15.0 if self.is_quick else 60.0

    def command(self, result: Path, scratch: Path, limit_s: float) -> list[str]:
        """Return the command line. ``SECONDS`` is less than the limit: a step that has begun is not stopped."""
        spare_s = 15 if self.is_quick else 60
        places = {"RESULT": str(result), "SCRATCH": str(scratch), "SECONDS": f"{max(10, limit_s - spare_s):.0f}"}
        return [sys.executable, *(places.get(argument, argument) for argument in self.argv)]


def _tests(result: Path, _: Path) -> Any:
    """Return how the tests of a file ended, and why some were skipped, as pytest's JUnit report has it."""
    counts: Counter[str] = Counter()
    skipped: Counter[str] = Counter()
    failed: list[str] = []
    for case in ElementTree.parse(result).iter("testcase"):
        kinds = {child.tag: child for child in case}
        kind = next((one for one in ("error", "failure", "skipped") if one in kinds), "passed")
        counts[kind] += 1
        failed += [case.get("name", "")] if kind in ("error", "failure") else []
        skipped.update([kinds[kind].get("message", "")] if kind == "skipped" else [])
    return {"counts": counts, "failed": failed, "skipped": skipped}


def _update(size: float, *more: str, rehearse: bool) -> tuple[str, ...]:
    small = ("--apart", "--width", "256", "--tokens", "16", "--steps", "1", "--chunk_mib", "1")
    here = small if rehearse else ("--gpu", *more)
    program = str(BENCHMARKS / "update_time.py")
    return (program, "--parameters", f"{size:g}", "--rounds", "1", "--json", "RESULT", *here)


def quick(*, rehearse: bool) -> list[Piece]:
    """Return the pieces of the eight minutes, which are worth most where a GPU can be had for no longer.

    A rehearsal may be on a machine that does much else, so there each has all the time that it wants.
    """
    device = ("--device", "cpu", "--tiny") if rehearse else ("--device", "cuda")
    here = ("--result", "RESULT", "--nvme_path", "SCRATCH", *device)
    timed = (*here, "--seconds", "SECONDS")
    headline = ("--profile", "--ways", *WAYS, "--tokens", "128" if rehearse else "16384")
    layers = () if rehearse else ("--layers", "4")
    hooks = ("--device", device[1], "--json", "RESULT", "--nvme_path", "SCRATCH", "--rounds", "1", "--counts")
    update = _update(3e5 if rehearse else 5e8, "--width", "4096", rehearse=rehearse)

    def piece(name: str, limit_s: float, *argv: str) -> Piece:
        return Piece(name, name, argv, limit_s=LIMIT_S if rehearse else limit_s, is_quick=True)

    return [
        piece("probe", 20, f"{OWN}/probe.py", *here),
        piece("smoke", 120, f"{OWN}/smoke.py", *timed),
        piece("headline", 170, f"{OWN}/headline.py", *headline, *layers, *timed),
        piece("hooks", 45, str(BENCHMARKS / "hook_cost.py"), *hooks, *(("10",) if rehearse else ("100", "1000"))),
        piece("update", 110, *update, "--shares", "0", "null"),
    ]


def longer(*, rehearse: bool) -> list[Piece]:
    """Return the pieces that take minutes each; a rehearsal has each kind once or twice, tiny."""
    device = ("--device", "cpu" if rehearse else "cuda")
    tiny = ("--tiny",) if rehearse else ()
    suites = sorted((ROOT / "tests" / "gpu").glob("test_*.py"))
    pytest = ("-m", "pytest", "-v", "-m", "gpu", "--tb=short", "-p", "no:cacheprovider")
    pytest += ("--junitxml", "RESULT", "--basetemp", "SCRATCH")
    found = [
        Piece(f"tests {path.stem}", "tests", (*pytest, str(path)), _tests)
        for path in (suites[:1] if rehearse else suites)
    ]
    measured = ("--result", "RESULT", "--nvme_path", "SCRATCH", "--seconds", "SECONDS", *device, *tiny)
    found += [
        Piece(f"length {tokens}", "lengths", (f"{OWN}/headline.py", "--tokens", str(tokens), *measured))
        for tokens in ((256,) if rehearse else TOKENS)
    ]
    hooks = ("--rounds", "1", "--counts", "10") if rehearse else ()
    program = (str(BENCHMARKS / "hook_cost.py"),)
    found.append(Piece("hook cost", "hooks", (*program, *device, "--json", "RESULT", "--nvme_path", "SCRATCH", *hooks)))
    curve = ("--minutes", "6", "--nvme_path", "SCRATCH", "--out", "SCRATCH", *device, *tiny)
    program = (str(BENCHMARKS / "races.py"), "curve")
    short = ("--rounds", "2", "--steps", "1", "--batches", "2") if rehearse else ("--batches", "4")
    found += [
        Piece(f"curve {model}", "hooks", (*program, "--models", model, *short, *curve), _curve)
        for model in (("GPT",) if rehearse else ("GPT", "BERT", "T5"))
    ]
    short = ("--rounds", "2", "--steps", "1") if rehearse else ()
    peers = (str(BENCHMARKS / "peers.py"), *short, *curve)
    found.append(Piece("peers", "peers", peers, lambda _, out: {"table": (out / "peers.md").read_text().splitlines()}))
    shares = ("--shares", "0", "0.5", "null")
    found += [
        Piece(f"update {size:g}", "update", (*_update(size, rehearse=rehearse), *shares))
        for size in ((3e5,) if rehearse else PARAMETERS)
    ]
    return found


def pieces(*, rehearse: bool) -> list[Piece]:
    """Return all pieces, in order."""
    return [*quick(rehearse=rehearse), *longer(rehearse=rehearse)]
