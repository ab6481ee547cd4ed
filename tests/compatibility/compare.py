"""A row of the table: the same program with and without the block, compared bit for bit."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from forked import Program, ProgramFailed, run, run_once
from support.runs import with_block

MIB = 1 << 20
COMPARED = ("losses", "parameters")
SMALL: dict[str, Any] = {"min_tensor_bytes": 4096, "io": {"staging_bytes": 8 * MIB}}
# A plan may take any time: on small models moving always costs more than it gains.
PLANNED: dict[str, Any] = {"placement": "adaptive", "max_step_overhead": 1000.0}
# A drive so worn that a plan may write nothing: what can be recomputed is.
WORN: dict[str, Any] = {"rated_endurance_tbw": 1e-6, "min_life_days": 36500.0}
RECOMPUTED: dict[str, Any] = {**PLANNED, "recompute": True, "ssd": WORN}


@dataclass(frozen=True)
class Compared:
    """The results of the run with the block, rank by rank, and what the table says of them.

    Attributes:
        plain: what the run without it returned.
    """

    results: list[dict[str, Any]]
    plain: list[dict[str, Any]]

    @property
    def reports(self) -> list[dict[str, Any]]:
        return [result["report"] for result in self.results]

    @property
    def moved_bytes(self) -> int:
        return sum(report["offloaded_bytes"] for report in self.reports)

    @property
    def recomputed_bytes(self) -> int:
        return sum(report["recomputed_bytes"] for report in self.reports)

    @property
    def rematerialized_bytes(self) -> int:
        return sum(report["rematerialized_bytes"] for report in self.reports)

    def __str__(self) -> str:
        recomputed = f", {self.recomputed_bytes / MIB:.1f} MiB recomputed" if self.recomputed_bytes else ""
        again = f", {self.rematerialized_bytes / MIB:.1f} MiB rematerialized" if self.rematerialized_bytes else ""
        steps = self.reports[0]["steps"]
        return f"bit-equal, {self.moved_bytes / MIB:.1f} MiB moved{again}{recomputed} in {steps} steps"


def row(section: str, name: str, *values: Any, decides: bool = False, marks: Iterable[Any] = ()) -> Any:
    """Return the parameters of a test that makes a row.

    Args:
        decides: the row is run before a change lands; ``make test-all`` runs all. One does, at least, for each thing
            that may go wrong in its own way: each stage of ZeRO and precision, where its states lie, what runs in
            backward, what is read from checkpoints, what ranks have to agree on, who calls the engine. Stages and
            placements take turns.
    """
    return pytest.param(*values, marks=[pytest.mark.compatible(section, name, decides=decides), *marks], id=name)


def compare(
    program: Program,
    config: dict[str, Any],
    directory: Path,
    *,
    ranks: int = 1,
    block: dict[str, Any] | None = None,
    must_move: bool = True,
    plain: list[dict[str, Any]] | None = None,
    **arguments: Any,
) -> Compared:
    """Train with and without the block; every loss and parameter of every rank must be the same.

    Args:
        program: returns ``losses`` (hexadecimal, so that no bit is lost), ``parameters`` (a fingerprint of all, by
            name) and ``report``.
        config: of DeepSpeed, without the block.
        block: keys of the block; ``"placement": "nvme"`` where it does not say.
        must_move: fail where no byte left memory.
        plain: what the run without the block returned, where that is known.
    """
    if plain is None:
        plain = run_once(program, config, directory / "plain", ranks=ranks, **arguments)
    nvme_path = directory / "nvme"
    nvme_path.mkdir(parents=True)
    settings = {"placement": "nvme", **SMALL, **(block or {})}
    ours = run(program, with_block(config, nvme_path, **settings), directory / "block", ranks=ranks, **arguments)
    return agrees(plain, ours, must_move=must_move)


def agrees(plain: list[dict[str, Any]], ours: list[dict[str, Any]], *, must_move: bool = True) -> Compared:
    """Check that the ranks returned the same without and with the block."""
    for rank, (expected, found) in enumerate(zip(plain, ours, strict=True)):
        assert expected["losses"], "the program trained nothing"
        for key in COMPARED:
            assert found[key] == expected[key], f"rank {rank}: {key} differ"
        assert found["report"], f"rank {rank}: no offloader was attached"
    compared = Compared(ours, plain)
    if must_move:
        assert compared.moved_bytes > 0, "no byte was moved"
    return compared


def refusal(
    program: Program, config: dict[str, Any], directory: Path, match: str, block: dict[str, Any] | None = None,
    **arguments: Any,
) -> str:  # fmt: skip
    """The message with which a run with the block ends before it trains."""
    nvme_path = directory / "nvme"
    nvme_path.mkdir()
    with pytest.raises(ProgramFailed, match=match) as failed:
        run(program, with_block(config, nvme_path, **SMALL, **(block or {})), directory / "block", **arguments)
    lines = str(failed.value).strip().splitlines()
    # Not the last one: what DeepSpeed has said before may be written only at the end.
    told = [line for line in lines if line.startswith("ds_tba.errors.")] or lines
    return f"refused: {told[-1].partition(': ')[2]}"
