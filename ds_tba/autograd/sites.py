"""Sites: where rematerialization is proven, bit for bit, before it is used, and how long it takes.

Knows recipes and an accelerator; does not know plans, nor where storages go.

[Note: Proof] A site is a recipe with its dtypes, shapes and strides. A place is where in a forward the work of a site
is done, in one of many layers, say; places are told apart by the module that runs, the lines of it, and how often they
have run. When a tensor of a place that is not proven is saved, it is made from its operands, while forward has both,
and every bit is compared. Only where none differs is the tensor not saved, in that very forward. If one differs, or
making it raises, none of the site is used any more. Of equal elements (zeros, say) that proves nothing for the next
time.

[Note: Proof, again] What autograd does not record may begin at any time. So each place is compared again: at
its second visit, its fourth, then ever more seldom, but once in ``PERIOD`` visits at least, each place in a turn of its
own. Where one differs, and tensors were left out at that place since one was equal, ``RematerializationError`` says
since when gradients may be wrong; a place that owes this comparison is compared also after its site was given up. What
begins and ends between two comparisons of a place is not seen.

[Note: Late answers] A device is not waited for: a comparison is read once the device has done it. Until then the tensor
is kept if its place is not proven (``cache.py``).

[Note: Kernels] Those of a CPU cut their work by the number of threads, oneDNN has some of its own, and a thread may
flush denormals: the last bits may follow from that. So what was made by so many threads, with oneDNN or without, and
with ``torch.set_flush_denormal`` or without, is made again likewise.
"""

from __future__ import annotations

import logging
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import _disable_current_modes

from ds_tba.autograd.blocks import place_in_code
from ds_tba.autograd.comparison import integers_of
from ds_tba.autograd.recipe import MAX_DEPTH, UNSAVED, Finder, Held, NoRecipeError, Recipe, is_supported, note
from ds_tba.autograd.rules import OPS
from ds_tba.autograd.saved import Keeper, SavedCounted, SavedStorage, SavedView, StorageKey
from ds_tba.autograd.tensors import ViewSpec, base_of, storage_bytes
from ds_tba.config import BLOCK, OffloadConfig
from ds_tba.device.accelerator import Accelerator, Clock, moment
from ds_tba.errors import ActivationModifiedError, ConfigError, RematerializationError, StateError, StorageError

logger = logging.getLogger(__name__)

MAX_SITES = 4096
MAX_PLACES = 1024  # of a site
MAX_KINDS = 1 << 16
# Visits of a place after which it is compared again at the latest.
PERIOD = 64


@dataclass(slots=True, eq=False)
class Site:
    """One kind of work that may make storages again.

    Attributes:
        op: the last of its ops.
        reason: why it is not used; empty where nothing speaks against it.
        places: by their keys.
        forward: the last in which it was met.
    """

    op: str
    reason: str = ""
    places: dict[int, Place] = field(default_factory=dict)
    forward: int = 0
    _sum_s: float = 0.0
    _measured: int = 0

    @property
    def seconds(self) -> float:
        """Mean measured seconds to make the storage."""
        return self._sum_s / max(1, self._measured)

    @property
    def owes(self) -> bool:
        """Whether tensors were left out that no comparison has vouched for since."""
        return any(place.unseen_since is not None for place in self.places.values())

    def add_time(self, seconds: float) -> None:
        """One making was measured."""
        self._sum_s += seconds
        self._measured += 1


