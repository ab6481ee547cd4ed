"""Whether code was compiled, and as one graph: then offloading lowers no peak."""

from __future__ import annotations

import torch

from ds_tba.core.hooks import compilations
from ds_tba.reporting import moves_in_vain
from ds_tba.stats import CacheStats


def test_moving_is_in_vain_where_it_lowers_no_peak_of_compiled_code() -> None:
    def stats(saved_bytes: int, resident_bytes: int) -> CacheStats:
        found = CacheStats()
        found.saved.add(saved_bytes)
        found.resident.add(resident_bytes)
        return found

    before = compilations()
    assert not moves_in_vain(stats(1000, 1000), 600, before)
    torch.compile(lambda x: x.sin(), backend="eager")(torch.ones(2))
    assert moves_in_vain(stats(1000, 1000), 600, before) and moves_in_vain(stats(1000, 1010), 600, before)
    assert not moves_in_vain(stats(1000, 900), 600, before) and not moves_in_vain(stats(1000, 1000), 500, before)
    torch._dynamo.reset()
    assert not moves_in_vain(stats(1000, 1000), 600, compilations())  # compiled before: says nothing of this step
