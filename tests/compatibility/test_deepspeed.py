"""What DeepSpeed has beyond the plain loop: ZeRO, precisions, checkpointing, saving, long sequences, experts."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import programs_deepspeed as programs
import pytest
from compare import COMPARED, PLANNED, RECOMPUTED, compare, row
from conftest import make_backend
from forked import Program, run
from support.runs import plain_config

pytestmark = pytest.mark.engine

SECTION = "DeepSpeed"
AUTOCAST = {"enabled": True, "dtype": "bfloat16"}
PLAN_STEPS = 10  # the first plan comes before


def rows(
    name: str,
    program: Program,
    stages: Sequence[int],
    ranks: int = 1,
    config: dict[str, Any] | None = None,
    decides: int | None = None,
    on_ranks: int = 1,
    **more: Any,
) -> list[Any]:
    """Return a row for each stage of ZeRO, of a program with these arguments.

    Args:
        ranks: their number ends the row's name, or where it is ``on_ranks`` is in it.
        decides: the stage whose row decides whether a change lands.
    """
    of_ranks = "" if ranks == 1 else f", {ranks} ranks"
    arguments = {"ranks": max(ranks, on_ranks), **more}
    return [
        row(
            SECTION, f"{name}, ZeRO-{stage}{of_ranks}", program, config_of(stage, **config or {}), arguments,
            decides=stage == decides,
        )
        for stage in stages
    ]  # fmt: skip


def config_of(stage: int, **more: Any) -> dict[str, Any]:
    """A config, whose ``zero_optimization`` may have more than the stage."""
    zero = more.pop("zero_optimization", {})
    config = plain_config(stage, **{"train_micro_batch_size_per_gpu": programs.BATCH, **more})
    config["zero_optimization"] |= zero
    return config


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


def compare_placements(program: Program, config: dict[str, Any], directory: Path, **arguments: Any) -> str:
    """With the placements ``nvme`` and ``adaptive``, each compared with one run without the block."""
    nvme = compare(program, config, directory, steps=PLAN_STEPS, **arguments)
    block = {**(arguments.pop("block", None) or {}), **PLANNED}
    planned = compare(
        program, config, directory / "adaptive", steps=PLAN_STEPS, **arguments, block=block, plain=nvme.plain
    )
    assert all(report["plans"] >= 1 for report in planned.reports), "the adaptive run made no plan"
    return f"nvme: {nvme}; adaptive: {planned}"


# ---- under one placement, and under two -----------------------------------------------------------------------------

CLIPPED = {"bf16": {"enabled": True}, "gradient_clipping": 0.1}
PROFILED = {"flops_profiler": {"enabled": True, "profile_step": 3}, "wall_clock_breakdown": True}
IN_TWO_PARTS = {"zero_optimization": {"zero_hpz_partition_size": 2}}
AUTO_TP = {"tensor_parallel": {"autotp_size": 2}}
TWICE = {"gradient_accumulation_steps": 2}
IN_HOST_MEMORY = {"activation_checkpointing": {"cpu_checkpointing": True}}
BY_DEEPSPEED = "deepspeed.checkpointing.checkpoint"


@pytest.mark.parametrize(
    ("program", "config", "arguments"),
    [
        *rows("the script's own torch.autocast", programs.trained, [2], autocast=True),
        *rows("torch_autocast in the config", programs.trained, [1, 3], config={"torch_autocast": AUTOCAST}, decides=1),
        *rows("a second partition within the host (zero_hpz_partition_size)", programs.trained, [3], 2, IN_TWO_PARTS,
              decides=3),
        *rows("two forwards before each backward, gradient accumulation 2", programs.trained_on_pairs, [2, 3],
              config=TWICE, decides=3),
        *rows("engine.no_sync", programs.trained_with_no_sync, [0, 1], decides=1),
        *rows("two engines, both forwards before both backwards", programs.trained_two_engines, [2, 3], decides=2),
        *rows("flops_profiler and wall_clock_breakdown", programs.trained, [2], config=PROFILED),
        *rows("experts as leaf modules (set_z3_leaf_modules)", programs.trained, [3], decides=3,
              model="leaf modules"),
        *rows("zero.Init, GatheredParameters between steps, an external parameter", programs.trained_from_zero_init,
              [3], decides=3),
        *rows(f"{BY_DEEPSPEED} of masks, indices, None, numbers and several outputs", programs.with_odd_checkpoints,
              [2], config={"activation_checkpointing": {}}),
        *rows(f"{BY_DEEPSPEED} of these with cpu_checkpointing, and of one tensor twice",
              programs.with_odd_checkpoints, [2], config=IN_HOST_MEMORY, decides=2),
        *rows("TiledMLP", programs.trained, [2, 3], model="TiledMLP", decides=2),
        *rows("TiledFusedLogitsLoss", programs.trained, [3], model="TiledFusedLogitsLoss"),
        *rows("UlyssesSPAttentionHF with Llama", programs.ulysses_of_hugging_face, [2, 3], 2, decides=3),
        *rows("AutoTP training of Llama", programs.with_tensor_parallelism, [0, 2], 2, AUTO_TP, 2),
    ],
)  # fmt: skip
def test_way(
    program: Program, config: dict[str, Any], arguments: dict[str, Any], tmp_path: Path, row_says: Callable[[str], None]
) -> None:
    row_says(str(compare(program, config, tmp_path, **arguments)))


@pytest.mark.parametrize(
    ("program", "config", "arguments"),
    [
        row(SECTION, "ZeRO-0, nvme and adaptive", programs.trained, config_of(0), {}, decides=True,
            marks=[pytest.mark.smoke]),
        *[row(SECTION, f"ZeRO-{stage}, nvme and adaptive", programs.trained, config_of(stage), {})
          for stage in range(1, 4)],
        *rows("bf16, gradient clipping", programs.trained, [2, 3], config=CLIPPED, decides=3),
        *rows("a new length in every step", programs.trained, [2, 3], lengths_change=True, decides=3),
        *rows("deepspeed.moe, experts on 2 ranks", programs.with_experts, [0, 2], on_ranks=2, decides=2),
    ],
)  # fmt: skip
def test_placements(
    program: Program, config: dict[str, Any], arguments: dict[str, Any], tmp_path: Path, row_says: Callable[[str], None]
) -> None:
    row_says(compare_placements(program, config, tmp_path, **arguments))


# ---- ZeRO's own offload, loss scales --------------------------------------------------------------------------------


ON_AIO = [pytest.mark.aio]


@pytest.mark.parametrize(
    "config",
    [
        row(SECTION, "optimizer on the CPU, ZeRO-2", offloaded(2, optimizer="cpu")),
        row(SECTION, "parameters and optimizer on the CPU, ZeRO-3", offloaded(3, param="cpu", optimizer="cpu"),
            decides=True),
        row(SECTION, "parameters on NVMe, ZeRO-3", offloaded(3, param="nvme"), marks=ON_AIO),
        row(SECTION, "parameters and optimizer on NVMe, ZeRO-3", offloaded(3, param="nvme", optimizer="nvme"),
            decides=True, marks=ON_AIO),
    ],
)  # fmt: skip
def test_offload_of_zero(config: dict[str, Any], tmp_path: Path, row_says: Callable[[str], None]) -> None:
    backend = "posix"
    if "nvme" in json.dumps(config):
        make_backend("aio")
        backend = "aio"
        config = json.loads(json.dumps(config).replace("NVME", str(tmp_path / "zero")))
    block = {"io": {"staging_bytes": 8 << 20, "backend": backend}}
    row_says(compare_placements(programs.trained, config, tmp_path, block=block))


@pytest.mark.parametrize(
    "stage",
    [row(SECTION, f"fp16 with skipped steps, ZeRO-{stage}", stage, decides=stage == 2) for stage in (1, 2, 3)],
)
def test_fp16(stage: int, tmp_path: Path, row_says: Callable[[str], None]) -> None:
    config = config_of(stage, fp16={"enabled": True, "initial_scale_power": 24, "hysteresis": 1})
    compared = compare(programs.trained_in_fp16, config, tmp_path, steps=14)
    skipped = {result["skipped_steps"] for result in (*compared.plain, *compared.results)}
    assert len(skipped) == 1 and 0 < min(skipped) < 14
    row_says(f"{compared}, {min(skipped)} steps skipped")


# ---- checkpointing --------------------------------------------------------------------------------------------------

PARTITIONED = {"partition_activations": True}
CONTIGUOUS = {
    **PARTITIONED, "contiguous_memory_optimization": True, "number_checkpoints": programs.LAYERS,
    "synchronize_checkpoint_boundary": True, "profile": True,
}  # fmt: skip


def checkpointing(
    name: str, call: str, stages: Sequence[int], ranks: int = 1, decides: int | None = None, **settings: Any
) -> list[Any]:
    config: dict[str, Any] = {"activation_checkpointing": settings}
    if call == "selective":
        config["zero_optimization"] = {"memory_efficient_linear": False}  # see SAVED_OPS
    return rows(name, programs.checkpointed, stages, ranks, config, decides, call=call)


@pytest.mark.parametrize(
    ("program", "config", "arguments"),
    [
        *checkpointing("torch checkpointing, reentrant", "torch, reentrant", [2, 3], decides=3),
        *checkpointing("torch checkpointing, non-reentrant", "torch, non-reentrant", [2, 3]),
        *checkpointing("selective checkpointing", "selective", [2, 3], decides=2),
        *checkpointing(BY_DEEPSPEED, "deepspeed", [2, 3]),
        *checkpointing(f"{BY_DEEPSPEED} with cpu_checkpointing", "deepspeed", [2, 3], 1, 2, cpu_checkpointing=True),
        *checkpointing("deepspeed.checkpointing.non_reentrant_checkpoint", "deepspeed, non-reentrant", [2]),
        *checkpointing(f"{BY_DEEPSPEED} with partition_activations", "deepspeed", [2], 2, **PARTITIONED),
        *checkpointing(f"{BY_DEEPSPEED} with partition_activations and cpu_checkpointing", "deepspeed", [3], 2,
                       **PARTITIONED, cpu_checkpointing=True),
        *checkpointing(f"{BY_DEEPSPEED} with contiguous_memory_optimization", "deepspeed", [2], 2, 2, **CONTIGUOUS),
    ],
)  # fmt: skip
def test_checkpointing(
    program: Program, config: dict[str, Any], arguments: dict[str, Any], tmp_path: Path, row_says: Callable[[str], None]
) -> None:
    compared = compare(program, config, tmp_path, **arguments)
    for result in (*compared.plain, *compared.results):
        assert result["runs"] == 2 * programs.LAYERS * result["micro_steps"], "nothing was made again in backward"
    row_says(str(compared))


# ---- saving and resuming --------------------------------------------------------------------------------------------

SAVING = "save_checkpoint and load_checkpoint"


@pytest.mark.parametrize(
    "stage",
    [
        row(SECTION, f"{SAVING}, with and without the block, ZeRO-{stage}", stage, decides=stage == 2)
        for stage in (2, 3)
    ],
)
def test_resuming(stage: int, tmp_path: Path, row_says: Callable[[str], None]) -> None:
    """Checkpoints saved with and without the block, each loaded with and without it."""
    config, plain, ours = config_of(stage), tmp_path / "plain_checkpoint", tmp_path / "our_checkpoint"
    without_block = run(programs.saved, config, tmp_path / "plain", to=plain)
    saved = compare(programs.saved, config, tmp_path / "saved", plain=without_block, to=ours)
    again = compare(programs.resumed, config, tmp_path / "from_plain", source=plain)
    (without,) = run(programs.resumed, config, tmp_path / "from_ours", source=ours)
    for key in COMPARED:
        assert without[key] == again.plain[0][key], f"resumed from a checkpoint of a run with the block: {key} differ"
    row_says(f"{saved}; resumed: {again}")


# ---- blocks that run again ------------------------------------------------------------------------------------------

RECOMPUTE = '"recompute": true'


@pytest.mark.parametrize(
    ("program", "config", "arguments"),
    [
        *rows(RECOMPUTE, programs.trained, [3]),
        *rows(f"{RECOMPUTE}, frozen norms", programs.trained, [3], model="frozen norms"),
        *rows(f"{RECOMPUTE}, a new length in every step", programs.trained, [2], lengths_change=True),
        *rows(f"{RECOMPUTE}, torch checkpointing, reentrant", programs.checkpointed, [3], call="torch, reentrant"),
        *rows(f"{RECOMPUTE}, {BY_DEEPSPEED}", programs.checkpointed, [3], call="deepspeed"),
        *rows(f"{RECOMPUTE}, TiledMLP", programs.trained, [3], model="TiledMLP", decides=3),
        *rows(f"{RECOMPUTE}, deepspeed.moe, experts on 2 ranks", programs.with_experts, [2], on_ranks=2),
        *rows(f"{RECOMPUTE}, AutoTP training of Llama", programs.with_tensor_parallelism, [2], 2, AUTO_TP),
    ],
)
def test_recomputing(
    program: Program, config: dict[str, Any], arguments: dict[str, Any], tmp_path: Path, row_says: Callable[[str], None]
) -> None:
    compared = compare(program, config, tmp_path, block=RECOMPUTED, steps=2 * PLAN_STEPS, must_move=False, **arguments)
    for report in compared.reports:  # blocks that the user checkpoints are the user's
        if program is not programs.checkpointed:
            assert report["recomputed_bytes"] > 0
    row_says(str(compared))
