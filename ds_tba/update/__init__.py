"""The optimizer update, on host and device at once; knows nothing of activations.

Here is the block ``"interleaved_optimizer_update"``, with its rules and what it needs beside it in the config, and what
is asked before each forward and save, whether or not the update itself is loaded.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated

from pydantic import BeforeValidator, Field, StrictBool, model_validator

from ds_tba.config import UPDATE_BLOCK, Block, Bytes, Count, DsConfig, Text, block_of, number, refusal, zero_block
from ds_tba.errors import ConfigError, UpdateInterruptedError

HALF_UPDATED = "ds_tba_half_updated"  # the mark of an optimizer; see [Note: Interrupted updates] in zero3.py
BYTES_PER_ELEMENT = 4  # master, moments and gradients are fp32
# Arrays that one chunk has on the device: master, two moments, gradient, and scratch for the formula.
ARRAYS_PER_CHUNK = 5
# Below it the calls cost more than the work.
MIN_CHUNK_BYTES = 1 << 16

Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False), BeforeValidator(number)]


class UpdateReportConfig(Block):
    """``report``: where and how often the report is written."""

    path: Text | None = None
    every_steps: Count = 0


class UpdateConfig(Block):
    """The block. Units are in the names; no value is ever the string ``"auto"``."""

    enabled: StrictBool = True
    device_share: Share | None = None  # fraction of the elements that the device updates; None balances in every step
    device_buffer_bytes: Bytes = 1 << 30  # device memory that the update takes while it runs
    # Bytes of the fp32 parameters of a chunk. Moments and gradients of a chunk are as large each.
    chunk_bytes: Annotated[int, Field(ge=MIN_CHUNK_BYTES), BeforeValidator(number)] = 1 << 26
    pinned_bytes: Bytes | None = None  # limit of pinned memory; None sets none. Only pinned memory goes to the device
    exact: StrictBool = True  # True: the device computes only where its bits are CPUAdam's
    report: UpdateReportConfig = UpdateReportConfig()

    @property
    def chunk_elements(self) -> int:
        """Elements of a chunk."""
        return self.chunk_bytes // BYTES_PER_ELEMENT

    @model_validator(mode="after")
    def _consistent(self) -> UpdateConfig:
        needed_bytes = ARRAYS_PER_CHUNK * self.chunk_bytes
        if self.device_buffer_bytes < needed_bytes and self.device_share != 0:
            raise refusal(
                f"device_buffer_bytes {self.device_buffer_bytes} is below 5 x chunk_bytes ({needed_bytes}), what one "
                "chunk takes on the device (parameters, two moments, gradient, scratch); raise it, lower chunk_bytes, "
                "or set device_share to 0"
            )
        return self


def parse_update_block(ds_config: DsConfig) -> UpdateConfig | None:
    """Return the validated block of a DeepSpeed config, or None where it is absent or ``"enabled": false``.

    Raises:
        ConfigError: naming for every bad key its value, the rule and the repair.
    """
    config = block_of(ds_config, UPDATE_BLOCK, UpdateConfig)
    if config is None:
        return None
    zero = zero_block(ds_config)
    offload = zero.get("offload_optimizer")
    device = offload.get("device") if isinstance(offload, Mapping) else None
    for key, found, needed in (("stage", zero.get("stage", 0), 3), ("offload_optimizer.device", device, "cpu")):
        if found != needed:
            raise ConfigError(
                f'"zero_optimization.{key}" is {json.dumps(found, default=str)}: "{UPDATE_BLOCK}" needs '
                f"{json.dumps(needed)}, for it shares out the update of optimizer states that ZeRO-3 keeps in host "
                f'memory; set it so, or remove "{UPDATE_BLOCK}".'
            )
    return config


def refuse_half_updated(zero: object) -> None:
    """Refuse to go on with a model of which only a part has taken a step.

    Raises:
        UpdateInterruptedError: an update was interrupted, on any rank, and no checkpoint was loaded since.
    """
    if getattr(zero, HALF_UPDATED, False):
        raise UpdateInterruptedError(
            "an optimizer update was interrupted, on this rank or another, so that some parameters have taken that "
            "step and others have not: load a checkpoint with its optimizer states before going on, and save none of "
            "this model."
        )
