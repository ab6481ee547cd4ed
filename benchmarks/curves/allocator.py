"""The settings of glibc's allocator, the same for every contender."""

from __future__ import annotations

import os
import sys

# Kept and given out again, as CUDA's allocator and those recommended for training on CPUs do: else a model that keeps
# its activations would pay for fresh pages in every step, and who frees them early would seem faster than it is.
HOLDING = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40), "MALLOC_TOP_PAD_": str(64 << 20)}


def hold_freed_memory() -> None:
    """Start this program again if need be: glibc reads its settings once. Call it first of all."""
    if any(os.environ.get(name) != value for name, value in HOLDING.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **HOLDING})
