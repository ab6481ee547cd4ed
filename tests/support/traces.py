"""Traces for the tests of the planners: small ones by hand, and any that hypothesis likes."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import strategies as st

from ds_tba.plan.plan import Limits, Plan, Prediction
from ds_tba.plan.replay import Assignment, Replay, Timeline
from ds_tba.plan.trace import FORMAT, OUTSIDE, BlockTrace, Resources, StorageTrace, Trace

SIZE = 4096 * 1000
TICK_S = 2.0**-10
UNLIMITED = float("inf")
NO_DRIVE = {"write_bytes_per_s": 0.0, "read_bytes_per_s": 0.0}


def resources(
    write: float = SIZE, read: float = SIZE, copy: float = UNLIMITED, staging_bytes: int = 100 * SIZE
) -> Resources:
    """One path, as fast beside the other kind as alone."""
    return Resources(write, read, copy, copy, staging_bytes)


def storage(pack_s: float, use_s: float, freed_s: float | None = None, blocks: tuple[int, ...] = (0,)) -> StorageTrace:
    """Return a storage of SIZE bytes that is not needed in forward after it was packed."""
    return StorageTrace(SIZE, "layer.0", blocks, pack_s, pack_s, use_s, use_s if freed_s is None else freed_s)


def one_block(*storages: StorageTrace, machine: Resources, inputs: tuple[int, ...] = ()) -> Trace:
    """A forward of 1 s and a backward of 2 s."""
    return Trace(storages, (BlockTrace("layer.0", 0.0, 1.0, 1.0, 3.0, inputs),), machine, 3.0)


# Two blocks. Storage 0 is saved before the first, which takes it; 1 and 2 in the first; 2 also in the second, which
# takes it; 3 in the second; 4 behind both.
TRACE = Trace(
    tuple(
        storage(pack_s, 1.0, 1.0, blocks)
        for pack_s, blocks in ((0.0, (OUTSIDE,)), (0.1, (0,)), (0.2, (0, 1)), (0.6, (1,)), (1.0, (OUTSIDE,)))
    ),
    (BlockTrace("a", 0.0, 0.5, 1.0, 1.5, (0,)), BlockTrace("b", 0.5, 1.0, 1.0, 1.5, (2,))),
    resources(),
    2.0,
)


def with_rates(trace: Trace, write: float = 1.0, read: float = 1.0, copy: float = 1.0) -> Trace:
    factors = {"write": write, "read": read, "copy_out": copy, "copy_in": copy}
    machine = trace.resources
    rates = {f"{name}_bytes_per_s": factor for name, factor in factors.items()}
    changed = {name: getattr(machine, name) * factor for name, factor in rates.items()}
    changed["compute_s_per_byte"] = machine.compute_s_per_byte / copy
    return replace(trace, resources=replace(machine, **changed))


@st.composite
def machines(draw: st.DrawFn) -> Resources:
    rate = st.sampled_from([1e6, 3e6, 1e7, 1e8, UNLIMITED])
    copy = st.sampled_from([1e7, 1e8, UNLIMITED])
    rates = (*draw(st.tuples(rate, rate) | st.just((0.0, 0.0))), draw(copy), draw(copy))
    staging_bytes, is_synchronous = 4096 * draw(st.integers(1, 40)), draw(st.booleans())
    compute_s = draw(st.sampled_from([0.0, 0.0, 2.0**-24]))
    return Resources(*rates, staging_bytes, is_synchronous=is_synchronous, compute_s_per_byte=compute_s)


@st.composite
def traces(draw: st.DrawFn, most_storages: int = 7, most_blocks: int = 3) -> Trace:
    """Shared storages, any order in backward, blocks of no length, inputs that nobody saves, nothing at all.

    Times are multiples of powers of two, so that their sums are exact.
    """
    tick = st.integers(0, 8)
    lengths = [(draw(tick) * TICK_S, draw(tick) * 2 * TICK_S) for _ in range(draw(st.integers(0, most_blocks)))]
    forward_end_s = sum(forward for forward, _ in lengths) + draw(tick) * TICK_S
    end_s = forward_end_s + sum(backward for _, backward in lengths) + draw(tick) * TICK_S
    part = st.integers(0, 16).map(lambda number: number / 16)
    packs = sorted(draw(part) * forward_end_s for _ in range(draw(st.integers(0, most_storages))))
    storages = []
    for pack_s in packs:
        left_s = pack_s + draw(part) * (forward_end_s - pack_s) * draw(st.sampled_from([0.0, 0.0, 1.0]))
        use_s = forward_end_s + draw(part) * (end_s - forward_end_s)
        freed_s = use_s + draw(part) * (end_s - use_s)
        members = st.lists(st.integers(OUTSIDE, len(lengths) - 1), max_size=2, unique=True).map(tuple)
        nbytes = draw(st.integers(1, 20)) * 4096 - draw(st.sampled_from([0, 0, 4095]))
        module = f"layers.{draw(st.integers(0, 2))}.{draw(st.sampled_from(['attention', 'mlp']))}"
        times = (pack_s, left_s, max(left_s, use_s), max(left_s, freed_s))
        is_movable = draw(st.sampled_from([True, True, True, False]))
        storages.append(StorageTrace(nbytes, module, draw(members), *times, is_movable=is_movable))
    blocks, forward_s, backward_s = [], 0.0, end_s
    for number, (forward, backward) in enumerate(lengths):
        inputs = st.lists(st.integers(0, len(storages) - 1), max_size=2, unique=True) if storages else st.just([])
        ends_s = (forward_s + forward, max(forward_end_s, backward_s - backward))
        again = draw(st.sampled_from([True, True, False]))
        times = (forward_s, *ends_s, backward_s)
        blocks.append(BlockTrace(f"layers.{number}", *times, tuple(draw(inputs)), is_recomputable=again))
        forward_s, backward_s = ends_s
    left_s, count = draw(tick) * TICK_S, draw(st.integers(1, 2))
    return Trace(tuple(storages), tuple(blocks), draw(machines()), end_s, left_s, count)


@st.composite
def rematerializable(draw: st.DrawFn, most_storages: int = 7, most_blocks: int = 3) -> Trace:
    """The same, where some storages can be made again from none to two others, of which some can be made again, too."""
    trace = draw(traces(most_storages, most_blocks))
    storages = []
    for index, one in enumerate(trace.storages):
        if draw(st.booleans()):
            sources = st.lists(st.integers(0, index - 1), max_size=2, unique=True) if index else st.just([])
            seconds = draw(st.sampled_from([0.0, 0.125, 0.5, 2.0])) * TICK_S
            one = replace(one, rematerialize_s=seconds, sources=tuple(draw(sources)))
        storages.append(one)
    return replace(trace, storages=tuple(storages))


@st.composite
def limits(draw: st.DrawFn) -> Limits:
    return Limits(
        max_step_overhead=draw(st.sampled_from([0.0, 0.02, 0.2, 1.0])),
        activation_budget_bytes=draw(st.none() | st.integers(0, 300_000)),
        host_budget_bytes=draw(st.sampled_from([0, 0, 50_000, 10_000_000])),
        write_limit_bytes_per_step=draw(st.sampled_from([0, 100_000, UNLIMITED, UNLIMITED])),
        recompute=draw(st.sampled_from([True, True, False])),
    )


def read(text: str) -> Trace:
    """Return the trace that ``Trace.to_json`` has written."""
    data = json.loads(text)
    assert data.pop("format") == FORMAT
    for name, kind in (("storages", StorageTrace), ("blocks", BlockTrace)):
        data[name] = [kind(**{key: _hashable(value) for key, value in row.items()}) for row in data[name]]
    data["resources"] = Resources(**data["resources"])
    return Trace(**{key: _hashable(value) for key, value in data.items()})


def _hashable(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def simulate(trace: Trace, plan: Plan) -> Prediction:
    assignment = Assignment(np.array(plan.placements, np.int8), np.array(plan.recomputed_blocks, bool))
    return Replay(Timeline(trace), assignment, plan.prefetch_distance).cost


def uneven_layers(seed: int, count: int, per_layer: int, spread: float, rate: float) -> Trace:
    """A chain as ``layers``, of blocks whose sizes and times are up to ``spread`` times smaller or larger."""
    chance = random.Random(seed)
    sizes = [
        (int(SIZE * spread ** chance.uniform(-1, 1)) // 4096 * 4096 + 4096, spread ** chance.uniform(-1, 1))
        for _ in range(count)
    ]
    machine = resources(rate * SIZE * per_layer, rate * SIZE * per_layer, 100 * SIZE, 8 * SIZE)
    return _chain(sizes, per_layer, machine, left_s=1e-6)


def layers(count: int, per_layer: int, rate: float, staging_bytes: int = 4 * SIZE) -> Trace:
    """A chain: each block takes 1 s forward and 2 s backward, and saves so many storages; the first is its input."""
    return _chain([(SIZE, 1.0)] * count, per_layer, resources(rate * SIZE, rate * SIZE, 100 * SIZE, staging_bytes))


def _chain(sizes: list[tuple[int, float]], per_layer: int, machine: Resources, left_s: float = 0.0) -> Trace:
    """Blocks, each with the bytes of its storages and the seconds of its forward."""
    forward_s = sum(took_s for _, took_s in sizes)
    storages, blocks, start_s = [], [], 0.0
    for number, (nbytes, took_s) in enumerate(sizes):
        backward_s = forward_s + 2 * sum(later_s for _, later_s in sizes[number + 1 :])
        module = f"layers.{number}"
        times = (start_s, start_s + took_s, backward_s, backward_s + 2 * took_s)
        blocks.append(BlockTrace(module, *times, (number * per_layer,)))
        for index in range(per_layer):
            pack_s = start_s + took_s * index / per_layer
            use_s = backward_s + 2 * took_s * (per_layer - 1 - index) / per_layer
            freed_s = use_s + 2 * took_s / per_layer
            storages.append(StorageTrace(nbytes, f"{module}.part{index}", (number,), pack_s, pack_s, use_s, freed_s))
        start_s += took_s
    return Trace(tuple(storages), tuple(blocks), machine, 3 * forward_s + left_s)


def pipeline(forwards: int, ahead: int) -> Trace:
    """A stage of four blocks with five storages each, ``ahead`` forwards of 1 s before the first backward of 2 s."""
    order = ["F"] * ahead + ["B", "F"] * (forwards - ahead) + ["B"] * ahead
    begins: dict[str, list[float]] = {"F": [], "B": []}
    now_s = 0.0
    for kind in order:
        begins[kind].append(now_s)
        now_s += 1.0 if kind == "F" else 2.0
    storages, blocks = [], []
    for forward_s, backward_s in zip(begins["F"], begins["B"], strict=True):
        for number in range(4):
            start_s, back_s = forward_s + number / 4, backward_s + (3 - number) / 2
            for part in range(5):
                packed_s, used_s = start_s + part / 20, back_s + (4 - part) / 10
                storages.append(StorageTrace(SIZE, "", (len(blocks),), packed_s, packed_s, used_s, used_s + 0.1))
            blocks.append(BlockTrace(f"blocks.{number}", start_s, start_s + 0.25, back_s, back_s + 0.5))
    machine = resources(write=10 * SIZE, read=10 * SIZE, staging_bytes=10 * SIZE)
    firsts = tuple(20 * number for number in range(forwards))
    return Trace(tuple(storages), tuple(blocks), machine, now_s + 1.0, forwards=firsts)
