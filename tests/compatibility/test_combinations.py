"""Most rows of the table: programs of people who train, each with the block and without, compared bit for bit.

``docs/guides/other_offloads.md`` says which setting is the better one beside the offload of others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import programs_deepspeed as programs
import programs_hf as hf
import programs_offloads as offloads
import pytest
from compare import COMPARED, PLANNED, RECOMPUTED, SMALL, Compared, Way, common_plan, compare, config_of, rows
from conftest import make_backend
from forked import ProgramFailed, run
from models import MODELS
from programs_deepspeed import trained
from programs_hf import checkpointing, dpo, sft, trainer
from support.runs import with_block

pytestmark = pytest.mark.engine

NVME: dict[str, Any] = {"placement": "nvme"}


def recomputed(compared: Compared) -> str:
    """Check that every rank recomputed blocks, and return the text of the row."""
    assert all(report["recomputed_bytes"] > 0 for report in compared.reports)
    return str(compared)


# ---- DeepSpeed ------------------------------------------------------------------------------------------------------

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
NEW_LENGTHS = {"model": "a new length in every step"}
TP_LLAMA = {"model": "Llama", "has_cache": False, "same_data": True, "steps": 5}


def with_skipped_steps(compared: Compared) -> str:
    skipped = {result["skipped_steps"] for result in (*compared.plain, *compared.results)}
    assert len(skipped) == 1 and 0 < min(skipped) < 14
    return f"{compared}, {min(skipped)} steps skipped"


def again_in_backward(compared: Compared) -> str:
    for result in (*compared.plain, *compared.results):
        assert result["runs"] == 2 * programs.LAYERS * result["micro_steps"], "nothing was made again in backward"
    return str(compared)


def checkpointed(
    name: str, call: str, stages: Sequence[int], decides: int | None = None, ranks: int = 1, **settings: Any
) -> Way:
    selective = {"memory_efficient_linear": False} if call == "selective" else {}  # see SAVED_OPS
    config = partial(config_of, activation_checkpointing=settings, zero_optimization=selective)
    return Way(name, programs.checkpointed, {"call": call}, stages, decides=decides, ranks=ranks, config=config,
               says=again_in_backward)  # fmt: skip


RECOMPUTE = '"recompute": true'
Again = partial(Way, block=RECOMPUTED, must_move=False, says=recomputed)
LONG = {"steps": 20}
DEEPSPEED = [
    Way("fp16 with skipped steps", programs.trained_in_fp16, stages=(1, 2, 3), decides=2, says=with_skipped_steps,
        config=partial(config_of, fp16={"enabled": True, "initial_scale_power": 24, "hysteresis": 1})),
    Way("the script's own torch.autocast", trained, {"autocast": True}, [2]),
    Way("torch_autocast in the config", trained, {}, [1, 3], decides=1,
        config=partial(config_of, torch_autocast=AUTOCAST)),
    Way("a second partition within the host (zero_hpz_partition_size), ZeRO-{}, 2 ranks", trained, {}, [3], decides=3,
        ranks=2, config=partial(config_of, zero_optimization={"zero_hpz_partition_size": 2})),
    Way("two forwards before each backward, gradient accumulation 2", programs.trained_on_pairs, decides=3,
        config=partial(config_of, gradient_accumulation_steps=2)),
    Way("engine.no_sync", programs.trained_with_no_sync, {}, [0, 1], decides=1),
    Way("two engines, both forwards before both backwards", programs.trained_two_engines, decides=2),
    Way("flops_profiler and wall_clock_breakdown", trained, {}, [2], config=partial(config_of, **PROFILED)),
    Way("experts as leaf modules (set_z3_leaf_modules)", trained, {"model": "leaf modules"}, [3], decides=3),
    Way("zero.Init, GatheredParameters between steps, an external parameter", programs.trained_from_zero_init, {}, [3],
        decides=3),
    checkpointed("torch checkpointing, reentrant", "torch, reentrant", [2, 3], 3),
    checkpointed("torch checkpointing, non-reentrant", "torch, non-reentrant", [2, 3]),
    checkpointed("selective checkpointing", "selective", [2, 3], 2),
    checkpointed(BY_DEEPSPEED, "deepspeed", [2, 3]),
    checkpointed(f"{BY_DEEPSPEED} with cpu_checkpointing", "deepspeed", [2, 3], 2, **IN_HOST_MEMORY),
    checkpointed("deepspeed.checkpointing.non_reentrant_checkpoint", "deepspeed, non-reentrant", [2]),
    checkpointed(BY_DEEPSPEED + " with partition_activations, ZeRO-{}, 2 ranks", "deepspeed", [2], None, 2,
                 **PARTITIONED),
    checkpointed(BY_DEEPSPEED + " with partition_activations and cpu_checkpointing, ZeRO-{}, 2 ranks", "deepspeed",
                 [3], None, 2, **PARTITIONED, **IN_HOST_MEMORY),
    checkpointed(BY_DEEPSPEED + " with contiguous_memory_optimization, ZeRO-{}, 2 ranks", "deepspeed", [2], 2, 2,
                 **CONTIGUOUS),
    checkpointed(f"{BY_DEEPSPEED} of masks, indices, None, numbers and several outputs", "deepspeed, odd", [2]),
    checkpointed(f"{BY_DEEPSPEED} of these with cpu_checkpointing, and of one tensor twice", "deepspeed, odd", [2], 2,
                 **IN_HOST_MEMORY),
    Way("TiledMLP", trained, {"model": "TiledMLP"}, decides=2),
    Way("TiledFusedLogitsLoss", trained, {"model": "TiledFusedLogitsLoss"}, [3]),
    Way("UlyssesSPAttentionHF with Llama, ZeRO-{}, 2 ranks", programs.ulysses_of_hugging_face, decides=3, ranks=2),
    Way("AutoTP training of Llama, ZeRO-{}, 2 ranks", trained, TP_LLAMA, [0, 2], decides=2, ranks=2, config=AUTO_TP),
    Again(RECOMPUTE, trained, LONG, [3]),
    Again(f"{RECOMPUTE}, frozen norms", trained, {"model": "frozen norms", **LONG}, [3]),
    Again(f"{RECOMPUTE}, a new length in every step", trained, {**NEW_LENGTHS, **LONG}, [2]),
    # Blocks that the user checkpoints are the user's.
    Again(f"{RECOMPUTE}, torch checkpointing, reentrant", programs.checkpointed, {"call": "torch, reentrant", **LONG},
          [3], says=str),
    Again(f"{RECOMPUTE}, {BY_DEEPSPEED}", programs.checkpointed, {"call": "deepspeed", **LONG}, [3], says=str),
    Again(f"{RECOMPUTE}, TiledMLP", trained, {"model": "TiledMLP", **LONG}, [3], decides=3),
    Again(f"{RECOMPUTE}, deepspeed.moe, experts on 2 ranks", programs.with_experts, LONG, [2], ranks=2),
    Again(RECOMPUTE + ", AutoTP training of Llama, ZeRO-{}, 2 ranks", trained, {**TP_LLAMA, **LONG}, [2], ranks=2,
          config=AUTO_TP),
]  # fmt: skip

PLAN_STEPS = 10  # the first plan comes before


def offloaded(stage: int, **devices: str) -> dict[str, Any]:
    """ZeRO's own offload; drives are the directory in which the ranks work."""
    zero: dict[str, Any] = {
        f"offload_{what}": {"device": device, **({"nvme_path": "."} if device == "nvme" else {})}
        for what, device in devices.items()
    }
    if devices.get("param") == "nvme":
        zero["offload_param"] |= {"buffer_count": 24, "buffer_size": 1 << 20}
    if stage == 3:
        zero |= {"stage3_prefetch_bucket_size": 0, "stage3_param_persistence_threshold": 100}
    return config_of(stage, bf16={"enabled": True}, zero_force_ds_cpu_optimizer=False, zero_optimization=zero)


