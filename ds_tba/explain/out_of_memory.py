"""What does a training hold beside activations, and which one key helps where memory runs out?

Knows torch's modules and optimizers, and that DeepSpeed puts its optimizer around the user's; not DeepSpeed's engine.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from ds_tba.config import BLOCK, OffloadConfig

MIB = 1 << 20


@dataclass(frozen=True)
class ModelMemory:
    """The bytes that a training holds on its device beside activations, and the part of its config that bears on them.

    Attributes:
        parameters, gradients, states: bytes now; states are the optimizer's, with its master weights and buffers.
        micro_batch, accumulation: sequences of a micro-batch (0 where that is not known), and micro-batches of a step.
        zero: the config's ``"zero_optimization"``.
    """

    parameters: int = 0
    gradients: int = 0
    states: int = 0
    micro_batch: int = 0
    accumulation: int = 1
    zero: Mapping[str, Any] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of all of them."""
        return self.parameters + self.gradients + self.states


class ModelMeter(Protocol):
    """Counts what a training holds beside activations."""

    def memory(self) -> ModelMemory:
        """Return that as it is now."""


def memory_of(model: nn.Module, optimizer: object, device: torch.device) -> ModelMemory:
    """Return what a model and its optimizer hold on a device.

    Args:
        optimizer: None where there is none; one around another, in its attribute ``optimizer``, counts with that.
    """
    parameters, seen = list(model.parameters()), set[int]()

    def taken(value: object) -> int:
        """Return the bytes of the storages in a value that were not counted yet."""
        nbytes = 0
        for one in tree_leaves(value):
            if isinstance(one, torch.Tensor) and one.device.type == device.type and one.layout is torch.strided:
                storage = one.untyped_storage()
                # Tied weights and views in ZeRO's flat buffers would count once for each name.
                nbytes += 0 if storage.data_ptr() in seen else storage.nbytes()
                seen.add(storage.data_ptr())
        return nbytes

    shards = [getattr(one, "ds_tensor", None) for one in parameters]  # of ZeRO-3
    held, gradients = taken([parameters, shards, list(model.buffers())]), taken([one.grad for one in parameters])
    states = 0
    while optimizer is not None:
        # Under ZeRO gradients are in buffers of its own.
        gradients += sum(taken(value) for key, value in vars(optimizer).items() if "grad" in key)
        states += sum(taken(value) for value in vars(optimizer).values())
        optimizer = vars(optimizer).get("optimizer")
    return ModelMemory(parameters=held, gradients=gradients, states=states)


def remedy(config: OffloadConfig, model: ModelMemory, peak_bytes: int, asked_bytes: int, *, in_step: bool) -> str:
    """Return the one change that helps most.

    Args:
        peak_bytes: of saved tensors in device memory.
        asked_bytes: of the allocation that failed; 0 where that is not known.
        in_step: True if the optimizer's step asked for them.
    """
    if in_step or model.nbytes > max(peak_bytes, asked_bytes):
        if not model.zero.get("offload_optimizer"):
            stage = max(2, int(model.zero.get("stage", 0)))
            return _keys({"zero_optimization": {"stage": stage, "offload_optimizer": {"device": "cpu"}}})
        return _keys({"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}) + ", or more ranks"
    if asked_bytes > peak_bytes:
        return (
            "give that line less at a time: a fused loss for logits, scaled_dot_product_attention for scores, a "
            "shorter sequence"
        )
    if config.placement in ("adaptive", "keep"):
        keys: dict[str, object] = {} if config.nvme_paths else {"nvme_path": "/local_nvme"}
        budget_bytes = (config.activation_budget_bytes or peak_bytes) // 2 // MIB * MIB
        keys |= {"placement": "adaptive", "activation_budget_bytes": max(MIB, budget_bytes)}
        return _keys({BLOCK: keys})
    if model.micro_batch > 1:
        halved = {"train_micro_batch_size_per_gpu": model.micro_batch // 2}
        return _keys({**halved, "gradient_accumulation_steps": 2 * model.accumulation})
    return "gradient checkpointing, or a shorter sequence"


def _keys(keys: Mapping[str, object]) -> str:
    return f"{json.dumps(keys)} in ds_config.json"
