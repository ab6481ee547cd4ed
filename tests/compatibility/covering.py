"""The rows of ``docs/evidence/compatibility.md`` that decide whether a change lands; ``make test-all`` runs all.

One row, at least, for each thing that may go wrong in its own way: each stage of ZeRO and precision, where its states
lie, what runs in backward, what is read from checkpoints, what ranks have to agree on, who calls the engine. Stages and
placements take turns. Rows that need no engine are not named here: they take milliseconds, and always run.
"""

from __future__ import annotations

COVERING: dict[str, list[str]] = {
    "DeepSpeed": [
        "ZeRO-0, nvme and adaptive",
        "bf16, gradient clipping, ZeRO-3",
        "parameters and optimizer on the CPU, ZeRO-3",
        "parameters and optimizer on NVMe, ZeRO-3",
        "fp16 with skipped steps, ZeRO-2",
        "torch_autocast in the config, ZeRO-1",
        "a second partition within the host (zero_hpz_partition_size), ZeRO-3, 2 ranks",
        "a new length in every step, ZeRO-3",
        "two forwards before each backward, gradient accumulation 2, ZeRO-3",
        "engine.no_sync, ZeRO-1",
        "two engines, both forwards before both backwards, ZeRO-2",
        "experts as leaf modules (set_z3_leaf_modules), ZeRO-3",
        "zero.Init, GatheredParameters between steps, an external parameter, ZeRO-3",
        "torch checkpointing, reentrant, ZeRO-3",
        "selective checkpointing, ZeRO-2",
        "deepspeed.checkpointing.checkpoint with cpu_checkpointing, ZeRO-2",
        "deepspeed.checkpointing.checkpoint with contiguous_memory_optimization, ZeRO-2, 2 ranks",
        "deepspeed.checkpointing.checkpoint of these with cpu_checkpointing, and of one tensor twice, ZeRO-2",
        "save_checkpoint and load_checkpoint, with and without the block, ZeRO-2",
        "TiledMLP, ZeRO-2",
        "UlyssesSPAttentionHF with Llama, ZeRO-3, 2 ranks",
        "deepspeed.moe, experts on 2 ranks, ZeRO-2",
        "AutoTP training of Llama, ZeRO-2, 2 ranks",
        '"recompute": true, TiledMLP, ZeRO-3',
    ],
    "Models": [
        "Llama with tied embeddings, ZeRO-3",
        "Qwen3-MoE, ZeRO-3, 2 ranks, adaptive",
        "Mamba-2, ZeRO-3, recompute",
    ],
    "Ranks": [
        "2 on one machine, ZeRO-2",
        "2 hosts of 2 ranks, drives of 1000 and 100 MB/s in other directories, ZeRO-3",
    ],
    "Rematerialization": [
        "Llama, ZeRO-3, keep, without a drive",
        "Llama, ZeRO-3, adaptive with recompute",
        "ZeRO-2, lengths that change in every step",
        "ZeRO-3, parameters gathered between forward and backward",
    ],
    "Transformers' Trainer": [
        "evaluation, and generation of text between steps, ZeRO-2",
        "resuming from a checkpoint, ZeRO-3",
        "gradient checkpointing, reentrant, recompute, ZeRO-3",
        "gradient accumulation, 2 ranks, ZeRO-3",
        "`accelerate launch` with a DeepSpeed config in a file, ZeRO-3, 2 ranks",
    ],
    "DeepSpeed and Accelerate in a loop of one's own": [
        "`loss.backward()` called by the script, ZeRO-3",
        "Accelerate, a plugin with `hf_ds_config`, ZeRO-2",
    ],
    "Beside other offloads": [
        "transformers: every_n_layers, recompute, ZeRO-3",
        "transformers: offload, nvme, ZeRO-2",
        "TRL: activation_offloading, DPO, adaptive, ZeRO-2",
        "DeepSpeed: CheckpointHiddenStatesOffload, ZeRO-3",
        "torch_remat, nvme, ZeRO-3",
        "DeepCompile: offload_activation, ZeRO-3",
    ],
    "TRL and PEFT": ["TRL SFTTrainer with packing, adaptive, ZeRO-2", "TRL DPOTrainer with LoRA, ZeRO-2"],
}


def is_covering(section: str, row: str) -> bool:
    return row in COVERING[section]
