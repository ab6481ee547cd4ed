"""What DeepSpeed has beyond the plain loop: ZeRO, precisions, checkpointing, saving, long sequences, experts."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import programs_deepspeed as programs
import pytest
from compare import COMPARED, PLANNED, RECOMPUTED, Compared, Way, compare, config_of, recomputed, rows
from conftest import make_backend
from forked import run
from programs_plain import plain_loop

pytestmark = pytest.mark.engine

SECTION = "DeepSpeed"
PLAN_STEPS = 10  # the first plan comes before


AUTOCAST = {"enabled": True, "dtype": "bfloat16"}
PROFILED = {"flops_profiler": {"enabled": True, "profile_step": 3}, "wall_clock_breakdown": True}
AUTO_TP = partial(config_of, tensor_parallel={"autotp_size": 2})
IN_HOST_MEMORY = {"cpu_checkpointing": True}
PARTITIONED = {"partition_activations": True}
CONTIGUOUS = {
    **PARTITIONED, "contiguous_memory_optimization": True, "number_checkpoints": programs.LAYERS,
    "synchronize_checkpoint_boundary": True, "profile": True,
}  # fmt: skip
BY_DEEPSPEED = "deepspeed.checkpointing.checkpoint"
TP_LLAMA = {"has_cache": False, "same_data": True, "steps": 5}


def with_skipped_steps(compared: Compared) -> str:
    skipped = {result["skipped_steps"] for result in (*compared.plain, *compared.results)}
    assert len(skipped) == 1 and 0 < min(skipped) < 14
    return f"{compared}, {min(skipped)} steps skipped"


def again_in_backward(compared: Compared) -> str:
    for result in (*compared.plain, *compared.results):
        assert result["runs"] == 2 * programs.LAYERS * result["micro_steps"], "nothing was made again in backward"
    return str(compared)


def checkpointing(
    name: str, call: str, stages: Sequence[int], decides: int | None = None, ranks: int = 1, **settings: Any
) -> Way:
    selective = {"memory_efficient_linear": False} if call == "selective" else {}  # see SAVED_OPS
    config = partial(config_of, activation_checkpointing=settings, zero_optimization=selective)
    return Way(name, programs.checkpointed, {"call": call}, stages, decides=decides, ranks=ranks, config=config,
               says=again_in_backward)  # fmt: skip


WAYS = [
    Way("fp16 with skipped steps", programs.trained_in_fp16, stages=(1, 2, 3), decides=2, says=with_skipped_steps,
        config=partial(config_of, fp16={"enabled": True, "initial_scale_power": 24, "hysteresis": 1})),
    Way("the script's own torch.autocast", programs.trained, {"autocast": True}, [2]),
    Way("torch_autocast in the config", programs.trained, {}, [1, 3], decides=1,
        config=partial(config_of, torch_autocast=AUTOCAST)),
    Way("a second partition within the host (zero_hpz_partition_size), ZeRO-{}, 2 ranks", programs.trained, {}, [3],
        decides=3, ranks=2, config=partial(config_of, zero_optimization={"zero_hpz_partition_size": 2})),
    Way("two forwards before each backward, gradient accumulation 2", programs.trained_on_pairs, decides=3,
        config=partial(config_of, gradient_accumulation_steps=2)),
    Way("engine.no_sync", programs.trained_with_no_sync, {}, [0, 1], decides=1),
    Way("two engines, both forwards before both backwards", programs.trained_two_engines, decides=2),
    Way("flops_profiler and wall_clock_breakdown", programs.trained, {}, [2], config=partial(config_of, **PROFILED)),
    Way("experts as leaf modules (set_z3_leaf_modules)", programs.trained, {"model": "leaf modules"}, [3], decides=3),
    Way("zero.Init, GatheredParameters between steps, an external parameter", programs.trained_from_zero_init, {}, [3],
        decides=3),
    checkpointing("torch checkpointing, reentrant", "torch, reentrant", [2, 3], 3),
    checkpointing("torch checkpointing, non-reentrant", "torch, non-reentrant", [2, 3]),
    checkpointing("selective checkpointing", "selective", [2, 3], 2),
    checkpointing(BY_DEEPSPEED, "deepspeed", [2, 3]),
    checkpointing(f"{BY_DEEPSPEED} with cpu_checkpointing", "deepspeed", [2, 3], 2, **IN_HOST_MEMORY),
    checkpointing("deepspeed.checkpointing.non_reentrant_checkpoint", "deepspeed, non-reentrant", [2]),
    checkpointing(BY_DEEPSPEED + " with partition_activations, ZeRO-{}, 2 ranks", "deepspeed", [2], None, 2,
                  **PARTITIONED),
    checkpointing(BY_DEEPSPEED + " with partition_activations and cpu_checkpointing, ZeRO-{}, 2 ranks", "deepspeed",
                  [3], None, 2, **PARTITIONED, **IN_HOST_MEMORY),
    checkpointing(BY_DEEPSPEED + " with contiguous_memory_optimization, ZeRO-{}, 2 ranks", "deepspeed", [2], 2, 2,
                  **CONTIGUOUS),
    checkpointing(f"{BY_DEEPSPEED} of masks, indices, None, numbers and several outputs", "deepspeed, odd", [2]),
    checkpointing(f"{BY_DEEPSPEED} of these with cpu_checkpointing, and of one tensor twice", "deepspeed, odd", [2], 2,
                  **IN_HOST_MEMORY),
    Way("TiledMLP", programs.trained, {"model": "TiledMLP"}, decides=2),
    Way("TiledFusedLogitsLoss", programs.trained, {"model": "TiledFusedLogitsLoss"}, [3]),
    Way("UlyssesSPAttentionHF with Llama, ZeRO-{}, 2 ranks", programs.ulysses_of_hugging_face, decides=3, ranks=2),
    Way("AutoTP training of Llama, ZeRO-{}, 2 ranks", plain_loop, TP_LLAMA, [0, 2], decides=2, ranks=2, config=AUTO_TP),
]  # fmt: skip


@pytest.mark.parametrize(("way", "stage"), rows(SECTION, WAYS))
def test_way(way: Way, stage: int, tmp_path: Path, row_says: Callable[[str], None]) -> None:
    row_says(way.says(way.compared(stage, tmp_path)))


RECOMPUTE = '"recompute": true'
AGAIN = [
    Way(RECOMPUTE, programs.trained, {}, [3], says=recomputed),
    Way(f"{RECOMPUTE}, frozen norms", programs.trained, {"model": "frozen norms"}, [3], says=recomputed),
    Way(f"{RECOMPUTE}, a new length in every step", programs.trained, {"lengths_change": True}, [2], says=recomputed),
    # Blocks that the user checkpoints are the user's.
    Way(f"{RECOMPUTE}, torch checkpointing, reentrant", programs.checkpointed, {"call": "torch, reentrant"}, [3]),
    Way(f"{RECOMPUTE}, {BY_DEEPSPEED}", programs.checkpointed, {"call": "deepspeed"}, [3]),
    Way(f"{RECOMPUTE}, TiledMLP", programs.trained, {"model": "TiledMLP"}, [3], decides=3, says=recomputed),
    Way(f"{RECOMPUTE}, deepspeed.moe, experts on 2 ranks", programs.with_experts, {}, [2], ranks=2, says=recomputed),
    Way(RECOMPUTE + ", AutoTP training of Llama, ZeRO-{}, 2 ranks", plain_loop, TP_LLAMA, [2], ranks=2, config=AUTO_TP,
        says=recomputed),
]  # fmt: skip


@pytest.mark.parametrize(("way", "stage"), rows(SECTION, AGAIN))
def test_recomputing(way: Way, stage: int, tmp_path: Path, row_says: Callable[[str], None]) -> None:
    row_says(way.says(way.compared(stage, tmp_path, block=RECOMPUTED, steps=2 * PLAN_STEPS, must_move=False)))


def offloaded(stage: int, **devices: str) -> dict[str, Any]:
    """ZeRO's own offload; ``nvme_path`` is filled in by the test."""
    zero: dict[str, Any] = {
        f"offload_{what}": {"device": device, **({"nvme_path": "NVME"} if device == "nvme" else {})}
        for what, device in devices.items()
    }
    if devices.get("param") == "nvme":
        zero["offload_param"] |= {"buffer_count": 24, "buffer_size": 1 << 20}
    if stage == 3:
        zero |= {"stage3_prefetch_bucket_size": 0, "stage3_param_persistence_threshold": 100}
    return config_of(stage, bf16={"enabled": True}, zero_force_ds_cpu_optimizer=False, zero_optimization=zero)


