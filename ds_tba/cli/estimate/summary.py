"""The whole estimate: a config, a model and a machine put together, and the sequence length from which offload pays.

[Note: The search for the length] The estimate is made again for sequences of twice the length, up to a limit, until the
plan lowers the peak to speak of; where it does so at once, for halves of the length, until it no longer does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ds_tba.cli.estimate.dry_run import DryRun, Settings, dry_run
from ds_tba.cli.estimate.ds_config import Training, read_training
from ds_tba.cli.estimate.hardware import Compute, compute_of, drive_of, resources_of
from ds_tba.cli.estimate.model import recipe_of
from ds_tba.cli.estimate.outlook import Outlook, outlook
from ds_tba.cli.opened_store import Probed, probe
from ds_tba.config import OffloadConfig
from ds_tba.errors import BackendUnavailableError, ConfigError, ModelError
from ds_tba.planner.trace import PathRates
from ds_tba.storage.backends.select import select_backend
from ds_tba.storage.nvme import Lanes

SHORTEST_SEQUENCE = 128


@dataclass(frozen=True, slots=True)
class Request:
    """What is asked; rates are per second, None where they are to be found.

    Attributes:
        batch: of a micro-step and rank; None takes the config's.
        dtype: instead of the config's.
        longest_sequence: the limit of the search.
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
    longest_sequence: int = 1 << 20


@dataclass(frozen=True, slots=True)
class Drives:
    """What the drives can do, and how that is known."""

    paths: tuple[PathRates, ...]
    source: str
    written_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Estimate:
    """The answer.

    Attributes:
        lengths: the sequences that were looked at beside the one asked for, in order.
        length_note: why the search ended early.
    """

    request: Request
    batch: int
    training: Training
    compute: Compute
    drives: Drives
    run: DryRun
    outlook: Outlook
    lengths: list[tuple[int, Outlook]]
    length_note: str

    @property
    def pays_from(self) -> int | None:
        """The shortest sequence looked at from which on offload pays."""
        return min((length for length, found in self.all_lengths if found.pays), default=None)

    @property
    def all_lengths(self) -> list[tuple[int, Outlook]]:
        """With the one asked for, the shortest first."""
        return sorted([(self.request.sequence, self.outlook), *self.lengths], key=lambda one: one[0])

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
            "pays_from_sequence": self.pays_from,
            "lengths": [
                {
                    "sequence": length,
                    "keep_peak_bytes": found.costs["keep"].peak_saved_bytes,
                    "plan_peak_bytes": found.costs["plan"].peak_saved_bytes,
                    "pays": found.pays,
                }
                for length, found in self.all_lengths
            ],
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
    resources = resources_of(drives.paths, compute, training.offload.io.staging_bytes, request.device)
    settings = _settings(request, training, compute)

    def run(sequence: int) -> DryRun:
        return dry_run(recipe, batch, sequence, settings, resources)

    asked = run(request.sequence)
    found = outlook(asked.trace, training.offload)
    lengths, note = search_lengths(run, training.offload, request, asked, found)
    return Estimate(request, batch, training, compute, drives, asked, found, lengths, note)


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


# ---- the search for the length --------------------------------------------------------------------------------------


def search_lengths(
    run: Callable[[int], DryRun], config: OffloadConfig, request: Request, asked: DryRun, found: Outlook
) -> tuple[list[tuple[int, Outlook]], str]:
    """What was found at other lengths, and why it was not looked further; see [Note: The search for the length].

    Args:
        asked, found: at ``request.sequence``.
    """
    if asked.runs_on != "meta":
        return [], "other sequence lengths are not looked at, because the model runs on the CPU"
    looked: list[tuple[int, Outlook]] = []
    pays = found.pays
    sequence = request.sequence
    while True:
        sequence = sequence // 2 if pays else sequence * 2
        if not SHORTEST_SEQUENCE <= sequence <= request.longest_sequence:
            return looked, ""
        try:
            again = run(sequence)
        except ModelError as error:
            return looked, f"the model does not run with a sequence of {sequence}: {error}"
        if again.runs_on != "meta":
            return looked, f"with a sequence of {sequence} the model needs the CPU"
        looked.append((sequence, outlook(again.trace, config)))
        if looked[-1][1].pays != pays:
            return looked, ""
