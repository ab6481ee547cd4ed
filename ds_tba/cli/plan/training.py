"""How a ds_config.json has a model trained, on which device, and what that holds of its memory beside activations.

No DeepSpeed here: the figures are what its ZeRO optimizers allocate (``stage_1_and_2.py``, ``stage3.py``). FLOP/s are
what training sustains in matrix products, about two fifths of what data sheets say. Blind spots: expert and pipeline
parallelism.
"""

from __future__ import annotations

import re
from argparse import ArgumentTypeError
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import hjson  # of DeepSpeed
import torch

from ds_tba.cli.format import size
from ds_tba.config import BLOCK, OffloadConfig, parse_block, refuse_misnamed
from ds_tba.errors import ConfigError
from ds_tba.holders import GRADIENTS, PARAMETERS, STATES, ModelMemory
from ds_tba.plan.trace import OUTSIDE, StorageTrace, Trace
from ds_tba.update import parse_update_block

# Without --config.
ASSUMED = {
    "train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "optimizer": {"type": "AdamW"},
    "zero_optimization": {"stage": 2},
}  # fmt: skip
CONTEXT_BYTES = 1 << 30  # of CUDA, its libraries and NCCL
MASTER_BYTES = 4  # of an fp32 copy of a 16-bit parameter, of its gradient in the optimizer's step, and of a moment
# Keys that change memory in ways that are not counted here, if they are not at one of these values.
_NOT_COUNTED = (
    "activation_checkpointing.cpu_checkpointing", "activation_checkpointing.partition_activations",
    "zero_optimization.offload_optimizer.ratio",
    "zero_optimization.zero_hpz_partition_size", "torch_autocast.enabled", "bf16.bf16_master_weights_and_grads",
    "bf16.bf16_optimizer_states", "tensor_parallel.autotp_size",
)  # fmt: skip
ONE_MOMENT = ("sgd", "lion", "adagrad", "muon")
# Of optimizer states in host memory: master and moments read and written, the gradient read, the parameter written.
HOST_UPDATE_BYTES, HOST_BYTES_PER_S = 30, 60e9
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_DECIDED_LATER = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "bf16.enabled", "fp16.enabled")