ByAio = partial(Way, block={"io": {"staging_bytes": 8 << 20, "backend": "aio"}}, marks=[pytest.mark.aio])
PLACED = [
    Way("ZeRO-{}, nvme and adaptive", trained, {}, [0], decides=0, marks=[pytest.mark.smoke]),
    Way("ZeRO-{}, nvme and adaptive", trained, {}, [1, 2, 3]),
    Way("bf16, gradient clipping", trained, decides=3,
        config=partial(config_of, bf16={"enabled": True}, gradient_clipping=0.1)),
    Way("a new length in every step", trained, NEW_LENGTHS, decides=3),
    Way("deepspeed.moe, experts on 2 ranks", programs.with_experts, {}, [0, 2], decides=2, ranks=2),
    Way("optimizer on the CPU", trained, {}, [2], config=partial(offloaded, optimizer="cpu")),
    Way("parameters and optimizer on the CPU", trained, {}, [3], decides=3,
        config=partial(offloaded, param="cpu", optimizer="cpu")),
    ByAio("parameters on NVMe", trained, {}, [3], config=partial(offloaded, param="nvme")),
    ByAio("parameters and optimizer on NVMe", trained, {}, [3], decides=3,
          config=partial(offloaded, param="nvme", optimizer="nvme")),
]  # fmt: skip


