"""Train a byte-level GPT on the sources of Python's standard library, with any ds_config.json.

    deepspeed examples/train_gpt.py --deepspeed_config ds_configs/zero3_nvme_params_activations.json

Nothing here imports ds_tba: the block in the config is enough. Only the report at the end uses the offloader.
``demo.py`` runs this script several times in different ways, and compares.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import hashlib
import json
import math
import os
import random
import sys
import sysconfig
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

BLOCK = "activation_nvme_offload"
UPDATE_BLOCK = "interleaved_optimizer_update"
VOCABULARY = 256
WIDTH, DEPTH, SEQUENCE = 384, 6, 512
PICTURE_COLUMNS = 72
KILLED = 137  # exit status of a process that needed more memory than it may have, as of one that the kernel ended
MEASURING_STEPS = 3  # before the first plan; left out of the step's time, with and without the block


# ---- the model ------------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    """Causal self-attention over (batch, sequence, width)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, sequence, width = x.shape
        q, k, v = self.qkv(x).view(batch, sequence, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, sequence, width))


class Block(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width, heads)
        self.norm2, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Bytes in, mean cross entropy in nats per byte out.

    Args:
        recompute: checkpoint every block with torch.utils.checkpoint.
    """

    def __init__(self, width: int, depth: int, sequence: int, *, recompute: bool = False) -> None:
        super().__init__()
        self.recompute = recompute
        self.tokens, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(sequence, width)
        self.blocks = nn.ModuleList(Block(width, max(1, width // 64)) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY)

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.tokens(inputs) + self.positions(torch.arange(inputs.shape[1], device=inputs.device))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), targets.flatten())


def with_lora(model: GPT, rank: int) -> nn.Module:
    """Freeze a model, and put LoRA into the linear layers of its blocks."""
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=rank, target_modules=["qkv", "out", "up", "down"]))


# ---- the data -------------------------------------------------------------------------------------------------------


def standard_library_bytes(min_bytes: int = 4 << 20) -> torch.Tensor:
    """Return the sources of Python's standard library, in a fixed order, as one uint8 tensor."""
    text = bytearray()
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text += path.read_bytes()
        if len(text) >= min_bytes:
            break
    return torch.frombuffer(text, dtype=torch.uint8)


