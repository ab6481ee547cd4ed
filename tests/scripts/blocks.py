"""Trains twice, without and with blocks recomputed, a model whose blocks have parameters of their own, and compares.

The blocks to recompute change from step to step; where the config offloads activations, it does so in the second run.
Prints one line per rank: EQUAL or DIFFERENT, the passes, and how many were recomputed.
"""

import argparse
import copy
import gc
import hashlib
import json
import sys
from contextlib import contextmanager, nullcontext
from pathlib import Path

import deepspeed
import torch
from deepspeed.runtime.zero import parameter_offload
from torch import nn
from torch.nn import functional

from ds_tba.recompute.blocks import Blocks, find_blocks

parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
parser.add_argument("--local_rank", type=int, default=0)
options = parser.parse_args()
deepspeed.init_distributed()
rank = deepspeed.comm.get_rank()
WIDTH, LAYERS = 64, 4
# By step.
PLANS = [(), (), (0, 1, 2, 3), (0, 1, 2, 3), (0, 2), (0, 2), (), (1,), (0, 1, 2, 3), (0, 1, 2, 3)]


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.gain, self.mix = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.eye(WIDTH))
        self.router = nn.Linear(WIDTH, 4)
        self.drop = nn.Dropout(0.1)

    def forward(self, x, side, *, scale):
        h = self.norm(x * self.gain) @ self.mix
        side.append(self.router(h))
        return x + self.down(self.drop(functional.gelu(self.up(h))) * scale)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(self, x, y):
        x = self.first(x)
        scale = x.detach().std()
        routed = []
        for layer in self.layers:
            x = layer(x, routed, scale=scale)
        # Backward reaches the routers before the outputs of their layers.
        side = sum(one.float().logsumexp(-1).mean() for one in routed)
        return functional.mse_loss(self.last(x).float(), y) + 0.1 * side


class Planned:
    def __init__(self):
        self.plan, self.passes, self.again = (), 0, 0

    def enter(self, block, inputs):
        self.passes += 1
        return block if block.index in self.plan else None

    def leave(self, block):
        pass

    def recompute(self, mark):
        self.again += 1

    def save_again(self, tensor):
        pass


def held_by_zero_3(model):
    """Return what its hooks have entered and not left, and gathered and not released."""
    there = [name for name, one in model.named_parameters() if getattr(one, "ds_active_sub_modules", None)]
    numbers = [one.shape.numel() for one in model.parameters()]
    return len(parameter_offload.FWD_MODULE_STACK), there, numbers


def listening(engine, blocks):
    """A forward's passes are told of: inside the cache's hooks, where there is one."""
    offloader = getattr(engine, "activation_offloader", None)
    if offloader is None:
        return blocks.listening()
    saving = type(offloader).saving

    @contextmanager
    def both(inputs=()):
        with saving(offloader, inputs), blocks.listening():
            yield

    offloader.saving = both
    return nullcontext()


def train(config, recompute):
    parameter_offload.FWD_MODULE_STACK.clear()
    torch.manual_seed(0)
    model = Net()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=copy.deepcopy(config))
    listener = Planned()
    blocks = Blocks(find_blocks(engine.module, None) if recompute else [], listener)
    dtype = torch.bfloat16 if engine.bfloat16_enabled() else torch.float32
    chance = torch.Generator().manual_seed(1 + rank)
    torch.manual_seed(100 + rank)
    losses = []
    for plan in PLANS:
        listener.plan = plan
        x = torch.randn(256, WIDTH, generator=chance).to(dtype)
        y = torch.randn(256, 1, generator=chance)
        with listening(engine, blocks):
            loss = engine(x, y)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    held = held_by_zero_3(engine.module)
    digest = hashlib.sha256(torch.get_rng_state().numpy().tobytes())
    for parameter in engine.module.parameters():
        with deepspeed.zero.GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")):
            digest.update(parameter.detach().float().numpy().tobytes())
    if recompute and blocks.left_out():
        raise SystemExit(str(blocks.left_out()))
    offloader = getattr(engine, "activation_offloader", None)
    if offloader is not None and not offloader.report().written_bytes:
        raise SystemExit("nothing was written")
    engine.destroy()
    del engine, model
    gc.collect()
    return (losses, digest.hexdigest(), held), listener


config = json.loads(Path(options.deepspeed_config).read_text())
without, _ = train({key: value for key, value in config.items() if key != "activation_nvme_offload"}, False)
recomputed, listener = train(config, True)
verdict = "EQUAL" if without == recomputed else "DIFFERENT"
sys.stdout.write(f"BLOCKS {rank} {verdict} {listener.passes} {listener.again}\n")
deepspeed.comm.destroy_process_group()
