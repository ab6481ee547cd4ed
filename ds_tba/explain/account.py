"""An account of device memory: who holds it in a training, and what makes a holder smaller.

``ds_tba plan`` estimates it, and a run counts it; both name holders and remedies by these words.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

PARAMETERS, GRADIENTS, STATES = "parameters", "gradients", "optimizer states"
SAVED, TEMPORARY = "saved tensors", "logits and other temporary tensors"


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


class Way(NamedTuple):
    """The part of a training's config that says what is done about memory already.

    Attributes:
        zero: the config's ``"zero_optimization"``.
        batch: sequences of a micro-batch; 0 where that is not known.
        aids: of ``--fused-loss``, ``--liger`` and ``--tiled-mlp`` those that are known to be in use.
    """

    zero: Mapping[str, Any] = {}
    batch: int = 0
    aids: Collection[str] = ()


def remedy(holder: str, way: Way) -> str:
    """Return what makes a holder smaller, of what is not done yet."""
    shorter = [*(["a smaller batch"] if way.batch > 1 else []), "a shorter sequence"]
    less = {"--fused-loss": "a fused loss for logits", "--tiled-mlp": "an MLP in tiles"}
    done = {*way.aids, *(["--fused-loss"] if "--liger" in way.aids else [])}
    states = {"stage": max(2, int(way.zero.get("stage") or 0)), "offload_optimizer": {"device": "cpu"}}
    on_host = as_keys({"zero_optimization": states})
    found = {
        PARAMETERS: [as_keys({"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}), "more ranks"],
        GRADIENTS: [on_host, "LoRA"],
        STATES: [on_host, "more ranks", "LoRA"],
        "gathered parameters": ["a lower stage3_max_live_parameters, which a module's own parameters may exceed"],
        "ZeRO's buckets": ["a lower reduce_bucket_size"],
        SAVED: ["gradient checkpointing", *shorter],
        TEMPORARY: [*(text for aid, text in less.items() if aid not in done), *shorter],
        "CUDA context": ["a larger GPU"],
    }[holder]
    return " or ".join(filter(None, (", ".join(found[:-1]), found[-1])))


def as_keys(keys: Mapping[str, object]) -> str:
    """Return keys as they are merged into the config."""
    return f"{json.dumps(keys)} in ds_config.json"