@pytest.mark.parametrize(("way", "stage"), rows("DeepSpeed", PLACED))
def test_placements(way: Way, stage: int, tmp_path: Path, row_says: Callable[[str], None]) -> None:
    """With the placements ``nvme`` and ``adaptive``, each compared with one run without the block."""
    block = way.block or {}
    if block:
        make_backend("aio")
    train = partial(compare, way.program, way.config(stage), ranks=way.ranks, steps=PLAN_STEPS, **way.arguments)
    nvme = train(tmp_path, block=block)
    planned = train(tmp_path / "adaptive", block={**block, **PLANNED}, plain=nvme.plain)
    assert all(report["plans"] >= 1 for report in planned.reports), "the adaptive run made no plan"
    row_says(f"nvme: {nvme}; adaptive: {planned}")


SAVING = Way("save_checkpoint and load_checkpoint, with and without the block", programs.saved, decides=2)


@pytest.mark.parametrize(("way", "stage"), rows("DeepSpeed", [SAVING]))
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


# ---- models, and ranks on one machine -------------------------------------------------------------------------------

OF_RANKS = (("Llama", 3, 2), ("T5", 2, 2), ("Qwen3-MoE", 3, 2), ("GPT-2", 2, 4), ("BERT", 3, 4))
OF_MODELS = [
    *(
        Way(one, trained, {"model": one}, decides={"Llama with tied embeddings": 3}.get(one))
        for one in MODELS
    ),
    *(
        Way(one + ", ZeRO-{}, recompute", trained, {"model": one, "steps": 12, "has_cache": False}, [3],
            block=RECOMPUTED, says=recomputed, decides={"Mamba-2": 3}.get(one))
        for one in MODELS
    ),
    *(
        Way(one + f", ZeRO-{{}}, {ranks} ranks, adaptive", trained, {"model": one, "steps": 8}, [stage], ranks=ranks,
            block=PLANNED, decides={"Qwen3-MoE": 3}.get(one))
        for one, stage, ranks in OF_RANKS
    ),
]  # fmt: skip


def one_plan(compared: Compared) -> str:
    common_plan(compared.reports)
    return str(compared)


RANKS = [
    Way(f"{ranks} on one machine", trained, {"steps": 10}, decides={2: 2}.get(ranks), ranks=ranks, block=PLANNED,
        says=one_plan)
    for ranks in (1, 2, 4)
]  # fmt: skip

# ---- beside other offloads ------------------------------------------------------------------------------------------

