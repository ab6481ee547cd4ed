"""The whole estimate: a config, a model and a machine put together."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ds_tba.autograd.sites import excluded_ops
from ds_tba.cli.estimate.dry_run import DryRun, Settings, dry_run
from ds_tba.cli.estimate.hardware import Compute, Drives, GivenRates, compute_of, drives_of
from ds_tba.cli.estimate.subject import Training, read_training, recipe_of
from ds_tba.cli.estimate.summary import Summary, summarize
from ds_tba.cli.opened_store import Probed, probe
from ds_tba.config import with_staging
from ds_tba.errors import BackendUnavailableError, ConfigError
from ds_tba.planner.trace import Resources
from ds_tba.storage.backends.select import select_backend
from ds_tba.storage.nvme import Lanes


@dataclass(frozen=True, slots=True)
class Request:
    """The arguments of the command.

    Attributes:
        batch: sequences of a micro-step and rank; None takes the config's.
        sequence: tokens of a sequence.
        dtype: of the parameters, instead of the config's.
        gpu_memory_bytes: of the training device; without it the estimate does not say what fits.
        ranks: that ZeRO divides among.
    """

    config: Path
    model: str
    batch: int | None
    sequence: int
    device: str
    dtype: torch.dtype | None
    rates: GivenRates
    gpu_memory_bytes: float | None
    ranks: int


@dataclass(frozen=True, slots=True)
class DeviceNeed:
    """Device memory of one rank, without saved tensors.

    Left out: fragmentation of the allocator, buffers of collectives, and parameters that ZeRO-3 gathers.

    Attributes:
        states_bytes: of the optimizer; None where they are not known.
        temporary_bytes: see :class:`ds_tba.cli.estimate.dry_run.PeakMeter`.
    """

    parameter_bytes: int
    gradient_bytes: int
    states_bytes: int | None
    temporary_bytes: int

    @classmethod
    def of(cls, training: Training, run: DryRun, ranks: int) -> DeviceNeed:
        """The need of each of ``ranks`` ranks."""
        zero = training.zero
        divided = ("states", "gradients", "parameters")[: zero.stage]

        def held(what: str, nbytes: int) -> int:
            return -(-nbytes // ranks) if what in divided else nbytes

        states_bytes: int | None = None
        if zero.offloads_optimizer:
            states_bytes = 0
        elif training.state_bytes is not None:
            states_bytes = held("states", run.parameters * training.state_bytes)
        return cls(
            0 if zero.offloads_parameters else held("parameters", run.parameter_bytes),
            held("gradients", run.parameter_bytes),
            states_bytes,
            run.temporary_bytes,
        )

    def with_saved(self, saved_bytes: int) -> int:
        """The whole need, with this peak of saved tensors."""
        return (
            saved_bytes + self.parameter_bytes + self.gradient_bytes + (self.states_bytes or 0) + self.temporary_bytes
        )


@dataclass(frozen=True, slots=True)
class Estimate:
    """The answer to a request."""

    request: Request
    batch: int
    training: Training
    compute: Compute
    drives: Drives
    run: DryRun
    summary: Summary

    @property
    def need(self) -> DeviceNeed:
        """Device memory of a rank, without saved tensors."""
        return DeviceNeed.of(self.training, self.run, self.request.ranks)

    def fits(self, placement: str) -> bool | None:
        """Whether a micro-step fits the device; None where its memory was not given.

        Args:
            placement: a key of ``summary.predictions``.
        """
        if self.request.gpu_memory_bytes is None:
            return None
        needed_bytes = self.need.with_saved(self.summary.predictions[placement].peak_saved_bytes)
        return needed_bytes <= self.request.gpu_memory_bytes

    def to_dict(self) -> dict[str, Any]:
        """Everything, ready for JSON."""
        trace = self.run.trace
        return {
            "batch": self.batch,
            "sequence": self.request.sequence,
            "device": self.request.device,
            "ran_on": self.run.runs_on,
            "parameters": self.run.parameters,
            "parameter_bytes": self.run.parameter_bytes,
            "device_need": asdict(self.need),
            "fits": {name: self.fits(name) for name in self.summary.predictions},
            "saved_bytes": self.run.saved_bytes,
            "peak_saved_bytes": self.run.peak_saved_bytes,
            "attention": sorted(one.name.lower() for one in self.run.attention),
            "flops_per_s": self.compute.flops.value,
            "memory_bytes_per_s": self.compute.memory.value,
            "copy_bytes_per_s": self.compute.copy.value,
            "write_bytes_per_s": trace.resources.write_bytes_per_s,
            "read_bytes_per_s": trace.resources.read_bytes_per_s,
            "drives": self.drives.source,
            **self.summary.to_dict(),
            "notes": [*self.training.notes, *self.run.notes],
        }


def estimate(request: Request) -> Estimate:
    """Make the estimate: takes seconds, of which the drives are busy for a moment if they are measured.

    Raises:
        ConfigError: the config or a number of the request is wrong.
        ModelError: the model cannot be made, or does not run.
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
    compute = compute_of(request.device, training.autocast or training.dtype or torch.float32, request.rates)
    drives = _drives(request.rates, training)
    is_host = request.device == "cpu"
    offload = with_staging(training.offload, math.inf, is_host=is_host)
    training = replace(training, offload=offload)
    copy = compute.copy.value
    resources = Resources(drives.paths, copy, copy, offload.io.ring_bytes, is_synchronous=is_host)
    settings = Settings(
        request.device,
        training.dtype,
        training.autocast,
        offload.min_tensor_bytes,
        offload.blocks,
        compute.flops.value,
        compute.memory.value,
        training.micro_steps,
        offload.rematerialize_enabled,
        excluded_ops(offload),
    )
    run = dry_run(recipe, batch, request.sequence, settings, resources)
    summary = summarize(run.trace, offload, run.ops)
    return Estimate(request, batch, training, compute, drives, run, summary)


# ---- the drives -----------------------------------------------------------------------------------------------------


def _drives(given: GivenRates, training: Training) -> Drives:
    """As given; else measured, if the config names directories of this machine; else as documented."""
    found = drives_of(given.write_bytes, given.read_bytes)
    if given.write_bytes is not None and given.read_bytes is not None:
        return found
    if not training.offload.nvme_paths:
        return replace(found, source=f"{found.source} (no nvme_path is named)")
    try:
        probed = _probed(training)
    except (ConfigError, BackendUnavailableError) as error:
        return replace(found, source=f"{found.source} (nvme_path cannot be measured here: {error})")
    where = f"measured here at {', '.join(training.offload.nvme_paths)}"
    if given.write_bytes is None and given.read_bytes is None:
        return Drives(probed.paths, where, probed.written_bytes)
    found = drives_of(
        given.write_bytes or sum(path.write_bytes_per_s for path in probed.paths),
        given.read_bytes or sum(path.read_bytes_per_s for path in probed.paths),
    )
    return Drives(found.paths, f"{found.source}; the one that was not given {where}", probed.written_bytes)


def _probed(training: Training) -> Probed:
    config = training.offload
    selection = select_backend(config, training.aio, zero_uses_nvme=False, pinned=False)
    lanes = Lanes(config.io.write_lanes, config.io.read_lanes)
    return probe(config.nvme_paths, selection.backend, lanes, config.io.integrity)
