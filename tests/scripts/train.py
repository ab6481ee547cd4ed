"""A training script as a user has it: nothing in it knows about ds_tba.

Prints every rank's losses and, at the end, a fingerprint of its parameters.
"""

import argparse
import hashlib
import sys
import time

import deepspeed
import torch
from torch import nn

parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
parser.add_argument("--local_rank", type=int, default=0)
parser.add_argument("--steps", type=int, default=3)
parser.add_argument("--tokens", type=int, default=4096)
parser.add_argument("--pause_s", type=float, default=0.0)
options = parser.parse_args()


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        return x + self.drop(self.down(nn.functional.gelu(self.up(self.norm(x)))))


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(128, 128), *(Block(128) for _ in range(4)), nn.Linear(128, 1))
engine, *_ = deepspeed.initialize(args=options, model=model, model_parameters=model.parameters())
rank = engine.global_rank
dtype = torch.bfloat16 if engine.bfloat16_enabled() else torch.float32
chance = torch.Generator().manual_seed(1 + rank)
torch.manual_seed(100 + rank)
for _ in range(options.steps * engine.gradient_accumulation_steps()):
    x = torch.randn(options.tokens, 128, generator=chance).to(engine.device, dtype)
    y = torch.randn(options.tokens, 1, generator=chance).to(engine.device)
    loss = nn.functional.mse_loss(engine(x).float(), y)
    time.sleep(options.pause_s)
    engine.backward(loss)
    engine.step()
    sys.stdout.write(f"LOSS {rank} {loss.item().hex()}\n")  # in one piece, or ranks would mix within a line

digest = hashlib.sha256()
for parameter in engine.module.parameters():
    with deepspeed.zero.GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")):
        digest.update(parameter.detach().float().cpu().numpy().tobytes())
sys.stdout.write(f"PARAMETERS {rank} {digest.hexdigest()}\n")
engine.destroy()
deepspeed.comm.destroy_process_group()
