"""What DeepSpeed has beyond the plain loop: ZeRO, precisions, checkpointing, saving, long sequences, experts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import programs_deepspeed as programs
import pytest
from compare import COMPARED, PLANNED, RECOMPUTED, compare
from conftest import make_backend
from forked import Program, run
from support.runs import plain_config

pytestmark = pytest.mark.engine

AUTOCAST = {"enabled": True, "dtype": "bfloat16"}
PLAN_STEPS = 10  # the first plan comes before


def row(name: str, *values: Any, marks: Any = (), **more: Any) -> Any:
    return pytest.param(*values, marks=[pytest.mark.compatible("DeepSpeed", name), *marks], id=name, **more)


def config_of(stage: int, **more: Any) -> dict[str, Any]:
    return plain_config(stage, **{"train_micro_batch_size_per_gpu": programs.BATCH, **more})


def offloaded(stage: int, **devices: str) -> dict[str, Any]:
    """ZeRO's own offload; ``nvme_path`` is filled in by the test."""
    zero = {
        f"offload_{what}": {"device": device, **({"nvme_path": "NVME"} if device == "nvme" else {})}
        for what, device in devices.items()
    }
    if "param" in devices:
        zero["offload_param"] |= {"buffer_count": 24, "buffer_size": 1 << 20} if devices["param"] == "nvme" else {}
    config = config_of(stage, bf16={"enabled": True}, zero_force_ds_cpu_optimizer=False)
    config["zero_optimization"] |= zero
    if stage == 3:
        config["zero_optimization"] |= {"stage3_prefetch_bucket_size": 0, "stage3_param_persistence_threshold": 100}
    return config


def compare_placements(program: Program, config: dict[str, Any], directory: Path, **arguments: Any) -> str:
    """With the placements ``nvme`` and ``adaptive``, each compared with one run without the block."""
    nvme = compare(program, config, directory, steps=PLAN_STEPS, **arguments)
    block = {**(arguments.pop("block", None) or {}), **PLANNED}
    planned = compare(
        program, config, directory / "adaptive", steps=PLAN_STEPS, **arguments, block=block, plain=nvme.plain
    )
    assert all(report["plans"] >= 1 for report in planned.reports), "the adaptive run made no plan"
    return f"nvme: {nvme}; adaptive: {planned}"


# ---- ZeRO and precision ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config",
    [
        row("ZeRO-0, nvme and adaptive", config_of(0), marks=[pytest.mark.smoke]),
        *[row(f"ZeRO-{stage}, nvme and adaptive", config_of(stage)) for stage in range(1, 4)],
        row("bf16, gradient clipping, ZeRO-2", config_of(2, bf16={"enabled": True}, gradient_clipping=0.1)),
        row("bf16, gradient clipping, ZeRO-3", config_of(3, bf16={"enabled": True}, gradient_clipping=0.1)),
    ],
)
def test_zero(config: dict[str, Any], tmp_path: Path, row_says: Callable[[str], None]) -> None:
    row_says(compare_placements(programs.trained, config, tmp_path))


@pytest.mark.parametrize(
    "config",
    [
        row("optimizer on the CPU, ZeRO-2", offloaded(2, optimizer="cpu")),
        row("parameters and optimizer on the CPU, ZeRO-3", offloaded(3, param="cpu", optimizer="cpu")),
        row("parameters on NVMe, ZeRO-3", offloaded(3, param="nvme"), marks=[pytest.mark.aio]),
        row(
            "parameters and optimizer on NVMe, ZeRO-3",
            offloaded(3, param="nvme", optimizer="nvme"),
            marks=[pytest.mark.aio],
        ),
    ],
)
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
    [
        row("fp16 with skipped steps, ZeRO-1", 1),
        row("fp16 with skipped steps, ZeRO-2", 2),
        row("fp16 with skipped steps, ZeRO-3", 3),
    ],
)
def test_fp16(stage: int, tmp_path: Path, row_says: Callable[[str], None]) -> None:
    config = config_of(stage, fp16={"enabled": True, "initial_scale_power": 24, "hysteresis": 1})
    compared = compare(programs.trained_in_fp16, config, tmp_path, steps=14)
    skipped = {result["skipped_steps"] for result in (*compared.plain, *compared.results)}
    assert len(skipped) == 1 and 0 < min(skipped) < 14
    row_says(f"{compared}, {min(skipped)} steps skipped")


@pytest.mark.parametrize(
    ("config", "autocast"),
    [
        row("the script's own torch.autocast, ZeRO-2", config_of(2), True),
        row("torch_autocast in the config, ZeRO-1", config_of(1, torch_autocast=AUTOCAST), False),
        row("torch_autocast in the config, ZeRO-3", config_of(3, torch_autocast=AUTOCAST), False),
    ],
)
def test_autocast(config: dict[str, Any], autocast: bool, tmp_path: Path, row_says: Callable[[str], None]) -> None:
    row_says(str(compare(programs.trained, config, tmp_path, autocast=autocast)))


