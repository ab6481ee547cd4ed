"""Activations on NVMe for DeepSpeed training, from the ``"activation_nvme_offload"`` block of ``ds_config.json``.

Importing this package registers the hook that waits for DeepSpeed (the same one that ``import torch`` registers
through the ``torch.backends`` entry point) and nothing else: no torch, no pydantic, no deepspeed is imported here,
because an error or a delay in this file would be an error or a delay of every ``import torch`` on the machine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ds_tba import autoload

if TYPE_CHECKING:
    from ds_tba.engine import attach
    from ds_tba.errors import (
        ActivationCorruptionError,
        ActivationLostError,
        ActivationModifiedError,
        BackendUnavailableError,
        ConfigError,
        DsTbaError,
        IncompatibleError,
        PathError,
        StateError,
        StorageError,
        TransferError,
        UpdateInterruptedError,
    )
    from ds_tba.loop import Offloader
    from ds_tba.offloader import ActivationOffloader
    from ds_tba.report import OffloadReport

__all__ = [
    "ActivationCorruptionError",
    "ActivationLostError",
    "ActivationModifiedError",
    "ActivationOffloader",
    "BackendUnavailableError",
    "ConfigError",
    "DsTbaError",
    "IncompatibleError",
    "OffloadReport",
    "Offloader",
    "PathError",
    "StateError",
    "StorageError",
    "TransferError",
    "UpdateInterruptedError",
    "attach",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("ds_tba")
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    homes = {
        "ActivationOffloader": "ds_tba.offloader",
        "OffloadReport": "ds_tba.report",
        "Offloader": "ds_tba.loop",
        "attach": "ds_tba.engine",
    }
    return getattr(import_module(homes.get(name, "ds_tba.errors")), name)


autoload.install()
