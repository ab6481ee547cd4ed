"""Random trainings, from the model to the block of ``ds_config.json``; ``running.py`` runs them."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, fields, replace
from typing import Any

from programs import parts

MIB = 1 << 20
MIN_BYTES = 4096
CONTROL_FRACTION = 0.12  # of the draws with plans


DROPPED = ("at once", "held", "cycle")
# The variants of kinds of steps.
HOW = {
    "several": ("sum", "in order", "reversed"), "dropped": DROPPED, "refill": DROPPED, "after": (*DROPPED, "cycle"),
    "between": (*DROPPED, "cycle"), "double": ("inside", "outside"), "inputs": ("grad", "backward"),
}  # fmt: skip


@dataclass(frozen=True, repr=False)
class Step:
    """One step of the training."""

    kind: str  # a method of ``running.Training``
    rows: int = 0  # of the batch, a multiple of 8
    micro_steps: int = 1  # forwards, each with its backward, or that many before one backward
    how: str = ""  # which variant of its kind
    pick: int = 0  # a number to choose by, where the kind needs one
    forwards: tuple[tuple[int, ...], ...] = ()  # rows of each forward of each micro-step, for the kind "lengths"
    keeps: int = 0  # losses of ``rows`` each, kept with their graphs until the next step is through its backwards

    def __repr__(self) -> str:
        told = ((one.name, getattr(self, one.name)) for one in fields(self) if getattr(self, one.name) != one.default)
        return f"({', '.join(f'{name} {value}' for name, value in told)})"


@dataclass(frozen=True)
class Program:
    """All that one draw runs; see :func:`draw` for what each may be."""

    seed: int
    width: int = 64
    stem: str = "linear"
    blocks: tuple[tuple[str, ...], ...] = ()  # the names of the parts of each block
    steps: tuple[Step, ...] = ()
    optimizer: str = "SGD"
    set_to_none: bool = True
    batches: str = "fresh"  # or one buffer for each length, refilled past its version counter ("numpy", "data")
    input_grad: bool = False
    device: str = "cpu"  # or "late" for the asynchronous double
    placement: str = "adaptive"
    recompute: bool = False
    rematerialize: bool = False
    planner: str = "adaptive"
    max_step_overhead: float = 0.02
    budget_part: float | None = None  # of the kept peak, as ``activation_budget_bytes``
    host_bytes: int = 0
    staging_bytes: int = MIB
    lanes: int = 2
    integrity: str = "sampled"
    collector: str = "usual"  # when garbage is collected: or "often", or "in lanes" only
    # At random the control "looks" at the plan, makes "recordings", or its "clock" stops, jumps and runs backwards.
    surprises: str = ""
    lengths: tuple[int, ...] = ()  # of the layers of a model that is no :class:`parts.Net`; see :class:`parts.Lengths`
    budget_bytes: int | None = None  # ``activation_budget_bytes``, where it is not a part of the kept peak
    ssd: dict[str, float] = field(default_factory=dict)

    def block(self, directory: str, budget_bytes: int | None) -> dict[str, Any]:
        io = {"backend": "posix", "staging_bytes": self.staging_bytes, "swap_file_bytes": 256 * MIB,
              "write_lanes": self.lanes, "read_lanes": self.lanes, "integrity": self.integrity}  # fmt: skip
        return {
            "nvme_path": directory,
            "placement": self.placement,
            "min_tensor_bytes": MIN_BYTES,
            "max_step_overhead": self.max_step_overhead,
            "activation_budget_bytes": budget_bytes,
            "recompute": self.recompute,
            "rematerialize": self.rematerialize,
            "host_budget_bytes": self.host_bytes,
            "ssd": self.ssd,
            "io": io,
        }


# ---- drawing --------------------------------------------------------------------------------------------------------


def draw(seed: int) -> Program:
    chance = random.Random(f"program {seed}")
    placement = _weighed(chance, adaptive=11, nvme=5, host=2, keep=2)
    device = _weighed(chance, cpu=3, late=1) if placement != "keep" else "cpu"
    stem = _weighed(chance, linear=3, embedding=1)
    blocks = _draw_blocks(chance, device)
    batches = _weighed(chance, fresh=3, numpy=1, data=1) if stem == "linear" else "fresh"
    steps = _draw_steps(chance, placement, batches, blocks)
    recompute, rematerialize = chance.random() < 0.5, chance.random() < 0.8
    if recompute:
        blocks = tuple(tuple(_replaced(name, REPEATABLE) for name in names) for names in blocks)
    # A block that runs again needs its inputs unchanged, as any checkpoint; and where something is rematerialized the
    # error may come earlier in backward than without us, before a checkpoint has run again what has state. It may also
    # come where autograd has no use for the changed input of a block, of which an op's output is made again.
    has_state = any(":" in name and name != _replaced(name, STATELESS) for names in blocks for name in names)
    is_operand = any(names[0].startswith("Ops") for names in blocks)
    if (recompute and placement == "adaptive") or (rematerialize and (has_state or is_operand)):
        steps = tuple(replace(step, kind="usual", how="") if step.kind == "mutate" else step for step in steps)
    budget_part = chance.choice((0.9, 0.5, 0.25, 0.125)) if placement == "adaptive" and chance.random() < 0.45 else None
    planners = ("recompute", "tba", "keep") if recompute else ("tba", "keep")
    forced = placement == "adaptive" and budget_part is None and chance.random() < 0.4
    uses_host = placement == "host" or (placement == "adaptive" and chance.random() < 0.25)
    program = Program(
        seed=seed,
        width=chance.choice((16, 32, 32, 64, 64, 128)),
        stem=stem,
        blocks=blocks,
        steps=steps,
        optimizer=_weighed(chance, SGD=1, AdamW=1),
        set_to_none=chance.random() < 0.6,
        batches=batches,
        input_grad=stem == "linear" and chance.random() < 0.4,
        device=device,
        placement=placement,
        recompute=recompute,
        rematerialize=rematerialize,
        planner=chance.choice(planners) if forced else "adaptive",
        max_step_overhead=chance.choice((1000.0, 1000.0, 0.02)),
        budget_part=budget_part,
        host_bytes=chance.choice((128 << 10, MIB, 16 * MIB)) if uses_host else 0,
        staging_bytes=chance.choice((MIB, 4 * MIB, 4 * MIB, 16 * MIB)),
        lanes=chance.choice((1, 2, 2)),
        integrity=_weighed(chance, sampled=2, full=2, off=1),
        collector=chance.choice(("usual", "usual", "often", "in lanes")),
    )
    return _controlled(program, chance) if placement == "adaptive" and chance.random() < CONTROL_FRACTION else program


def _controlled(program: Program, chance: random.Random) -> Program:
    """Steps that no plan was made for: other lengths and micro-steps, or none at all; and surprises."""
    course = chance.choice(("growing", "alternating", "random"))
    steps = []
    for number, step in enumerate(program.steps):
        if step.kind == "usual":
            most = parts.CAPACITY // 8
            rows = {"growing": min(most, 2 + number), "alternating": 2 + 6 * (number % 2)}
            rows_of_8 = rows.get(course) or chance.randint(1, most)
            times = chance.choice((1, 1, 2, 3)) if course == "random" else 1 + number // 8 % 2
            step = replace(step, rows=8 * rows_of_8, micro_steps=times)
        steps.append(step)
        if chance.random() < 0.1:
            steps.append(Step("idle", step.rows, 1, chance.choice(("nothing", "evaluation"))))
    surprises = chance.choice(("", "looks", "recordings", "clock"))
    return replace(program, steps=tuple(steps), surprises=surprises)


# By the name of a part that may not run a second time: one that may, in its place.
STATELESS = {part.__name__: "Dropout" for part in (*parts.STATEFUL, parts.BatchNorm)}
# The same for any checkpoint. It cannot run again what reads or changes state, nor what changes its input or saves a
# strided nested tensor. And it hands out an alias of what a Function saved, which ``.grad`` may then share.
REPEATABLE = STATELESS | {
    "ReturnsLeaf": "ReturnsFresh", "ReturnsBuffer": "ReturnsFresh", "ChangesInput": "InPlace", "Nested": "Dropout",
}  # fmt: skip


def _replaced(name: str, others: dict[str, str]) -> str:
    kind, colon, around = name.partition(":")
    return others.get(kind, kind) + colon + around


def _draw_blocks(chance: random.Random, device: str) -> tuple[tuple[str, ...], ...]:
    """Two to five blocks, mostly alike."""
    depth = chance.randint(2, 5)
    first = _draw_parts(chance, device)
    if chance.random() < 0.75:
        return (first,) * depth
    return tuple(_draw_parts(chance, device) for _ in range(depth))


def _draw_parts(chance: random.Random, device: str) -> tuple[str, ...]:
    """One to three parts; those that change their input come first, where it is nobody else's."""
    names = []
    for number in range(chance.choice((1, 2, 2, 3))):
        groups = {parts.USUAL: 7, (parts.Ops,): 6, parts.CHANGES: 3, parts.KINDS: 2, parts.OF_USERS: 4,
                  parts.STATEFUL: 7, parts.STREAMS: 6 if device == "late" else 0}  # fmt: skip
        kind = chance.choice(chance.choices([*groups], [*groups.values()])[0])
        if kind is parts.ChangesInput and number:
            kind = parts.InPlace
        around = _weighed(chance, none=8, non_reentrant=1, reentrant=1)
        # The kernels of usual operations run on the host: under a checkpoint they would run while another stream is on.
        may_run_again = kind is not parts.ChangesInput and kind not in parts.STREAMS
        name = f"Ops/{chance.randrange(1 << 20)}" if kind is parts.Ops else kind.__name__
        names.append(name + (f":{around}" if around != "none" and may_run_again else ""))
    return tuple(names)


