"""What does a training hold on its device beside activations? Counts parameters, gradients and optimizer states.

Knows torch's modules and optimizers, and that DeepSpeed puts its optimizer around the user's; not DeepSpeed's engine.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from ds_tba.explain.out_of_memory import ModelMemory


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
    held = taken([parameters, shards, list(model.buffers())])
    gradients = taken([one.grad for one in parameters])
    states, name = 0, ""
    while optimizer is not None:
        name = type(optimizer).__name__
        # Under ZeRO gradients are in buffers of its own.
        gradients += sum(taken(value) for key, value in vars(optimizer).items() if "grad" in key)
        states += sum(taken(value) for value in vars(optimizer).values())
        optimizer = vars(optimizer).get("optimizer")
    trained = sum(getattr(one, "ds_numel", one.numel()) * one.element_size() for one in parameters if one.requires_grad)
    return ModelMemory(parameters=held, gradients=gradients, states=states, trained=trained, optimizer=name)
