"""State of the whole process that a forward depends on: random generators, PyTorch's settings, and modes.

Knows PyTorch, Python and NumPy; does not know modules.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy
import torch
from torch.overrides import _get_current_function_mode_stack as function_modes
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack


class Held:
    """An object known by its identity; held, because another could be made where it was."""

    __slots__ = ("_value",)

    def __init__(self, value: Any) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Held) and self._value is other._value

    def __hash__(self) -> int:
        return id(self._value)


def default_generators() -> list[torch.Generator]:
    """PyTorch's own: of the CPU, and of the current device if there is one."""
    found = [torch.default_generator]
    kind = torch.accelerator.current_accelerator() if hasattr(torch, "accelerator") else None
    device = None if kind is None else torch.get_device_module(kind)
    if device is not None and getattr(device, "is_initialized", lambda: False)():
        found += [device.default_generators[device.current_device()]]
    return found


def python_chance() -> tuple[Any, Any]:
    """The states of Python's and NumPy's global generators."""
    return random.getstate(), numpy.random.get_state()


def set_python_chance(states: tuple[Any, Any]) -> None:
    """Put them back."""
    random.setstate(states[0])
    numpy.random.set_state(states[1])


def drawn_from(before: tuple[Any, Any], after: tuple[Any, Any]) -> str | None:
    """Which of the two generators has drawn numbers."""
    if before[0] != after[0]:
        return "Python's random"
    (_, keys, *place), (_, later_keys, *later_place) = before[1], after[1]
    return "numpy.random" if place != later_place or not numpy.array_equal(keys, later_keys) else None


_SETTINGS: tuple[Callable[[], Any], ...] = (
    torch.backends.cuda.flash_sdp_enabled,
    torch.backends.cuda.mem_efficient_sdp_enabled,
    torch.backends.cuda.math_sdp_enabled,
    torch.backends.cuda.cudnn_sdp_enabled,
    torch.are_deterministic_algorithms_enabled,
    torch.get_default_dtype,
    torch.get_float32_matmul_precision,
    torch._C._get_cudnn_enabled,
    torch._C._get_cudnn_benchmark,
    torch._C._get_cudnn_deterministic,
    torch._C._get_cudnn_allow_tf32,
    torch._C._get_mkldnn_enabled,
)


def settings() -> tuple[Any, ...]:
    """Which kernels PyTorch takes, and which modes change what functions of it do."""
    return *(_setting(one) for one in _SETTINGS), *(Held(one) for one in modes())


def modes() -> list[Any]:
    """``TorchFunctionMode`` and ``TorchDispatchMode`` that are on; not the default device, which a checkpoint keeps."""
    functions = [one for one in function_modes() if not isinstance(one, DeviceContext)]  # type: ignore[no-untyped-call]
    return [*functions, *_get_current_dispatch_mode_stack()]


def _setting(getter: Callable[[], Any]) -> Any:
    try:
        return getter()
    except RuntimeError:  # of what was set through its newer name
        return None
