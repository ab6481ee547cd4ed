"""Runs out of memory in a forward or a backward, under a limit of the process's address space."""

import argparse
import json
import resource
import sys
from pathlib import Path

import deepspeed
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from support.models import Mlp, Stack

parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
parser.add_argument("--local_rank", type=int, default=0)
parser.add_argument("--phase", choices=["forward", "backward"])
options = parser.parse_args()
ROOM_BYTES = 48 << 20


class Hungry(torch.autograd.Function):
    """Asks for more than there is, in the phase that is to fail."""

    @staticmethod
    def forward(ctx, x):
        return x + (grow() if options.phase == "forward" and is_last else 0)

    @staticmethod
    def backward(ctx, gradient):
        return gradient + (grow() if options.phase == "backward" and is_last else 0)


def grow():
    used_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used_bytes + ROOM_BYTES, resource.RLIM_INFINITY))
    try:
        return torch.zeros(2 * ROOM_BYTES)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


class Model(Stack):
    def __init__(self):
        super().__init__(lambda: Mlp(64), 3)

    def call(self, layer, x):
        return layer(Hungry.apply(x) if layer is self.layers[2] else x)


torch.manual_seed(1)
is_last = False
model = Model()
engine, *_ = deepspeed.initialize(
    model=model, model_parameters=model.parameters(), config=json.loads(Path(options.deepspeed_config).read_text())
)
for step in range(4):
    is_last = step == 3
    engine.backward(engine(torch.randn(64, 64)))
    engine.step()
