"""Sites: where rematerialization is proven, bit for bit, before it is used, and how long it takes.

Knows recipes and an accelerator; does not know plans.

[Note: Proof] A site is a recipe with its dtypes, shapes and strides; in one forward it occurs in each layer, say. The
n-th occurrence is not proven at first: its storage is saved as usual, and in backward, where it would be made again, it
is made and compared with what was saved. If every bit is equal, the n-th occurrence is made again from the next forward
on. Of equal elements (zeros, say) that proves nothing, and it is compared again. If one differs, raises, or had an
operand changed in place before backward, none of the site is used any more. A device is not waited for: a comparison is
read once it is done.

[Note: Kernels] Those of a CPU cut their work by the number of threads, and oneDNN has some of its own: the last bits
may follow from that. So what was made by so many threads, and with oneDNN or without, is made again likewise.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import _disable_current_modes

from ds_tba.autograd.comparison import integers_of
from ds_tba.autograd.recipe import UNSAVED, Finder, NoRecipeError, Recipe, is_supported, note
from ds_tba.autograd.rules import OPS
from ds_tba.autograd.saved import Keeper, SavedCounted, SavedStorage, SavedView
from ds_tba.autograd.tensors import ViewSpec, base_of, storage_bytes
from ds_tba.config import BLOCK, OffloadConfig
from ds_tba.device.accelerator import Accelerator, moment
from ds_tba.errors import ActivationModifiedError, ConfigError, StorageError

logger = logging.getLogger(__name__)

MAX_SITES = 4096
MAX_PLACES = 1 << 16


@dataclass(slots=True, eq=False)
class Site:
    """One kind of work that may make storages again.

    Attributes:
        op: the last of its ops.
        reason: why it is not used; empty where nothing speaks against it.
        proven: the occurrences that were equal.
        occurred: how often it has in this forward.
    """

    op: str
    reason: str = ""
    proven: set[int] = field(default_factory=set)
    occurred: int = 0
    _sum_s: float = 0.0
    _measured: int = 0

    @property
    def seconds(self) -> float:
        """Of one making, as measured."""
        return self._sum_s / max(1, self._measured)

    def add_time(self, seconds: float) -> None:
        """One making was measured."""
        self._sum_s += seconds
        self._measured += 1


class Occurrence(NamedTuple):
    """One of the places of a forward that have the same site."""

    site: Site
    number: int

    @property
    def is_proven(self) -> bool:
        """Whether its storage need not be saved."""
        return not self.site.reason and self.number in self.site.proven

    @property
    def seconds(self) -> float | None:
        """Of making the storage, as measured; None unless it is proven."""
        return self.site.seconds if self.is_proven else None


class Kernels(NamedTuple):
    """What chooses among the kernels of a CPU; see [Note: Kernels]."""

    threads: int
    with_onednn: bool

    @classmethod
    def present(cls) -> Kernels:
        """As they are chosen now, in this thread."""
        return cls(torch.get_num_threads(), torch._C._get_mkldnn_enabled())

    def choose(self) -> None:
        """Choose them."""
        if torch.get_num_threads() != self.threads:
            torch.set_num_threads(self.threads)
        torch._C._set_mkldnn_enabled(self.with_onednn)


class Derivation(NamedTuple):
    """How a saved storage is made again: the recipe, its site, and how the storage was laid out.

    Attributes:
        kernels: that made it.
    """

    recipe: Recipe
    site: Occurrence
    spec: ViewSpec
    kernels: Kernels | None

    @property
    def depth(self) -> int:
        """See ``Recipe.depth``."""
        return self.recipe.depth

    @property
    def scratch_bytes(self) -> int:
        """Of what is made on the way, beside the storage itself."""
        return self.recipe.between_bytes

    def bound(self, share: Callable[[SavedView], SavedView]) -> Derivation:
        """The same with views of its own; see ``Recipe.bound``."""
        return self._replace(recipe=self.recipe.bound(share))

    def records(self) -> Iterator[SavedStorage]:
        """The saved storages that it is made of."""
        for held in self.recipe.held():
            if isinstance(held, SavedView):
                yield held.record

    def make(self) -> torch.Tensor:
        """The storage (uint8, 1-D).

        Raises:
            ActivationModifiedError, ActivationLostError, ActivationCorruptionError: as :meth:`Recipe.make`.
        """
        return storage_bytes(self.made())

    def made(self) -> torch.Tensor:
        """The output of the op, laid out as in forward."""
        with _as_in_forward(self.kernels):
            made = self.recipe.make()
            if made.stride() != self.spec.stride or made.untyped_storage().nbytes() != made.numel() * made.itemsize:
                laid_out = torch.empty_strided(
                    self.spec.shape, self.spec.stride, dtype=self.spec.dtype, device=made.device
                )
                made = laid_out.copy_(made)
        return made

    def differs(self, made: torch.Tensor, saved: torch.Tensor, offset: int) -> torch.Tensor | None:
        """Whether any bit differs, and whether the elements do (two bools); None where the two cannot be compared.

        Args:
            saved: a view of the storage that was saved, in whatever memory it lies now.
            offset: of that view in the storage, in elements.
        """
        spec = self.spec
        is_alike = (made.shape, made.stride(), made.dtype, made.device) == (
            spec.shape, spec.stride, saved.dtype, saved.device
        )  # fmt: skip
        if not is_alike:
            return None
        with _as_in_forward(self.kernels):
            whole = saved.as_strided(spec.shape, spec.stride, int(saved.storage_offset()) - offset)
            bits = integers_of(whole)
            return torch.stack(((integers_of(made) != bits).any(), bits.amin() != bits.amax()))


class _Comparison(NamedTuple):
    """A comparison under way.

    Attributes:
        differs: see :meth:`Derivation.differs`; in host memory, once ``done``.
        done: event; None where it is done.
        marks: of the clock, before and after the making.
    """

    site: Occurrence
    differs: torch.Tensor
    done: Any
    marks: tuple[Any, Any]


@dataclass
class RematerializationStats:
    """For the report.

    Attributes:
        seconds: that making them took, by what it took when it was measured.
        refused: recipes that were not found, by reason; each kind of tensor once.
    """

    seconds: float = 0.0
    refused: Counter[str] = field(default_factory=Counter)


class Sites:
    """All sites of a run; see [Note: Proof].

    Args:
        cache: whose saved views are operands.
        accelerator: the training device.
        exclude: ops that are not made again.
    """

    def __init__(self, cache: Keeper, accelerator: Accelerator, exclude: frozenset[str] = frozenset()) -> None:
        self.stats = RematerializationStats()
        self._finder = Finder(cache, exclude)
        self._accelerator = accelerator
        self._is_synchronous = accelerator.is_synchronized_device()
        self._sites: dict[Any, Site] = {}
        self._without: set[Any] = set()
        self._places: dict[Any, int] = {}
        self._unsaved: set[Any] = set()
        self._under_way: deque[_Comparison] = deque()

    def origin(self, tensor: torch.Tensor) -> Derivation | None:
        """How the storage of a tensor that is being saved could be made again; None where it cannot."""
        made = base_of(tensor)
        if not self._finder.may_find(made.grad_fn):
            return None
        place = self._place(made)
        if place in self._unsaved:
            return None
        try:
            recipe = self._finder.find(tensor)
        except NoRecipeError as reason:
            if str(reason) == UNSAVED and len(self._unsaved) < MAX_PLACES:
                self._unsaved.add(place)
            self._count_without(tensor, str(reason))
            return None
        # A node of another PyTorch, or one whose buffers are freed.
        except (AttributeError, LookupError, RuntimeError) as error:
            self._count_without(tensor, f"its node cannot be read ({type(error).__name__})")
            return None
        if recipe is None:
            return None
        spec, kernels = ViewSpec.of(made), Kernels.present() if self._is_synchronous else None
        site = self._site((recipe.signature(), spec.stride, kernels), recipe.rule.op)
        if site.reason:
            return None
        site.occurred += 1
        return Derivation(recipe, Occurrence(site, site.occurred), spec, kernels)

    def compare(self, origin: Derivation, tensor: torch.Tensor, offset: int) -> None:
        """Make a storage again, and compare it with what was saved of it; see :meth:`Derivation.differs`."""
        site, clock = origin.site.site, self._accelerator.clock
        before = clock.mark()
        try:
            made = origin.made()
        except ActivationModifiedError:
            self._refuse(site, "an operand was changed in place before backward")
            return
        except StorageError:  # backward will want the operand, too
            return
        except (LookupError, RuntimeError, ValueError, TypeError) as error:
            self._refuse(site, f"{type(error).__name__} while it was made again")
            return
        after = clock.mark()
        differs = origin.differs(made, tensor, offset)
        if differs is None:
            self._refuse(site, "made again it has another shape")
            return
        if not self._is_synchronous:
            host = self._accelerator.pin_memory(torch.empty(2, dtype=torch.bool))
            differs = host.copy_(differs, non_blocking=True)
        self._under_way.append(_Comparison(origin.site, differs, moment(self._accelerator), (before, after)))

    def note(self, tensor: torch.Tensor, held: SavedView | SavedCounted) -> None:
        """A tensor was saved: what recipes may want to know of it later."""
        note(tensor, held)

    def begin_forward(self) -> None:
        """Count occurrences anew, and read the comparisons that are done."""
        self._finder.begin_forward()
        self._places = {}
        for site in list(self._sites.values()):
            site.occurred = 0
        while True:
            try:
                comparison = self._under_way.popleft()
            except IndexError:  # perhaps because another thread begins a forward, too
                break
            (site, number), differs, done, marks = comparison
            if done is not None and not done.query():
                self._under_way.appendleft(comparison)
                break
            site.add_time(self._accelerator.clock.elapsed_s(*marks))
            is_other, has_values = differs.tolist()
            if is_other:
                self._refuse(site, "made again it differs")
            elif has_values:
                site.proven.add(number)

    def make(self, origin: Derivation) -> torch.Tensor:
        """Make a storage again (uint8, 1-D); raises what :meth:`Derivation.make` raises."""
        made = origin.make()
        self._share(origin)
        self.stats.seconds += origin.site.site.seconds
        return made

    def _share(self, origin: Derivation) -> None:
        """Tell the allocator that this stream has used the operands, which another may have allocated."""
        if not self._is_synchronous:
            stream = self._accelerator.current_stream()
            for held in origin.recipe.held():
                if held.held is not None and held.held.device == self._accelerator.device():
                    self._accelerator.share(held.held, stream)

    def summary(self) -> dict[str, Any]:
        """For the report."""
        sites = list(self._sites.values())
        refused = Counter(site.reason for site in sites if site.reason) + self.stats.refused
        return {
            "rematerialized_s": self.stats.seconds,
            "rematerialized_sites": dict(Counter(site.op for site in sites if site.proven and not site.reason)),
            "refused_sites": dict(refused),
        }

    def _place(self, made: torch.Tensor) -> Any:
        """Which of a forward's outputs of one op and shape this is: what was in vain there is not tried again."""
        kind = type(made.grad_fn), made.shape
        number = self._places[kind] = self._places.get(kind, 0) + 1
        return kind, number

    def _site(self, signature: Any, op: str) -> Site:
        site = self._sites.get(signature)
        if site is None:
            if len(self._sites) >= MAX_SITES:  # of lengths that do not come again; what was refused stays so
                unused = next((one for one, site in self._sites.items() if not site.reason), None)
                if unused is None:
                    return Site(op, "too many kinds")
                del self._sites[unused]
            site = self._sites[signature] = Site(op)
        return site

    def _refuse(self, site: Site, reason: str) -> None:
        if not site.reason:
            site.reason = reason
            logger.debug("%s is not rematerialized: %s", site.op, reason)

    def _count_without(self, tensor: torch.Tensor, reason: str) -> None:
        kind = (reason, tensor.dtype, tensor.shape)
        if kind not in self._without and len(self._without) < MAX_SITES:
            self._without.add(kind)
            self.stats.refused[reason] += 1
            logger.debug("a tensor of shape %s and %s is not rematerialized: %s", *reversed(kind[1:]), reason)


