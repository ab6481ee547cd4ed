"""Ranks of one machine divide its drives and memory, whoever has started them, and whatever variables that has set."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support import runs

from ds_tba import ranks

pytestmark = pytest.mark.engine
RANKS = 4


@pytest.mark.parametrize(
    "variables",
    [{}, {"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, {"LOCAL_SIZE": "64"}],
    ids=["by hand", "mpirun", "of an allocation"],
)
def test_ranks_started_without_a_launcher_divide_the_machine(tmp_path: Path, variables: dict[str, str]) -> None:
    done = runs.run(
        None, tmp_path, str(tmp_path), ranks=RANKS, script=runs.SCRIPTS / "shares.py", told_local_rank=False,
        LOCAL_WORLD_SIZE=None, **variables,
    )  # fmt: skip
    assert done.returncode == 0, done.output
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(RANKS)]
    assert all(one["swap"] < 1.1 * 0.9 / RANKS for one in found)
    assert sum(one["host_bytes"] for one in found) <= sum(one["available_bytes"] for one in found) / RANKS
    assert [one["endurance_tbw"] for one in found] == [600 / RANKS] * RANKS


def test_a_kernel_without_a_boot_id_is_told_by_its_host_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = ranks.machine()
    monkeypatch.setattr(ranks, "_BOOT_ID", tmp_path / "none")
    monkeypatch.setattr("socket.gethostname", lambda: "node7")
    assert ranks.machine() == "node7" != own
