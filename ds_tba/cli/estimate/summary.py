"""The whole estimate: a config, a model and a machine put together."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ds_tba.cli.estimate.dry_run import DryRun, Settings, dry_run
from ds_tba.cli.estimate.hardware import Compute, DeviceNeed, compute_of, drive_of, resources_of
from ds_tba.cli.estimate.outlook import Outlook, outlook
from ds_tba.cli.estimate.subject import Training, read_training, recipe_of
from ds_tba.cli.opened_store import Probed, probe
from ds_tba.config import with_staging
from ds_tba.errors import BackendUnavailableError, ConfigError
from ds_tba.planner.trace import PathRates
from ds_tba.storage.backends.select import select_backend
from ds_tba.storage.nvme import Lanes


@dataclass(frozen=True, slots=True)
class Request:
    """What is asked; rates are per second, None where they are to be found.

    Attributes:
        batch: of a micro-step and rank; None takes the config's.
        dtype: instead of the config's.
        gpu_memory_bytes: of the device that will train, for a verdict.
        ranks: that ZeRO divides among.
    """

    config: Path
    model: str
    batch: int | None
    sequence: int
    device: str = "cuda"
    dtype: torch.dtype | None = None
    flops: float | None = None
    memory_bytes: float | None = None
    copy_bytes: float | None = None
    write_bytes: float | None = None
    read_bytes: float | None = None
    gpu_memory_bytes: float | None = None
    ranks: int = 1


@dataclass(frozen=True, slots=True)
class Drives:
    """What the drives can do, and how that is known."""

    paths: tuple[PathRates, ...]
    source: str
    written_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Estimate:
    """The answer."""

    request: Request
    batch: int
    training: Training
    compute: Compute
    drives: Drives
    run: DryRun
    outlook: Outlook

    @property
    def need(self) -> DeviceNeed:
        """What a rank needs of the device, beside saved tensors."""
        run = self.run
        return DeviceNeed.of(
            self.training, run.parameters, run.parameter_bytes, run.temporary_bytes, self.request.ranks
        )

    def fits(self, placement: str) -> bool | None:
        """Whether a micro-step fits the device; None where its memory was not given.

        Args:
            placement: a key of ``outlook.costs``.
        """
        if self.request.gpu_memory_bytes is None:
            return None
        needed_bytes = self.need.with_saved(self.outlook.costs[placement].peak_saved_bytes)
        return needed_bytes <= self.request.gpu_memory_bytes

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        trace = self.run.trace
        return {
            "batch": self.batch,
            "sequence": self.request.sequence,
            "device": self.request.device,
            "ran_on": self.run.runs_on,
            "parameters": self.run.parameters,
            "parameter_bytes": self.run.parameter_bytes,
            "device_need": asdict(self.need),
            "fits": {name: self.fits(name) for name in self.outlook.costs},
            "saved_bytes": self.run.saved_bytes,
            "peak_saved_bytes": self.run.peak_saved_bytes,
            "attention": sorted(one.name.lower() for one in self.run.attention),
            "flops_per_s": self.compute.flops.value,
            "memory_bytes_per_s": self.compute.memory.value,
            "copy_bytes_per_s": self.compute.copy.value,
            "write_bytes_per_s": trace.resources.write_bytes_per_s,
            "read_bytes_per_s": trace.resources.read_bytes_per_s,
            "drives": self.drives.source,
            **self.outlook.to_dict(),
            "notes": [*self.training.notes, *self.run.notes],
        }


def estimate(request: Request) -> Estimate:
    """Make the estimate; takes seconds, and a moment of the drives where they are measured.

    Raises:
        ConfigError: the config or a number of the request is wrong.
        ModelError: the model cannot be had, or does not run.
    """
    training = read_training(request.config)
    if request.dtype is not None:
        training = replace(training, dtype=request.dtype)
    batch = request.batch or training.micro_batch
    if batch is None:
        raise ConfigError(
            f'{request.config} has no number at "train_micro_batch_size_per_gpu": give the sequences of a micro-step '
            "with --batch."
        )
    recipe = recipe_of(request.model)
    rates = (request.flops, request.memory_bytes, request.copy_bytes)
    compute = compute_of(request.device, training.autocast or training.dtype or torch.float32, *rates)
    drives = _drives(request, training)
    offload = with_staging(training.offload, math.inf, is_host=request.device == "cpu")
    training = replace(training, offload=offload)
    resources = resources_of(drives.paths, compute, offload.io.ring_bytes, request.device)
    settings = _settings(request, training, compute)

    run = dry_run(recipe, batch, request.sequence, settings, resources)
    return Estimate(request, batch, training, compute, drives, run, outlook(run.trace, training.offload))


def _settings(request: Request, training: Training, compute: Compute) -> Settings:
    return Settings(
        request.device,
        training.dtype,
        training.autocast,
        training.offload.min_tensor_bytes,
        training.offload.blocks,
        compute.flops.value,
        compute.memory.value,
        training.micro_steps,
    )


# ---- the drives -----------------------------------------------------------------------------------------------------


def _drives(request: Request, training: Training) -> Drives:
    """As given; else measured, if the config names directories that are here; else as data sheets have it."""
    config = training.offload
    if request.write_bytes is not None and request.read_bytes is not None:
        return Drives(*drive_of(request.write_bytes, request.read_bytes))
    if not config.nvme_paths:
        paths, source = drive_of(request.write_bytes, request.read_bytes)
        return Drives(paths, f"{source} (no nvme_path is named)")
    try:
        found = _probed(training)
    except (ConfigError, BackendUnavailableError) as error:
        paths, source = drive_of(request.write_bytes, request.read_bytes)
        return Drives(paths, f"{source} (nvme_path cannot be measured here: {error})")
    where = f"measured here at {', '.join(config.nvme_paths)}"
    if request.write_bytes is None and request.read_bytes is None:
        return Drives(found.paths, where, found.written_bytes)
    write = request.write_bytes or sum(path.write_bytes_per_s for path in found.paths)
    read = request.read_bytes or sum(path.read_bytes_per_s for path in found.paths)
    paths, source = drive_of(write, read)
    return Drives(paths, f"{source}; the one that was not given {where}", found.written_bytes)


def _probed(training: Training) -> Probed:
    config = training.offload
    selection = select_backend(config, training.aio, zero_uses_nvme=False, pinned=False)
    lanes = Lanes(config.io.write_lanes, config.io.read_lanes)
    return probe(config.nvme_paths, selection.backend, lanes, config.io.integrity)
