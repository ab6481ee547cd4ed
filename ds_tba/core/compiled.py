"""Counts what ``torch.compile`` has compiled, and tells whether moving tensors has lowered no peak since."""

from __future__ import annotations

import sys

from ds_tba.stats import CacheStats

# The fraction by which offloading is to lower the peak.
MIN_GAIN = 0.02


def compilations() -> int:
    """Return how much ``torch.compile`` has compiled in this process so far; 0 where nobody has imported it.

    Counts everything that it times: frames, backwards (compiled when they first run), kernels and their tuning.
    """
    times: dict[str, list[float]] = getattr(sys.modules.get("torch._dynamo.utils"), "compilation_time_metrics", {})
    return sum(map(len, list(times.values())))  # a list: another thread may compile meanwhile


def moves_in_vain(stats: CacheStats, moved_bytes: int, compilations_before: int) -> bool:
    """Return whether most of what is saved was offloaded and the peak is no lower for it, since code was compiled.

    Code that is compiled as one graph saves everything at its end, and takes all of it back before its backward begins.

    Args:
        compilations_before: how many there were when the first step began; they say nothing about what it ran.
    """
    in_vain = stats.resident.peak > (1 - MIN_GAIN) * stats.saved.peak
    return in_vain and moved_bytes > stats.saved.peak / 2 and compilations() > compilations_before
