"""A row of the table: the same program with and without the block, compared bit for bit."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from forked import Program, ProgramFailed, run
from runs import with_block

MIB = 1 << 20
COMPARED = ("losses", "parameters")
SMALL: dict[str, Any] = {"min_tensor_bytes": 4096, "io": {"staging_bytes": 8 * MIB}}


@dataclass(frozen=True)
class Compared:
    """What the run with the block returned, rank by rank, and what the table says of it.

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

    def __str__(self) -> str:
        return f"bit-equal, {self.moved_bytes / MIB:.1f} MiB moved in {self.reports[0]['steps']} steps"


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
        plain = run(program, config, directory / "plain", ranks=ranks, **arguments)
    nvme_path = directory / "nvme"
    nvme_path.mkdir(parents=True)
    settings = {"placement": "nvme", **SMALL, **(block or {})}
    ours = run(program, with_block(config, nvme_path, **settings), directory / "block", ranks=ranks, **arguments)
    for rank, (expected, found) in enumerate(zip(plain, ours, strict=True)):
        assert expected["losses"], "the program trained nothing"
        for key in COMPARED:
            assert found[key] == expected[key], f"rank {rank}: {key} differ"
        assert found["report"], f"rank {rank}: no offloader was attached"
    compared = Compared(ours, plain)
    if must_move:
        assert compared.moved_bytes > 0, "no byte was moved"
    return compared


def refusal(program: Program, config: dict[str, Any], directory: Path, match: str, **arguments: Any) -> str:
    """The message with which a run with the block ends before it trains."""
    nvme_path = directory / "nvme"
    nvme_path.mkdir()
    with pytest.raises(ProgramFailed, match=match) as failed:
        run(program, with_block(config, nvme_path, **SMALL), directory / "block", **arguments)
    last: str = str(failed.value).strip().splitlines()[-1]
    return f"refused: {last.partition(': ')[2]}"
