"""A training loop of its own, in a process in which importing DeepSpeed raises.

    python tests/scripts/loop.py gradients|core|rooms|ranks DIRECTORY PLACEMENT|BLOCK

Prints EQUAL where the gradients of all steps are bit for bit those of the same loop without an offloader, and the rooms
of ds_tba that were imported.
"""

from __future__ import annotations

import json
import sys
from contextlib import AbstractContextManager, nullcontext
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import Any


class NoDeepSpeed(MetaPathFinder):
    def find_spec(self, fullname: str, *_: object) -> None:
        if fullname.partition(".")[0] == "deepspeed":
            raise ImportError("DeepSpeed is not to be imported here")


sys.meta_path.insert(0, NoDeepSpeed())

import torch  # noqa: E402
from torch import distributed, nn  # noqa: E402

import ds_tba  # noqa: E402

STEPS, MICRO_STEPS, WIDTH = 12, 2, 64


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = (nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(4))
        self.layers = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = nn.functional.dropout(x + layer(x), 0.1)
        return x.square().mean()


def saving(offloader: Any) -> AbstractContextManager[None]:
    return nullcontext() if offloader is None else offloader.saving()


def train(model: nn.Module, offloader: Any) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(1)
    found = []
    for _ in range(STEPS):
        for _ in range(MICRO_STEPS):
            with saving(offloader):
                loss = model(torch.randn(128, WIDTH))
            loss.backward()
        found += [one.grad.clone() for one in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
        if offloader is not None:
            offloader.step()
    return found


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
    return " ".join(["ROOMS", *sorted(found & {"cli", "engine", "explain", "plan", "recompute", "remat", "update"})])


def compare(model: nn.Module, watched: nn.Module | None, keys: dict[str, Any], expected: list[torch.Tensor]) -> None:
    with ds_tba.Offloader(watched, **keys) as offloader:
        found = train(model, offloader)
    equal = len(found) == len(expected) and all(map(torch.equal, found, expected))
    sys.stdout.write("EQUAL\n" if equal else "DIFFERENT\n")


def main(what: str, directory: str, argument: str) -> int:
    torch.set_num_threads(1)
    if what == "rooms":
        keys = keys_of(directory, "nvme") | {"rematerialize": False, **json.loads(argument)}
        model = Model()
        with ds_tba.Offloader(model if keys["placement"] == "adaptive" else None, **keys) as offloader:
            train(model, offloader)
    elif what == "ranks":
        distributed.init_process_group("gloo")
        expected = train(nn.parallel.DistributedDataParallel(Model()), None)
        model = nn.parallel.DistributedDataParallel(Model())
        compare(model, model, keys_of(directory, argument), expected)
        distributed.destroy_process_group()
        return 0
    else:
        expected, model = train(Model(), None), Model()
        is_core = what == "core"
        keys = keys_of(directory, argument) | ({"rematerialize": False} if is_core else {})
        compare(model, None if is_core else model, keys, expected)
        if not is_core:
            return 0
    sys.stdout.write(rooms() + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
