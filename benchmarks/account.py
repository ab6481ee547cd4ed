"""Accounts for the bytes in memory at the peak of a step, by the module that made them, with PyTorch's profiler.

The profiler sees every allocation of PyTorch's CPU allocator in the thread that trains, also an operator's own memory,
which no hook and no dispatch mode sees. It does not see staging, which is no tensor's memory, nor what the allocator
keeps.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

_MODULE = re.compile(r"nn\.Module: (\w+?)_\d+")
_NODE = re.compile(r"autograd::engine::evaluate_function: (\w+)")


def live_at_peak(step: Callable[[], object]) -> Counter[tuple[str, str, int]]:
    """Take a step, and return how many pieces of memory there were at its peak, by module, operator and bytes."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, with_stack=True) as profiler:
        step()
    changes = sorted(allocations(profiler.profiler.kineto_results.experimental_event_tree()), key=lambda one: one[0])
    now = peak = ends = 0
    for number, (_, _, nbytes, _) in enumerate(changes):
        now += nbytes
        if now > peak:
            peak, ends = now, number + 1
    live: dict[int, tuple[int, Any]] = {}
    for _, address, nbytes, event in changes[:ends]:
        live.pop(address, None)
        if nbytes > 0:
            live[address] = nbytes, event
    return Counter((*made_by(event), nbytes) for nbytes, event in live.values())


def allocations(events: Iterable[Any]) -> Iterator[tuple[int, int, int, Any]]:
    """Yield time, address, bytes (negative where they are freed) and event of each allocation."""
    from torch._C._profiler import _EventType

    waiting = list(events)
    while waiting:
        event = waiting.pop()
        waiting += event.children
        kind, fields = event.typed
        if kind == _EventType.Allocation:
            yield event.start_time_ns, fields.ptr, fields.alloc_size, event


def made_by(event: Any) -> tuple[str, str]:
    """Return the modules (or, in backward, the node of the graph) and the operator in which memory was allocated."""
    names = []
    while event := event.parent:
        names.append(event.name)
    modules = [found[1] for name in reversed(names) if (found := _MODULE.fullmatch(name))]
    node = next((found[1] for name in names if (found := _NODE.fullmatch(name))), "")
    operator = next((name for name in names if name.startswith("aten::")), names[0] if names else "")
    return "/".join(modules[-3:]) or node, operator