def _draw_steps(
    chance: random.Random, placement: str, batches: str, blocks: tuple[tuple[str, ...], ...]
) -> tuple[Step, ...]:
    """A course of one kind, of random lengths, of several forwards before a backward, or of a bit of everything."""
    count = chance.randint(12, 25) if placement == "adaptive" else chance.randint(8, 14)
    course = _weighed(chance, steady=8, lengths=3, several=3, mixed=6)
    rows = 8 * chance.choice((2, 4, 8, 8, 16))
    micro_steps = chance.choice((1, 1, 2, 3))
    reuses = any(name.startswith("ReusesBuffer") for names in blocks for name in names)
    several = Step("several", rows, chance.choice((2, 2, 3)), chance.choice(HOW["several"]))
    steps = []
    for _ in range(count):
        step = Step("usual", rows, micro_steps)
        if course == "several":
            step = several
        if course == "lengths" or (course == "mixed" and chance.random() < 0.3):
            step = replace(step, rows=8 * chance.randint(1, parts.CAPACITY // 8))
        if (course == "mixed" and chance.random() < 0.5) or chance.random() < 0.06:
            step = _draw_special(chance, step, batches, len(blocks), reuses)
        steps.append(step)
    return tuple(steps)


def _draw_special(chance: random.Random, step: Step, batches: str, depth: int, reuses: bool) -> Step:
    kind = _weighed(chance, several=2, dropped=2, between=1, after=2, retain=1, double=1, evaluate=1, raises=1, fails=1,
                    inputs=1, mutate=1, refill=3 if batches != "fresh" else 0)  # fmt: skip
    if reuses and kind in ("retain", "double"):  # autograd refuses these, once the buffer has changed
        kind = "usual"
    times = chance.choice((2, 3)) if kind == "several" else 1
    return Step(kind, step.rows, times, chance.choice(HOW.get(kind, ("",))), chance.randint(0, depth))


def _weighed(chance: random.Random, **weights: int) -> str:
    return chance.choices([*weights], [*weights.values()])[0]
