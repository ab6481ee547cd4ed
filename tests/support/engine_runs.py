"""Training under an engine, printed: losses, a fingerprint of all that it leaves, and the report."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable
from typing import Any

import deepspeed
import torch


def fingerprint(engine: Any, *states: Any) -> str:
    """Return a digest of the parameters, of torch's random state, and of other states by their text."""
    digest = hashlib.sha256(torch.get_rng_state().numpy().tobytes() + repr(states).encode())
    for parameter in engine.module.parameters():
        with deepspeed.zero.GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")):
            digest.update(parameter.detach().float().cpu().numpy().tobytes())
    return digest.hexdigest()


def tell_training(
    engine: Any, word: str, name: str, steps: int, loss_of: Callable[[], torch.Tensor], states: Callable[[], Any]
) -> None:
    """Train for so many steps, and print each in one piece, or ranks would mix within a line.

    Args:
        word: what the report calls the name, such as "case".
        states: returns what the fingerprint is to have beside the parameters.
    """
    rank = engine.global_rank
    for _ in range(steps):
        loss = loss_of()
        engine.backward(loss)
        engine.step()
        sys.stdout.write(f"LOSS {rank} {name} {loss.item().hex()}\n")
    sys.stdout.write(f"PARAMETERS {rank} {name} {fingerprint(engine, states())}\n")
    offloader = getattr(engine, "activation_offloader", None)
    if offloader is not None:
        report = offloader.report().to_dict()
        sys.stdout.write(f"REPORT {rank} {json.dumps({word: name, **report})}\n")
    engine.destroy()
