"""The house: imports go strictly down, and the host framework is named where the design says and nowhere else."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "ds_tba"
LEVELS = [
    ["errors"],
    ["config", "tensors", "spans", "notes", "states", "host_memory", "agreement", "monitor"],
    ["streams"],
    ["layers", "recompute"],
    ["blocks"],
    ["telemetry.stats", "telemetry.report", "telemetry.drive"],
    ["telemetry.wear", "telemetry.path_meter"],
    ["io.base", "io.memory", "io.cuda", "io.names"],
    ["io.posix", "io.kvikio"],
    ["io.aio"],
    ["io.gds"],
    ["io.select", "transfer", "store.paths", "store.swap_file", "store.device_checksum", "store.lanes"],
    ["store.base", "store.integrity"],
    ["store.ticket", "store.host"],
    ["store.swap_path"],
    ["store.swap_space"],
    ["store.lane_work", "store.trial"],
    ["store.nvme"],
    ["store.bundles", "store.pieces"],
    ["plan.trace", "plan.limits", "plan.placement"],
    ["plan.timeline", "plan.drive", "plan.layout", "plan.resources", "telemetry.traffic"],
    ["plan.cost", "plan.residency", "plan.lead"],
    ["plan.replay"],
    ["plan.simulate"],
    ["plan.plan", "plan.tba", "plan.teraio"],
    ["plan.search"],
    ["plan.planner"],
    ["policy", "profile.copies"],
    ["profile.rates", "planning"],
    ["profile.probe", "profile.tuning"],
    ["micro_step"],
    ["saved"],
    ["cache", "tiers"],
    ["recorder"],
    ["recording", "rehearsal"],
    ["survey"],
    ["controller"],
    ["offloader"],
    ["engine"],
    [
        "estimate.subject",
        "estimate.answers",
        "estimate.op_clock",
        "estimate.kernels",
        "estimate.machine",
        "estimate.training",
    ],
    ["estimate.dry_run", "estimate.footprint"],
    ["estimate.outlook"],
    ["estimate.estimate"],
    ["cli.numbers", "cli.table"],
    ["cli.doctor", "cli.estimate", "cli.report", "cli.tune"],
    ["cli", "autoload", "__init__", "__main__"],
]
LEVEL = {name: number for number, names in enumerate(LEVELS) for name in names}
PACKAGES = {"estimate", "io", "plan", "profile", "store", "telemetry"}
MODULES = {
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__"): path
    for path in PACKAGE.rglob("*.py")
}


def imports(path: Path) -> set[str]:
    """Every module that a file imports, also inside functions and under TYPE_CHECKING."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def test_every_module_has_a_level() -> None:
    assert set(MODULES) - PACKAGES == set(LEVEL)


@pytest.mark.parametrize("name", sorted(LEVEL))
def test_imports_go_strictly_down(name: str) -> None:
    own = {module.removeprefix("ds_tba.") for module in imports(MODULES[name]) if module.startswith("ds_tba.")}
    upward = {module for module in own if module in LEVEL and LEVEL[module] >= LEVEL[name]}
    if name in ("__init__", "autoload"):
        upward -= {"autoload", "engine"}  # the entry point reaches the engine by itself, once DeepSpeed is there
    if name in ("cli", "__main__"):
        upward -= {"cli"}
    assert not upward


def test_deepspeed_is_imported_in_its_rooms_only() -> None:
    users = {name for name, path in MODULES.items() if any(one.split(".")[0] == "deepspeed" for one in imports(path))}
    assert users == {"engine", "io.aio", "io.gds"}


@pytest.mark.parametrize("name", sorted(LEVEL))
def test_no_file_hides_too_much(name: str) -> None:
    assert len(MODULES[name].read_text().splitlines()) <= 480
