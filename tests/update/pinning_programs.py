"""Memory that is pinned in place, as programs for processes of their own."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import torch
from support.late_device import LateDevice
from update_programs import build, steps

from ds_tba.update import UpdateConfig, zero3


class Pins:
    """Remembers what is pinned, as CUDA does."""

    def __init__(self, *, refuses: bool = False) -> None:
        self.pinned: dict[int, int] = {}
        self.tried = 0
        self.refuses = refuses

    def register(self, address: int, nbytes: int) -> bool:
        self.tried += 1
        if self.refuses:
            return False
        self.pinned[address] = nbytes
        return True

    def unregister(self, address: int) -> None:
        del self.pinned[address]


class _AsCuda(LateDevice):
    def device(self) -> torch.device:
        return torch.device("cuda", 0)


def loads(config: dict[str, Any], *, block: dict[str, Any]) -> dict[str, Any]:
    """A checkpoint that is loaded in mid-run, with pinned moments."""
    pins, folder = Pins(), str(Path.cwd() / "checkpoint")
    zero3.CudaDriver = lambda: pins  # type: ignore[assignment,misc]
    engine = build(config)
    device, zero = _AsCuda(longest_pause_s=0.001), engine.optimizer
    update = zero3.InterleavedUpdate(UpdateConfig.model_validate(block), device, zero)
    engine.interleaved_optimizer_update = update
    counts = [len(pins.pinned)]
    for _ in range(2):
        steps(engine, 1)
        counts.append(len(pins.pinned))
    found: dict[str, Any] = {"pinned": counts, "pinned_bytes": update.report().pinned_bytes}
    engine.save_checkpoint(folder, tag="2")
    steps(engine, 2, seed=2)
    states = [zero.optimizer.state[master] for master in zero.fp32_partitioned_groups_flat]
    storages = [state[name].untyped_storage() for state in states for name in ("exp_avg", "exp_avg_sq")]
    places = [(storage.data_ptr(), storage.data_ptr() + storage.nbytes()) for storage in storages]
    others = sorted(address for address in pins.pinned if not any(start <= address < stop for start, stop in places))
    moments = [weakref.ref(storage) for storage in storages]
    found |= {"pinned moments": len(pins.pinned) - len(others), "moments": len(moments)}
    del states, storages
    engine.load_checkpoint(folder, tag="2")
    found["freed"] = sum(moment() is None for moment in moments)
    found["masters and gradients stay"] = bool(others) and sorted(pins.pinned) == others
    found["goes on"] = steps(engine, 2, seed=2)
    engine.load_checkpoint(folder, tag="2")
    found["goes on again"] = steps(engine, 2, seed=2)
    return found