def batches(batch: int, sequence: int, rank: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield (inputs, targets), each int64 (batch, sequence), the same for the same rank in every run."""
    text = standard_library_bytes()
    chance = random.Random(1234 + rank)
    while True:
        starts = [chance.randrange(len(text) - sequence - 1) for _ in range(batch)]
        rows = torch.stack([text[start : start + sequence + 1] for start in starts]).long()
        yield rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


# ---- training -------------------------------------------------------------------------------------------------------


@dataclass
class Length:
    """Time and memory of one step at another length, measured before the training and without its memory limit."""

    sequence: int
    peak_memory_bytes: int
    step_s: float


@dataclass
class Run:
    """The results of one training run."""

    losses: list[float]
    parameters_sha256: str
    step_s: float
    tokens_per_s: float
    peak_memory_bytes: int
    step_memory_bytes: list[int]  # over the last step, so many as its picture is wide
    held_memory_bytes: int  # before the first step that is timed
    sequence: int
    lengths: list[Length]
    report: dict[str, Any] | None


def train(options: argparse.Namespace, ds_config: dict[str, Any], title: str, console: Console) -> Run:
    """Train one run from the seed to the last step."""
    torch.manual_seed(options.seed)
    with deepspeed.zero.Init(enabled=False):
        model: nn.Module = GPT(options.width, options.depth, options.sequence, recompute=options.recompute)
        model = with_lora(model, options.lora_rank) if options.lora_rank else model
    trained = [one for one in model.parameters() if one.requires_grad]
    engine, *_ = deepspeed.initialize(model=model, model_parameters=trained, config=ds_config)
    lengths = measure_lengths(options, engine)
    data = batches(engine.train_micro_batch_size_per_gpu(), options.sequence, engine.global_rank)
    reset_peak_memory()
    held = memory_bytes()
    watch = MemoryWatch(options.memory_limit_bytes)
    losses, times = [], []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, TextColumn("{task.fields[status]}"), console=console) as progress:
        task = progress.add_task(title, total=options.steps, status="")
        for _ in range(options.steps):
            started = watch.start_step()
            losses.append(one_step(engine, data))
            times.append(time.perf_counter() - started)
            tokens = engine.train_batch_size() * options.sequence
            status = f"loss {losses[-1]:.4f}  {tokens / times[-1]:,.0f} tokens/s"
            progress.update(task, advance=1, status=status)
    peak, step_memory_bytes = peak_memory_bytes(), watch.stop()
    offloader = getattr(engine, "activation_offloader", None)
    report = offloader.report().to_dict() if offloader is not None else None
    rows = offloader.report().rows() if offloader is not None else []
    if rows:
        console.print(report_table(rows))
    settled = sorted(times[MEASURING_STEPS:] or times)
    step_s = settled[len(settled) // 2]
    run = Run(
        losses=losses,
        parameters_sha256=parameters_sha256(engine),
        step_s=step_s,
        tokens_per_s=tokens / step_s,
        peak_memory_bytes=peak,
        step_memory_bytes=step_memory_bytes,
        held_memory_bytes=held,
        sequence=options.sequence,
        lengths=lengths,
        report=report,
    )
    engine.destroy()
    del engine, model
    gc.collect()
    return run


def measure_lengths(options: argparse.Namespace, engine: Any) -> list[Length]:
    """Train one step at each of ``--also_lengths``, and write the memory and time of each to ``--lengths``.

    A run that later exceeds its memory limit ends without a message; the file stays.
    """
    found: list[Length] = []
    rows = engine.train_micro_batch_size_per_gpu()
    for sequence in options.also_lengths:
        if not found:  # the first step builds what all later ones use again: a short one, which is not counted
            one_step(engine, batches(rows, max(1, sequence // 4), engine.global_rank))
        data = batches(rows, sequence, engine.global_rank)
        reset_peak_memory()
        started = time.perf_counter()
        one_step(engine, data)
        found.append(Length(sequence, peak_memory_bytes(), time.perf_counter() - started))
    if options.lengths and engine.global_rank == 0:
        Path(options.lengths).write_text(json.dumps([asdict(one) for one in found]))
    return found


def one_step(engine: Any, data: Iterator[tuple[torch.Tensor, torch.Tensor]]) -> float:
    """Train one optimizer step, and return the mean loss of its micro-batches."""
    micro_steps = engine.gradient_accumulation_steps()
    total = 0.0
    for _ in range(micro_steps):
        inputs, targets = (part.to(engine.device) for part in next(data))
        loss = engine(inputs, targets)
        engine.backward(loss)
        engine.step()
        total += loss.item()
    return total / micro_steps


def parameters_sha256(engine: Any) -> str:
    """Return a hash of all parameters, gathered if ZeRO-3 has partitioned them."""
    digest = hashlib.sha256()
    for parameter in engine.module.parameters():
        with deepspeed.zero.GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")):
            digest.update(parameter.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def use_exact_kernels() -> None:
    """Select kernels that give the same bits each time; with others, equal runs on a GPU may differ in last bits."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA's matrix library starts
    torch.use_deterministic_algorithms(not get_accelerator().is_synchronized_device())
    torch.utils.deterministic.fill_uninitialized_memory = False  # filling would write to every tensor once more


def reset_peak_memory() -> None:
    """Start a new peak: of the accelerator, or of this process on a CPU-only machine."""
    if get_accelerator().is_synchronized_device():
        ctypes.CDLL(None).malloc_trim(0)  # or memory that an earlier run freed would count for this one
        Path("/proc/self/clear_refs").write_text("5")
    else:
        get_accelerator().reset_peak_memory_stats()


def peak_memory_bytes() -> int:
    """Return the device bytes at the peak, or this process's resident bytes on a CPU-only machine."""
    if not get_accelerator().is_synchronized_device():
        return int(get_accelerator().max_memory_allocated())
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


def memory_bytes() -> int:
    """Return the device bytes at this moment, or this process's resident bytes on a CPU-only machine."""
    if not get_accelerator().is_synchronized_device():
        return int(get_accelerator().memory_allocated())
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def memory_owner() -> str:
    """Return the owner of the peak memory, in words."""
    return "process" if get_accelerator().is_synchronized_device() else "device"


class MemoryWatch:
    """Looks at the memory of the device, or on a CPU-only machine of this process, every few milliseconds.

    Args:
        limit_bytes: the bytes that the process may have, or 0; beyond them it ends as if the kernel had killed it.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._is_device = not get_accelerator().is_synchronized_device()
        self._limit_bytes = 0 if self._is_device else limit_bytes
        if self._is_device and limit_bytes:  # the allocator itself refuses; what it holds from before would count
            get_accelerator().empty_cache()
            torch.cuda.set_per_process_memory_fraction(limit_bytes / torch.cuda.mem_get_info()[1])
        self._step: list[tuple[float, int]] = []
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def start_step(self) -> float:
        """Begin a step, and return the time."""
        self._step = []
        return time.perf_counter()

    def stop(self, columns: int = PICTURE_COLUMNS) -> list[int]:
        """Return the peaks of equal parts of the last step."""
        ended, samples = time.perf_counter(), self._step
        self._is_over.set()
        self._thread.join()
        found = [0] * columns
        for moment, nbytes in samples:
            column = int(columns * (moment - samples[0][0]) / max(ended - samples[0][0], 1e-9))
            found[min(column, columns - 1)] = max(nbytes, found[min(column, columns - 1)])
        for column in range(1, columns):  # a short step has fewer looks than columns
            found[column] = found[column] or found[column - 1]
        return found

    def _look(self) -> None:
        while not self._is_over.wait(0.005):
            nbytes = memory_bytes()
            self._step.append((time.perf_counter(), nbytes))
            if 0 < self._limit_bytes < nbytes:
                os._exit(KILLED)


# ---- output ---------------------------------------------------------------------------------------------------------


def report_table(rows: list[tuple[str, str]]) -> Table:
    table = Table(title="activation offload", show_header=False)
    for name, value in rows:
        table.add_row(name, value)
    return table


# ---- the command ----------------------------------------------------------------------------------------------------


def read_config(options: argparse.Namespace) -> dict[str, Any]:
    """Return the JSON, with the directories and the backend of the command line put in."""
    ds_config: dict[str, Any] = json.loads(Path(options.deepspeed_config).read_text())
    if options.without_block:
        for block in (BLOCK, UPDATE_BLOCK):
            ds_config.pop(block, None)
    if options.batch:
        ds_config["train_micro_batch_size_per_gpu"] = options.batch
    if options.nvme_path:
        for offload in ("offload_param", "offload_optimizer"):
            part = ds_config.get("zero_optimization", {}).get(offload, {})
            if part.get("device") == "nvme":
                part["nvme_path"] = options.nvme_path
        if BLOCK in ds_config:
            ds_config[BLOCK]["nvme_path"] = options.nvme_path
    if options.fp32:
        ds_config.pop("bf16", None)
    if options.placement and BLOCK in ds_config:
        ds_config[BLOCK]["placement"] = options.placement
        if options.placement == "keep":  # nothing is moved: needs no drive
            ds_config[BLOCK].pop("nvme_path", None)
    if options.backend and BLOCK in ds_config:
        ds_config[BLOCK].setdefault("io", {})["backend"] = options.backend
    if options.activation_budget_bytes and BLOCK in ds_config:
        ds_config[BLOCK]["activation_budget_bytes"] = options.activation_budget_bytes
    if options.staging_bytes and BLOCK in ds_config:
        ds_config[BLOCK].setdefault("io", {})["staging_bytes"] = options.staging_bytes
    if options.min_tensor_bytes and BLOCK in ds_config:
        ds_config[BLOCK]["min_tensor_bytes"] = options.min_tensor_bytes
    if options.report and BLOCK in ds_config:
        timeline = str(Path(options.report).with_suffix(".timeline.json"))
        ds_config[BLOCK].setdefault("report", {}).update(path=options.report, timeline_path=timeline)
    return ds_config


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--deepspeed_config", required=True, help="the ds_config.json")
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps")
    parser.add_argument("--width", type=int, default=WIDTH)
    parser.add_argument("--depth", type=int, default=DEPTH)
    parser.add_argument("--lora_rank", type=int, default=0, help="train LoRA of this rank alone; 0: everything")
    parser.add_argument("--sequence", type=int, default=SEQUENCE, help="bytes per sequence")
    parser.add_argument(
        "--batch", type=int, default=0, help="sequences per micro-batch and rank (default: the config's)"
    )
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--recompute", action="store_true", help="checkpoint every block (torch.utils.checkpoint)")
    parser.add_argument("--nvme_path", help="use this directory instead of those in the config")
    parser.add_argument("--backend", help="use this io.backend instead of the config's")
    parser.add_argument("--activation_budget_bytes", type=int, help="use this budget instead of the config's")
    parser.add_argument("--staging_bytes", type=int, help="use this io.staging_bytes instead of the config's")
    parser.add_argument("--min_tensor_bytes", type=int, help="use this min_tensor_bytes instead of the config's")
    parser.add_argument("--placement", help="use this placement instead of the config's")
    parser.add_argument("--fp32", action="store_true", help="train in FP32 whatever the config says")
    parser.add_argument("--memory_limit_bytes", type=int, default=0, help="end if the process, or device, needs more")
    parser.add_argument(
        "--also_lengths",
        type=int,
        nargs="*",
        default=[],
        help="before the training, two steps at each of these lengths",
    )
    parser.add_argument("--lengths", help="write the memory and time of --also_lengths to this JSON file")
    parser.add_argument("--report", help="write the offloader's report to this file, and a timeline beside it")
    parser.add_argument("--without_block", action="store_true", help="as if the config had no block")
    parser.add_argument(
        "--deterministic", action="store_true", help="kernels that give the same bits each time, on a GPU"
    )
    parser.add_argument("--result", help="write losses, fingerprint, memory and report to this JSON file")
    parser.add_argument("--local_rank", type=int, default=0, help="set by the launcher")
    return parser.parse_args(argv)


def console_of(rank: int) -> Console:
    return Console(quiet=rank != 0, width=110)


def write_result(options: argparse.Namespace, run: Run) -> None:
    """Write the JSON of each rank at ``--result``."""
    if options.result:
        rank = int(os.environ.get("RANK", "0"))
        path = Path(options.result if rank == 0 else f"{options.result}.rank{rank}")
        path.write_text(json.dumps(asdict(run)))


def main(argv: list[str] | None = None) -> int:
    """Train; return 0 if all went well, 137 if memory ran out."""
    options = parse(sys.argv[1:] if argv is None else argv)
    if options.deterministic:
        use_exact_kernels()
    deepspeed.init_distributed()
    console = console_of(deepspeed.comm.get_rank())
    parameters = sum(p.numel() for p in GPT(options.width, options.depth, options.sequence).parameters())
    console.print(
        f"GPT of {parameters / 1e6:.1f} M parameters, {options.depth} blocks of width {options.width}, "
        f"sequences of {options.sequence} bytes, {torch.get_num_threads()} threads"
    )
    title = "without the block" if options.without_block else "training"
    try:
        run = train(options, read_config(options), title, console)
    except torch.OutOfMemoryError as error:
        console.print(f"[red]{error}")
        return KILLED
    write_result(options, run)
    deepspeed.comm.destroy_process_group()
    if not all(math.isfinite(loss) for loss in run.losses):
        console.print("the loss is not finite")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
