"""CUDA through torch alone, and DeepSpeed's accelerator, have every name that ours asks for."""

from __future__ import annotations

import ast
import inspect

import pytest

from ds_tba.device import accelerator
from ds_tba.device.torch_cuda import TorchCuda


def test_every_name_that_the_accelerator_asks_for_is_there() -> None:
    asked = {
        node.attr
        for node in ast.walk(ast.parse(inspect.getsource(accelerator)))
        if isinstance(node, ast.Attribute)
        and (getattr(node.value, "attr", "") == "_api" or getattr(node.value, "id", "") == "api")
    }
    assert {"current_device", "Stream", "memory_stats"} <= asked
    assert not {name for name in asked if not hasattr(TorchCuda, name)}
    abstract = pytest.importorskip("deepspeed.accelerator.abstract_accelerator")
    assert not {name for name in asked if not hasattr(abstract.DeepSpeedAccelerator, name)}
