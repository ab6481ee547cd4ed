"""Trains with TRL's trainers, each case without our block and then with each placement, and compares.

A case is "trainer/data/checkpointing", such as "sft/packed/reentrant". Every run has a process of its own, forked
from one that has imported everything. Prints one line per run with the block: EQUAL or DIFFERENT, and the bytes that
were moved or recomputed, and another with the number of tensors that went through our hooks.
"""

import argparse
import hashlib
import json
import os
import random
import socket
import sys
import traceback
from pathlib import Path

import datasets
import deepspeed
import torch
import transformers
import trl
from tokenizers import Tokenizer, models, pre_tokenizers

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=0)
parser.add_argument("--nvme_path", required=True)
parser.add_argument("--stage", type=int, default=3)
parser.add_argument("--steps", type=int, default=8)
parser.add_argument("--min_tensor_bytes", type=int, default=4096)
parser.add_argument("--placements", nargs="+", default=["adaptive", "recompute", "nvme", "host", "keep"])
parser.add_argument("--cases", nargs="+")
parser.add_argument("--until_backward", action="store_true")
options = parser.parse_args()
WORDS = 60


def tokenizer():
    words = {"<pad>": 0, "<eos>": 1, "<unk>": 2, **{f"w{number}": number + 3 for number in range(WORDS)}}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def text(chance, least, most):
    return " ".join(f"w{chance.randrange(WORDS)}" for _ in range(chance.randrange(least, most)))


def model():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, intermediate_size=64,
        vocab_size=WORDS + 3, pad_token_id=0, eos_token_id=1, bos_token_id=1, tie_word_embeddings=False,
        max_position_embeddings=256,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def arguments(case, config, directory):
    checkpointing = case.split("/")[2]
    more = {"use_reentrant": checkpointing == "reentrant"}
    return {
        "output_dir": str(directory), "deepspeed": config, "max_steps": options.steps, "report_to": [], "use_cpu": True,
        "per_device_train_batch_size": 2, "save_strategy": "no", "logging_steps": 1, "bf16": False, "seed": 5,
        "disable_tqdm": True, "max_length": 64, "lr_scheduler_type": "constant", "learning_rate": 1e-3,
        "gradient_checkpointing": checkpointing != "none", "gradient_checkpointing_kwargs": more,
    }  # fmt: skip


def trainer(case, config, directory):
    kind, data, _ = case.split("/")
    chance, more = random.Random(3), arguments(case, config, directory)
    if kind == "sft":
        rows = [{"text": text(chance, 8, 80)} for _ in range(4 * options.steps)]
        args = trl.SFTConfig(**more, packing=data == "packed", dataset_text_field="text")
        trainer, extra = trl.SFTTrainer, {}
    elif kind in ("grpo", "rloo"):
        rows = [{"prompt": text(chance, 4, 8)} for _ in range(4 * options.steps)]
        config, trainer = (trl.GRPOConfig, trl.GRPOTrainer) if kind == "grpo" else (trl.RLOOConfig, trl.RLOOTrainer)
        del more["max_length"]
        args = config(**more, num_generations=2, max_completion_length=24, beta=0.0)
        extra = {"reward_funcs": lambda completions, **_: [float(len(set(one.split()))) for one in completions]}
    else:
        rows = [
            {"prompt": text(chance, 4, 8), "chosen": text(chance, 8, 30), "rejected": text(chance, 8, 30)}
            for _ in range(4 * options.steps)
        ]
        args = trl.DPOConfig(**more)
        trainer, extra = trl.DPOTrainer, {"ref_model": model()}
    dataset = datasets.Dataset.from_list(rows)
    return trainer(model=model(), args=args, train_dataset=dataset, processing_class=tokenizer(), **extra)


def train(case, config, directory):
    """Return the results of the run, and what our report says of it."""
    made = trainer(case, config, directory)
    made.train()
    engine = made.model_wrapped
    digest = hashlib.sha256()
    for parameter in engine.module.parameters():
        with deepspeed.zero.GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")):
            digest.update(parameter.detach().float().numpy().tobytes())
    losses = [float(one["loss"]).hex() for one in made.state.log_history if "loss" in one]
    offloader = getattr(engine, "activation_offloader", None)
    report = None if offloader is None else offloader.report().to_dict()
    return {"outcome": [losses, digest.hexdigest()], "report": report}


def in_a_process_of_its_own(case, config, directory):
    found = directory / "found.json"
    found.unlink(missing_ok=True)
    child = os.fork()
    if not child:
        with socket.socket() as probe:
            probe.bind(("", 0))
            os.environ["MASTER_PORT"] = str(probe.getsockname()[1])
        try:
            found.write_text(json.dumps(train(case, config, directory)))
        except BaseException:  # noqa: BLE001 - the parent must go on
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for left in Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_*_{os.environ['MASTER_PORT']}_*"):
                left.unlink()
            os._exit(0)
    os.waitpid(child, 0)
    return json.loads(found.read_text()) if found.exists() else {"outcome": None, "report": None}


def block(placement, directory):
    io = {"backend": "posix", "staging_bytes": 8 << 20, "swap_file_bytes": 256 << 20}
    made = {"nvme_path": str(directory), "io": io, "min_tensor_bytes": options.min_tensor_bytes}
    made["placement"] = "adaptive" if placement == "recompute" else placement
    made["until_backward"] = options.until_backward
    if placement == "recompute":  # nothing is large enough to be moved: recomputing alone makes the peak lower
        made |= {"recompute": True, "max_step_overhead": 1000.0, "min_tensor_bytes": 8 << 20}
    return made | ({"host_budget_bytes": 64 << 20} if placement == "host" else {})


directory = Path(options.nvme_path)
for case in options.cases:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto", "torch_adam": True}},
        "zero_optimization": {"stage": options.stage, "stage3_param_persistence_threshold": 0},
    }
    without = in_a_process_of_its_own(case, config, directory)["outcome"]
    for placement in options.placements:
        ours = in_a_process_of_its_own(
            case, {**config, "activation_nvme_offload": block(placement, directory)}, directory
        )
        verdict = "EQUAL" if without is not None and ours["outcome"] == without else "DIFFERENT"
        report = ours["report"] or {}
        moved = report.get("offloaded_bytes", 0) + report.get("recomputed_bytes", 0)
        sys.stdout.write(f"TRL {case} {placement} {verdict} {moved}\n")
        sys.stdout.write(f"SAVED {case} {placement} {report.get('packed_tensors')}\n")
        sys.stdout.flush()
