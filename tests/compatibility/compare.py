"""A row of the table: the same program with and without the block, compared bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any

import pytest
from forked import Program, run, run_once
from support.runs import plain_config, with_block

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
    """The results of the run with the block, rank by rank, and of the ``plain`` one; ``str`` is what the table says."""

    results: list[dict[str, Any]]
    plain: list[dict[str, Any]]

    @property
    def reports(self) -> list[dict[str, Any]]:
        return [result["report"] for result in self.results]

    def total(self, key: str) -> int:
        return sum(report[f"{key}_bytes"] for report in self.reports)

    def __str__(self) -> str:
        words = {"offloaded": "moved", "rematerialized": "rematerialized", "recomputed": "recomputed"}
        found = {word: self.total(key) / MIB for key, word in words.items()}
        told = ", ".join(f"{mib:.1f} MiB {word}" for word, mib in found.items() if mib or word == "moved")
        return f"bit-equal, {told} in {self.reports[0]['steps']} steps"


def row(section: str, name: str, *values: Any, decides: bool = False, marks: Iterable[Any] = ()) -> Any:
    """Return the parameters of a test that makes a row.

    Args:
        decides: the row is run before a change lands; ``make test-all`` runs all. One does, at least, for each thing
            that may go wrong in its own way: each stage of ZeRO and precision, where its states lie, what runs in
            backward, what is read from checkpoints, what ranks have to agree on, who calls the engine. Stages and
            placements take turns.
    """
    return pytest.param(*values, marks=[pytest.mark.compatible(section, name, decides=decides), *marks], id=name)


def config_of(stage: int, **more: Any) -> dict[str, Any]:
    """A config, whose ``zero_optimization`` may have more than the stage."""
    zero = more.pop("zero_optimization", {})
    config = plain_config(stage, **{"train_micro_batch_size_per_gpu": 2, **more})
    config["zero_optimization"] |= zero
    return config


@dataclass(frozen=True)
class Way:
    """A program with its arguments: a row for each stage of ZeRO."""

    name: str  # of the row, with ``{}`` for the stage, or without it at its end
    program: Program
    arguments: dict[str, Any] = field(default_factory=dict)
    stages: Sequence[int] = (2, 3)
    _: KW_ONLY
    decides: int | None = None  # the stage whose row does
    ranks: int = 1
    config: Callable[[int], dict[str, Any]] = config_of  # of DeepSpeed, for a stage
    block: dict[str, Any] | None = None
    blocks: Mapping[int, dict[str, Any]] = field(default_factory=dict)  # by the stage, where ``block`` is none
    must_move: bool = True
    says: Callable[[Compared], str] = str  # what the row says; it may check more
    marks: Sequence[Any] = ()

    def compared(self, stage: int, directory: Path) -> Compared:
        return compare(
            self.program, self.config(stage), directory, ranks=self.ranks, must_move=self.must_move,
            block=self.block or self.blocks.get(stage), **self.arguments,
        )  # fmt: skip


def rows(section: str, ways: Iterable[Way]) -> list[Any]:
    """Return the parameters of a test of these ways: ``way`` and ``stage``."""
    return [
        row(
            section, one.name.format(stage) if "{}" in one.name else f"{one.name}, ZeRO-{stage}", one, stage,
            decides=stage == one.decides, marks=one.marks,
        )
        for one in ways
        for stage in one.stages
    ]  # fmt: skip


def common_plan(reports: Sequence[dict[str, Any]]) -> None:
    """Check that all ranks follow one plan; the reason and the time are a rank's own."""
    plans = [{**report["plan"], "reason": "", "measured_step_s": None} for report in reports]
    assert plans == [plans[0]] * len(reports)


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
        program: returns ``losses`` (hexadecimal, so that no bit is lost), ``parameters`` (a fingerprint of each) and
            ``report``.
        block: keys of the block; ``"placement": "nvme"`` where it does not say.
        plain: what the run without the block returned, where that is known.
    """
    if plain is None:
        plain = run_once(program, config, directory / "plain", ranks=ranks, **arguments)
    nvme_path = directory / "nvme"
    nvme_path.mkdir(parents=True)
    settings = {"placement": "nvme", **SMALL, **(block or {})}
    ours = run(program, with_block(config, nvme_path, **settings), directory / "block", ranks=ranks, **arguments)
    return agrees(plain, ours, must_move=must_move)


def agrees(
    plain: list[dict[str, Any]], ours: list[dict[str, Any]], *, must_move: bool = True, more: Sequence[str] = ()
) -> Compared:
    """Check that the ranks returned the same without and with the block: losses, parameters, and ``more``."""
    for rank, (expected, found) in enumerate(zip(plain, ours, strict=True)):
        assert expected["losses"], "the program trained nothing"
        for key in (*COMPARED, *more):
            assert found[key] == expected[key], f"rank {rank}: {key} differ"
        assert found["report"], f"rank {rank}: no offloader was attached"
    compared = Compared(ours, plain)
    assert not must_move or compared.total("offloaded") > 0, "no byte was moved"
    return compared
