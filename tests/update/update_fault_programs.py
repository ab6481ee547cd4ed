"""Faults of optimizer updates, as programs for processes of their own."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
from late_device import LateDevice
from torch.optim.optimizer import register_optimizer_step_post_hook
from update_programs import BLOCK, build, digest, state_of, steps

from ds_tba.errors import UpdateInterruptedError
from ds_tba.update import updater
from ds_tba.update.formula import HostAdam
from ds_tba.update.zero3 import Zero3Update, _changed_methods


class _Interrupted:
    """A function that is interrupted in one of its calls."""

    def __init__(self, owner: Any, name: str, call: int) -> None:
        self._owner, self._name, self._call, self._calls = owner, name, call, 0
        self._original = getattr(owner, name)

    def __enter__(self) -> None:
        original = self._original

        def interrupted(*args: Any, **more: Any) -> Any:
            self._calls += 1
            if self._calls == self._call:
                raise KeyboardInterrupt
            return original(*args, **more)

        setattr(self._owner, self._name, interrupted)

    def __exit__(self, *_: object) -> None:
        setattr(self._owner, self._name, self._original)


def _problem(engine: Any) -> str:
    try:
        steps(engine, 1)
    except UpdateInterruptedError as error:
        return str(error)
    return "none"


def interrupted(config: dict[str, Any], *, block: dict[str, Any], place: str) -> dict[str, Any]:
    """An interrupted update, and attempts to go on."""
    engine = build({**config, BLOCK: block}, "decay")
    steps(engine, 1)
    checkpoint = str(Path.cwd() / "checkpoint")
    engine.save_checkpoint(checkpoint, tag="1")
    found: dict[str, Any] = {"uninterrupted": steps(engine, 2)}
    engine.load_checkpoint(checkpoint, tag="1")
    owner, name, call = {
        "counting steps": (Zero3Update, "_sub_group", 2),
        "host": (HostAdam, "update", 7),
        "device": (updater, "update_", 1),
    }[place]
    try:
        with _Interrupted(owner, name, call):
            steps(engine, 1)
    except KeyboardInterrupt:
        found["interrupted"] = "KeyboardInterrupt"
    found["at once"] = _problem(engine)
    try:
        engine.save_checkpoint(checkpoint, tag="half")
    except UpdateInterruptedError:
        found["saved"] = False
    engine.load_checkpoint(checkpoint, tag="1", load_optimizer_states=False)
    found["without optimizer states"] = _problem(engine)
    engine.load_checkpoint(checkpoint, tag="1")
    found["after a load"] = steps(engine, 2)
    engine.destroy()
    return found


class _MemoryLater(LateDevice):
    refusals = 2

    def allocate(self, nbytes: int, device: torch.device) -> torch.Tensor:
        if self.refusals:
            self.refusals -= 1
            raise torch.OutOfMemoryError("none yet")
        return super().allocate(nbytes, device)


def late_memory(config: dict[str, Any], *, block: dict[str, Any]) -> dict[str, Any]:
    """A device that has memory from the third update on."""
    from ds_tba.update.config import UpdateConfig
    from ds_tba.update.interleaved import InterleavedUpdate

    engine = build(config)
    update = InterleavedUpdate(UpdateConfig.model_validate(block), _MemoryLater(), engine.optimizer)
    engine.interleaved_optimizer_update = update
    verified, elements = [], []
    for _ in range(4):
        steps(engine, 1)
        verified.append(update.report().verified_chunks)
        elements.append(update.report().device_elements)
    update.close()
    engine.destroy()
    return {"verified": verified, "elements": elements}


def surroundings(config: dict[str, Any], *, block: dict[str, Any]) -> dict[str, Any]:
    """Steps under another default dtype, and with a hook of all optimizers."""
    found: dict[str, Any] = {}
    for name, own in {"stock": {}, "ours": {BLOCK: block}}.items():
        engine = build({**config, **own})
        generator, seen = torch.Generator().manual_seed(3), found.setdefault(name, [])

        def see(optimizer: Any, _args: Any, _kwargs: Any, seen: list[Any] = seen) -> None:
            seen.append([digest(state["exp_avg"]) for state in optimizer.state.values()])

        for number, dtype in enumerate([torch.float32, torch.bfloat16, torch.float64, torch.float32]):
            loss = engine(torch.randn(4, 37, generator=generator).bfloat16(), True)
            engine.backward(loss)
            torch.set_default_dtype(dtype)
            hook = register_optimizer_step_post_hook(see) if number == 3 else None
            try:
                engine.step()
            finally:
                torch.set_default_dtype(torch.float32)
                if hook is not None:
                    hook.remove()
            seen.append(state_of(engine))
        if name == "ours":
            found["fallbacks"] = engine.interleaved_optimizer_update.report().fallbacks
        engine.destroy()
    return found


def replaced(owner: str, name: str) -> dict[str, Any]:
    """What is said of a class before one of its methods is wrapped by somebody else, and then."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

    kind = {"zero": DeepSpeedZeroOptimizer_Stage3, "adam": DeepSpeedCPUAdam}[owner]
    zero = DeepSpeedZeroOptimizer_Stage3.__new__(DeepSpeedZeroOptimizer_Stage3)
    vars(zero)["optimizer"] = DeepSpeedCPUAdam.__new__(DeepSpeedCPUAdam)
    original = getattr(kind, name)

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs)

    found = {"before": [problem for problem, _ in _changed_methods(zero)]}
    setattr(kind, name, wrapper)
    try:
        found["replaced"] = [problem for problem, _ in _changed_methods(zero)]
    finally:
        setattr(kind, name, original)
    return found