@dataclass(slots=True, eq=False)
class Place:
    """Where in a forward the work of a site is done; see [Note: Proof].

    Attributes:
        key: tells it apart from the others of its site.
        visits: how often a tensor was saved here.
        next_visit: that is compared again.
        equal_in: the last step in which it was compared, and equal; None before the first.
        unseen_since: the first step since then in which a tensor was left out and not compared; None without any.
    """

    site: Site
    key: int
    visits: int = 0
    next_visit: int = 0
    equal_in: int | None = None
    unseen_since: int | None = None

    @property
    def is_proven(self) -> bool:
        """Whether a comparison was equal, and nothing has spoken against the site since."""
        return self.equal_in is not None and not self.site.reason

    @property
    def is_due(self) -> bool:
        """Whether this visit is to be compared; see [Note: Proof, again]."""
        return not self.is_proven or self.visits >= self.next_visit

    def compared(self) -> None:
        """This visit is compared."""
        interval = min(PERIOD, self.visits)
        self.next_visit = self.visits + interval - self.key % max(1, interval // 2)

    @property
    def seconds(self) -> float | None:
        """Of making the storage, as measured; None unless it is proven."""
        return self.site.seconds if self.is_proven else None


class Kernels(NamedTuple):
    """What chooses among the kernels of a CPU; see [Note: Kernels]."""

    threads: int
    with_onednn: bool
    flushes_denormals: bool

    @classmethod
    def present(cls) -> Kernels:
        """As they are chosen now, in this thread."""
        # The processor does for Python's numbers what it does for PyTorch's, which has no name for asking.
        flushes = sys.float_info.min * 0.5 == 0.0
        return cls(torch.get_num_threads(), torch._C._get_mkldnn_enabled(), flushes)

    def choose(self) -> None:
        """Choose them."""
        if torch.get_num_threads() != self.threads:
            torch.set_num_threads(self.threads)
        torch._C._set_mkldnn_enabled(self.with_onednn)
        torch.set_flush_denormal(self.flushes_denormals)


class Origin(NamedTuple):
    """How a saved storage is made again: the recipe, its place, and how the storage was laid out.

    Attributes:
        kernels: that made it.
        depth: how many storages lie behind each other that can be made one from the other, with this one.
    """

    recipe: Recipe
    place: Place
    spec: ViewSpec
    kernels: Kernels | None
    depth: int = 1

    @property
    def scratch_bytes(self) -> int:
        """Of what is made on the way, beside the storage itself."""
        return self.recipe.between_bytes

    @property
    def work_bytes(self) -> int:
        """At most, of all that is in memory at once while it is made and compared."""
        result_bytes = self.recipe.steps[-1].nbytes
        return 2 * result_bytes + self.scratch_bytes + sum(_work_bytes(record) for record in set(self.records()))

    @property
    def sources(self) -> tuple[StorageKey, ...]:
        """The saved storages that it is made of."""
        return tuple(dict.fromkeys(record.key for record in self.records()))

    def bound(self, share: Callable[[SavedView], SavedView]) -> Origin:
        """The same with views of its own; see ``Recipe.bound``."""
        return self._replace(recipe=self.recipe.bound(share))

    def copied(self, cache: Keeper) -> Origin:
        """The same with copies of its own; see ``Recipe.copied``."""
        return self._replace(recipe=self.recipe.copied(cache))

    def records(self) -> Iterator[SavedStorage]:
        """The saved storages that it is made of, as often as they are held."""
        return (held.record for held in self.recipe.held() if isinstance(held, SavedView))

    def made(
        self, restore: Callable[[Held], torch.Tensor], clock: Clock | None, marks: list[tuple[Any, Any]]
    ) -> torch.Tensor:
        """The output of the op, laid out as in forward; see ``Recipe.make``.

        Raises:
            NoRecipeError: it cannot be the same bits.
        """
        spec, last = self.spec, self.recipe.steps[-1]
        with _as_in_forward(self.kernels):
            made = self.recipe.make(restore, clock, marks)
            if made.stride() != spec.stride or made.untyped_storage().nbytes() != made.numel() * made.itemsize:
                if not (_is_same_order(made, spec) or last.rule.is_rounded_once(last.constants)):
                    raise NoRecipeError("made again it has another order of elements")
                laid_out = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=made.device)
                made = laid_out.copy_(made)
        return made

    def flags(self, made: torch.Tensor, saved: torch.Tensor) -> torch.Tensor | None:
        """Whether any bit differs, and whether the elements do (two bools); None where the two cannot be compared."""
        form, other = ((one.shape, one.stride(), one.dtype, one.device) for one in (made, saved))
        if form != other:
            return None
        with _as_in_forward(self.kernels):
            bits = integers_of(saved)
            return torch.stack(((integers_of(made) != bits).any(), bits.amin() != bits.amax()))


def _is_same_order(made: torch.Tensor, spec: ViewSpec) -> bool:
    strides = zip(made.shape, made.stride(), spec.stride, strict=True)
    return all(size == 1 or one == other for size, one, other in strides)


class Comparison(NamedTuple):
    """A comparison under way, or done.

    Attributes:
        flags: see :meth:`Origin.flags`; in host memory, once ``done``.
        done: event; None where it is done.
        marks: of the clock, around each step of the making.
        step: in which the tensor was saved.
        visit: of the place.
        module: path of the module in which the tensor was saved; empty where the place was not proven before.
    """

    origin: Origin
    flags: torch.Tensor
    done: Any
    marks: list[tuple[Any, Any]]
    step: int
    visit: int
    module: str

    @property
    def is_done(self) -> bool:
        """Whether it can be read without waiting for the device."""
        return self.done is None or bool(self.done.query())


@dataclass
class RematerializationStats:
    """For the report.

    Attributes:
        seconds: that making them took, by what it took when it was measured.
        refused: recipes that were not found, by reason; each kind of tensor once.
    """

    seconds: float = 0.0
    refused: Counter[str] = field(default_factory=Counter)