@pytest.mark.parametrize(
    "ranks", [row("a second partition within the host (zero_hpz_partition_size), ZeRO-3, 2 ranks", 2)]
)
def test_zero_pp(ranks: int, tmp_path: Path, row_says: Callable[[str], None]) -> None:
    config = config_of(3)
    config["zero_optimization"]["zero_hpz_partition_size"] = ranks
    row_says(str(compare(programs.trained, config, tmp_path, ranks=ranks)))


# ---- batches and loops ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "stage", [row("a new length in every step, ZeRO-2", 2), row("a new length in every step, ZeRO-3", 3)]
)
def test_lengths(stage: int, tmp_path: Path, row_says: Callable[[str], None]) -> None:
    row_says(compare_placements(programs.trained, config_of(stage), tmp_path, lengths_change=True))


@pytest.mark.parametrize(
    ("program", "config"),
    [
        row(
            "two forwards before each backward, gradient accumulation 2, ZeRO-2",
            programs.trained_on_pairs,
            config_of(2, gradient_accumulation_steps=2),
        ),
        row(
            "two forwards before each backward, gradient accumulation 2, ZeRO-3",
            programs.trained_on_pairs,
            config_of(3, gradient_accumulation_steps=2),
        ),
        row("engine.no_sync, ZeRO-0", programs.trained_with_no_sync, config_of(0)),
        row("engine.no_sync, ZeRO-1", programs.trained_with_no_sync, config_of(1)),
        row("two engines, both forwards before both backwards, ZeRO-2", programs.trained_two_engines, config_of(2)),
        row("two engines, both forwards before both backwards, ZeRO-3", programs.trained_two_engines, config_of(3)),
        row(
            "flops_profiler and wall_clock_breakdown, ZeRO-2",
            programs.trained,
            config_of(2, flops_profiler={"enabled": True, "profile_step": 3}, wall_clock_breakdown=True),
        ),
        row("experts as leaf modules (set_z3_leaf_modules), ZeRO-3", programs.with_leaf_modules, config_of(3)),
        row(
            "zero.Init, GatheredParameters between steps, an external parameter, ZeRO-3",
            programs.trained_from_zero_init,
            config_of(3),
        ),
    ],
)
def test_loop(program: Program, config: dict[str, Any], tmp_path: Path, row_says: Callable[[str], None]) -> None:
    row_says(str(compare(program, config, tmp_path)))


# ---- checkpointing --------------------------------------------------------------------------------------------------


def checkpointing_row(name: str, call: str, stage: int, **activation_checkpointing: bool) -> Any:
    config = config_of(stage, activation_checkpointing=activation_checkpointing)
    if call == "selective":
        config["zero_optimization"]["memory_efficient_linear"] = False  # see selective_checkpoint
    return row(f"{name}, ZeRO-{stage}", call, config, 1)


@pytest.mark.parametrize(
    ("call", "config", "ranks"),
    [
        checkpointing_row("torch checkpointing, reentrant", "torch, reentrant", 2),
        checkpointing_row("torch checkpointing, reentrant", "torch, reentrant", 3),
        checkpointing_row("torch checkpointing, non-reentrant", "torch, non-reentrant", 2),
        checkpointing_row("torch checkpointing, non-reentrant", "torch, non-reentrant", 3),
        checkpointing_row("selective checkpointing", "selective", 2),
        checkpointing_row("selective checkpointing", "selective", 3),
        checkpointing_row("deepspeed.checkpointing.checkpoint", "deepspeed", 2),
        checkpointing_row("deepspeed.checkpointing.checkpoint", "deepspeed", 3),
        *[
            checkpointing_row(
                "deepspeed.checkpointing.checkpoint with cpu_checkpointing", "deepspeed", stage, cpu_checkpointing=True
            )
            for stage in (2, 3)
        ],
        checkpointing_row("deepspeed.checkpointing.non_reentrant_checkpoint", "deepspeed, non-reentrant", 2),
        row(
            "deepspeed.checkpointing.checkpoint with partition_activations, ZeRO-2, 2 ranks",
            "deepspeed",
            config_of(2, activation_checkpointing={"partition_activations": True}),
            2,
        ),
        row(
            "deepspeed.checkpointing.checkpoint with partition_activations and cpu_checkpointing, ZeRO-3, 2 ranks",
            "deepspeed",
            config_of(3, activation_checkpointing={"partition_activations": True, "cpu_checkpointing": True}),
            2,
        ),
        row(
            "deepspeed.checkpointing.checkpoint with contiguous_memory_optimization, ZeRO-2, 2 ranks",
            "deepspeed",
            config_of(
                2,
                activation_checkpointing={
                    "partition_activations": True,
                    "contiguous_memory_optimization": True,
                    "number_checkpoints": programs.LAYERS,
                    "synchronize_checkpoint_boundary": True,
                    "profile": True,
                },
            ),
            2,
        ),
    ],
)
def test_checkpointing(
    call: str, config: dict[str, Any], ranks: int, tmp_path: Path, row_says: Callable[[str], None]
) -> None:
    compared = compare(programs.checkpointed, config, tmp_path, ranks=ranks, call=call)
    for result in (*compared.plain, *compared.results):
        assert result["runs"] == 2 * programs.LAYERS * result["micro_steps"], "nothing was made again in backward"
    row_says(str(compared))


