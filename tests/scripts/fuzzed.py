"""Random trainings (``programs/trainings.py``) under DeepSpeed's engine, with the block and without: says what differs.

    python fuzzed.py DIR SEED [SEED ...]

A program's model, lengths, micro-batches, graphs without a backward and evaluations are taken; the rest is the
engine's. Wants the variables that the launcher sets.
"""

import gc
import random
import sys
from dataclasses import replace

import deepspeed
import torch
from programs import parts
from programs.running import TOKENS, Tape, collecting
from programs.trainings import Program, draw

BUCKET = 1 << 20  # elements; DeepSpeed's default reserves gigabytes
STEPS = 15


def program_of(seed: int) -> Program:
    """The program of a seed as far as an engine can run it."""
    program = draw(seed)
    no_engine = {kind.__name__ for kind in (*parts.STREAMS, *parts.FUNCTIONS)}
    blocks = tuple(
        tuple(name for name in names if name.partition(":")[0] not in no_engine) or ("Mlp",) for names in program.blocks
    )
    micro_steps = program.steps[0].micro_steps
    steps = tuple(
        replace(step, kind=step.kind if step.kind in ("dropped", "evaluate") else "usual", micro_steps=micro_steps)
        for step in (program.steps * STEPS)[:STEPS]
    )
    return replace(program, blocks=blocks, steps=steps, device="cpu", planner="adaptive", placement="adaptive")


def train(program: Program, block: dict | None) -> Tape:
    """Losses of every forward and parameters after every step."""
    tape = Tape()
    parts.reset_states(program.seed)
    data = torch.Generator().manual_seed(program.seed)
    net = parts.Net(program.stem, program.blocks, program.width, TOKENS)
    engine, *_ = deepspeed.initialize(
        model=net, model_parameters=net.parameters(), config=config_of(program) | ({} if block is None else block)
    )
    assert (getattr(engine, "activation_offloader", None) is not None) == (block is not None)

    def forward(rows: int) -> torch.Tensor:
        if program.stem == "embedding":
            batch = torch.randint(0, TOKENS, (rows,), generator=data)
        else:
            batch = torch.randn(rows, program.width, generator=data)
        parts.ThreadLocal.there.factor = 1.5
        token = parts.FACTOR.set(1.5)
        loss: torch.Tensor = engine(batch)
        parts.FACTOR.reset(token)
        del parts.ThreadLocal.there.factor
        tape.note("loss", loss)
        return loss

    for number, step in enumerate(program.steps):
        for _ in range(step.micro_steps):
            loss = forward(step.rows)
            if step.kind == "dropped":
                cycle = [forward(step.rows)]
                cycle.append(cycle)
                del cycle
            if step.kind == "evaluate":
                engine.eval()
                with torch.no_grad():
                    forward(24)
                engine.train()
            engine.backward(loss)
            engine.step()
        for name, parameter in net.named_parameters():
            tape.note(f"step {number} {name}", parameter)
    for name, value in parts.states().items():
        tape.note(name, value)
    engine.destroy()
    return tape


def config_of(program: Program) -> dict:
    """Without the block."""
    chance = random.Random(f"engine {program.seed}")
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": program.steps[0].micro_steps,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {
            "stage": chance.choice((0, 1, 2)),
            "reduce_bucket_size": BUCKET,
            "allgather_bucket_size": BUCKET,
        },
    }


def main() -> None:
    torch.set_num_threads(1)
    directory, *seeds = sys.argv[1:]
    for seed in map(int, seeds):
        program = program_of(seed)
        reference = train(program, None)
        with collecting(program.collector):
            found = train(program, {"activation_nvme_offload": program.block(directory, None)})
        gc.collect()
        difference = reference.difference(found)
        sys.stdout.write(f"SEED {seed} {'DIFFERS, ' + difference if difference else 'is exact'}\n")
        if difference:
            sys.stdout.write(program.describe() + "\n")


if __name__ == "__main__":
    main()
