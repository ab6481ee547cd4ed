"""Beside the activation offload of others: what both do, who gets what, and that no bit differs.

``docs/guides/other_offloads.md`` says which setting is the better one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import programs_hf
import pytest
from compare import PLANNED, RECOMPUTED, Way, config_of, refusal, rows
from programs_deepspeed import checkpointed, trained
from programs_hf import checkpointing, trainer
from programs_offloads import with_deepspeed_offload, with_torch_remat, with_transformers_offload, with_trl_offload

pytestmark = pytest.mark.engine

SECTION = "Beside other offloads"
OfTrainers = partial(Way, config=programs_hf.config_of)
# See SAVED_OPS.
Selective = partial(Way, config=partial(config_of, zero_optimization={"memory_efficient_linear": False}))
EVERY_SECOND = checkpointing(False, every_n_layers=2)
PLANNED_SELECTIVE, AGAIN_SELECTIVE = ({"call": "selective", "steps": steps} for steps in (10, 14))

OTHERS = [
    OfTrainers("transformers: every_n_layers, nvme", trainer, EVERY_SECOND),
    OfTrainers("transformers: every_n_layers, adaptive", trainer, EVERY_SECOND, [2], block=PLANNED),
    OfTrainers("transformers: every_n_layers, recompute", trainer, {**EVERY_SECOND, "steps": 14}, [3],
               block=RECOMPUTED, decides=3),
    OfTrainers("transformers: offload, nvme", with_transformers_offload, decides=2),
    OfTrainers("transformers: offload and every_n_layers, adaptive", with_transformers_offload, {"every_n_layers": 2},
               [2], block=PLANNED),
    # Under ZeRO-3 it ends without us, too: TRL's chunked loss looks for parameters, and its hooks return other tensors.
    OfTrainers("TRL: activation_offloading, SFT, nvme", with_trl_offload, {}, [2]),
    OfTrainers("TRL: activation_offloading, DPO, adaptive", with_trl_offload, {"way": "dpo"}, [2], block=PLANNED,
               decides=2),
    Way("DeepSpeed: CheckpointHiddenStatesOffload", with_deepspeed_offload, decides=3),
    Way("torch_remat, nvme", with_torch_remat, decides=3),
    Way("torch_remat, adaptive", with_torch_remat, {"steps": 10}, [2], block=PLANNED),
    Selective("selective checkpointing, adaptive", checkpointed, PLANNED_SELECTIVE, block=PLANNED),
    Selective("selective checkpointing, recompute", checkpointed, AGAIN_SELECTIVE, [2], block=RECOMPUTED),
]  # fmt: skip


@pytest.mark.parametrize(("way", "stage"), rows(SECTION, OTHERS))
def test_other(way: Way, stage: int, tmp_path: Path, row_says: Callable[[str], None]) -> None:
    if way.program is with_torch_remat:
        pytest.importorskip("torch_remat")
    row_says(str(way.compared(stage, tmp_path)))


@pytest.mark.compatible(SECTION, "DeepCompile: offload_activation, ZeRO-3", decides=True)
def test_deepcompile(tmp_path: Path, row_says: Callable[[str], None]) -> None:
    config: dict[str, Any] = config_of(3, compile={"deepcompile": True, "offload_activation": True})
    row_says(refusal(trained, config, tmp_path, r'offload_activation.*set "compile": {"deepcompile": false}'))
