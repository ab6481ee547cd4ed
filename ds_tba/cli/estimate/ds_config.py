"""What ``ds_config.json`` says about training, as far as it matters for what is saved. Knows JSON; not DeepSpeed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ds_tba.config import BLOCK, AioConfig, OffloadConfig, parse_block
from ds_tba.errors import ConfigError

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_AUTOCAST = {"bfloat16": torch.bfloat16, "float16": torch.float16}
# Bytes for each parameter of Adam's two moments, and of the FP32 copy beside 16-bit parameters.
_MOMENTS_BYTES, _MASTER_BYTES = 8, 4


@dataclass(frozen=True, slots=True)
class Training:
    """How the model will be trained.

    Attributes:
        offload: the block, or its defaults where there is none.
        dtype: of parameters; None where they stay as the model has them.
        autocast: the dtype of ``torch_autocast``, if it is on.
        micro_batch: of one rank, if the config has a number.
        micro_steps: of one step.
        offloads_parameters, offloads_optimizer: ZeRO has them off the device.
        notes: what was assumed.
    """

    offload: OffloadConfig
    aio: AioConfig
    dtype: torch.dtype | None
    autocast: torch.dtype | None
    micro_batch: int | None
    micro_steps: int
    zero_stage: int
    offloads_parameters: bool
    offloads_optimizer: bool
    optimizer: str
    notes: tuple[str, ...]

    @property
    def state_bytes(self) -> int | None:
        """Of the optimizer, for each parameter; None where it is not known."""
        if "adam" not in self.optimizer.lower():
            return None
        return _MOMENTS_BYTES + (_MASTER_BYTES if self.dtype is not None else 0)

    def states(self, parameters: int) -> str:
        """What else a rank holds, in words; empty where the optimizer is not known."""
        if self.state_bytes is None:
            return ""
        what = f"{self.optimizer}'s states {parameters * self.state_bytes / 2**30:.2f} GiB"
        divided = {1: "the states", 2: "gradients and states", 3: "parameters, gradients and states"}
        if self.zero_stage in divided:
            what += f"; ZeRO stage {self.zero_stage} divides {divided[self.zero_stage]} by the number of ranks"
        return what


def read_training(path: Path) -> Training:
    """What a ``ds_config.json`` says.

    Raises:
        ConfigError: it cannot be read, or its block is wrong.
    """
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"--config {path} cannot be read as ds_config.json: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"--config {path} holds {type(found).__name__}: ds_config.json is an object.")
    notes: list[str] = []
    parsed = parse_block(found)
    if parsed is None:
        notes.append(f'{path} has no enabled "{BLOCK}" block: the defaults of the block are taken')
        parsed = OffloadConfig(enabled=False), AioConfig()
    zero = _section(found, "zero_optimization")
    return Training(
        *parsed,
        _dtype(found, notes),
        _autocast(found),
        _number(found, "train_micro_batch_size_per_gpu"),
        _number(found, "gradient_accumulation_steps") or 1,
        _number(zero, "stage") or 0,
        _section(zero, "offload_param").get("device", "none") != "none",
        _section(zero, "offload_optimizer").get("device", "none") != "none",
        str(_section(found, "optimizer").get("type", "")),
        tuple(notes),
    )


def _section(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = config.get(key)
    return value if isinstance(value, dict) else {}


def _number(config: Mapping[str, Any], key: str) -> int | None:
    value = config.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _dtype(config: Mapping[str, Any], notes: list[str]) -> torch.dtype | None:
    for name, dtype in _DTYPES.items():
        enabled = _section(config, name).get("enabled", False)
        if enabled is True:
            return dtype
        if enabled == "auto":
            notes.append(
                f'"{name}.enabled" is "auto", which the trainer decides: it is taken for off (--dtype sets it)'
            )
    return None


def _autocast(config: Mapping[str, Any]) -> torch.dtype | None:
    section = _section(config, "torch_autocast")
    if section.get("enabled") is not True:
        return None
    return _AUTOCAST.get(str(section.get("dtype", "bfloat16")), torch.bfloat16)
