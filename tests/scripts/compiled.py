"""Trains a compiled model without the block and then with each of several, and prints one JSON line for each run.

A line has the losses, a fingerprint of the parameters, what ``torch.compile`` has compiled, and the report.
"""

import argparse
import copy
import gc
import hashlib
import json
import sys
from pathlib import Path

import deepspeed
import torch
from torch import nn
from torch._dynamo.utils import compilation_time_metrics, counters
from torch.nn import functional

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=0)
parser.add_argument("--configs", type=Path, help="JSON: the config of each run")
parser.add_argument("--way", choices=("engine", "model", "blocks", "wrapped"))
parser.add_argument("--backend", default="aot_eager")
parser.add_argument("--varying", action="store_true")
parser.add_argument("--steps", type=int, default=10)
parser.add_argument("--layers", type=int, default=4)
options = parser.parse_args()
WIDTH, BATCH = 64, 4


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.blocks = nn.ModuleList(Block() for _ in range(options.layers))

    def forward(self, x, y):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return functional.mse_loss(self.last(x).float(), y)


def built(config):
    torch.manual_seed(0)
    model = Net()
    if options.way == "model":
        model.compile(backend=options.backend)
    if options.way == "wrapped":
        for index, block in enumerate(model.blocks):
            model.blocks[index] = torch.compile(block, backend=options.backend)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=copy.deepcopy(config))
    if options.way == "engine":
        engine.compile(backend=options.backend)
    if options.way == "blocks":
        for block in engine.module.blocks:
            block.compile(backend=options.backend)
    return engine


def length(step):
    return (256, 384, 256, 512, 448, 320)[step % 6] if options.varying else 512


def train(config):
    torch._dynamo.reset()
    counters.clear()
    compilation_time_metrics.clear()
    engine = built(config)
    chance = torch.Generator().manual_seed(1)
    losses, compiled_in = [], []
    for step in range(options.steps):
        compiled = len(compilation_time_metrics.get("_compile.compile_inner", ()))
        x, y = (torch.randn(BATCH, length(step), width, generator=chance) for width in (WIDTH, 1))
        loss = engine(x, y)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item().hex())
        if len(compilation_time_metrics.get("_compile.compile_inner", ())) > compiled:
            compiled_in.append(step)
    digest = hashlib.sha256()
    for parameter in engine.module.parameters():
        with deepspeed.zero.GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")):
            digest.update(parameter.detach().numpy().tobytes())
    offloader = getattr(engine, "activation_offloader", None)
    report = None if offloader is None else offloader.report().to_dict()
    engine.destroy()
    return {
        "losses": losses,
        "parameters": digest.hexdigest(),
        "compiled": len(compilation_time_metrics.get("_compile.compile_inner", ())),
        "frames": dict(counters["frames"]),
        "graphs": counters["stats"]["unique_graphs"],
        "breaks": sum(counters["graph_break"].values()),
        "compiled_in": compiled_in,
        "report": report,
    }


for config in json.loads(options.configs.read_text()):
    sys.stdout.write("RUN " + json.dumps(train(config)) + "\n")
    sys.stdout.flush()
    gc.collect()
deepspeed.comm.destroy_process_group()
