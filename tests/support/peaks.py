"""The most bytes of saved tensors in device memory while backward runs."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ds_tba.core.cache import TensorCache


class BackwardPeak:
    """Looks at a cache's account as each tensor is unpacked: ``cache.saving(around=peak.around)``.

    Attributes:
        nbytes: the most since it was last set to 0.
    """

    def __init__(self, cache: TensorCache) -> None:
        self._cache = cache
        self.nbytes = 0

    def around(self, hooks: Any) -> Any:
        pack, unpack = hooks

        def look(held: Any) -> Tensor:
            tensor: Tensor = unpack(held)
            self.nbytes = max(self.nbytes, self._cache.stats.resident.now)
            return tensor

        return pack, look
