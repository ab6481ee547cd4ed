"""Faults of optimizer updates, as programs for processes of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from update_programs import BLOCK, build, digest, steps

from ds_tba.errors import UpdateInterruptedError
from ds_tba.update import updater
from ds_tba.update.device import DevicePipeline
from ds_tba.update.host import HostUpdate
from ds_tba.update.zero3 import InterleavedUpdate


@contextmanager
def _interrupted(owner: Any, name: str, call: int) -> Iterator[None]:
    """Interrupt a function in one of its calls."""
    original, calls = getattr(owner, name), count(1)

    def interrupting(*args: Any, **more: Any) -> Any:
        if next(calls) == call:
            raise KeyboardInterrupt
        return original(*args, **more)

    with mock.patch.object(owner, name, interrupting):
        yield


def _refusals(engine: Any, folder: Path) -> dict[str, str]:
    """What each way to use or save the model says; nothing may be in the folder afterwards."""

    def evaluate() -> None:
        engine.eval()
        try:
            with torch.no_grad():
                engine(torch.zeros(4, 37, dtype=torch.bfloat16), True)
        finally:
            engine.train()

    ways: dict[str, Callable[[], Any]] = {
        "forward": lambda: steps(engine, 1),
        "evaluation": evaluate,
        "step": engine.step,
        "save_checkpoint": lambda: engine.save_checkpoint(str(folder), tag="half"),
        "save_16bit_model": lambda: engine.save_16bit_model(str(folder)),
        "consolidated": engine._zero3_consolidated_16bit_state_dict,
        "optimizer's state_dict": engine.optimizer.state_dict,
    }
    found = {}
    for way, call in ways.items():
        try:
            call()
            found[way] = "done"
        except UpdateInterruptedError as error:
            found[way] = str(error)
    return found | {"files": ", ".join(path.name for path in folder.glob("*"))}


def interrupted(config: dict[str, Any], *, block: dict[str, Any], place: str) -> dict[str, Any]:
    """An update that is interrupted on the last rank, and attempts to go on."""
    engine = build({**config, BLOCK: block}, "decay")
    last = torch.distributed.get_world_size() - 1
    steps(engine, 1)
    checkpoint, folder = str(Path.cwd().parent / "checkpoint"), Path.cwd().parent / "half"
    engine.save_checkpoint(checkpoint, tag="1")
    found: dict[str, Any] = {"uninterrupted": steps(engine, 2)}
    engine.load_checkpoint(checkpoint, tag="1")
    owner, name, call = {
        "counting steps": (InterleavedUpdate, "_sub_group", 2),
        "host": (HostUpdate, "_update", 7),
        "device": (updater, "update_", 1),
        "draining": (DevicePipeline, "_block_until_done", 2),
        "DeepSpeed's": (type(engine.optimizer.optimizer), "step", 2),
    }[place]
    see = register_optimizer_step_post_hook(lambda *_: None) if place == "DeepSpeed's" else None
    try:
        if torch.distributed.get_rank() == last:
            with _interrupted(owner, name, call):
                steps(engine, 1)
        else:
            steps(engine, 1)
    except (KeyboardInterrupt, UpdateInterruptedError) as error:
        found["interrupted"] = type(error).__name__
    if see is not None:
        see.remove()
    found["at once"] = _refusals(engine, folder)
    engine.load_checkpoint(checkpoint, tag="1", load_optimizer_states=False)
    found["without optimizer states"] = _refusals(engine, folder)
    engine.load_checkpoint(checkpoint, tag="1")
    found["after a load"] = steps(engine, 2)
    try:
        with _interrupted(owner, name, call):
            steps(engine, 1)
    except KeyboardInterrupt:
        engine.interleaved_optimizer_update.close()
    found["closed"] = _refusals(engine, folder)
    engine.load_checkpoint(checkpoint, tag="1")
    found["closed, after a load"] = steps(engine, 2)
    found["left behind"] = sorted({"step", "state_dict", "load_state_dict"} & set(vars(engine.optimizer)))
    engine.destroy()
    return found


def surroundings(config: dict[str, Any], *, block: dict[str, Any]) -> dict[str, Any]:
    """Steps under other default dtypes, and one with a hook of all optimizers, which sees their states."""
    found: dict[str, Any] = {}
    for name, own in {"stock": {}, "ours": {BLOCK: block}}.items():
        engine, seen = build({**config, **own}), found.setdefault(name, [])

        def see(optimizer: Any, *_: object, seen: list[Any] = seen) -> None:
            seen.append([digest(state["exp_avg"]) for state in optimizer.state.values()])

        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            torch.set_default_dtype(dtype)
            seen += steps(engine, 1)
        torch.set_default_dtype(torch.float32)
        hook = register_optimizer_step_post_hook(see)
        seen += steps(engine, 1)
        hook.remove()
        if name == "ours":
            found["fallbacks"] = engine.interleaved_optimizer_update.report().fallbacks
        engine.destroy()
    return found
