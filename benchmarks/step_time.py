"""Step time and peak memory of the example's model: keep, and other ways to train it, as ratios to keep.

    python benchmarks/step_time.py [--rounds 5] [--steps 4] [--width 512 --depth 8 --sequence 512 --batch 8]
    python benchmarks/step_time.py --bf16 --drive_mbps 300 --variants nvme lz4 zstd

``keep`` has no block, ``nvme`` and ``rematerialize`` have ours (the latter without a drive), ``recompute`` is
torch.utils.checkpoint, ``save_on_cpu`` PyTorch's hooks. ``lz4`` and ``zstd`` are ``nvme`` with ``io.compression``; with
``--drive_mbps`` the lanes of these three sleep for as long as a drive of that rate each way would have taken.

With ``--parameters_on_drive`` ZeRO-3 reads and writes parameters in the same directory, in all variants. A control
group with a limit of I/O (``blkio.throttle``, ``io.max``) makes the drive slow for both.

Every measurement is a process of its own; the variants take turns, in a new random order each round, because machines
are noisy; processor time is less so. Reported are medians over the rounds of each process's median step time and of its
peak memory, divided by keep's of the same round. Peak memory is what the accelerator reports, or on a CPU-only machine
the process's resident bytes (staging included); "activations" is that peak less what the keep process holds between two
steps. "Saved tensors" are those in device memory, as the block counts them. What the drive was written is of all steps.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from operator import itemgetter
from pathlib import Path
from typing import Any

from alternating import add_process_options, has_answered, in_a_process, rounds_of
from benchmarking import GIB, JSON, Found, markdown_table, median, parser_of, ranged, ratios, write_json

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
VARIANTS = ("keep", "nvme", "rematerialize", "recompute", "save_on_cpu")
CODECS = ("lz4", "zstd")
OPTIMIZER = {"type": "AdamW", "params": {"lr": 3e-4, "torch_adam": True}}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure a few steps of one variant, in one process."""
    import deepspeed
    import torch
    from curves.throttled import ThrottledBackend, opened

    sys.path.insert(0, str(EXAMPLES))
    from train_gpt import GPT, batches, one_step, peak_memory_bytes, reset_peak_memory

    config: dict[str, Any] = {"train_micro_batch_size_per_gpu": options.batch, "optimizer": OPTIMIZER}
    config |= {"bf16": {"enabled": options.bf16}, "zero_optimization": {"stage": options.zero}}
    if options.parameters_on_drive:
        # With these no parameter stays in memory between two of its uses.
        offload = {"device": "nvme", "nvme_path": options.nvme_path, "max_in_cpu": 0, "buffer_count": 8}
        offload["buffer_size"] = 8 * options.width**2
        none_stays = {"stage3_max_live_parameters": 1, "stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 0}
        config["zero_optimization"] = {"stage": 3, "offload_param": offload, **none_stays}
        config["aio"] = {"block_size": 1 << 20, "queue_depth": 16, "overlap_events": True}
    if options.variant in ("nvme", *CODECS):
        codec = options.variant if options.variant in CODECS else None
        io = {"backend": options.backend, "staging_bytes": options.staging_mib << 20, "compression": codec}
        block = {"nvme_path": options.nvme_path, "io": io, "placement": options.placement}
        config["activation_nvme_offload"] = {"enabled": True, **block}
    if options.variant == "rematerialize":
        config["activation_nvme_offload"] = {"enabled": True, "placement": "keep"}
    torch.manual_seed(1)
    model = GPT(options.width, options.depth, options.sequence, recompute=options.variant == "recompute")
    with opened(None if options.drive_mbps is None else ThrottledBackend(options.drive_mbps * 1e6)):
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    if options.variant == "save_on_cpu":
        forward = engine.module.forward

        def saved_on_cpu(*inputs: torch.Tensor) -> torch.Tensor:
            with torch.autograd.graph.save_on_cpu(pin_memory=torch.cuda.is_available()):
                result: torch.Tensor = forward(*inputs)
                return result

        engine.module.forward = saved_on_cpu
    data = batches(options.batch, options.sequence, 0)
    losses = [one_step(engine, data) for _ in range(options.warmup)]
    counters = getattr(engine, "activation_offloader", None) and engine.activation_offloader.cache.stats
    if counters:
        for level in (counters.resident, counters.saved):
            level.lap()
            level.peak = level.now
    reset_peak_memory()
    rest_bytes = resident_bytes()
    times, cpu_times = [], []
    for _ in range(options.steps):
        started, cpu_started = time.perf_counter(), time.process_time()
        losses.append(one_step(engine, data))
        times.append(time.perf_counter() - started)
        cpu_times.append(time.process_time() - cpu_started)
    result = {"step_s": statistics.median(times), "cpu_s": statistics.median(cpu_times), "losses": losses}
    result |= {"peak_bytes": peak_memory_bytes(), "rest_bytes": rest_bytes, "report": None}
    if counters:
        result["saved_peak_bytes"] = [counters.resident.peak, counters.saved.peak]
        result["report"] = engine.activation_offloader.report().to_dict()
    engine.destroy()
    return result


def resident_bytes() -> int:
    """Return the bytes held now, between two steps."""
    from deepspeed.accelerator import get_accelerator

    if not get_accelerator().is_synchronized_device():
        return int(get_accelerator().memory_allocated())
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def table(rounds: list[dict[str, Found]], variants: list[str]) -> list[str]:
    """Return the Markdown table."""
    rest = median(rounds, "keep", itemgetter("rest_bytes"))
    step_s, cpu_s, peak_bytes = map(itemgetter, ("step_s", "cpu_s", "peak_bytes"))

    def activations_bytes(found: Found) -> float:
        return float(found["peak_bytes"]) - rest

    def row(variant: str) -> Iterator[str]:
        def to_keep(value: Callable[[Found], float]) -> str:
            return ranged(ratios(rounds, variant, value))

        yield from (variant, f"{median(rounds, variant, step_s):.3f}", to_keep(step_s), to_keep(cpu_s))
        for nbytes in (peak_bytes, activations_bytes):
            yield from (f"{median(rounds, variant, nbytes) / GIB:.3f}", to_keep(nbytes))
        yield saved(rounds[0][variant])

    columns = ("variant", "step s", "step / keep", "processor time / keep", "peak GiB", "peak / keep",
               "activations GiB", "activations / keep", "saved tensors GiB")  # fmt: skip
    return markdown_table(columns, [tuple(row(variant)) for variant in variants])


def drive_table(rounds: list[dict[str, Found]], variants: list[str]) -> list[str]:
    """Return the Markdown table of what the drive was written; empty where nothing was."""
    rows = []
    for variant in variants:
        reports = [one[variant]["report"] for one in rounds if one[variant]["report"]]
        written_bytes = statistics.median(one["written_bytes"] for one in reports) if reports else 0
        if written_bytes:
            before_bytes = statistics.median(one["uncompressed_bytes"] or one["written_bytes"] for one in reports)
            step = ranged(ratios(rounds, variant, itemgetter("step_s"), "nvme")) if "nvme" in variants else ""
            figures = (written_bytes / 1e9, before_bytes / 1e9, written_bytes / before_bytes)
            rows.append((variant, step, *(f"{one:.3f}" for one in figures)))
    return markdown_table(("variant", "step / nvme", "written to the drive, GB", "of", "left"), rows) if rows else []


def saved(found: Found) -> str:
    """Return the peak of saved tensors in device memory, and the peak that it would be without us."""
    with_it, without = found.get("saved_peak_bytes", (0, 0))
    return f"{with_it / GIB:.3f} instead of {without / GIB:.3f}" if without else ""


def parse(argv: list[str]) -> argparse.Namespace:
    parser = parser_of(
        __doc__, rounds=5, steps=(4, "measured steps in each process"), warmup=(2, "steps before them"),
        width=512, depth=8, sequence=512, batch=8, zero=0, bf16=False, backend=("posix", "io.backend of nvme"),
        placement=("nvme", "adaptive has no plan before its 4th step"), staging_mib=48, nvme_path=".",
        drive_mbps=(float, "MB/s each way of a slower drive than the one that is there"),
        parameters_on_drive=(False, "those of ZeRO-3; wants --bf16"), json=JSON,
    )  # fmt: skip
    parser.add_argument("--variants", nargs="+", default=VARIANTS, choices=(*VARIANTS, *CODECS))
    add_process_options(parser, (*VARIANTS, *CODECS))
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    options = parse(argv)
    if has_answered(options, measure):
        return 0
    variants = ["keep", *(variant for variant in options.variants if variant != "keep")]
    rounds: list[dict[str, Found]] = []
    with contextlib.suppress(KeyboardInterrupt):
        for found in rounds_of(variants, lambda variant: in_a_process(__file__, variant, argv), options.rounds):
            rounds.append(found)
            steps = {variant: round(found[variant]["step_s"], 3) for variant in variants}
            print(f"round {len(rounds)} of {options.rounds}, step s: {steps}", flush=True)
    print("\n".join([*table(rounds, variants), "", *drive_table(rounds, variants)]))
    equal = all(one[variant]["losses"] == one["keep"]["losses"] for one in rounds for variant in variants)
    print(f"losses of all variants and rounds equal: {'yes' if equal else 'NO'}")
    write_json(options.json, {"options": vars(options) | {"json": None}, "rounds": rounds})
    return 0 if equal else 1


if __name__ == "__main__":
    raise SystemExit(main())