@contextmanager
def _as_in_forward(kernels: Kernels | None) -> Iterator[None]:
    """No graph, no autocast (which has acted in forward), no modes of the user; the same kernels."""
    with ExitStack() as state:
        state.enter_context(torch.no_grad())
        state.enter_context(torch._C.DisableTorchFunction())
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                state.enter_context(torch.autocast(kind, enabled=False))
        if torch._C._len_torch_dispatch_stack():
            state.enter_context(_disable_current_modes())
        present = None if kernels is None else Kernels.present()
        if kernels is not None and present is not None and kernels != present:
            kernels.choose()
            state.callback(present.choose)
        yield


def open_sites(config: OffloadConfig, cache: Keeper, accelerator: Accelerator) -> Sites | None:
    """The sites of a run; None where the config or PyTorch leaves nothing to rematerialize.

    Raises:
        ConfigError: as :func:`excluded_ops`.
    """
    if not config.rematerialize_enabled:
        return None
    exclude = excluded_ops(config)
    if not is_supported():
        logger.info("nothing is rematerialized: PyTorch %s does not show what its graph holds", torch.__version__)
        return None
    return Sites(cache, accelerator, exclude)


def excluded_ops(config: OffloadConfig) -> frozenset[str]:
    """The ops that are not made again.

    Raises:
        ConfigError: ``rematerialize.exclude`` names an op that there is no rule for.
    """
    unknown = sorted(config.rematerialize_exclude - OPS)
    if unknown:
        raise ConfigError(
            f'"{BLOCK}.rematerialize.exclude" names {", ".join(unknown)}: the ops are {", ".join(sorted(OPS))}.'
        )
    return config.rematerialize_exclude
