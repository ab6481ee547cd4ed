"""TBA's planner as published: a prefix goes to NVMe, the suffix that backward wants too soon stays.

The rule (arXiv 2408.10013): walk the scopes in the order of forward. For each, V is what was packed before it and
twice its own bytes, T three times the forward of all less twice that of those before it. The first with V / T above
the drive's bandwidth begins the suffix. The last scope is kept, because its backward follows at once. No word of host
memory, recomputation, wear, or reads beside writes.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

from ds_tba.config import Placement
from ds_tba.plan.replay import Assignment, Timeline
from ds_tba.plan.trace import StorageTrace, Trace


@dataclass(slots=True)
class Scope:
    """Storages packed one after the other by one child (attention, MLP, ...) of one block."""

    first: int
    nbytes: int
    start_s: float


def tba_assignment(trace: Trace) -> Assignment:
    """Return TBA's choice: the prefix goes to NVMe, everything else is kept."""
    assignment = Timeline(trace).kept
    if trace.resources.write_bytes_per_s and trace.storages:
        assignment.placements[: _suffix(trace)] = Placement.NVME
    return assignment


def _suffix(trace: Trace) -> int:
    """Return the index of the first storage that is kept."""
    scopes, before_bytes = _scopes(trace), 0
    start_s, used_s = scopes[0].start_s, max(one.last_forward_use_s for one in trace.storages)
    end_s = max([used_s, *(block.forward_end_s for block in trace.blocks)])
    for scope in scopes[:-1]:
        until_s = 3 * (end_s - start_s) - 2 * (scope.start_s - start_s)
        if before_bytes + 2 * scope.nbytes > trace.resources.write_bytes_per_s * until_s:
            return scope.first
        before_bytes += scope.nbytes
    return scopes[-1].first


def _scopes(trace: Trace) -> list[Scope]:
    scopes = []
    for _, run in groupby(enumerate(trace.storages), lambda entry: _scope_of(trace, entry[1])):
        members = list(run)
        first, storage = members[0]
        scopes.append(Scope(first, sum(one.nbytes for _, one in members if one.is_movable), storage.pack_s))
    return scopes


def _scope_of(trace: Trace, storage: StorageTrace) -> tuple[int, str]:
    """Return the block that saved it first, and that block's child; a storage of no block is a scope by its module."""
    if not storage.blocks or storage.blocks[0] < 0:
        return -1, storage.module
    block = storage.blocks[0]
    below = storage.module.removeprefix(trace.blocks[block].module).lstrip(".")
    return block, below.partition(".")[0]