PLACED = [
    Way("ZeRO-{}, nvme and adaptive", programs.trained, {}, [0], decides=0, marks=[pytest.mark.smoke]),
    Way("ZeRO-{}, nvme and adaptive", programs.trained, {}, [1, 2, 3]),
    Way("bf16, gradient clipping", programs.trained, decides=3,
        config=partial(config_of, bf16={"enabled": True}, gradient_clipping=0.1)),
    Way("a new length in every step", programs.trained, {"lengths_change": True}, decides=3),
    Way("deepspeed.moe, experts on 2 ranks", programs.with_experts, {}, [0, 2], decides=2, ranks=2),
    Way("optimizer on the CPU", programs.trained, {}, [2], config=partial(offloaded, optimizer="cpu")),
    Way("parameters and optimizer on the CPU", programs.trained, {}, [3], decides=3,
        config=partial(offloaded, param="cpu", optimizer="cpu")),
    Way("parameters on NVMe", programs.trained, {}, [3], config=partial(offloaded, param="nvme"),
        marks=[pytest.mark.aio]),
    Way("parameters and optimizer on NVMe", programs.trained, {}, [3], decides=3,
        config=partial(offloaded, param="nvme", optimizer="nvme"), marks=[pytest.mark.aio]),
]  # fmt: skip


