"""Two ranks with unequal sizes and wishes: one plan, the results of the run without us, and nobody waits."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import deepspeed
import forked
import fsdp
import pytest
import torch
import torch.distributed as dist
from support import runs
from torch import nn

from ds_tba import Offloader, ranks
from ds_tba.device.accelerator import available_bytes

pytestmark = pytest.mark.engine
TIMEOUT_S = 180  # of a run of seconds: whoever waits longer waits for ever
STEPS = 18
CHANGE = 5  # the step from which on a rank does what the other does not


def in_force(offloader: Offloader) -> dict[str, Any] | None:
    """The plan that the next step follows."""
    found = offloader._offloader.controller.in_force
    if found is None:
        return None
    placements = [int(one) for one in found.placements]
    return {"placements": placements, "storages_bytes": sum(one.nbytes for one in found.trace.storages)}


def train(_: None, where: str, case: str, offloads: bool) -> dict[str, Any]:
    """Train without DeepSpeed; what the steps leave, losses and gradients, and the plan that each step followed."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, steps, plans, report, offloader = dist.get_rank(), [], [], None, None
    model = fsdp.made("ddp", "none")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with ExitStack() as stack:
        if offloads:
            own = Path(where, f"{case}{rank}")
            own.mkdir()
            io = {"backend": "posix", "staging_bytes": 16 << 20, "swap_file_bytes": 64 << 20}
            keys = {"nvme_path": str(own), "min_tensor_bytes": 4096, "max_step_overhead": 1000.0, "io": io}
            offloader = stack.enter_context(Offloader(model, **keys))
        for step in range(STEPS):
            if step == CHANGE and rank == 1 and case == "saves":  # one more storage, and no more time
                model.module.head = nn.Sequential(nn.Sigmoid(), nn.Tanh())
            plans.append(None if offloader is None else in_force(offloader))
            rows = fsdp.ROWS * (3 if rank == 1 and case == "sizes" else 1)
            steps.append(fsdp.train(model, optimizer, offloader, range(step, step + 1), rows, rank))
        if offloader is not None:
            report = offloader.report().to_dict()
    fsdp.meet_at_the_end()
    return {"steps": steps, "plans": plans, "report": report}


def check(directory: Path, case: str) -> list[dict[str, Any]]:
    """Results as without us, and one plan at every step."""
    without, found = (
        forked.run(train, None, directory, ranks=2, timeout_s=TIMEOUT_S, where=str(directory), case=case, offloads=one)
        for one in (False, True)
    )
    assert [rank["steps"] for rank in found] == [rank["steps"] for rank in without]
    plans = [rank["plans"] for rank in found]
    assert plans[0] == plans[1] and plans[0][-1] is not None
    assert found[0]["report"]["plans"] == found[1]["report"]["plans"] >= 1
    return found


def test_the_rank_that_saves_most_decides_for_both(tmp_path: Path) -> None:
    found = check(tmp_path, "sizes")
    saved = [rank["report"]["peak_saved_bytes_without"] for rank in found]
    assert saved[1] > 2 * saved[0]
    assert found[0]["plans"][-1]["storages_bytes"] >= saved[1]


def test_when_one_rank_wants_a_trace_both_take_one(tmp_path: Path) -> None:
    found = check(tmp_path, "saves")
    plans = [plan for plan in found[0]["plans"] if plan is not None]
    assert len(plans[-1]["placements"]) == len(plans[0]["placements"]) + 1  # what only the other rank saves


# ---- what each may take of the machine, whoever has started them, and whatever variables that has set --------------


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
    found = forked.run(shares, config, tmp_path, ranks=2, variables=own, where=str(tmp_path))
    assert all(one["swap"] < 1.1 * 0.9 / 2 for one in found)
    assert sum(one["host_bytes"] for one in found) <= sum(one["available_bytes"] for one in found) / 2
    assert [one["endurance_tbw"] for one in found] == [600 / 2] * 2


def test_a_kernel_without_a_boot_id_is_told_by_its_host_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = ranks.machine()
    monkeypatch.setattr(ranks, "_BOOT_ID", tmp_path / "none")
    monkeypatch.setattr("socket.gethostname", lambda: "node7")
    assert ranks.machine() == "node7" != own
