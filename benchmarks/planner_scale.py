"""How long the planners take, against the number of storages, on synthetic traces.

    python benchmarks/planner_scale.py [--rounds 3] [--json FILE]

Nothing is trained: the trace is computed from the shapes of a model. How good the plans for such traces are is tested
in ``tests/plan/test_against_oracle.py``, and measured by ``races.py curve``.

Assumptions: shapes from the models' public configs; batch 1 x sequence 8192; no tensor parallelism; every linear
layer, norm, rotary embedding and activation saves its input, FlashAttention its q, k, v, output and log-sum-exp, the
loss the logits and their softmax in FP32; time is FLOPs over a sustained rate, backward twice forward; storages below
1 MiB stay. Drives read as fast as they write; copies at 50 GB/s each
way; 2 GiB of staging; no host memory. Two regimes: bf16 at 400 TFLOP/s, and FP32 at 50 TFLOP/s, the precision of
TERAIO's runs.
"""

from __future__ import annotations

import os
import statistics
import sys
import timeit
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
from benchmarking import JSON, markdown_table, parser_of, write_json
from planners import PLANNERS

from ds_tba.plan.plan import Limits
from ds_tba.plan.trace import OUTSIDE, BlockTrace, Resources, StorageTrace, Trace

COUNTS = (1000, 10_000, 100_000)
PLANNERS_SHOWN = ("recompute", "tba", "teraio", "adaptive")
SEQUENCE = 8192
STAGING_BYTES = 2 << 30
MIN_MOVED_BYTES = 1 << 20
BUDGET_FRACTION = 0.25
COPY_BYTES_PER_S = 50e9
PUBLISHED_S = "31.2 (Llama-3-8B), 37.9 (Granite-8B), 396.6 (Llama-3-70B)"


