"""The pieces of a run, in the order of what matters: each is a program that ends within ten minutes."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpu.results import ROOT

LIMIT_S = 570.0
TOKENS = (4096, 8192, 16384, 32768, 65536, 131072)
PARAMETERS = (1e9, 3e9)
BENCHMARKS = ROOT / "benchmarks"


@dataclass(frozen=True)
class Piece:
    """One.

    Attributes:
        part: of the table, a to e.
        argv: of the program; ``RESULT`` stands for a file to write, ``SCRATCH`` for a directory to work in, and
            ``SECONDS`` for how long.
        read: what it found, from these two.
        limit_s: ended then; what it had written until then counts.
    """

    name: str
    part: str
    argv: Sequence[str]
    read: Callable[[Path, Path], Any] = field(default=lambda result, _: json.loads(result.read_text(encoding="utf-8")))
    limit_s: float = LIMIT_S

    def command(self, result: Path, scratch: Path, limit_s: float) -> list[str]:
        """``SECONDS`` is what it may plan for: a step that has begun is not stopped."""
        places = {"RESULT": str(result), "SCRATCH": str(scratch), "SECONDS": f"{max(30, limit_s - 60):.0f}"}
        return [sys.executable, *(places.get(argument, argument) for argument in self.argv)]


def _rok(_: Path, scratch: Path) -> Any:
    return json.loads((scratch / "rok.json").read_text(encoding="utf-8"))


def pieces(*, rehearse: bool) -> list[Piece]:
    """All of them; in a rehearsal on the CPU, each kind once or twice and tiny."""
    device = ("--device", "cpu" if rehearse else "cuda")
    own, tiny = str(BENCHMARKS / "gpu"), ("--tiny",) if rehearse else ()
    found = [Piece("facts", "a", (f"{own}/facts.py", "--result", "RESULT", *device, *tiny))]
    suites = sorted((ROOT / "tests" / "gpu").glob("test_*.py"))
    found += [
        Piece(f"tests {path.stem}", "b", (f"{own}/suite.py", "--result", "RESULT", "--scratch", "SCRATCH", str(path)))
        for path in (suites[:1] if rehearse else suites)
    ]
    measured = ("--result", "RESULT", "--nvme_path", "SCRATCH", "--seconds", "SECONDS", *device, *tiny)
    found += [
        Piece(f"headline {tokens}", "c", (f"{own}/headline.py", "--tokens", str(tokens), *measured))
        for tokens in ((256,) if rehearse else TOKENS)
    ]
    hooks = ("--rounds", "1", "--counts", "10") if rehearse else ()
    found.append(
        Piece(
            "hook cost",
            "d",
            (str(BENCHMARKS / "hook_cost.py"), *device, "--json", "RESULT", "--nvme_path", "SCRATCH", *hooks),
        )
    )
    curve = ("--nvme_path", "SCRATCH", "--out", "SCRATCH", *device, *tiny)
    short = ("--rounds", "2", "--steps", "1", "--batches", "2") if rehearse else ("--batches", "4")
    found += [
        Piece(
            f"rok {model}", "d", (str(BENCHMARKS / "rok.py"), "--models", model, "--minutes", "6", *short, *curve), _rok
        )
        for model in (("GPT",) if rehearse else ("GPT", "BERT", "T5"))
    ]
    shares = ("--shares", "0", "0.5", "null", "--rounds", "1", "--json", "RESULT")
    small = ("--apart", "--width", "256", "--tokens", "16", "--steps", "1", "--chunk_mib", "1")
    found += [
        Piece(
            f"update {size:g}",
            "e",
            (
                str(BENCHMARKS / "update_time.py"),
                "--parameters",
                f"{size:g}",
                *shares,
                *(small if rehearse else ("--gpu",)),
            ),
        )
        for size in ((3e5,) if rehearse else PARAMETERS)
    ]
    return found
