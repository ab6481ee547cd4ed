"""Trains pipelines one after the other, as a user's script does: nothing in it knows about ds_tba.

    deepspeed pipeline.py CASES

``CASES`` is a JSON file: a list of objects with ``name``, ``config`` (for DeepSpeed) and ``options`` (see ``OPTIONS``).
Prints every rank's losses and a fingerprint of its parameters, in one JSON line for each case.
"""

import argparse
import gc
import hashlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import deepspeed
import torch
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from torch import nn

WIDTH, CLASSES = 64, 32
OPTIONS = {
    "steps": 6,
    "stages": 2,
    "depth": 4,
    "rows": 32,
    "tied": False,
    "evaluates": False,
    "varies": False,  # micro-batches of other lengths in every step
    "is_masked": False,  # stages hand over a tuple
    "is_seeded": False,  # PipelineModule seeds every layer
    "raises": False,  # once, in the middle of a schedule; the script goes on with the next batch
}


class Interruption(Exception):
    """Raised by a block."""


class Embedding(nn.Module):
    def __init__(self, options):
        super().__init__()
        self.is_masked = options.is_masked
        self.weight = nn.Parameter(torch.randn(CLASSES, WIDTH) / 8)

    def forward(self, x):
        if self.is_masked:
            tokens, mask = x
            return nn.functional.embedding(tokens, self.weight), mask
        return nn.functional.embedding(x, self.weight)


class Block(nn.Module):
    def __init__(self, options):
        super().__init__()
        self.is_masked = options.is_masked
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        x, *mask = x if self.is_masked else (x,)
        # The output is saved, too, and is what the engine sends to the next stage.
        x = torch.tanh(x + self.drop(self.down(nn.functional.gelu(self.up(self.norm(x))))))
        return (x * mask[0].to(x.dtype), *mask) if self.is_masked else x


class Raising(Block):
    passes = 0

    def forward(self, x):
        if torch.is_grad_enabled():
            Raising.passes += 1
            if Raising.passes == 14:
                raise Interruption
        return super().forward(x)


class Head(nn.Module):
    def __init__(self, options):
        super().__init__()
        self.is_masked = options.is_masked
        self.out = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        return self.out(x[0] if self.is_masked else x)


def logits(embedding, x):
    return nn.functional.linear(x[0] if embedding.is_masked else x, embedding.weight)


def loss_of(outputs, labels):
    return nn.functional.cross_entropy(outputs.float().view(-1, CLASSES), labels.view(-1))


def batches(options, micro_batches, seed):
    chance = torch.Generator().manual_seed(seed)
    step = 0
    while True:
        for _ in range(micro_batches):
            length = 32 + 8 * (step % 3) if options.varies else 32
            tokens = torch.randint(0, CLASSES, (options.rows, length), generator=chance)
            mask = (torch.rand(options.rows, length, 1, generator=chance) > 0.1).long()
            yield (tokens, mask) if options.is_masked else tokens, tokens.roll(1, 1)
        step += 1


def layers_of(options):
    block = Raising if options.raises else Block
    first, last = LayerSpec(Embedding, options), LayerSpec(Head, options)
    if options.tied:
        first = TiedLayerSpec("embedding", Embedding, options)
        last = TiedLayerSpec("embedding", Embedding, options, forward_fn=logits)
    return [first, *(LayerSpec(block, options) for _ in range(options.depth)), last]


def train(config, options):
    Raising.passes = 0
    torch.manual_seed(0)
    model = PipelineModule(
        layers_of(options),
        num_stages=options.stages,
        loss_fn=loss_of,
        partition_method="uniform",
        checkpointable_layers=["Block"],
        seed_layers=options.is_seeded,
        dynamic_shape=options.varies,
    )
    engine, *_ = deepspeed.initialize(config=config, model=model, model_parameters=list(model.parameters()))
    torch.manual_seed(100 + engine.global_rank)
    micro_batches = engine.gradient_accumulation_steps()
    data = batches(options, micro_batches, engine.grid.data_parallel_id)
    held_out = batches(options, micro_batches, 1000)
    losses = []
    for step in range(options.steps):
        try:
            losses.append(engine.train_batch(data).item().hex())
        except Interruption:
            engine.timers("train_batch").stop()
            engine.zero_grad()
            losses.append("raised")
            continue
        if options.evaluates and step % 2:
            losses.append(engine.eval_batch(held_out).item().hex())
    digest = hashlib.sha256()
    for parameter in engine.module.parameters():
        digest.update(parameter.detach().float().cpu().numpy().tobytes())
    engine.destroy()
    return {"losses": losses, "parameters": digest.hexdigest()}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=0)
    parser.add_argument("cases", type=Path)
    cases = json.loads(parser.parse_args().cases.read_text())
    deepspeed.init_distributed(dist_backend="gloo")
    rank = deepspeed.comm.get_rank()
    for case in cases:
        found = train(case["config"], SimpleNamespace(**{**OPTIONS, **case["options"]}))
        line = json.dumps({"case": case["name"], "rank": rank, **found})
        sys.stdout.write(f"FOUND {line}\n")  # in one piece, or ranks would mix within a line
        sys.stdout.flush()
        gc.collect()
    deepspeed.comm.destroy_process_group()
