"""Recipes: the ops that rematerialize a storage, their operands and kernels; and sites, which say if that was proven.

Knows rules and the objects that autograd holds; cannot see the graph, nor where storages go.

[Note: Kernels] Those of a CPU cut their work by the number of threads, oneDNN has some of its own, and a thread may
flush denormals: the last bits may follow from that. So whoever changes these between forward and backward is told.

[Note: Order of elements] The vector loop of a CPU's kernel and the scalar loop behind it may round differently, so the
last bits of an element may depend on where it lies in memory. Steps get their operands in the strides of forward, and
give their results in the same, but for copies and casts: the graph does not tell into which memory format. Behind one
of those only such ops are rematerialized whose results are rounded once.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeGuard

import torch
from torch.utils._python_dispatch import _disable_current_modes

from ds_tba.core.saved import Held, Keeper, PassedThrough, SavedCounted, SavedStorage, SavedView, StorageKey
from ds_tba.core.tensors import ViewSpec, is_owned, is_parameter, nbytes_of
from ds_tba.device.accelerator import Event
from ds_tba.remat.rules import NoRecipeError, Step

logger = logging.getLogger(__name__)

# Visits of a site after which it is compared again at the latest.
PERIOD = 64


@dataclass(slots=True, eq=False)
class Site:
    """An op in the graph whose output can be rematerialized; see [Note: Proof].

    Attributes:
        op: the last of its recipe's.
        key: identity of the site.
        reason: cause for which it is not used; empty without one.
        visits: number of tensors saved here.
        next_visit: number of the next visit that is compared.
        equal_in: last step in which a comparison was equal; None before the first.
        unseen_since: first step since then in which a tensor was neither saved nor compared; None without any.
        measured_s: seconds that the recipe took in its last comparison.
    """

    op: str
    key: int
    reason: str = ""
    visits: int = 0
    next_visit: int = 0
    equal_in: int | None = None
    unseen_since: int | None = None
    measured_s: float = 0.0

    @property
    def is_proven(self) -> bool:
        """True if a comparison was equal, and none has differed since."""
        return self.equal_in is not None and not self.reason

    @property
    def is_due(self) -> bool:
        """True if this visit is to be compared; see [Note: Proof, again]."""
        return not self.is_proven or self.visits >= self.next_visit  # a change in mid-run would go unseen for ever

    def compared(self) -> None:
        """Note that this visit is compared, and choose the next one that is."""
        interval = min(PERIOD, self.visits)
        self.next_visit = self.visits + interval - self.key % max(1, interval // 2)  # not all sites in one step

    def refuse(self, reason: str) -> None:
        """Use it no more."""
        if not self.reason:  # the first reason is the one that is reported
            self.reason = reason
            logger.debug("%s is not rematerialized: %s", self.op, reason)


class Makeable(NamedTuple):
    """A way to rematerialize a storage.

    Attributes:
        site: op that makes it.
        depth: length of the chain of storages that can be made one from the other.
        sources: storages that it is made of.
    """

    site: Site
    depth: int
    sources: tuple[StorageKey, ...]

    @property
    def op(self) -> str:
        return self.site.op

    @property
    def seconds(self) -> float | None:
        return self.site.measured_s if self.site.is_proven else None


class Kernels(NamedTuple):
    """The settings that choose among the kernels of a CPU; see [Note: Kernels]."""

    threads: int
    with_onednn: bool
    flushes_denormals: bool

    @classmethod
    def present(cls) -> Kernels:
        """Return the calling thread's current settings."""
        # The processor does for Python's numbers what it does for PyTorch's, which has no name for asking.
        flushes = sys.float_info.min * 0.5 == 0.0
        return cls(torch.get_num_threads(), torch._C._get_mkldnn_enabled(), flushes)


@contextmanager
def as_in_forward() -> Iterator[None]:
    """Run without graph, autocast (which has acted in forward) and the user's modes."""
    with ExitStack() as state:
        state.enter_context(torch.no_grad())
        state.enter_context(torch._C.DisableTorchFunction())
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                state.enter_context(torch.autocast(kind, enabled=False))
        if torch._C._len_torch_dispatch_stack():
            state.enter_context(_disable_current_modes())
        yield


