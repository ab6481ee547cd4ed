"""The longest sequence within a memory limit, and memory and seconds per token: keep, checkpointing, tiles, and ours.

    python benchmarks/capacity.py [--nvme_path DIR] [--headroom_mib 112] [--rounds 3] [--json FILE]

A Llama with random weights (16 layers) under DeepSpeed, one sequence per step. Some variants have what people add for
long sequences: DeepSpeed's ``TiledFusedLogitsLoss`` and its ``TiledMLP``. A loss in tiles rounds in another way, so
such a variant is compared with the same tiles without anything of ours. Each variant runs in processes of its own.
Memory is measured, not limited: the peak of a step is the process's peak of resident bytes, staging included, and a
sequence fits if that is within the limit. (RLIMIT_AS would count reserved addresses, of which PyTorch has many.) The
limit is what the process without anything of this holds between two steps, plus a headroom. Sequences are doubled until
one does not fit; then the longest is sought in between. No sequence is tried that would take longer than
``--longest_s``. On a GPU ``make gpu`` measures the layers of Llama-3-8B instead.

Time is taken at one length that all variants can train, in rounds; from the second on the variants take turns in
random order. Seconds on the clock, and of the process's processor time, on which a busy machine has less influence.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from alternating import add_process_options, has_answered, in_a_process, rounds_of
from step_time import resident_bytes

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
MIB = 1 << 20
TIMED_STEPS = 4
MMAP_THRESHOLD_BYTES = str(64 << 10)  # narrow tensors, too, are given back to the system when they are freed
INTERPOLATIONS = 3
TILE_TOKENS = 256  # in each part of a tiled MLP
BLOCK_OF_TOKENS = 64  # sequences are multiples of it


@dataclass(frozen=True)
class Variant:
    """One way to train.

    Attributes:
        checkpointing: arguments of Hugging Face's gradient checkpointing, or None.
        block: keys of our block, or None.
        is_tiled: True if DeepSpeed computes loss and MLP in parts of the sequence.
    """

    title: str
    checkpointing: dict[str, Any] | None = None
    block: dict[str, Any] | None = None
    is_tiled: bool = False

    @property
    def compared_with(self) -> str:
        """The variant without ours that has the same arithmetic, hence the same losses."""
        return "tiled" if self.is_tiled else "keep"


NVME, TILES = {"placement": "nvme"}, "DeepSpeed's tiled loss and MLP"
VARIANTS = {
    "keep": Variant("keep (nothing)"),
    "checkpoint": Variant("torch checkpointing of every layer", {}),
    "nvme": Variant('**ours**, `"placement": "nvme"`', block=NVME),
    "checkpoint_nvme": Variant("torch checkpointing + **ours**", {}, block=NVME),
    "tiled": Variant(TILES, is_tiled=True),
    "checkpoint_tiled": Variant(f"torch checkpointing, {TILES}", {}, is_tiled=True),
    "nvme_tiled": Variant(f"{TILES} + **ours**", block=NVME, is_tiled=True),
    "checkpoint_nvme_tiled": Variant(f"torch checkpointing, {TILES} + **ours**", {}, block=NVME, is_tiled=True),
}


# ---- one process ----------------------------------------------------------------------------------------------------


class Training:
    """A model, an engine and random bytes, for one variant."""

    def __init__(self, options: argparse.Namespace) -> None:
        import deepspeed
        import torch

        sys.path.insert(0, str(EXAMPLES))
        from long_context import llama, tile_loss
        from train_gpt import peak_memory_bytes, reset_peak_memory

        self.variant = VARIANTS[options.variant]
        self._peak_bytes, self._reset_peak = peak_memory_bytes, reset_peak_memory
        torch.manual_seed(1)
        model = llama(options.width, options.layers, options.longest_sequence)
        if self.variant.is_tiled:
            tile_mlps(model)
            tile_loss(model)
        if self.variant.checkpointing is not None:
            checkpoint_layers(model, **self.variant.checkpointing)
        self._engine, *_ = deepspeed.initialize(
            model=model, model_parameters=model.parameters(), config=ds_config(options)
        )
        self._random = torch.Generator().manual_seed(1)
        self._rows = options.rows
        self._out_of_memory = torch.OutOfMemoryError

    def step(self, sequence: int) -> dict[str, float]:
        """Take one step, and return loss, peak memory and time; the peak is infinite where memory ran out."""
        import torch

        tokens = torch.randint(256, (self._rows, sequence), generator=self._random).to(self._engine.device)
        self._reset_peak()
        began_s, began_cpu_s = time.perf_counter(), time.process_time()
        try:
            loss = self._engine(input_ids=tokens, labels=tokens).loss
            self._engine.backward(loss)
            self._engine.step()
            last = loss.item()
        except self._out_of_memory:
            return {"loss": float("nan"), "peak_bytes": float("inf"), "step_s": 0.0, "cpu_s": 0.0}
        times = {"step_s": time.perf_counter() - began_s, "cpu_s": time.process_time() - began_cpu_s}
        return {"loss": last, "peak_bytes": float(self._peak_bytes()), **times}

    def steps(self, sequence: int, count: int) -> dict[str, Any]:
        """Take steps, and return their highest peak and median time; the first of a new length takes longest."""
        found = [self.step(sequence) for _ in range(count)]
        last = found[count // 2 :]
        return {
            "sequence": sequence,
            "peak_bytes": max(one["peak_bytes"] for one in found),
            "step_s": statistics.median(one["step_s"] for one in last),
            "cpu_s": statistics.median(one["cpu_s"] for one in last),
            "losses": [one["loss"] for one in found],
        }

    def report(self) -> dict[str, Any] | None:
        """Return the report of our offloader, if there is one."""
        offloader = getattr(self._engine, "activation_offloader", None)
        return None if offloader is None else offloader.report().to_dict()


def ds_config(options: argparse.Namespace) -> dict[str, Any]:
    """Return the DeepSpeed config of this variant."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 1e-3}},
    }
    variant = VARIANTS[options.variant]
    if variant.block is not None:
        io = {"backend": options.backend, "staging_bytes": options.staging_mib * MIB}
        block = {"enabled": True, "min_tensor_bytes": options.min_tensor_kib * 1024, "nvme_path": options.nvme_path}
        config["activation_nvme_offload"] = {**block, "io": io, **variant.block}
    return config


