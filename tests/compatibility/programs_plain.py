"""How people train: each function here is a training script, with as little else in it as can be.

They run in processes of their own (``forked.py``), under a DeepSpeed config with or without the block, and know nothing
of ds_tba but ``engine.activation_offloader``, whose report they return.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import deepspeed
import torch
from models import MODELS
from torch import Tensor, nn

BATCH = 2


def outcome(engine: Any, losses: list[float]) -> dict[str, Any]:
    """Return what is compared, and the report if there is one."""
    digests = {}
    for name, parameter in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")):
            data = parameter.detach().cpu().contiguous().view(torch.uint8).numpy()
            digests[name] = hashlib.sha256(data.tobytes()).hexdigest()
    offloader = getattr(engine, "activation_offloader", None)
    return {
        "losses": [float(loss).hex() for loss in losses],
        "parameters": digests,
        "report": offloader.report().to_dict() if offloader is not None else None,
    }


def started(config: dict[str, Any], build: Callable[[], nn.Module], **more: Any) -> Any:
    """An engine for a new model, with every random state set."""
    torch.manual_seed(0)
    model = build()
    options = {"model_parameters": model.parameters(), **more}
    engine, *_ = deepspeed.initialize(model=model, config=config, **options)
    torch.manual_seed(100 + engine.global_rank)
    return engine


def ended(engine: Any, losses: list[float], **more: Any) -> dict[str, Any]:
    result = {**outcome(engine, losses), **more}
    engine.destroy()
    return result


def loop(engine: Any, loss_of: Callable[[], Tensor], steps: int) -> list[float]:
    """Train for so many steps; return the loss of each micro-step."""
    losses = []
    for _ in range(steps * engine.gradient_accumulation_steps()):
        loss = loss_of()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def plain_loop(
    config: dict[str, Any],
    model: str = "Llama",
    steps: int = 6,
    *,
    has_cache: bool = True,
    own_backward: bool = False,
    evaluates: bool = False,
    detects_anomalies: bool = False,
    same_data: bool = False,
) -> dict[str, Any]:
    """``deepspeed.initialize``, ``engine.backward``, ``engine.step``.

    Args:
        has_cache: Hugging Face's models fill a key-value cache in training, unless told not to.
        own_backward: the script calls ``loss.backward()``.
        evaluates: after each step, in inference mode.
        same_data: ranks that have parts of one model get the same data.
    """
    torch.autograd.set_detect_anomaly(detects_anomalies)

    def build() -> nn.Module:
        built = MODELS[model].build()
        for module in built.modules():
            if not has_cache and hasattr(getattr(module, "config", None), "use_cache"):
                module.config.use_cache = False
        return built

    engine = started(config, build)
    rank = 0 if same_data else engine.global_rank
    chance = torch.Generator().manual_seed(1 + rank)
    torch.manual_seed(100 + rank)

    def loss_of() -> Tensor:
        result = engine(**MODELS[model].batch(BATCH, chance))
        return result if isinstance(result, Tensor) else result.loss

    losses, backward = [], Tensor.backward if own_backward else engine.backward
    for _ in range(steps * engine.gradient_accumulation_steps()):
        loss = loss_of()
        backward(loss)
        engine.step()
        losses.append(loss.item())
        if evaluates:
            engine.eval()
            with torch.inference_mode():
                losses.append(loss_of().item())
            engine.train()
    return ended(engine, losses)
