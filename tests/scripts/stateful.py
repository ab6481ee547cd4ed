"""Trains blocks, also such that keep state outside of what PyTorch knows, each kind in an engine of its own.

Prints every rank's losses of each kind and, after them, a fingerprint of its parameters and of every random state; and
where the config has our block, what the report says of the kind.
"""

import argparse
import gc

import deepspeed
import torch
from programs import parts
from support.engine_runs import tell_training

parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
parser.add_argument("--local_rank", type=int, default=0)
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--kinds", nargs="+")
options = parser.parse_args()
WIDTH, ROWS, DEPTH = 64, 512, 3
KINDS = {
    "plain": "Norm", "counter": "Counter", "memory": "Memory", "generator": "OwnGenerator", "python": "PythonRandom",
    "numpy": "NumpyRandom", "tracker": "Tracker", "contextvar": "Context", "argument": "LateArgument",
}  # fmt: skip


def train(kind):
    parts.reset_states(0)
    model = parts.Net("linear", ((KINDS[kind], "Attention", "Dropout"),) * DEPTH, WIDTH, 0)
    engine, *_ = deepspeed.initialize(args=options, model=model, model_parameters=model.parameters())
    parts.reset_states(100 + engine.global_rank)
    chance = torch.Generator().manual_seed(1 + engine.global_rank)

    def loss():
        token = parts.FACTOR.set(1.5)  # in forward only
        try:
            dtype = next(model.parameters()).dtype
            return engine(torch.randn(ROWS, WIDTH, generator=chance).to(dtype))
        finally:
            parts.FACTOR.reset(token)

    tell_training(engine, "kind", kind, options.steps, loss, parts.states)


for kind in options.kinds:
    train(kind)
    gc.collect()
deepspeed.comm.destroy_process_group()