def checkpoint_layers(model: Any, **more: Any) -> None:
    """Turn on gradient checkpointing, whose arguments have moved in transformers 5."""
    kwargs = {"use_reentrant": False}
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=kwargs, **more)
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs | more)


def tile_mlps(model: Any) -> None:
    """Have DeepSpeed's ``TiledMLP`` compute each layer's MLP in parts of the sequence."""
    from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledMLP

    def in_tiles(mlp: Any, x: Any) -> Any:
        whole = type(mlp).forward
        return TiledMLP.apply(whole, mlp, x, tiles(x.shape[1]), list(mlp.parameters()))

    for layer in model.model.layers:
        layer.mlp.forward = partial(in_tiles, layer.mlp)


def tiles(sequence: int) -> int:
    """Return in how many parts a sequence is computed: of 256 tokens or a few more."""
    return max(1, sequence // TILE_TOKENS)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure in one process: time at one length, and with ``--sweep`` peak memory at growing lengths."""
    training = Training(options)
    training.step(4 * BLOCK_OF_TOKENS)
    if options.limit_mib is None:
        options.limit_mib = resident_bytes() // MIB + options.headroom_mib
    timed = training.steps(options.timed_sequence, TIMED_STEPS)
    found: dict[str, Any] = {"timed": timed, "lengths": [], "limit_mib": options.limit_mib}
    if options.sweep:
        found["lengths"] = list(sweep(training, options))
        found["threads"], found["report"] = threads(), training.report()
    return found


def threads() -> int:
    import torch

    return torch.get_num_threads()


def sweep(training: Training, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Try sequences of growing length until one does not fit, then some between it and the last that fits."""
    limit_bytes, fits, fails = options.limit_mib * MIB, 0, 0
    peaks: dict[int, float] = {}
    sequence = options.shortest_sequence
    while sequence <= options.longest_sequence:
        found = training.steps(sequence, 1)
        yield found
        peaks[sequence] = found["peak_bytes"]
        if found["peak_bytes"] > limit_bytes:
            fails = sequence
            break
        fits = sequence
        # attention is quadratic: the next may take four times as long
        if 4 * found["cpu_s"] > options.longest_s:
            return
        sequence *= 2
    for _ in range(INTERPOLATIONS):
        if not fits or not fails or fails - fits <= max(BLOCK_OF_TOKENS, fits // 16):
            return
        sequence = between(peaks, fits, fails, limit_bytes)
        found = training.steps(sequence, 1)
        yield found
        peaks[sequence] = found["peak_bytes"]
        if found["peak_bytes"] > limit_bytes:
            fails = sequence
        else:
            fits = sequence


def between(peaks: dict[int, float], fits: int, fails: int, limit_bytes: int) -> int:
    """Return a length between one that fits and one that does not: the straight line crosses the limit there."""
    share = (limit_bytes - peaks[fits]) / (peaks[fails] - peaks[fits]) if peaks[fails] < float("inf") else 0.5
    guess = (fits + int(share * (fails - fits))) // BLOCK_OF_TOKENS * BLOCK_OF_TOKENS
    return min(max(guess, fits + BLOCK_OF_TOKENS), fails - BLOCK_OF_TOKENS)


# ---- the table ------------------------------------------------------------------------------------------------------


def line(lengths: list[dict[str, Any]]) -> tuple[float, float]:
    """Return slope and intercept of peak memory over length; nan for fewer than two lengths.

    The line goes through the longest length and the longest of at most half of it. At shorter ones something else may
    be the peak, staging or the optimizer's step, and a line through them would be too flat.
    """
    points = sorted((one["sequence"], one["peak_bytes"]) for one in lengths if one["peak_bytes"] != float("inf"))
    halves = [point for point in points if 2 * point[0] <= points[-1][0]]
    if not halves:
        return float("nan"), float("nan")
    return tuple(statistics.linear_regression(*zip(halves[-1], points[-1], strict=True)))


def longest(lengths: list[dict[str, Any]], limit_bytes: int) -> str:
    """Return the longest sequence that fits, and, if none did not, the length at which the line of peaks does not."""
    fits = max((one["sequence"] for one in lengths if one["peak_bytes"] <= limit_bytes), default=0)
    if any(one["peak_bytes"] > limit_bytes for one in lengths):
        return f"{fits:,}"
    slope, intercept = line(lengths)
    if not slope > 0:
        return f"more than {fits:,}"
    return f"more than {fits:,}; by the slope {max(fits, round((limit_bytes - intercept) / slope, -2)):,.0f}"


def ratio(rounds: list[dict[str, dict[str, Any]]], name: str, key: str) -> str:
    """Return the median of the per-round ratios to keep, and their range."""
    found = [one[name]["timed"][key] / one["keep"]["timed"][key] for one in rounds]
    return f"{statistics.median(found):.2f} [{min(found):.2f}-{max(found):.2f}]"


def table(rounds: list[dict[str, dict[str, Any]]], options: argparse.Namespace) -> list[str]:
    """Return the Markdown table."""
    lines = [
        f"| variant | longest sequence in {options.limit_mib} MiB | KiB of memory per token | to keep | ms per token "
        "| time / keep | processor time / keep |",
        "|---|---|---|---|---|---|---|",
    ]
    first = rounds[0]
    kept, _ = line(first["keep"]["lengths"])
    for name, variant in VARIANTS.items():
        if name not in first:
            continue
        per_token, _ = line(first[name]["lengths"])
        per_token_s = statistics.median(one[name]["timed"]["step_s"] for one in rounds) / options.timed_sequence
        lines.append(
            f"| {variant.title} | {longest(first[name]['lengths'], options.limit_mib * MIB)} | {per_token / 1024:.1f} "
            f"| {per_token / kept:.3f} | {per_token_s * 1000:.2f} | {ratio(rounds, name, 'step_s')} "
            f"| {ratio(rounds, name, 'cpu_s')} |"
        )
    return lines


# ---- the command ----------------------------------------------------------------------------------------------------


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--headroom_mib", type=int, default=112, help="beyond what a process holds anyway")
    parser.add_argument("--limit_mib", type=int, help="memory limit instead of that")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=VARIANTS)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--rows", type=int, default=1, help="sequences in a micro-batch")
    parser.add_argument("--timed_sequence", type=int, default=1024)
    parser.add_argument("--shortest_sequence", type=int, default=512)
    parser.add_argument("--longest_sequence", type=int, default=8192)
    parser.add_argument("--longest_s", type=float, default=60.0, help="try no length that takes longer")
    parser.add_argument("--staging_mib", type=int, default=32, help="io.staging_bytes of ours")
    # Per token, a tensor of width 128 has a 32nd of the bytes of one of width 4096.
    parser.add_argument("--min_tensor_kib", type=int, default=32, help="min_tensor_bytes of ours")
    parser.add_argument("--backend", default="posix", help="io.backend of ours")
    parser.add_argument("--nvme_path", default=".")
    parser.add_argument("--json", type=Path, help="write every measurement to this file")
    parser.add_argument("--sweep", action="store_true", help=argparse.SUPPRESS)
    add_process_options(parser, list(VARIANTS))
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    options = parse(argv)
    if has_answered(options, measure):
        return 0
    variants = with_compared(options.variants)

    def turn(name: str, *more: str) -> dict[str, Any]:
        found = in_a_process(__file__, name, [*argv, *more], MALLOC_MMAP_THRESHOLD_=MMAP_THRESHOLD_BYTES)
        print(f"{name}: {found['timed']['step_s']:.2f} s", *map(shown, found["lengths"]), flush=True)
        return found

    first: dict[str, dict[str, Any]] = {}
    rounds = [first]
    for name in variants:  # keep is the first: its process says what the limit is
        more = [] if options.limit_mib is None else ["--limit_mib", str(options.limit_mib)]
        first[name] = turn(name, "--sweep", *more)
        options.limit_mib = first[name]["limit_mib"]
        write(options, rounds)
    with contextlib.suppress(KeyboardInterrupt):
        for later in rounds_of(list(first), turn, options.rounds - 1):
            rounds.append(later)
            write(options, rounds)
    print("\n".join(table(rounds, options)))
    equal = all(
        first_losses(one[name]) == first_losses(one[VARIANTS[name].compared_with]) for one in rounds for name in one
    )
    print(f"losses equal those of the same arithmetic without ours, in all rounds: {'yes' if equal else 'NO'}")
    return 0 if equal else 1


def with_compared(names: Sequence[str]) -> list[str]:
    """Return the variants to run: keep first, and before each variant the one that its losses are compared with."""
    return list(dict.fromkeys(["keep", *(one for name in names for one in (VARIANTS[name].compared_with, name))]))


def write(options: argparse.Namespace, rounds: list[dict[str, dict[str, Any]]]) -> None:
    """Write the results so far, where ``--json`` says."""
    if options.json:
        shown_options = {key: value for key, value in vars(options).items() if key not in ("json", "result")}
        options.json.write_text(json.dumps({"options": shown_options, "rounds": rounds}, indent=1) + "\n")


def first_losses(found: dict[str, Any]) -> list[float]:
    """Return the losses of the steps that every variant runs at first."""
    losses: list[float] = found["timed"]["losses"]
    return losses[:TIMED_STEPS]


def shown(one: dict[str, Any]) -> str:
    return f"{one['sequence']}: {one['peak_bytes'] / MIB:.0f} MiB {one['step_s']:.1f} s"


if __name__ == "__main__":
    raise SystemExit(main())
