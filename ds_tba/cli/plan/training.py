"""How a ds_config.json has a model trained, on which device, and what that holds of its memory beside activations.

No DeepSpeed here: the figures are what its ZeRO optimizers allocate (``stage_1_and_2.py``, ``stage3.py``). FLOP/s are
what training sustains in matrix products, about two fifths of what data sheets say. Blind spots: expert and pipeline
parallelism.
"""

from __future__ import annotations

import re
from argparse import ArgumentTypeError
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import hjson  # of DeepSpeed
import torch

from ds_tba.cli.format import size
from ds_tba.config import BLOCK, OffloadConfig, parse_block, refuse_misnamed
from ds_tba.errors import ConfigError
from ds_tba.explain.account import GRADIENTS, PARAMETERS, STATES, ModelMemory
from ds_tba.plan.timeline import Spans
from ds_tba.plan.trace import Trace
from ds_tba.update.config import parse_update_block

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


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRun:
    """The result of one micro-step.

    Attributes:
        temporary: tensors beside saved ones, by time.
        loose_bytes: that checkpointed layers leave to the allocator, and the head cannot use.
        parameters, parameter_bytes, trained, trained_bytes: of all parameters, and of those that have gradients.
        largest_module: parameters that one module holds itself, at most: ZeRO-3 gathers all of a module at once.
        hidden_size: of the model's config, else 0.
        attention, notes: the attention kernels that ran, and limitations of this result, for the reader.
    """

    trace: Trace
    temporary: Spans = field(compare=False)
    loose_bytes: int = 0
    parameters: int
    parameter_bytes: int
    trained: int
    trained_bytes: int
    largest_module: int = 0
    hidden_size: int = 0
    attention: Sequence[str] = ()
    notes: tuple[str, ...] = ()

    @property
    def saved_bytes(self) -> int:
        """Bytes of all saved storages."""
        return sum(storage.nbytes for storage in self.trace.storages if storage.blocks)

    @property
    def temporary_bytes(self) -> int:
        """Peak of the temporary tensors."""
        return int(self.temporary.nbytes.max(initial=0))


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

    Rates are per second, of matrix products, of its memory and of copies from and to the host; ``launch_s`` is the time
    to launch an operation.
    """

    name: str
    memory_bytes: int | None
    flops: float
    memory_bytes_per_s: float
    copy_bytes_per_s: float
    launch_s: float = 0.0


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
    return Device(name, memory_bytes, flops, 1e9 * memory_gbps, 1e9 * copy_gbps, LAUNCH_S)


@dataclass(frozen=True, slots=True)
class Training:
    """How the model will be trained.

    Attributes:
        config: the whole ``ds_config.json``.
        offload: the block, or its defaults where there is none.
        dtype: of parameters; None where they stay as the model has them.
        notes: assumptions, for the reader.
    """

    config: Mapping[str, Any]
    offload: OffloadConfig
    dtype: torch.dtype | None = None
    notes: tuple[str, ...] = ()

    def at(self, path: str) -> Any:
        """Return the value at keys with dots between them; None where there is none."""
        found: Any = self.config
        for key in path.split("."):
            found = found.get(key) if isinstance(found, Mapping) else None
        return found

    def number(self, path: str) -> int | None:
        """Return the number above 0 that is there; None for anything else, such as "auto"."""
        value = self.at(path)
        return int(value) if isinstance(value, (int, float)) and value > 0 and value is not True else None

    @property
    def micro_steps(self) -> int:
        return self.number("gradient_accumulation_steps") or 1

    @property
    def stage(self) -> int:
        return self.number("zero_optimization.stage") or 0

    def offloads(self, what: str) -> str:
        """Return where ZeRO keeps the ``optimizer`` or the parameters (``param``): ``cpu``, ``nvme``, or empty."""
        device = self.at(f"zero_optimization.offload_{what}.device")
        return "" if device in (None, "none") else str(device)

    def part(self, elements: float, ranks: int, divided_from: int = 1) -> int:
        """Return the elements or bytes that one of ``ranks`` ranks has of what ZeRO divides from a stage on."""
        return -(-int(elements) // ranks) if self.stage >= divided_from else int(elements)

    @property
    def state_bytes(self) -> int:
        """Bytes of the optimizer's states, for each trained parameter: moments in FP32, and the master copy."""
        moments = 1 if any(name in str(self.at("optimizer.type")).lower() for name in ONE_MOMENT) else 2
        return MASTER_BYTES * (moments + (self.dtype is not None))

    @property
    def stepping_bytes(self) -> int:
        """Bytes for each parameter in the optimizer's step alone: its gradient for the master, and temporary ones.

        PyTorch's AdamW updates many tensors at once, with the roots of all second moments beside them. DeepSpeed's own
        FusedAdam, which it takes for the config's name, has none.
        """
        of_torch = not self.at("optimizer.type") or self.at("optimizer.params.torch_adam") is True
        return MASTER_BYTES * ((self.dtype is not None) + of_torch)

    def update_s(self, trained: int, ranks: int, device: Device) -> float:
        """Return the seconds of the optimizer's update of so many parameters, where its states are."""
        trained = self.part(trained, ranks)
        if self.offloads("optimizer"):
            return trained * HOST_UPDATE_BYTES / HOST_BYTES_PER_S
        return trained * 2 * (self.state_bytes + MASTER_BYTES) / device.memory_bytes_per_s


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
    for key in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps"):
        if found.get(key) == "auto":
            notes.append(f'"{key}" is "auto", which the trainer decides: 1 is assumed')
    wanted = ((name, value) for value in (True, "auto") for name in _DTYPES)
    name, value = next((one for one in wanted if training.at(f"{one[0]}.enabled") == one[1]), ("", None))
    if value == "auto":
        notes.append(f'"{name}.enabled" is "auto", which the trainer decides: taken as on')
    return replace(training, dtype=_DTYPES.get(name), notes=tuple(notes))