def _nowhere() -> str:
    return ""


def _work_bytes(record: SavedStorage) -> int:
    """Of an operand, and where that is made again itself, of what this takes."""
    recipe = record.recipe
    passing_bytes = 0 if record.ticket is None else record.ticket.passing_bytes
    return record.nbytes + passing_bytes if recipe is None else recipe.work_bytes


class Sites:
    """All sites of a run; see [Note: Proof].

    Args:
        cache: whose saved views are operands.
        accelerator: the training device.
        exclude: ops that are not made again.

    Attributes:
        step: the number of the step that runs, from 1 on.
        running_module: tells the path of the module that runs.
    """

    def __init__(self, cache: Keeper, accelerator: Accelerator, exclude: frozenset[str] = frozenset()) -> None:
        self.stats = RematerializationStats()
        self.step = 1
        self.running_module: Callable[[], str] = _nowhere
        self._finder = Finder(cache, exclude)
        self._accelerator = accelerator
        self._is_synchronous = accelerator.is_synchronized_device()
        self._sites: dict[Any, Site] = {}  # the least recently met first
        self._forward = 0
        self._without: set[Any] = set()
        self._numbers: dict[Any, int] = {}
        self._unsaved: set[Any] = set()

    def origin(self, tensor: torch.Tensor) -> Origin | None:
        """How the storage of a tensor that is being saved could be made again; None where it cannot."""
        made = base_of(tensor)
        if not self._finder.may_find(made.grad_fn):
            return None
        kind = self._kind(made)
        if kind in self._unsaved:
            return None
        try:
            recipe = self._finder.find(tensor)
        except NoRecipeError as reason:
            if str(reason) == UNSAVED and len(self._unsaved) < MAX_KINDS:
                self._unsaved.add(kind)
            self._count_without(tensor, str(reason))
            return None
        # A node of another PyTorch, or one whose buffers are freed.
        except (AttributeError, LookupError, RuntimeError) as error:
            self._count_without(tensor, f"its node cannot be read ({type(error).__name__})")
            return None
        if recipe is None:
            return None
        depth = depth_of(recipe)
        if depth > MAX_DEPTH:
            self._count_without(tensor, "too many recipes behind each other")
            return None
        spec, kernels = ViewSpec.of(made), Kernels.present() if self._is_synchronous else None
        place = self._place((recipe.signature(), spec.stride, kernels), recipe.rule.op)
        is_over = place.site.reason and place.unseen_since is None
        return None if is_over else Origin(recipe, place, spec, kernels, depth)

    def compare(self, origin: Origin, tensor: torch.Tensor) -> Comparison | None:
        """Make the storage of a tensor that is being saved, and compare; None where that shows that it cannot be made.

        Args:
            origin: with views of its own.
        """
        place, marks = origin.place, list[tuple[Any, Any]]()
        try:
            made = origin.made(self._restore, self._accelerator.clock, marks)
            flags = origin.flags(made, base_of(tensor))
            if flags is not None and not self._is_synchronous:
                host = self._accelerator.pin_memory(torch.empty(2, dtype=torch.bool, device="cpu"))
                flags = host.copy_(flags, non_blocking=True)
        except NoRecipeError as reason:
            self._refuse(place.site, str(reason))
            return None
        except (StorageError, torch.OutOfMemoryError):  # backward will want the operand, too; or another time
            return None
        except (LookupError, RuntimeError, ValueError, TypeError) as error:
            self._refuse(place.site, f"{type(error).__name__} while it was made again")
            return None
        place.compared()
        if flags is None:
            self._refuse(place.site, "made again it has another shape")
            return None
        module = self.running_module() if place.is_proven else ""
        return Comparison(origin, flags, moment(self._accelerator), marks, self.step, place.visits, module)

    def read(self, comparison: Comparison) -> bool:
        """Whether no bit differed. Waits for the device.

        Raises:
            RematerializationError: one did, at a place where tensors were left out since none had.
        """
        place = comparison.origin.place
        if comparison.done is not None:
            comparison.done.synchronize()
        place.site.add_time(sum(self._accelerator.clock.elapsed_s(*marks) for marks in comparison.marks))
        is_other, has_values = comparison.flags.tolist()
        if not is_other:
            if has_values:
                place.equal_in = comparison.step
                place.unseen_since = None if comparison.visit == place.visits else comparison.step
            return True
        self._refuse(place.site, "made again it differs")
        since, place.unseen_since = place.unseen_since, None
        if since is not None:
            raise RematerializationError(_differs(comparison, since))
        return False

    def left_out(self, origin: Origin) -> None:
        """A storage is not saved, and was not compared, or is not known to be equal yet."""
        if origin.place.unseen_since is None:
            origin.place.unseen_since = self.step

    def note(self, tensor: torch.Tensor, held: SavedView | SavedCounted) -> None:
        """A tensor was saved: what recipes may want to know of it later."""
        note(tensor, held)

    def begin_forward(self) -> None:
        """A forward begins: nothing of earlier ones is entered, and places are told from its first op on."""
        self._finder.begin_forward()
        self._numbers = {}
        self._forward += 1

    def make(self, origin: Origin) -> torch.Tensor:
        """Make a storage again (uint8, 1-D).

        Raises:
            ActivationModifiedError, ActivationLostError, ActivationCorruptionError: as ``SavedView.restore``.
        """
        try:
            made = storage_bytes(origin.made(self._restore, None, []))
        except ActivationModifiedError as error:  # perhaps of a tensor that nobody else wants any more
            raise ActivationModifiedError(
                f"{error} Output of {origin.place.site.op} was to be made again from it, not saved: "
                f"{_remedy(origin.recipe)} if your model may change it."
            ) from error
        except NoRecipeError as error:
            raise StateError(f"{origin.place.site.op}, equal in forward: {error}; this is a bug in ds_tba") from error
        self.stats.seconds += origin.place.site.seconds
        return made

    def _restore(self, held: Held) -> torch.Tensor:
        """An operand, for the current stream; another may have allocated it."""
        operand = held.restore()
        if not self._is_synchronous and operand.device == self._accelerator.device():
            self._accelerator.share(operand, self._accelerator.current_stream())
        return operand

    def summary(self) -> dict[str, Any]:
        """For the report."""
        sites = list(self._sites.values())
        used = [site for site in sites if any(place.is_proven for place in list(site.places.values()))]
        refused = Counter(site.reason for site in sites if site.reason) + self.stats.refused
        return {
            "rematerialized_s": self.stats.seconds,
            "rematerialized_sites": dict(Counter(site.op for site in used)),
            "refused_sites": dict(refused),
        }

    def _kind(self, made: torch.Tensor) -> Any:
        """Which of a forward's outputs of one op and shape this is: what was in vain there is not tried again."""
        kind = type(made.grad_fn), made.shape
        number = self._numbers[kind] = self._numbers.get(kind, 0) + 1
        return kind, number

    def _place(self, signature: Any, op: str) -> Place:
        """The place of a site that comes next in this forward."""
        site, code = self._site(signature, op), place_in_code()
        number = self._numbers[site, code] = self._numbers.get((site, code), 0) + 1
        key = hash((code, number))
        place = site.places.get(key)
        if place is None:
            if len(site.places) >= MAX_PLACES:  # of forwards that do not come again
                site.places = {one.key: one for one in site.places.values() if one.unseen_since is not None}
            place = site.places[key] = Place(site, key)
        place.visits += 1
        return place

    def _site(self, signature: Any, op: str) -> Site:
        site = self._sites.get(signature)
        if site is not None and site.forward == self._forward:
            return site
        if site is None:
            if len(self._sites) >= MAX_SITES:  # of lengths that do not come again; what was refused stays so
                unused = next((one for one, site in self._sites.items() if not (site.reason or site.owes)), None)
                if unused is None:
                    return Site(op, "too many kinds")
                del self._sites[unused]
            site = Site(op)
        else:
            del self._sites[signature]
        site.forward = self._forward
        self._sites[signature] = site
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