OfTrainers = partial(Way, config=hf.config_of)
Selective = partial(Way, config=partial(config_of, zero_optimization={"memory_efficient_linear": False}))
EVERY_SECOND = checkpointing(False, every_n_layers=2)
Remat = partial(
    Way, program=offloads.with_torch_remat,
    marks=[pytest.mark.skipif(find_spec("torch_remat") is None, reason="torch_remat is not installed")],
)  # fmt: skip
OTHERS = [
    OfTrainers("transformers: every_n_layers, nvme", trainer, EVERY_SECOND),
    OfTrainers("transformers: every_n_layers, adaptive", trainer, EVERY_SECOND, [2], block=PLANNED),
    OfTrainers("transformers: every_n_layers, recompute", trainer, {**EVERY_SECOND, "steps": 14}, [3],
               block=RECOMPUTED, decides=3),
    OfTrainers("transformers: offload, nvme", offloads.with_transformers_offload, decides=2),
    OfTrainers("transformers: offload and every_n_layers, adaptive", offloads.with_transformers_offload,
               {"every_n_layers": 2}, [2], block=PLANNED),
    # Under ZeRO-3 it ends without us, too: TRL's chunked loss looks for parameters, and its hooks return other tensors.
    OfTrainers("TRL: activation_offloading, SFT, nvme", offloads.with_trl_offload, {}, [2]),
    OfTrainers("TRL: activation_offloading, DPO, adaptive", offloads.with_trl_offload, {"way": "dpo"}, [2],
               block=PLANNED, decides=2),
    Way("DeepSpeed: CheckpointHiddenStatesOffload", offloads.with_deepspeed_offload, decides=3),
    Remat("torch_remat, nvme", decides=3),
    Remat("torch_remat, adaptive", arguments={"steps": 10}, stages=[2], block=PLANNED),
    Selective("selective checkpointing, adaptive", programs.checkpointed, {"call": "selective", "steps": 10},
              block=PLANNED),
    Selective("selective checkpointing, recompute", programs.checkpointed, {"call": "selective", "steps": 14}, [2],
              block=RECOMPUTED),
]  # fmt: skip

# ---- rematerialization by itself, and beside every other placement --------------------------------------------------

ALONE: dict[str, Any] = {"placement": "keep", "nvme_path": None}
BLOCKS: dict[str, dict[str, Any]] = {
    "keep, without a drive": ALONE,
    "nvme": NVME,
    "host": {"placement": "host", "host_budget_bytes": 64 << 20},
    "adaptive": PLANNED,
    "adaptive with a budget": {"placement": "adaptive", "activation_budget_bytes": 2 << 20},
    "adaptive with recompute": RECOMPUTED,
}
DECIDING = {("Llama", "keep, without a drive"): 3, ("Llama", "adaptive with recompute"): 3}


def made_again(compared: Compared, *, is_kept: bool = False) -> str:
    for report in compared.reports:
        assert report["budget_excess_bytes"] == 0
        # A plan may do without: it is a matter of measured times.
        assert report["placement"] == "adaptive" or report["rematerialized_bytes"] > 0
        assert not is_kept or report["step_peak_saved_bytes"] < 0.8 * report["peak_saved_bytes_without"]
    return str(compared)


# Without a drive; with one, all rows of DeepSpeed's rematerialize.
Alone = partial(Way, block=ALONE, must_move=False, says=made_again)
REMATERIALIZED = [
    *(
        # A plan is in force for the last of the steps.
        Way(f"{model}, ZeRO-{{}}, {name}", trained, {"model": model, "steps": 8, "has_cache": False}, [stage],
            block=block, must_move=block is not ALONE, decides=DECIDING.get((model, name)),
            says=partial(made_again, is_kept=block is ALONE))
        for model, stage in (("Llama", 3), ("GPT-2", 2))
        for name, block in BLOCKS.items()
    ),
    Alone("ZeRO-{}, lengths that change in every step", trained, {**NEW_LENGTHS, "steps": 12}, [2], decides=2),
    Alone("ZeRO-{}, parameters gathered between forward and backward", programs.trained_with_a_look, {}, [3],
          decides=3),
]  # fmt: skip

# ---- trainers, and habits of loops of one's own ---------------------------------------------------------------------

EVALUATING: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 2}
GROUPED: dict[str, Any] = {"train_sampling_strategy": "group_by_length", "varying_lengths": True}


def each_its_own(compared: Compared) -> str:
    losses = {tuple(result["losses"]) for result in compared.results}
    assert len(losses) == len(compared.results), "ranks trained on the same data"
    for report in compared.reports:
        assert report["placement"] != "adaptive" or report["plans"], "no plan was in force"
    return str(compared)


