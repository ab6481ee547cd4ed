"""What a cache and its stores still hold when all graphs are gone. Knows no pytest: programs ask, too."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

from ds_tba.core.cache import TensorCache
from ds_tba.storage.host import HostStore
from ds_tba.storage.nvme import NvmeStore


def held(cache: TensorCache, nvme: NvmeStore | None = None, host: HostStore | None = None) -> str:
    """Return what is held or counted, in words; empty where nothing is."""
    gc.collect()
    cache.settle()
    counts = {
        "records": cache.live_records,
        "saved bytes": cache.stats.saved.now,
        "resident bytes": cache.stats.resident.now,
    }
    if nvme is not None:
        nvme.settle()
        counts["bytes of staging"] = nvme.ring.slots.used_bytes
        counts["bytes of swap files"] = sum(path.extents.used_bytes for path in nvme.paths)
    if host is not None:
        host.settle()
        counts["bytes of host memory"] = sum(segment.spans.used_bytes for segment in host._segments)
    return ", ".join(f"{count} {name}" for name, count in counts.items() if count)


def after_a_while(look: Callable[[], str], seconds: float) -> str:
    """Return what is still there by then: lanes and late devices may be busy with what nobody wants any more."""
    deadline = time.monotonic() + seconds
    while (found := look()) and time.monotonic() < deadline:
        time.sleep(0.001)
    return found
