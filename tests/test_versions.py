"""What pyproject.toml claims is what docs/evidence/status.md says was run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

ROOT = Path(__file__).parents[1]
NUMBER = r"(\d[\d.]*)(?: \(too old since\))?"


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    tomllib = pytest.importorskip("tomllib", reason="since Python 3.11")
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.fixture(scope="module")
def ran() -> list[tuple[Version, Version, Version]]:
    """Python, torch and DeepSpeed of each row of the table."""
    rows = re.findall(
        rf"^\| {NUMBER} \| {NUMBER} \| {NUMBER} \|", (ROOT / "docs" / "evidence" / "status.md").read_text(), re.M
    )
    return [(Version(python), Version(torch), Version(deepspeed)) for python, torch, deepspeed in rows]


def oldest(specifier: SpecifierSet) -> Version:
    (least,) = (Version(one.version) for one in specifier if one.operator == ">=")
    return least


def requirement(project: dict[str, Any], name: str) -> SpecifierSet:
    (found,) = (one for one in map(Requirement, project["dependencies"]) if one.name == name)
    return found.specifier


def test_each_python_that_is_claimed_ran(project: dict[str, Any], ran: list[tuple[Version, Version, Version]]) -> None:
    claimed = re.findall(r"Python :: (3\.\d+)", "\n".join(project["classifiers"]))
    assert sorted(claimed) == sorted({f"{python.major}.{python.minor}" for python, _, _ in ran})
    assert min(map(Version, claimed)) == oldest(SpecifierSet(project["requires-python"]))


def test_python_3_10_goes_with_the_last_torch_that_runs_on_it(project: dict[str, Any]) -> None:
    needs_newer = oldest(requirement(project, "torch")) >= Version("2.15")
    assert (oldest(SpecifierSet(project["requires-python"])) >= Version("3.11")) is needs_newer


@pytest.mark.parametrize(("package", "column"), [("torch", 1), ("deepspeed", 2)])
def test_the_oldest_version_that_is_claimed_ran(
    project: dict[str, Any], ran: list[tuple[Version, Version, Version]], package: str, column: int
) -> None:
    claimed, table = requirement(project, package), (ROOT / "docs" / "evidence" / "status.md").read_text()
    least = min(row[column] for row in ran if row[column] in claimed)
    assert least.release[: len(oldest(claimed).release)] == oldest(claimed).release
    for row in ran:
        assert (row[column] in claimed) is (f"| {row[column]} (too old since) |" not in table)


@pytest.mark.parametrize("package", ["numpy", "pydantic", "packaging", "xxhash"])
def test_the_oldest_of_the_other_dependencies_ran(project: dict[str, Any], package: str) -> None:
    claimed = oldest(requirement(project, package))
    found = re.search(rf"{package} {NUMBER}\b", (ROOT / "docs" / "evidence" / "status.md").read_text())
    assert found is not None and Version(found[1].rstrip(".")).release[: len(claimed.release)] == claimed.release
