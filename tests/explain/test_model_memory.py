"""Bytes of a model beside its activations: each storage once, with what an optimizer has around another."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import nn

from ds_tba.explain.model_memory import memory_of

CPU = torch.device("cpu")


def test_parameters_gradients_and_states_count_once() -> None:
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    model[1].weight = model[0].weight
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    found = memory_of(model, SimpleNamespace(optimizer=optimizer, grad_buffers=[torch.zeros(16)]), CPU)
    assert (found.parameters, found.gradients, found.trained) == (256, 256 + 64, 256)
    assert 512 <= found.states < 600 and found.optimizer == "Adam"  # two moments, and a number of steps


def test_without_an_optimizer_and_on_another_device_nothing_counts() -> None:
    model = nn.Linear(8, 8, bias=False)
    assert memory_of(model, None, CPU).states == 0
    assert memory_of(model, None, torch.device("cuda")).parameters == 0