@dataclass(slots=True, eq=False)
class Recipe:
    """The ops that rematerialize the storage of a saved tensor.

    Attributes:
        site: op whose output it is.
        steps: ops, each behind those it needs; the last gives the storage itself.
        spec: layout of the storage.
        kernels: settings of forward; None on a device.
        held: the operands, each once.
        records: the saved storages that it is made of, as often as they are held.
    """

    site: Site
    steps: tuple[Step, ...]
    spec: ViewSpec
    kernels: Kernels | None
    held: tuple[Held, ...] = field(init=False)
    records: tuple[SavedStorage, ...] = field(init=False)

    def __post_init__(self) -> None:
        held = {id(one): one for step in self.steps for one in step.operands if isinstance(one, Held)}
        self.held = tuple(held.values())
        self.records = tuple(one.record for one in self.held if isinstance(one, SavedView))

    @property
    def scratch_bytes(self) -> int:
        """Return the most intermediate bytes that are held while it runs."""
        return sum(step.nbytes for step in self.steps[:-1])

    @property
    def work_bytes(self) -> int:
        """Return the most bytes that are in memory at once while the storage is made and compared."""
        return 2 * self.steps[-1].nbytes + self.scratch_bytes + sum(_work_bytes(one) for one in set(self.records))

    @property
    def depth(self) -> int:
        """Return the length of the chain of storages that can be made one from the other, with this one."""
        origins = (record.origin for record in self.records)
        return 1 + max((one.depth for one in origins if isinstance(one, Makeable)), default=0)

    @property
    def sources(self) -> tuple[StorageKey, ...]:
        """Return the saved storages that it is made of."""
        return tuple(dict.fromkeys(record.key for record in self.records))

    def owned(self, cache: Keeper) -> Recipe:
        """Return the same with operands of its own: copies of parameters and buffers as they are now, else twins."""
        own: dict[int, Held] = {}
        for one in self.held:
            if is_of_a_module(one):
                with torch.no_grad():
                    copy = one.held.detach().clone()  # an optimizer may step before backward
                # No micro-step: autograd has not saved it.
                own[id(one)] = SavedCounted(cache, copy, copy.untyped_storage(), nbytes_of(copy), "", None)
        with cache.lock:
            own |= {id(one): one.twin() for one in self.held if not isinstance(one, PassedThrough)}
        steps = (step._replace(operands=tuple(own.get(id(one), one) for one in step.operands)) for step in self.steps)
        return replace(self, steps=tuple(steps))

    def make(self, restored: Mapping[int, torch.Tensor]) -> torch.Tensor:
        """Return the output of the op, laid out as in forward. Called :func:`as_in_forward`.

        Args:
            restored: the tensors that are held, by the ids of what holds them.

        Raises:
            NoRecipeError: it cannot be the same bits.
        """
        spec, last = self.spec, self.steps[-1]
        results: list[torch.Tensor] = []
        for step in self.steps:
            held: list[Any] = [restored.get(id(one), one) for one in step.operands]
            operands = [results[one] if isinstance(one, int) else one for one in held]
            result = step.run(operands)
            taken = {one.untyped_storage().data_ptr() for one in operands if one is not None}
            if step is last and result.untyped_storage().data_ptr() in taken:
                result = result.clone()  # ``contiguous`` may return its operand, which must not be written into
            results.append(result)
        if result.stride() != spec.stride or result.untyped_storage().nbytes() != last.nbytes:
            strides = zip(result.shape, result.stride(), spec.stride, strict=True)
            is_same_order = all(size == 1 or one == other for size, one, other in strides)  # 1 has no order
            if not (is_same_order or last.rule.is_rounded_once(last.constants)):
                raise NoRecipeError("made again it has another order of elements")
            result = result.new_empty_strided(spec.shape, spec.stride, dtype=spec.dtype).copy_(result)
        return result


def _work_bytes(record: SavedStorage) -> int:
    """Return the bytes of an operand, with what loading it takes at most."""
    return record.nbytes if record.ticket is None else max(record.nbytes, record.ticket.load_bytes)


class Comparison(NamedTuple):
    """A comparison under way, or done.

    Attributes:
        flags: two booleans in host memory, once ``done``: any bit differs, and the elements are not all equal.
        done: event of the device, which comes with them.
        marks: of the clock, around the recipe.
        step: step of training in which the tensor was saved.
        visit: number of the site's visit.
        module: path of the module in which the tensor was saved; empty where the site was not proven before.
    """

    recipe: Recipe
    flags: torch.Tensor
    done: Event
    marks: tuple[Any, Any]
    step: int
    visit: int
    module: str

    @property
    def is_done(self) -> bool:
        """True if it can be read without waiting for the device."""
        return bool(self.done.query())


def is_of_a_module(held: Held) -> TypeGuard[PassedThrough]:
    """Return whether it is a parameter or buffer, whose owner may change it at any time."""
    return isinstance(held, PassedThrough) and (is_parameter(held.held) or is_owned(held.held))
