"""The verdicts of a soak: pure functions of what both processes wrote down."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from benchmarking import MIB

from soaking.faults import KINDS
from soaking.meters import slope

# Growth that fails: at this rate, and by so much that it is not the noise of one sample.
MEMORY_BYTES_PER_1000_STEPS = 16 * MIB
MEMORY_NOISE_BYTES = 24 * MIB
# From so many steps on each kind of fault must have struck, and each error of ours must have come.
STEPS_FOR_ALL_FAULTS = 1000
WARM_UP_FRACTION = 0.1

Run = dict[str, Any]


@dataclass(frozen=True)
class Verdict:
    """One check, whether it held, and the figures."""

    check: str
    held: bool
    found: str


def verdicts_of(plain: Run, offload: Run, steps: int) -> list[Verdict]:
    """Return the verdict of every check."""
    return [
        _both_ended(plain, offload, steps),
        _equal(plain, offload, steps),
        _faults(offload, steps),
        memory("memory at rest", plain, offload, steps, at_rest=True),
        memory("memory within the engines' lives", plain, offload, steps, at_rest=False),
        _constant("threads at rest", "threads", offload, steps),
        _constant("open files at rest", "files", offload, steps),
        _none("objects of ours at rest", offload, "objects", steps),
        _none("disk at rest", offload, "disk_bytes", steps),
        _nothing_left(offload),
    ]


def _both_ended(plain: Run, offload: Run, steps: int) -> Verdict:
    problems = [run["problem"].strip().splitlines()[-1] for run in (plain, offload) if run["problem"]]
    done = min(len(run["steps"]) for run in (plain, offload))
    errors = sum(offload["errors"].values())
    found = "; ".join(problems) or f"{errors} errors were due, came, and were recovered from; no other came"
    return Verdict("all steps done, errors as due", not problems and done == steps, found.replace("|", "/"))


def _equal(plain: Run, offload: Run, steps: int) -> Verdict:
    pairs = list(zip(plain["steps"], offload["steps"], strict=False))
    different = [number for number, (one, other) in enumerate(pairs) if one != other]
    found = f"{len(pairs)} of {steps} steps equal bit for bit"
    if different:
        found = f"step {different[0]} is the first of {len(different)} that differ"
    held = not different and len(pairs) == steps and plain["parameters"] == offload["parameters"]
    return Verdict("losses, gradients, parameters equal", held, found)


def _faults(offload: Run, steps: int) -> Verdict:
    missing = [kind for kind in KINDS if not offload["faults"].get(kind)] if steps >= STEPS_FOR_ALL_FAULTS else []
    wanted = ("ActivationLostError", "ActivationCorruptionError") if steps >= STEPS_FOR_ALL_FAULTS else ()
    missing += [name for name in wanted if not offload["errors"].get(name)]
    moved = [offload["sums"].get(f"{what}_bytes", 0) for what in ("written", "read")]
    struck = sum(offload["faults"].get(kind, 0) for kind in KINDS)
    found = f"never seen: {', '.join(missing)}" if missing else f"{struck} faults struck"
    return Verdict("the run was worth something", not missing and all(moved), found)


def memory(check: str, plain: Run, offload: Run, steps: int, *, at_rest: bool) -> Verdict:
    """Bound the slope of the memory that we add, at rest over the run, or within each engine's life."""
    without = {(one["step"], one["segment"]): one["memory_bytes"] for one in plain["samples"]}
    points = [
        (one["step"], one["memory_bytes"] - without[one["step"], one["segment"]], one["segment"])
        for one in _measured(offload, steps)
        if (one["segment"] == -1) == at_rest and (one["step"], one["segment"]) in without
    ]
    per_step = slope(points)
    groups = [[step for step, _, group in points if group == one] for one in {group for *_, group in points}]
    span = max((max(numbers) - min(numbers) for numbers in groups), default=0)
    fast = per_step * 1000 > MEMORY_BYTES_PER_1000_STEPS and per_step * span > MEMORY_NOISE_BYTES
    found = (
        f"{per_step * 1000 / MIB:+.2f} MiB per 1000 steps over the run without us ({len(points)} samples; "
        f"limit {MEMORY_BYTES_PER_1000_STEPS / MIB:.0f}, and {MEMORY_NOISE_BYTES / MIB:.0f} MiB in all)"
    )
    return Verdict(check, len(points) > 1 and not fast, found)


def _measured(run: Run, steps: int) -> list[dict[str, Any]]:
    """Return the samples after the warm-up, which is over with the first engine at the earliest."""
    first = min((one["step"] for one in run["samples"] if one["segment"] == -1), default=0)
    return [one for one in run["samples"] if one["step"] >= max(first, steps * WARM_UP_FRACTION)]


def _at_rest(run: Run, steps: int, key: str) -> list[int]:
    return [one[key] for one in _measured(run, steps) if one["segment"] == -1]


def _constant(check: str, key: str, offload: Run, steps: int) -> Verdict:
    values = _at_rest(offload, steps, key)
    rising = sum(after > before for before, after in pairwise(values))
    held = len(values) > 1 and values[-1] <= values[0]
    first, last = (values[0], values[-1]) if values else ("-", "-")
    return Verdict(check, held, f"{first} to {last}, rose {rising} times")


def _none(check: str, offload: Run, key: str, steps: int) -> Verdict:
    # The first engine's are not counted: what classes and modules hold for good is made there.
    values = _at_rest(offload, steps, key)[1:]
    files = offload["files_at_end"] if key == "disk_bytes" else []
    found = f"at most {max(values, default=0)}" + (f", files left: {', '.join(files)}" if files else "")
    return Verdict(check, bool(values) and not any(values) and not files, found)


def _nothing_left(offload: Run) -> Verdict:
    left = [one for one in offload["samples"] if one["left"]]
    found = f"step {left[0]['step']}: {left[0]['left']}" if left else f"{len(offload['samples'])} looks, nothing held"
    held = bool(offload["samples"]) and not left
    return Verdict("records, staging and extents given back between steps", held, found)
