"""ZeRO-0 to -3 in fp32 and bf16 with gradient accumulation 4, each with and without the block, on every rank.

Stages with an odd number are checkpointed in fp32, the others in bf16; ``--others`` trains it the other way round.
Prints one line per combination and rank: EQUAL or DIFFERENT, and the bytes that were written.
"""

import argparse
import copy
import gc
import sys
from pathlib import Path

import deepspeed
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
from train_gpt import GPT, parameters_sha256, use_exact_kernels

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=0)
parser.add_argument("--nvme_path", required=True)
parser.add_argument("--others", action="store_true")
options = parser.parse_args()
use_exact_kernels()
deepspeed.init_distributed()
rank = deepspeed.comm.get_rank()
SEQUENCE = 128
VARIANTS = ("plain", "checkpointed")


def train(config, recompute):
    torch.manual_seed(5)
    model = GPT(64, 2, SEQUENCE, recompute=recompute)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=copy.deepcopy(config))
    chance = torch.Generator().manual_seed(9 + rank)
    losses = []
    for _ in range(2 * engine.gradient_accumulation_steps()):
        text = torch.randint(0, 256, (4, SEQUENCE + 1), generator=chance).to(engine.device)
        loss = engine(text[:, :-1].contiguous(), text[:, 1:].contiguous())
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    fingerprint = parameters_sha256(engine)
    offloader = getattr(engine, "activation_offloader", None)
    written = offloader.report().written_bytes if offloader is not None else 0
    engine.destroy()
    del engine, model
    gc.collect()
    return (losses, fingerprint), written


for stage in range(4):
    for bf16 in (False, True):
        config = {
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": 4,
            "gradient_clipping": 1.0,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
            "bf16": {"enabled": bf16},
            "zero_optimization": {"stage": stage},
        }
        block = {"enabled": True, "nvme_path": options.nvme_path, "min_tensor_bytes": 16384, "placement": "nvme"}
        block["io"] = {"backend": "posix", "staging_bytes": 1 << 20}
        recompute = ((stage % 2 == 0) == bf16) != options.others
        plain, _ = train(config, recompute)
        offload, written = train({**config, "activation_nvme_offload": block}, recompute)
        verdict = "EQUAL" if plain == offload else "DIFFERENT"
        name = f"{stage} {'bf16' if bf16 else 'fp32'} {VARIANTS[recompute]}"
        sys.stdout.write(f"MATRIX {name} {rank} {verdict} {written}\n")  # in one piece, or ranks would mix in a line
deepspeed.comm.destroy_process_group()