def held_of(training: Training, run: DryRun, ranks: int) -> ModelMemory:
    """Return the bytes that one of ``ranks`` ranks holds."""
    stage, is_on_host = training.stage, training.offloads("optimizer")
    element_bytes = run.parameter_bytes / max(1, run.parameters)
    named = str(training.at("data_types.grad_accum_dtype"))
    gradient_bytes = {"fp32": 4, "bf16": 2, "fp16": 2}.get(named, run.trained_bytes / max(1, run.trained))

    def part(divided_from: int, nbytes: float) -> int:
        return training.part(nbytes, ranks, divided_from)

    def elements(key: str, usual: float) -> float:
        if training.at(f"zero_optimization.{key}") == "auto" and run.hidden_size:  # as the Trainer of transformers
            return run.hidden_size**2
        return training.number(f"zero_optimization.{key}") or usual

    gathered_bytes = bucket_bytes = 0.0
    if stage == 3 and (ranks > 1 or training.offloads("param")):
        live = min(run.parameters, elements("stage3_max_live_parameters", 1e9))
        gathered_bytes = max(live, run.largest_module) * element_bytes  # a module's are there together, however many
    if stage and training.at("zero_optimization.contiguous_gradients") in (None, True):
        buffers = 2 if stage < 3 and training.at("zero_optimization.overlap_comm") is True else 1
        bucket_bytes = buffers * elements("reduce_bucket_size", 5e8) * gradient_bytes
    stepping = 0 if is_on_host else part(1, run.trained)
    # ZeRO-3 steps through one sub-group at a time: the whole would be counted many times too large.
    if stage == 3:
        stepping = min(stepping, int(elements("sub_group_size", 1e9)))
    return ModelMemory(
        {
            PARAMETERS: 0 if stage == 3 and training.offloads("param") else part(3, run.parameter_bytes),
            GRADIENTS: 0 if is_on_host and stage >= 2 else part(2, run.trained * gradient_bytes),
            STATES: 0 if is_on_host and stage else part(1, run.trained * training.state_bytes),
            "CUDA context": CONTEXT_BYTES,
        },
        {"gathered parameters": int(gathered_bytes), "ZeRO's buckets": int(bucket_bytes)},
        training.stepping_bytes * stepping,
    )


class Beside(NamedTuple):
    """Bytes that ZeRO keeps off the device of one rank, and moves in a step.

    ``host_bytes`` and ``swap_bytes`` are held; ``link_bytes`` cross the link to the host in the busier direction;
    ``read_bytes`` and ``written_bytes`` are the drive's.
    """

    host_bytes: int
    swap_bytes: int
    link_bytes: int
    read_bytes: int
    written_bytes: int


def beside(training: Training, run: DryRun, ranks: int) -> Beside:
    """Return what ZeRO's own offloads take of one of ``ranks`` ranks.

    Parameters go to the device in forward and again in backward of each micro-step, each rank's part over its own link;
    gradients leave it in each. States on a drive are read and written in each step, with the gradients in FP32.
    """
    param = training.offloads("param") if training.stage == 3 else ""
    optimizer, times = training.offloads("optimizer"), training.micro_steps
    parameters = training.part(run.parameter_bytes, ranks) if param else 0
    states = training.part(run.trained, ranks) * (training.state_bytes + MASTER_BYTES) if optimizer else 0
    gradients = training.part(run.trained_bytes, ranks, 2) if optimizer else 0
    parameters_there, states_there = parameters * (param == "nvme"), states * (optimizer == "nvme")
    return Beside(
        host_bytes=parameters + states - parameters_there - states_there,
        swap_bytes=parameters_there + states_there,
        link_bytes=times * max(2 * parameters, gradients),
        read_bytes=states_there + 2 * times * parameters_there,
        written_bytes=states_there + (training.part(run.trained_bytes, ranks) if param == "nvme" else 0),
    )
