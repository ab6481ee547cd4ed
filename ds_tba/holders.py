"""The holders of device memory beside saved tensors, by name, and what makes each smaller.

Knows names and bytes only. A run counts them (``explain/``), and ``ds_tba plan`` estimates them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

PARAMETERS, GRADIENTS, STATES = "parameters", "gradients", "optimizer states"
SAVED, TEMPORARY = "saved tensors", "logits and other temporary tensors"
_LESS_SAVED = "a smaller batch or a shorter sequence"
_STATES_ON_HOST = 'ZeRO stage 2 or 3 with "offload_optimizer": {"device": "cpu"}'
# By holder, what makes it smaller.
REMEDIES = {
    PARAMETERS: 'ZeRO stage 3 with "offload_param": {"device": "cpu"}, or more ranks',
    GRADIENTS: f"{_STATES_ON_HOST}, or LoRA",
    STATES: f"{_STATES_ON_HOST}, more ranks or LoRA",
    "gathered parameters": "a lower stage3_max_live_parameters, which a module's own parameters may exceed",
    "ZeRO's buckets": "a lower reduce_bucket_size",
    SAVED: f"gradient checkpointing, {_LESS_SAVED}",
    TEMPORARY: f"a fused loss for logits, an MLP in tiles, {_LESS_SAVED}",
    "CUDA context": "a larger GPU",
}


@dataclass(frozen=True)
class ModelMemory:
    """The device bytes that a training holds beside what comes and goes in a micro-step, by holder.

    ``always`` is there all the time, ``passing`` in forward and backward, ``stepping_bytes`` in the optimizer's step.
    """

    always: Mapping[str, int] = field(default_factory=dict)
    passing: Mapping[str, int] = field(default_factory=dict)
    stepping_bytes: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes in forward and backward."""
        return sum(self.always.values()) + sum(self.passing.values())
