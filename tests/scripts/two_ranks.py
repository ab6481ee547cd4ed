"""One of two ranks that train together without DeepSpeed: gradients are averaged after each backward.

    RANK=0 python two_ranks.py DIRECTORY CASE

Writes to ``DIRECTORY/CASE.RANK.json`` the losses, a digest of the parameters, and for each step what plan was in force.
Drives are modelled: they are as slow as the case says, whatever the machine's are.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path[:0] = [
    str(Path(__file__).parents[1]),
    str(Path(__file__).parents[2] / "benchmarks"),
]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from planners import PLANNERS  # noqa: E402
from support.modelled_drive import ModelledDrive  # noqa: E402
from support.planned_training import DEPTH, ROWS, WIDTH, Block, Model  # noqa: E402
from support.stepping import end_step, forward, note_backward  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import ds_tba.storage.tiers  # noqa: E402
from ds_tba.config import AioConfig, OffloadConfig  # noqa: E402
from ds_tba.device.accelerator import CpuAccelerator  # noqa: E402
from ds_tba.offloader import ActivationOffloader  # noqa: E402
from ds_tba.plan.agreement import Ranks  # noqa: E402
from ds_tba.storage.backends.select import Selection  # noqa: E402

FAST, SLOW = 400e6, 40e6  # bytes per second
STEPS = 18
CHANGE = 5  # the step from which on a rank does what the other does not
MIB = 1 << 20


class Checkpointed(Block):
    """On the rank whose block it is, it checkpoints itself: running it again would free nothing."""

    def __init__(self, is_checkpointed: bool) -> None:
        super().__init__()
        self.is_checkpointed = is_checkpointed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.is_checkpointed:
            return super().forward(x)
        result: torch.Tensor = checkpoint(super().forward, x, use_reentrant=False)
        return result


def model_of(rank: int, case: str) -> torch.nn.Module:
    torch.manual_seed(0)
    model = Model()
    if case.endswith("checkpointed"):
        torch.manual_seed(0)
        model.blocks = torch.nn.ModuleList(Checkpointed(rank == 1 and at == 2) for at in range(DEPTH))
    return model


def offloader_of(model: torch.nn.Module, rank: int, directory: Path, case: str) -> ActivationOffloader:
    backend = ModelledDrive(SLOW if rank == 1 and case == "drives" else FAST)
    ds_tba.storage.tiers.select_backend = lambda *_, **__: Selection(backend, "the test's")
    own = directory / f"{case}{rank}"
    own.mkdir()
    io = {"staging_bytes": 16 * MIB, "swap_file_bytes": 64 * MIB}
    block = {"nvme_path": str(own), "io": io, "min_tensor_bytes": 4096, "max_step_overhead": 1000.0}
    if case == "checkpointed":
        block |= {"recompute": True}
    offloader = ActivationOffloader(OffloadConfig.model_validate(block), AioConfig(), CpuAccelerator(), rank=rank)
    # The plan recomputes whatever can be, or what is best.
    offloader.watch(model, Ranks(), PLANNERS["recompute" if case == "checkpointed" else "adaptive"])
    return offloader


def rows_of(rank: int, case: str) -> int:
    return ROWS * (3 if rank == 1 and case == "sizes" else 1)


def in_force(offloader: ActivationOffloader) -> dict[str, Any] | None:
    found = offloader._controller.in_force if offloader._controller is not None else None
    if found is None:
        return None
    (path,) = found.trace.resources.paths
    return {
        "placements": [int(one) for one in found.plan.placements],
        "recomputed": list(found.plan.recomputed_blocks),
        "write_bytes_per_s": path.write_bytes_per_s,
        "storages_bytes": sum(one.nbytes for one in found.trace.storages),
    }


def train(rank: int, directory: Path, case: str) -> dict[str, Any]:
    model = model_of(rank, case)
    offloader = None if case.startswith("without") else offloader_of(model, rank, directory, case)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    chance = torch.Generator().manual_seed(rank)
    torch.manual_seed(100 + rank)
    losses, plans = [], []
    for step in range(STEPS):
        if step == CHANGE and rank == 1 and case.endswith("saves"):
            model.head = torch.nn.Sequential(
                torch.nn.Sigmoid(), torch.nn.Tanh(), model.head
            )  # one more storage, and no more time
        x = torch.randn(rows_of(rank, case.removeprefix("without ")), WIDTH, generator=chance)
        loss = forward(model, x, offloader)
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        note_backward(offloader)
        end_step(optimizer, offloader)
        if offloader is not None:
            plans.append(in_force(offloader))
        losses.append(loss.item().hex())
    digest = hashlib.sha256(b"".join(one.detach().numpy().tobytes() for one in model.parameters())).hexdigest()
    found = {"losses": losses, "parameters": digest, "plans": plans}
    if offloader is not None:
        found["report"] = offloader.report().to_dict()
        offloader.close()
    return found


if __name__ == "__main__":
    rank, directory, case = int(os.environ["RANK"]), Path(sys.argv[1]), sys.argv[2]
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{directory}/{case.replace(' ', '_')}.meet", rank=rank, world_size=2
    )
    (directory / f"{case}.{rank}.json").write_text(json.dumps(train(rank, directory, case)))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo's own threads may abort at interpreter exit, also without us