# Under ZeRO-2 all goes to NVMe, under ZeRO-3 a plan says what; where a row has another placement its name says so.
Loops = partial(Way, blocks={2: NVME, 3: PLANNED}, says=each_its_own)
Trains = partial(Loops, config=hf.config_of)
OF_TRAINER = [
    Trains("gradient accumulation", trainer, {"gradient_accumulation_steps": 2}),
    Trains("bf16", trainer, {"bf16": True}),
    Trains("evaluation, and generation of text between steps", trainer, {"generates": True, **EVALUATING}, decides=2),
    Trains("resuming from a checkpoint", hf.resumed_trainer, decides=3),
    Trains("gradient checkpointing, non-reentrant", trainer, checkpointing(False)),
    Trains("gradient checkpointing, reentrant", trainer, checkpointing(True)),
    Trains("gradient checkpointing, non-reentrant, recompute", trainer, {**checkpointing(False), "steps": 14},
           block=RECOMPUTED),
    Trains("gradient checkpointing, reentrant, recompute", trainer, {**checkpointing(True), "steps": 14},
           block=RECOMPUTED, decides=3),
    Trains("lengths that change in every step, grouped by length", trainer, {**GROUPED, "steps": 12}),
    Trains("label smoothing, NEFTune and clipping", trainer, hf.FINE),
    Trains("LoRA", trainer, {"lora": True}),
    Trains("LoRA with gradient checkpointing", trainer, {"lora": True, **checkpointing(False)}),
    Trains("gradient accumulation, 2 ranks", trainer, {"gradient_accumulation_steps": 2}, ranks=2, decides=3),
    Trains("lengths that change in every step, 4 ranks", trainer, {**GROUPED, "steps": 12}, [3], ranks=4),
]  # fmt: skip
LLAMA = {"model": "Llama", "steps": 8}
OF_LOOPS = [
    Loops("`loss.backward()` called by the script", trained, {"own_backward": True, **LLAMA}, decides=3),
    Loops("evaluation in inference mode after each step", trained, {"evaluates": True, **LLAMA}),
    Loops("anomaly detection", trained, {"detects_anomalies": True, **LLAMA}),
    Trains("Accelerate, a plugin with `hf_ds_config`", hf.accelerated, decides=2),
    Trains("Accelerate, a plugin without a DeepSpeed config", hf.accelerated, {"in_json": False}),
]
OF_TRL = [
    *(
        Trains(f"TRL {name}, {block['placement']}", program, arguments, block=block,
               decides=2 if "packing" in arguments and block is PLANNED else None)
        for name, program, arguments in (
            ("SFTTrainer", sft, {}),
            ("SFTTrainer with packing", sft, {"packing": True}),
            ("DPOTrainer", dpo, {}),
        )
        for block in (NVME, PLANNED)
    ),
    Trains("TRL SFTTrainer, recompute", sft, {"steps": 14}, [3], block=RECOMPUTED),
    Trains("TRL DPOTrainer with LoRA", dpo, {"lora": True}, decides=2),
]  # fmt: skip

WAYS = {
    "DeepSpeed": DEEPSPEED, "Models": OF_MODELS, "Beside other offloads": OTHERS, "Ranks": RANKS,
    "Rematerialization": REMATERIALIZED, "Transformers' Trainer": OF_TRAINER,
    "DeepSpeed and Accelerate in a loop of one's own": OF_LOOPS, "TRL and PEFT": OF_TRL,
}  # fmt: skip


@pytest.mark.parametrize(("way", "stage"), [one for section, ways in WAYS.items() for one in rows(section, ways)])
def test_way(way: Way, stage: int, tmp_path: Path, row_says: Callable[[str], None]) -> None:
    row_says(way.says(way.compared(stage, tmp_path)))


def test_excluded_ops_are_saved(tmp_path: Path) -> None:
    block = {**ALONE, "rematerialize": {"exclude": ["silu"]}}
    way = Alone("", trained, {"model": "Llama", "has_cache": False}, block=block)
    sites = way.compared(2, tmp_path).reports[0]["rematerialized_sites"]
    assert "mul" in sites and "silu" not in sites


@pytest.mark.compatible("Beside other offloads", "DeepCompile: offload_activation, ZeRO-3", decides=True)
def test_deepcompile(tmp_path: Path, row_says: Callable[[str], None]) -> None:
    config = with_block(config_of(3, compile={"deepcompile": True, "offload_activation": True}), tmp_path, **SMALL)
    with pytest.raises(ProgramFailed, match=r'offload_activation.*set "compile": {"deepcompile": false}') as failed:
        run(trained, config, tmp_path / "block")
    told = [line for line in str(failed.value).splitlines() if line.startswith("ds_tba.errors.")]
    row_says(f"refused: {told[-1].partition(': ')[2]}")
