"""What is said of a run: loaded where somebody asks, with or without a model."""

from __future__ import annotations

import torch
from torch import nn

from ds_tba.config import AioConfig, OffloadConfig
from ds_tba.device.accelerator import CpuAccelerator
from ds_tba.explain.out_of_memory import ModelMemory
from ds_tba.offloader import ActivationOffloader


class Meter:
    def memory(self) -> ModelMemory:
        return ModelMemory(parameters=3 << 20, states=5 << 20)


def offloader() -> ActivationOffloader:
    return ActivationOffloader(OffloadConfig(placement="keep", min_tensor_bytes=1), AioConfig(), CpuAccelerator())


def test_who_asks_without_a_model_is_told_of_the_steps_from_then_on() -> None:
    one, x = offloader(), torch.ones(64, requires_grad=True)
    assert "rank 0, step 1." in one.explain() and one.report().holders == []
    with one.saving():
        x.exp().sum().backward()
    one.note_step()
    assert "test_explainer.py" in one.explain() and "rank 0, step 2." in one.explain()
    one.close()


def test_the_model_counts_where_somebody_counts_it() -> None:
    one = offloader()
    one.watch(nn.Linear(1, 1), meter=Meter())
    assert "parameters 3.00 MiB" in one.explain() and "optimizer states 5.00 MiB" in one.explain()
    one.close()
