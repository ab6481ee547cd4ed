"""Trains models of repeated blocks, each kind in an engine of its own.

Prints every rank's losses of each kind and, after them, a fingerprint of its parameters and of every random state; and
where the config has our block, what the report says of the kind.
"""

import argparse
import gc
import hashlib
import json
import sys

import deepspeed
import torch
from programs import parts
from torch import nn
from torch.nn import functional

parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
parser.add_argument("--local_rank", type=int, default=0)
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--kinds", nargs="+")
options = parser.parse_args()
WIDTH, ROWS, DEPTH = 64, 512, 3


class Layer(nn.Module):
    """Has parameters of its own, which ZeRO-3 gathers with the hooks of the block itself; takes more than a tensor."""

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


class Routed(nn.Module):
    """Its backward reaches the routers before the outputs of their layers."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.layers = nn.ModuleList(Layer() for _ in range(DEPTH))

    def forward(self, x):
        x = self.first(x)
        scale = x.detach().std()
        routed = []
        for layer in self.layers:
            x = layer(x, routed, scale=scale)
        return self.last(x).float().square().mean() + 0.1 * sum(one.float().logsumexp(-1).mean() for one in routed)


def of_parts(first):
    return lambda: parts.Net("linear", ((first, "Attention", "Dropout"),) * DEPTH, WIDTH, 0)


KINDS = {"routed": Routed, "plain": of_parts("Norm"), "counter": of_parts("Counter"), "tracker": of_parts("Tracker")}


def fingerprint(engine):
    digest = hashlib.sha256(repr(parts.states()).encode())
    for parameter in engine.module.parameters():
        with deepspeed.zero.GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")):
            digest.update(parameter.detach().float().cpu().numpy().tobytes())
    return digest.hexdigest()


def train(kind):
    parts.reset_states(0)
    model = KINDS[kind]()
    engine, *_ = deepspeed.initialize(args=options, model=model, model_parameters=model.parameters())
    rank, dtype = engine.global_rank, next(model.parameters()).dtype
    parts.reset_states(100 + rank)
    chance = torch.Generator().manual_seed(1 + rank)
    for _ in range(options.steps):
        loss = engine(torch.randn(ROWS, WIDTH, generator=chance).to(dtype))
        engine.backward(loss)
        engine.step()
        sys.stdout.write(f"LOSS {rank} {kind} {loss.item().hex()}\n")  # in one piece, or ranks would mix within a line
    sys.stdout.write(f"PARAMETERS {rank} {kind} {fingerprint(engine)}\n")
    offloader = getattr(engine, "activation_offloader", None)
    if offloader is not None:
        sys.stdout.write(f"REPORT {rank} {json.dumps({'kind': kind, **offloader.report().to_dict()})}\n")
    engine.destroy()


for kind in options.kinds:
    train(kind)
    gc.collect()
deepspeed.comm.destroy_process_group()
