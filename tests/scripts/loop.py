"""Training loops of their own, in a process in which importing DeepSpeed raises.

    python tests/scripts/loop.py rooms|ranks|refused DIRECTORY

rooms: one loop after the other, each with a key more. ranks: a rank of two. Prints for each loop its name, EQUAL where
the gradients of all steps are bit for bit those of the same loop without an offloader, else DIFFERENT, and the rooms of
ds_tba that were imported so far.
refused: a rank of two, of which the second names a device that nobody serves. Prints the error of each.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import Any


class NoDeepSpeed(MetaPathFinder):
    def find_spec(self, fullname: str, *_: object) -> None:
        if fullname.partition(".")[0] == "deepspeed":
            raise ImportError("DeepSpeed is not to be imported here")


sys.meta_path.insert(0, NoDeepSpeed())
TESTS = Path(__file__).parents[1]
sys.path += [str(TESTS), str(TESTS / "compatibility")]

import torch  # noqa: E402
from fsdp import made, train  # noqa: E402
from torch import distributed, nn  # noqa: E402

import ds_tba  # noqa: E402


def keys_of(directory: str, placement: str) -> dict[str, Any]:
    return {
        "nvme_path": directory,
        "placement": placement,
        "min_tensor_bytes": 4096,
        "max_step_overhead": 1000.0,
        "host_budget_bytes": 32 << 20 if placement == "host" else 0,
        "io": {"staging_bytes": 8 << 20, "swap_file_bytes": 64 << 20},
        "report": {"path": str(Path(directory) / "report.json")},
    }


def rooms() -> str:
    found = {name.split(".")[1] for name in sys.modules if name.startswith("ds_tba.")}
    return " ".join(sorted(found & {"cli", "engine", "explain", "plan", "recompute", "remat", "update"}))


def model() -> nn.Module:
    return made("alone", "none")


def trained(model: nn.Module, offloader: Any) -> list[str]:
    return train(model, torch.optim.SGD(model.parameters(), lr=0.1), offloader, range(10), rows=128)


def compare(name: str, make: Callable[[], nn.Module], keys: dict[str, Any], *, watched: bool) -> None:
    expected, ours = trained(make(), None), make()
    with ds_tba.Offloader(ours if watched else None, **keys) as offloader:
        found = trained(ours, offloader)
    sys.stdout.write(f"{name} {'EQUAL' if found == expected else 'DIFFERENT'} {rooms()}\n")


def each_room(directory: str) -> None:
    for placement in ("nvme", "host", "keep"):
        compare(placement, model, keys_of(directory, placement) | {"rematerialize": False}, watched=False)
    compare("rematerialize", model, keys_of(directory, "nvme"), watched=False)
    timeline = {"report": {"timeline_path": str(Path(directory) / "step.json")}}
    compare("timeline", model, keys_of(directory, "nvme") | timeline, watched=False)
    compare("adaptive", model, keys_of(directory, "adaptive"), watched=True)


def each_rank(directory: str) -> None:
    distributed.init_process_group("gloo")
    compare("ranks", lambda: nn.parallel.DistributedDataParallel(model()), keys_of(directory, "adaptive"), watched=True)
    distributed.destroy_process_group()


def each_refused_rank(directory: str) -> None:
    distributed.init_process_group("gloo")
    own = {"device": "meta"} if distributed.get_rank() == 1 else {}
    try:
        ds_tba.Offloader(model(), **keys_of(directory, "nvme"), **own)
    except ds_tba.DsTbaError as error:
        sys.stdout.write(f"refused {type(error).__name__} {error}\n")
    distributed.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    what, where = sys.argv[1:]
    {"rooms": each_room, "ranks": each_rank, "refused": each_refused_rank}[what](where)