@pytest.mark.parametrize(
    "settings",
    [
        row("deepspeed.checkpointing.checkpoint of masks, indices, None, numbers and several outputs, ZeRO-2", {}),
        row(
            "deepspeed.checkpointing.checkpoint of these with cpu_checkpointing, and of one tensor twice, ZeRO-2",
            {"cpu_checkpointing": True},
        ),
    ],
)
def test_arguments_of_checkpoints(settings: dict[str, bool], tmp_path: Path, row_says: Callable[[str], None]) -> None:
    config = config_of(2, activation_checkpointing=settings)
    row_says(str(compare(programs.with_odd_checkpoints, config, tmp_path)))


# ---- saving and resuming --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "stage",
    [row(f"save_checkpoint and load_checkpoint, with and without the block, ZeRO-{stage}", stage) for stage in (2, 3)],
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


# ---- long sequences -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "stage"),
    [
        row("TiledMLP, ZeRO-2", "TiledMLP", 2),
        row("TiledMLP, ZeRO-3", "TiledMLP", 3),
        row("TiledFusedLogitsLoss, ZeRO-3", "TiledFusedLogitsLoss", 3),
    ],
)
def test_long_sequences(how: str, stage: int, tmp_path: Path, row_says: Callable[[str], None]) -> None:
    row_says(str(compare(programs.tiled, config_of(stage), tmp_path, how=how)))


@pytest.mark.parametrize(
    "stage", [row(f"UlyssesSPAttentionHF with Llama, ZeRO-{stage}, 2 ranks", stage) for stage in (2, 3)]
)
def test_ulysses_of_hugging_face(stage: int, tmp_path: Path, row_says: Callable[[str], None]) -> None:
    row_says(str(compare(programs.ulysses_of_hugging_face, config_of(stage), tmp_path, ranks=2)))


# ---- experts and tensor parallelism ---------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [row(f"deepspeed.moe, experts on 2 ranks, ZeRO-{stage}", stage) for stage in (0, 2)])
def test_experts(stage: int, tmp_path: Path, row_says: Callable[[str], None]) -> None:
    row_says(compare_placements(programs.with_experts, config_of(stage), tmp_path, ranks=2))


@pytest.mark.parametrize("stage", [row(f"AutoTP training of Llama, ZeRO-{stage}, 2 ranks", stage) for stage in (0, 2)])
def test_automatic_tensor_parallelism(stage: int, tmp_path: Path, row_says: Callable[[str], None]) -> None:
    config = config_of(stage, tensor_parallel={"autotp_size": 2})
    row_says(str(compare(programs.with_tensor_parallelism, config, tmp_path, ranks=2)))


# ---- blocks that run again ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("program", "config", "arguments", "outcome"),
    [
        row('"recompute": true, ZeRO-3', programs.trained, config_of(3), {}, "recomputed"),
        row('"recompute": true, frozen norms, ZeRO-3', programs.trained_but_for_norms, config_of(3), {}, "recomputed"),
        row(
            '"recompute": true, a new length in every step, ZeRO-2',
            programs.trained,
            config_of(2),
            {"lengths_change": True},
            "recomputed",
        ),
        row(
            '"recompute": true, torch checkpointing, reentrant, ZeRO-3',
            programs.checkpointed,
            config_of(3),
            {"call": "torch, reentrant"},
            "the user's",
        ),
        row(
            '"recompute": true, deepspeed.checkpointing.checkpoint, ZeRO-3',
            programs.checkpointed,
            config_of(3),
            {"call": "deepspeed"},
            "the user's",
        ),
        row('"recompute": true, TiledMLP, ZeRO-3', programs.tiled, config_of(3), {"how": "TiledMLP"}, "recomputed"),
        row(
            '"recompute": true, deepspeed.moe, experts on 2 ranks, ZeRO-2',
            programs.with_experts,
            config_of(2),
            {"ranks": 2},
            "recomputed",
        ),
        row(
            '"recompute": true, AutoTP training of Llama, ZeRO-2, 2 ranks',
            programs.with_tensor_parallelism,
            config_of(2, tensor_parallel={"autotp_size": 2}),
            {"ranks": 2},
            "recomputed",
        ),
    ],
)
def test_recomputing(
    program: Program,
    config: dict[str, Any],
    arguments: dict[str, Any],
    outcome: str,
    tmp_path: Path,
    row_says: Callable[[str], None],
) -> None:
    compared = compare(program, config, tmp_path, block=RECOMPUTED, steps=2 * PLAN_STEPS, must_move=False, **arguments)
    for report in compared.reports:
        if outcome == "recomputed":
            assert report["recomputed_bytes"] > 0, report["blocks_left_out"]
    row_says(str(compared))