def brief(begin_s: float, end_s: float, nbytes: int) -> StorageTrace:
    """Return bytes that are there for some time of a micro-step, whatever is offloaded."""
    return StorageTrace(nbytes, "", (OUTSIDE,), begin_s, begin_s, end_s, end_s, is_movable=False, is_used=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRun:
    """The result of one micro-step."""

    trace: Trace
    temporary: tuple[StorageTrace, ...]  # tensors beside saved ones, as storages that nobody saves; see :func:`brief`
    parameters: int  # all of them
    parameter_bytes: int
    trained: int  # those that have gradients
    trained_bytes: int
    largest_bytes: int = 0  # of one storage in forward
    largest_module: int = 0  # parameters that one module holds itself, at most: ZeRO-3 gathers all of a module at once
    notes: tuple[str, ...] = ()  # limitations of this result, for the reader

    @property
    def saved_bytes(self) -> int:
        """Bytes of all saved storages."""
        return sum(storage.nbytes for storage in self.trace.storages if storage.blocks)

    @property
    def temporary_bytes(self) -> int:
        """Peak of the temporary tensors."""
        return max((one.nbytes for one in self.temporary), default=0)


# GiB by name, and as PyTorch has it with ECC; TFLOP/s of products in 16 and in 32 bits; GB/s of its memory, and of
# each way to the host.
# Of several with the memory that is asked for, the first is taken.
GPUS = {
    "H100": (80, 79.1, 400, 50, 3350, 50),
    "H200": (141, 139.8, 400, 50, 4800, 50),
    "B200": (180, 178.3, 800, 70, 8000, 50),
    "A100": (80, 79.1, 190, 60, 2000, 25),
    "A100-40": (40, 39.4, 190, 60, 1555, 25),
    "L40S": (48, 44.4, 150, 40, 864, 25),
    "A6000": (48, 47.5, 80, 30, 768, 25),
    "RTX 5090": (32, 31.3, 120, 50, 1790, 50),
    "RTX 4090": (24, 23.6, 100, 45, 1008, 25),
    "RTX 3090": (24, 23.6, 45, 20, 936, 25),
    "A10": (24, 22.0, 60, 15, 600, 25),
    "V100": (32, 31.7, 60, 12, 900, 12),
    "T4": (16, 14.6, 25, 6, 320, 12),
    "A100-80": (80, 79.1, 190, 60, 2000, 25),
    "H100 NVL": (94, 93.1, 330, 45, 3938, 50),
    "A40": (48, 44.4, 60, 15, 696, 25),
    "L4": (24, 22.0, 48, 12, 300, 25),
}
LAUNCH_S = 10e-6  # of one operation in eager mode, from Python


class Device(NamedTuple):
    """The GPU: whose rates are taken, and what PyTorch has of its memory, if known.

    Rates are per second, of matrix products, of its memory and of copies from and to the host.
    """

    name: str
    memory_bytes: int | None
    flops: float
    memory_bytes_per_s: float
    copy_bytes_per_s: float


def gpu_of(text: str | None, dtype: torch.dtype) -> Device:
    """Return a GPU with the table's rates.

    Args:
        text: name ("RTX 4090"), or memory as cards are sold ("24GB", in GiB without a unit), of which PyTorch has less.

    Raises:
        ConfigError: it is neither.
    """

    def plain(name: str) -> str:
        return re.sub(r"nvidia|geforce|rtx|sxm\d?|pcie|gb|[^a-z0-9]", "", name.lower())

    name, asked_gib = "H100" if text is None else next((one for one in GPUS if plain(one) == plain(text)), ""), 0.0
    if text is not None and not name:
        try:
            asked_gib = size(f"{text}GiB" if text.replace(".", "").isdigit() else text) / 2**30
        except ArgumentTypeError:
            raise ConfigError(f"--gpu {text!r} must be a size such as 24GB, or one of {', '.join(GPUS)}") from None
        name = min(GPUS, key=lambda one: abs(GPUS[one][0] - asked_gib))
    named_gib, gib, tflops, tflops_32_bit, memory_gbps, copy_gbps = GPUS[name]
    memory_bytes = None if text is None else int((asked_gib or named_gib) * 2**30 * gib / named_gib)
    flops = 1e12 * (tflops if dtype.itemsize == 2 else tflops_32_bit)
    return Device(name, memory_bytes, flops, 1e9 * memory_gbps, 1e9 * copy_gbps)


@dataclass(frozen=True, slots=True)
class Training:
    """How the model will be trained."""

    config: Mapping[str, Any]  # the whole ``ds_config.json``
    offload: OffloadConfig  # the block, or its defaults where there is none
    dtype: torch.dtype | None = None  # of parameters; None where they stay as the model has them
    ranks: int = 1  # that ZeRO divides among
    notes: tuple[str, ...] = ()  # assumptions, for the reader

    def at(self, path: str) -> Any:
        """Return the value at keys with dots between them; None where there is none."""
        found: Any = self.config
        for key in path.split("."):
            found = found.get(key) if isinstance(found, Mapping) else None
        return found

    def number(self, path: str, usual: int) -> int:
        """Return the number above 0 that is there; ``usual`` for anything else, such as "auto"."""
        value = self.at(path)
        return int(value) if isinstance(value, (int, float)) and value > 0 and value is not True else usual

    @property
    def stage(self) -> int:
        return self.number("zero_optimization.stage", 0)

    def offloads(self, what: str) -> str:
        """Return where ZeRO keeps the ``optimizer`` or the parameters (``param``): ``cpu``, ``nvme``, or empty."""
        device = self.at(f"zero_optimization.offload_{what}.device")
        return "" if device in (None, "none") else str(device)

    def part(self, whole: int, from_stage: int) -> int:
        """Return the elements or bytes that one rank has of what ZeRO divides from a stage on."""
        return -(-whole // self.ranks) if self.stage >= from_stage else whole


def read_training(path: Path | None) -> Training:
    """Read how a ``ds_config.json`` has the model trained; without one, what is assumed.

    Raises:
        ConfigError: the file cannot be read, or a block of ours in it is wrong or misplaced.
    """
    found: dict[str, Any] = ASSUMED
    notes = ["no --config was given: bf16, AdamW and ZeRO stage 2 are assumed"]
    if path is not None:
        try:
            found, notes = hjson.loads(path.read_text()), []  # as DeepSpeed does: comments are allowed
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigError(
                f"--config {path} cannot be read as ds_config.json: {getattr(error, 'strerror', error)}"
            ) from error
        if not isinstance(found, dict):
            raise ConfigError(f"--config {path} holds {type(found).__name__}: ds_config.json is an object.")
    refuse_misnamed(found)
    parse_update_block(found)  # refuses here what training would refuse
    parsed = parse_block(found)
    if parsed is None:
        notes += [] if path is None else [f'{path} has no enabled "{BLOCK}" block: its defaults are used']
    training = Training(found, OffloadConfig(enabled=False) if parsed is None else parsed[0])
    if not training.at("optimizer.type"):
        notes.append(
            'no "optimizer" is named: the states of Adam and the temporary tensors of PyTorch\'s AdamW are counted; an '
            "optimizer of 8 bits takes less"
        )
    changed = [key for key in _NOT_COUNTED if training.at(key) is True or training.at(key) not in (None, False, 0, 1)]
    if changed:
        notes.append(f"NOT COUNTED, though they change memory: {', '.join(changed)}")
    if undecided := [key for key in _DECIDED_LATER if training.at(key) == "auto"]:
        notes.append(f'"auto", which the trainer decides, is taken as 1 or as on: {", ".join(undecided)}')
    wanted = ((name, value) for value in (True, "auto") for name in _DTYPES)
    dtype = next((_DTYPES[name] for name, value in wanted if training.at(f"{name}.enabled") == value), None)
    return replace(training, dtype=dtype, notes=tuple(notes))


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """The bytes that one rank holds beside activations, and what ZeRO's own offloads move in a step."""

    held: ModelMemory  # on the device
    host_bytes: int  # off the device, in host memory
    swap_bytes: int  # off the device, on drives
    link_bytes: int  # over the link to the host, in the busier direction
    written_bytes: int  # to drives
    update_s: float  # of the optimizer's step


def account_of(training: Training, run: DryRun, device: Device) -> Account:
    """Return what one rank holds and moves.

    Offloaded parameters go to the device in forward and again in backward of each micro-step, each rank's part over its
    own link; gradients leave it in each. States on a drive are read and written in each step, with the gradients in
    FP32: the step takes at least that long.
    """
    stage, times, part = training.stage, run.trace.micro_steps, training.part
    param = training.offloads("param") if stage == 3 else ""
    optimizer = training.offloads("optimizer") if stage else ""
    parameters, trained = part(run.parameter_bytes, 3), part(run.trained, 1)
    is_fp32 = training.at("data_types.grad_accum_dtype") == "fp32"
    gradient_bytes = MASTER_BYTES * run.trained if is_fp32 else run.trained_bytes
    gradients = part(gradient_bytes, 2)

    gathered_bytes = bucket_bytes = 0.0
    if stage == 3 and (training.ranks > 1 or param):
        live = min(run.parameters, training.number("zero_optimization.stage3_max_live_parameters", 10**9))
        # A module's are there together, however many.
        gathered_bytes = max(live, run.largest_module) * run.parameter_bytes / max(1, run.parameters)
    is_small = training.at("zero_optimization.reduce_bucket_size") == "auto"  # the square of the hidden size
    if stage and training.at("zero_optimization.contiguous_gradients") in (None, True) and not is_small:
        buffers = 2 if stage < 3 and training.at("zero_optimization.overlap_comm") is True else 1
        elements = training.number("zero_optimization.reduce_bucket_size", 5 * 10**8)
        bucket_bytes = buffers * elements * gradient_bytes / max(1, run.trained)
    moments = 1 if any(name in str(training.at("optimizer.type")).lower() for name in ONE_MOMENT) else 2
    masters = int(training.dtype is not None)
    # PyTorch's AdamW updates many tensors at once, with the roots of all second moments beside them. DeepSpeed's own
    # FusedAdam, which it takes for the config's name, has none.
    roots = int(not training.at("optimizer.type") or training.at("optimizer.params.torch_adam") is True)
    # ZeRO-3 steps through one sub-group at a time: the whole would be counted many times too large.
    stepping = min(trained, training.number("zero_optimization.sub_group_size", 10**9)) if stage == 3 else trained
    states = trained * MASTER_BYTES * (moments + masters)
    held = ModelMemory(
        {
            PARAMETERS: 0 if param else parameters,
            GRADIENTS: 0 if optimizer and stage >= 2 else gradients,
            STATES: 0 if optimizer else states,
            "CUDA context": CONTEXT_BYTES,
        },
        {"gathered parameters": int(gathered_bytes), "ZeRO's buckets": int(bucket_bytes)},
        0 if optimizer else stepping * MASTER_BYTES * (masters + roots),
    )
    updated_bytes = states + trained * MASTER_BYTES
    update_s = 2 * updated_bytes / device.memory_bytes_per_s
    if optimizer:
        update_s = trained * HOST_UPDATE_BYTES / HOST_BYTES_PER_S
    states_there, parameters_there = updated_bytes * (optimizer == "nvme"), parameters * (param == "nvme")
    written_bytes = states_there + part(run.trained_bytes, 3) * (param == "nvme")
    machine = run.trace.resources
    if written_bytes and machine.read_bytes_per_s:
        read_s = (states_there + 2 * times * parameters_there) / machine.read_bytes_per_s
        update_s = max(update_s, read_s + written_bytes / machine.write_bytes_per_s)
    swap_bytes = states_there + parameters_there
    return Account(
        held=held,
        host_bytes=parameters * bool(param) + updated_bytes * bool(optimizer) - swap_bytes,
        swap_bytes=swap_bytes,
        link_bytes=times * max(2 * parameters * bool(param), gradients * bool(optimizer)),
        written_bytes=written_bytes,
        update_s=update_s,
    )
