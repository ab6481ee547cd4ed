"""CUDA through torch alone has every name that the accelerator asks for; on a GPU none has trained through it yet."""

from __future__ import annotations

import ast
import inspect

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
