"""Ranks of one machine divide its drives and memory, whoever has started them, and whatever variables that has set."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import deepspeed
import forked
import pytest
from support import runs
from torch import nn

from ds_tba import ranks
from ds_tba.device.accelerator import available_bytes

pytestmark = pytest.mark.engine
RANKS = 2


def shares(config: dict[str, Any], where: str) -> dict[str, float]:
    """Make an engine; return what its rank may take of the machine."""
    before_bytes = available_bytes()
    model = nn.Linear(4, 4)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    tiers = engine.activation_offloader._tiers
    deepspeed.comm.barrier()
    statvfs = os.statvfs(where)
    found = {
        "swap": tiers.paths[0].file.limit_bytes / (statvfs.f_bavail * statvfs.f_frsize),
        "host_bytes": tiers.host.limit_bytes,
        "available_bytes": before_bytes,
        "endurance_tbw": tiers.left_tbw(),
    }
    deepspeed.comm.barrier()
    engine.destroy()
    deepspeed.comm.destroy_process_group()
    return found


@pytest.mark.parametrize(
    "variables",
    [{}, {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, {"LOCAL_SIZE": "64"}],
    ids=["by hand", "mpirun", "of an allocation"],
)
def test_ranks_started_without_a_launcher_divide_the_machine(tmp_path: Path, variables: dict[str, str]) -> None:
    block = {"placement": "nvme", "host_budget_bytes": None, "ssd": {"rated_endurance_tbw": 600}}
    config = runs.with_block(runs.plain_config(), tmp_path, **block, io={"staging_bytes": 1 << 20})
    own = {"LOCAL_WORLD_SIZE": None, **variables}
    found = forked.run(shares, config, tmp_path, ranks=RANKS, variables=own, where=str(tmp_path))
    assert all(one["swap"] < 1.1 * 0.9 / RANKS for one in found)
    assert sum(one["host_bytes"] for one in found) <= sum(one["available_bytes"] for one in found) / RANKS
    assert [one["endurance_tbw"] for one in found] == [600 / RANKS] * RANKS


def test_a_kernel_without_a_boot_id_is_told_by_its_host_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = ranks.machine()
    monkeypatch.setattr(ranks, "_BOOT_ID", tmp_path / "none")
    monkeypatch.setattr("socket.gethostname", lambda: "node7")
    assert ranks.machine() == "node7" != own
