"""The house: rooms import only rooms below, files of a room go in no circle, and the host framework has its places."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "ds_tba"
# From the top. Rooms of one row do not know each other.
ROOMS = [
    ["cli"],
    ["engine"],
    ["offloader"],
    ["plan"],
    ["explain"],
    ["recompute", "remat"],
    ["core", "update"],
    ["storage"],
    ["device"],
    ["report"],
    ["holders"],
    ["stats", "wear"],
    ["config"],
    ["errors"],
]
RANK = {room: number for number, row in enumerate(ROOMS) for room in row}
ENTRIES = ["__init__", "__main__", "autoload"]  # reach the engine by themselves, once DeepSpeed is there
LONGEST_CHAIN = 8
MAX_FILES = 86
MAX_LINES = 22950
MODULES = {
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__"): path
    for path in PACKAGE.rglob("*.py")
}


@cache
def named(name: str) -> frozenset[str]:
    """Everything that a module imports, also inside functions and under TYPE_CHECKING."""
    found = set()
    for node in ast.walk(ast.parse(MODULES[name].read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return frozenset(found)


@cache
def imports(name: str) -> frozenset[str]:
    """The modules of this package that a module imports."""
    own = {one.removeprefix("ds_tba.") for one in named(name) if one.startswith("ds_tba.")}
    return frozenset((own & set(MODULES)) - {name})


@cache
def chain(name: str, *above: str) -> tuple[str, ...]:
    """The longest way down from a module."""
    assert name not in above, f"a circle: {' > '.join([*above, name])}"
    below = [chain(one, *above, name) for one in imports(name)]
    return (name, *max(below, key=len, default=()))


def room(name: str) -> str:
    return name.partition(".")[0]


INSIDE = sorted(set(MODULES) - set(ENTRIES))


@pytest.mark.parametrize("name", INSIDE)
def test_rooms_import_only_rooms_below(name: str) -> None:
    others = {one for one in imports(name) if room(one) != room(name)}
    assert not {one for one in others if RANK[room(one)] <= RANK[room(name)]}


def test_no_chain_of_imports_is_long() -> None:
    longest = max((chain(name) for name in INSIDE), key=len)
    assert len(longest) <= LONGEST_CHAIN, " > ".join(longest)


def test_there_are_not_many_files() -> None:
    assert len(MODULES) <= MAX_FILES


def test_planning_is_pure() -> None:
    pure = {f"plan.{name}" for name in ("plan", "replay", "search", "timeline", "trace")}
    assert {one for name in pure for one in imports(name)} - pure == {"config", "errors"}
    assert not {name for name in pure for one in named(name) if one.startswith("torch")}


def test_deepspeed_is_imported_in_its_places_only() -> None:
    users = {name for name in MODULES if any(one.split(".")[0] == "deepspeed" for one in named(name))}
    assert users == {"engine", "storage.backends.aio"}


def test_there_are_not_many_lines() -> None:
    assert sum(len(path.read_text().splitlines()) for path in MODULES.values()) <= MAX_LINES