@dataclass(frozen=True)
class Shape:
    """A decoder with grouped-query attention and a gated MLP."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    mlp: int
    vocabulary: int

    @property
    def kv(self) -> int:
        return self.hidden // self.heads * self.kv_heads


SHAPES = {
    "Llama-3-8B": Shape(4096, 32, 32, 8, 14336, 128256),
    "Llama-3-70B": Shape(8192, 80, 64, 8, 28672, 128256),
    "Granite-8B": Shape(4096, 36, 32, 8, 14336, 49152),  # granite-8b-code
}


class Regime(NamedTuple):
    """Bytes of an element, and the FLOPs per second that the accelerator sustains."""

    name: str
    element_bytes: int
    flops_per_s: float


REGIMES = (Regime("bf16, 400 TFLOP/s", 2, 400e12), Regime("FP32, 50 TFLOP/s", 4, 50e12))

# One operation: its name, the bytes that it saves first, and its forward's FLOPs.
Operation = tuple[str, list[int], float]


def layer_operations(shape: Shape, element: int) -> list[Operation]:
    """Return the operations of a layer, in order."""
    tokens, hidden, kv, mlp = SEQUENCE, shape.hidden, shape.kv, shape.mlp
    wide, narrow, gate = tokens * hidden * element, tokens * kv * element, tokens * mlp * element
    light = 10.0 * tokens * hidden  # what is bound by memory, as FLOPs of the same time, roughly
    return [
        ("attention.norm", [wide, tokens * 4], light),
        ("attention.qkv", [wide], 2.0 * tokens * hidden * (hidden + 2 * kv)),
        ("attention.core", [wide, narrow, narrow, wide, tokens * shape.heads * 4], 2.0 * tokens * SEQUENCE * hidden),
        ("attention.out", [], 2.0 * tokens * hidden * hidden),
        ("mlp.norm", [wide, tokens * 4], light),
        ("mlp.gate_up", [wide], 4.0 * tokens * hidden * mlp),
        ("mlp.activation", [gate, gate, gate], light),
        ("mlp.down", [gate], 2.0 * tokens * hidden * mlp),
    ]


def head_operations(shape: Shape, element: int) -> list[Operation]:
    """Return the final norm, the logits and the loss."""
    tokens, hidden = SEQUENCE, shape.hidden
    return [
        ("norm", [tokens * hidden * element], 10.0 * tokens * hidden),
        ("head", [tokens * hidden * element], 2.0 * tokens * hidden * shape.vocabulary),
        ("loss", [tokens * shape.vocabulary * 4], 10.0 * tokens * shape.vocabulary),
    ]


def model_trace(shape: Shape, regime: Regime, bytes_per_s: float, pieces: int = 1) -> Trace:
    """Return the trace of one micro-step, with each storage cut into so many pieces."""
    layer, head = (make(shape, regime.element_bytes) for make in (layer_operations, head_operations))
    operations = [(number, f"layers.{number}.{name}", *more) for number in range(shape.layers) for name, *more in layer]
    operations += [(OUTSIDE, *one) for one in head]
    end_s = 3 * sum(flops / regime.flops_per_s for *_, flops in operations)
    storages: list[StorageTrace] = []
    bounds: dict[int, tuple[float, float, int]] = {}
    start_s = 0.0
    for number, module, saved, flops in operations:
        done_s = start_s + flops / regime.flops_per_s
        first = bounds.get(number, (start_s, 0.0, len(storages)))
        bounds[number] = (first[0], done_s, first[2])
        # Backward mirrors forward at twice its length.
        use_s, freed_s = end_s - 2 * done_s, min(end_s, end_s - 2 * start_s)
        for nbytes in saved:
            piece = max(1, nbytes // pieces)
            is_moved = piece >= MIN_MOVED_BYTES / pieces
            times = (start_s, min(done_s, use_s), use_s, freed_s)
            storages += [StorageTrace(piece, module, (number,), *times, is_moved)] * pieces
        start_s = done_s
    blocks = []
    for number, (begin, end, first_saved) in bounds.items():
        if number != OUTSIDE:
            inputs = tuple(range(first_saved, first_saved + pieces))  # a layer's input, which its first norm saves
            times = (begin, end, end_s - 2 * end, min(end_s, end_s - 2 * begin))
            blocks.append(BlockTrace(f"layers.{number}", *times, inputs))
    machine = Resources(bytes_per_s, bytes_per_s, COPY_BYTES_PER_S, COPY_BYTES_PER_S, STAGING_BYTES)
    return Trace(tuple(storages), tuple(blocks), machine, end_s)


def planning_times(rounds: int, counts: list[int]) -> list[dict[str, object]]:
    """Return the seconds of each planner, with a budget and without, for traces of about so many storages."""
    rows: list[dict[str, object]] = []
    shape, regime = SHAPES["Llama-3-8B"], REGIMES[0]
    whole = len(model_trace(shape, regime, 16e9).storages)
    for count in counts:
        trace = model_trace(shape, regime, 16e9, max(1, round(count / whole)))
        peak = PLANNERS["keep"](trace, Limits()).prediction.peak_saved_bytes
        budget = Limits(activation_budget_bytes=int(peak * BUDGET_FRACTION))
        for goal, limits in (("overhead", Limits()), ("budget", budget)):
            for name in PLANNERS_SHOWN:
                ask = partial(PLANNERS[name], trace, limits)
                took = timeit.repeat(ask, "import gc; gc.enable()", number=1, repeat=rounds)
                row = {"storages": len(trace.storages), "goal": goal, "planner": name}
                rows.append({**row, "median_s": statistics.median(took), "longest_s": max(took)})
    return rows


def main(argv: list[str] | None = None) -> int:
    parser = parser_of(__doc__, rounds=3, json=JSON)
    parser.add_argument("--counts", type=int, nargs="+", default=list(COUNTS))
    options = parser.parse_args(argv)
    times = planning_times(options.rounds, options.counts)
    cells: dict[tuple[object, object], list[str]] = {}
    for row in times:
        cells.setdefault((row["storages"], row["goal"]), []).append(f"{row['median_s']:.2f}")
    print(f"Published planning times of TERAIO, s: {PUBLISHED_S}\n")
    columns = ("storages", "goal", *(f"{name} s" for name in PLANNERS_SHOWN))
    print("\n".join(markdown_table(columns, [(*asked, *took) for asked, took in cells.items()])))
    machine = {"python": sys.version, "numpy": np.__version__, "cores": os.cpu_count(), "load": os.getloadavg()}
    write_json(options.json, {"machine": machine, "planning_times": times})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
