"""What a cache and its stores still hold when all graphs are gone. Knows no pytest: programs ask, too."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

from ds_tba.core.cache import TensorCache
from ds_tba.storage.host import HostStore
from ds_tba.storage.nvme import NvmeStore


def held(cache: TensorCache) -> str:
    """Return what a cache and its stores hold or count, in words; empty where that is nothing."""
    gc.collect()
    cache.settle()
    counts: dict[str, float] = {
        "records": cache.live_records,
        "saved bytes": cache.stats.saved.now,
        "resident bytes": cache.stats.resident.now,
    }
    for store in cache.stores:
        if isinstance(store, NvmeStore):
            store.settle()
            counts["bytes of staging"] = store.ring.slots.used_bytes
            counts["bytes of swap files"] = sum(path.extents.used_bytes for path in store.paths)
        elif isinstance(store, HostStore):
            store.settle()
            counts["bytes of host memory"] = sum(segment.spans.used_bytes for segment in store._segments)
    return ", ".join(f"{count} {name}" for name, count in counts.items() if count)


def after_a_while(look: Callable[[], str], seconds: float) -> str:
    """Return what is still there by then: lanes and late devices may be busy with what nobody wants any more."""
    deadline = time.monotonic() + seconds
    while (found := look()) and time.monotonic() < deadline:
        time.sleep(0.001)
    return found
