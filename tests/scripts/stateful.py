"""Trains blocks, also such that keep state outside of what PyTorch knows, each kind in an engine of its own.

Prints every rank's losses of each kind and, after them, a fingerprint of its parameters and of every random state; and
where the config has our block, what the report says of the kind.
"""

import argparse
import gc
import hashlib
import json
import random
import sys
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass

import deepspeed
import numpy
import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
parser.add_argument("--local_rank", type=int, default=0)
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--kinds", nargs="+")
options = parser.parse_args()
WIDTH, ROWS = 64, 512
SCALE = ContextVar("SCALE", default=1.0)


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)
        self.chance, self.calls, self.memory = torch.Generator().manual_seed(3), 0, None

    def forward(self, x, extra=None):
        x = self.read(x, extra)
        h = self.norm(x).view(4, 2, ROWS // 8, WIDTH)
        x = x + functional.scaled_dot_product_attention(h, h, h, dropout_p=0.1).reshape(ROWS, WIDTH)
        return x + self.drop(self.down(functional.gelu(self.up(self.norm(x)))))

    def read(self, x, extra):
        return x


class Counts(Plain):
    def read(self, x, extra):
        self.calls += 1
        return x * (1 + self.calls / 100)


class Remembers(Plain):
    def read(self, x, extra):
        return x if self.memory is None else x + self.memory


class OwnGenerator(Plain):
    def read(self, x, extra):
        return x * (1 + torch.rand(WIDTH, generator=self.chance))


class PythonRandom(Plain):
    def read(self, x, extra):
        return x * (1 + random.random())


class NumpyRandom(Plain):
    def read(self, x, extra):
        return x * (1 + float(numpy.random.random()))


class Tracked(Plain):
    def read(self, x, extra):
        with fork():
            return self.drop(x)


class ReadsContext(Plain):
    def read(self, x, extra):
        return x * SCALE.get()


class ReadsArgument(Plain):
    def read(self, x, extra):
        return x * extra.scale


@dataclass
class Extra:
    scale: float = 1.0


STATES = {"model": torch.Generator().manual_seed(1234).get_state()}


@contextmanager
def fork():
    before = torch.get_rng_state()
    torch.set_rng_state(STATES["model"])
    try:
        yield
    finally:
        STATES["model"] = torch.get_rng_state()
        torch.set_rng_state(before)


KINDS = {
    "plain": Plain, "counter": Counts, "memory": Remembers, "generator": OwnGenerator, "python": PythonRandom,
    "numpy": NumpyRandom, "tracker": Tracked, "contextvar": ReadsContext, "argument": ReadsArgument, "sdpa": Plain,
}  # fmt: skip


class Net(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.blocks = nn.ModuleList(KINDS[kind]() for _ in range(3))
        self.extra = Extra()

    def forward(self, x, y):
        x = self.first(x)
        self.extra.scale = 1.5
        token = SCALE.set(1.5)
        with sdpa_kernel(SDPBackend.MATH) if self.kind == "sdpa" else nullcontext():
            for block in self.blocks:
                inside = block(x, self.extra if self.kind == "argument" else None)
                block.memory, x = x.detach() if self.kind == "memory" else None, inside
        SCALE.reset(token)
        self.extra.scale = 1.0
        return functional.mse_loss(self.last(x).float(), y)


def fingerprint(engine):
    digest = hashlib.sha256(torch.get_rng_state().numpy().tobytes() + repr(random.getstate()).encode())
    digest.update(repr(numpy.random.get_state(legacy=False)).encode())
    for parameter in engine.module.parameters():
        with deepspeed.zero.GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")):
            digest.update(parameter.detach().float().cpu().numpy().tobytes())
    return digest.hexdigest()


def train(kind):
    torch.manual_seed(0)
    model = Net(kind)
    engine, *_ = deepspeed.initialize(args=options, model=model, model_parameters=model.parameters())
    rank = engine.global_rank
    for seed in (torch.manual_seed, random.seed, numpy.random.seed):
        seed(100 + rank)
    chance = torch.Generator().manual_seed(1 + rank)
    for _ in range(options.steps):
        loss = engine(torch.randn(ROWS, WIDTH, generator=chance), torch.randn(ROWS, 1, generator=chance))
        engine.backward(loss)
        engine.step()
        sys.stdout.write(f"LOSS {rank} {kind} {loss.item().hex()}\n")
    sys.stdout.write(f"PARAMETERS {rank} {kind} {fingerprint(engine)}\n")
    offloader = getattr(engine, "activation_offloader", None)
    if offloader is not None:
        report = offloader.report().to_dict()
        sys.stdout.write(f"REPORT {rank} {json.dumps({'kind': kind, **report})}\n")
    engine.destroy()
    del engine, model
    gc.collect()


for kind in options.kinds:
    train(kind)
deepspeed.comm.destroy_process_group()
