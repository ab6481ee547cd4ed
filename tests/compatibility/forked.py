"""Training programs in processes of their own; see ``support/ranks.py``.

A *program* is a function of a module of the tests: ``program(config, **arguments) -> dict``. It trains under the
DeepSpeed config that it gets, as one rank of a job, and returns what can be compared. The process knows its rank from
the usual environment variables, as under a launcher.
"""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from support import ranks as of_ranks
from support.runs import once

TIMEOUT_S = 300.0

Program = Callable[..., dict[str, Any]]


class ProgramFailed(Exception):
    """A rank raised or died; the text is the end of what it printed."""


def run(
    program: Program,
    config: dict[str, Any] | None,
    directory: Path,
    *,
    ranks: int = 1,
    timeout_s: float = TIMEOUT_S,
    variables: Mapping[str, str | None] = {},
    **arguments: Any,
) -> list[dict[str, Any]]:
    """Run a program on some ranks; return what each of them returned, and under ``output`` what it printed.

    Args:
        variables: of their environment; None takes one away.

    Raises:
        ProgramFailed: a rank did not come to its end.
    """
    directory.mkdir(parents=True, exist_ok=True)
    codes, outputs = of_ranks.fork(
        _rank, program, config, arguments, str(directory), directory=directory, ranks=ranks, timeout_s=timeout_s,
        **variables,
    )  # fmt: skip
    if any(codes):
        raise ProgramFailed(f"exit codes {codes}\n" + "\n".join(output[-8000:] for output in outputs))
    results = [json.loads((directory / f"result{rank}.json").read_text()) for rank in range(ranks)]
    return [{**result, "output": output} for result, output in zip(results, outputs, strict=True)]


def run_each(
    program: Program, each: Sequence[tuple[dict[str, Any], dict[str, Any]]], directory: Path, **options: Any
) -> list[list[dict[str, Any]]]:
    """Run a program under each of these configs, with its arguments, one after the other in one job.

    Returns:
        For each what :func:`run` returns, which takes the same options.
    """
    ranks = run(_each, None, directory, trains=program, each=each, **options)
    return [[rank["found"][at] | {"output": rank["output"]} for rank in ranks] for at in range(len(each))]


def run_once(
    program: Program, config: dict[str, Any], directory: Path, *, ranks: int = 1, **arguments: Any
) -> list[dict[str, Any]]:
    """Call :func:`run` once in a run of the tests: many tests compare with a run without the block."""
    key = [program.__module__, program.__qualname__, config, ranks, arguments]
    return once(key, lambda: run(program, config, directory, ranks=ranks, **arguments))


def _each(_: None, trains: Program, each: Sequence[tuple[dict[str, Any], dict[str, Any]]]) -> dict[str, Any]:
    found = []
    for config, arguments in each:
        found.append(trains(config, **arguments))
        gc.collect()  # what the engine before held
    return {"found": found}


def _rank(program: Program, config: dict[str, Any] | None, arguments: dict[str, Any], directory: str) -> None:
    Path(directory, f"result{os.environ['RANK']}.json").write_text(json.dumps(program(config, **arguments)))