@pytest.mark.parametrize(("way", "stage"), rows(SECTION, PLACED))
def test_placements(way: Way, stage: int, tmp_path: Path, row_says: Callable[[str], None]) -> None:
    """With the placements ``nvme`` and ``adaptive``, each compared with one run without the block."""
    text, block = json.dumps(way.config(stage)), {}
    if "NVME" in text:
        make_backend("aio")
        block = {"io": {"staging_bytes": 8 << 20, "backend": "aio"}}
    config = json.loads(text.replace("NVME", str(tmp_path / "zero")))
    train = partial(compare, way.program, config, ranks=way.ranks, steps=PLAN_STEPS, **way.arguments)
    nvme = train(tmp_path, block=block)
    planned = train(tmp_path / "adaptive", block={**block, **PLANNED}, plain=nvme.plain)
    assert all(report["plans"] >= 1 for report in planned.reports), "the adaptive run made no plan"
    row_says(f"nvme: {nvme}; adaptive: {planned}")


SAVING = Way("save_checkpoint and load_checkpoint, with and without the block", programs.saved, decides=2)


@pytest.mark.parametrize(("way", "stage"), rows(SECTION, [SAVING]))
def test_resuming(way: Way, stage: int, tmp_path: Path, row_says: Callable[[str], None]) -> None:
    """Checkpoints saved with and without the block, each loaded with and without it."""
    config, plain, ours = way.config(stage), tmp_path / "plain_checkpoint", tmp_path / "our_checkpoint"
    without_block = run(programs.saved, config, tmp_path / "plain", to=plain)
    saved = compare(programs.saved, config, tmp_path / "saved", plain=without_block, to=ours)
    again = compare(programs.resumed, config, tmp_path / "from_plain", source=plain)
    (without,) = run(programs.resumed, config, tmp_path / "from_ours", source=ours)
    for key in COMPARED:
        assert without[key] == again.plain[0][key], f"resumed from a checkpoint of a run with the block: {key} differ"
    row_says(f"{saved}; resumed: {again}")