def depth_of(recipe: Recipe) -> int:
    """How many storages lie behind each other that can be made one from the other, with the recipe's own."""
    behind = (held.record.origin for held in recipe.held() if isinstance(held, SavedView))
    return 1 + max((one.depth for one in behind if one is not None), default=0)


def _differs(comparison: Comparison, since: int) -> str:
    place = comparison.origin.place
    steps = f"step {since}" if since >= comparison.step else f"steps {since} to {comparison.step}"
    where = f", saved in {comparison.module}," if comparison.module else ""
    return (
        f"what {place.site.op} has made{where} is made again in backward instead of being saved, and that is no longer "
        f"the same: it was in step {place.equal_in}, so gradients of {steps} of this run may be wrong. Something has "
        "changed the tensor, or what it is made of, without autograd's knowledge (through .data, or under "
        f"torch.no_grad()). Go back to a checkpoint from before step {since} of this run, and "
        f"{_remedy(comparison.origin.recipe)}."
    )


def _remedy(recipe: Recipe) -> str:
    ops = sorted({step.rule.op for step in recipe.steps} & OPS)
    names = ", ".join(f'"{op}"' for op in ops)
    return f'set "{BLOCK}": {{"rematerialize": {{"exclude": [{names}]}}}}, or "rematerialize": false'


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
