"""Sites and recipes: what can be made again instead of being saved, and how; proven, bit for bit, before it is used.

Knows graph nodes, rules, an accelerator and the objects that autograd holds; not plans, nor where storages go.

[Note: Words] A *site* is an op in the graph whose output can be made again, told from others by its work (ops, numbers,
dtypes, shapes, strides), the module that runs, the lines of it, and how often that has come in a forward. A *recipe*
says how: the ops to run, and what on.

[Note: Proof] When an output is saved at a site that is not proven, it is made from its operands, while forward has
both, and every bit is compared. Only where none differs is the tensor not saved, in that very forward. If one differs,
or making it raises, the site is not used any more. Of equal elements (zeros, say) that proves nothing for the next
time.

[Note: Proof, again] What autograd does not record may begin at any time. So each site is compared again: at its second
visit, its fourth, then ever more seldom, but once in ``PERIOD`` visits at least, each site in a turn of its own. Where
one differs, and tensors were left out at that site since one was equal, ``RematerializationError`` says since when
gradients may be wrong. What begins and ends between two comparisons of a site is not seen.

[Note: Late answers] A device is not waited for: a comparison is read once the device has done it. Until then the tensor
is kept if its site is not proven (``cache.py``).

[Note: Kernels] Those of a CPU cut their work by the number of threads, oneDNN has some of its own, and a thread may
flush denormals: the last bits may follow from that. So what was made by so many threads, with oneDNN or without, and
with ``torch.set_flush_denormal`` or without, is made again likewise.

[Note: Operands] A node's saved operands are the objects that our pack hook returned for them: they are looked up, never
unpacked, and no hook of the user is called. An operand that the node does not hold may have been saved by another node:
each saved view is noted at the node that made it, in the node's ``metadata``, and lives no longer for that. Else it is
made again in turn, within a bound of steps and of bytes; a node that is wanted twice is one step. A recipe holds views
of its own of what it needs, not the nodes: another backward may free the buffers of a node.

[Note: What is refused] The output of an op is made again only where it is whole, dense and untouched since, and where
all that it is made of is under autograd's eye until backward. So no operand is a parameter, a buffer of a module or an
input of the model, whose owners change them without a version: ZeRO's optimizer in ``engine.step()``, a data loader.
Of a parameter or buffer that the op itself saves, a norm's weight say, a copy is the operand, taken in forward, if it
is small beside what need not be saved for it. No graph of an earlier forward is entered: what was changed in between,
it does not tell. What the graph cannot tell even of this forward, a change through ``tensor.data`` say, only the
comparisons see.

[Note: Order of elements] The vector loop of a CPU's kernel and the scalar loop behind it may round differently, so the
last bits of an element may depend on where it lies in memory. Steps get their operands in the strides of forward, and
give their results in the same, but for copies and casts: the graph does not tell into which memory format. Behind one
of those only such ops are made again whose results are rounded once.
"""

from __future__ import annotations

import inspect
import logging
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any, NamedTuple, TypeGuard

import torch
from torch.nn import functional
from torch.utils._python_dispatch import _disable_current_modes

from ds_tba.config import BLOCK, OffloadConfig
from ds_tba.core.saved import Keeper, PassedThrough, SavedCounted, SavedStorage, SavedView, StorageKey, nbytes_of
from ds_tba.core.tensors import (
    ViewSpec,
    base_of,
    form_of,
    has_plain_storage,
    integers_of,
    is_input,
    is_owned,
    is_parameter,
    next_sequence_number,
    shows_graph,
    storage_bytes,
)
from ds_tba.core.where import MODULE_CALL, RunningModule
from ds_tba.device.accelerator import Accelerator, Clock, PinnedAnswers, moment
from ds_tba.device.memory import is_out_of_memory
from ds_tba.errors import ActivationModifiedError, ConfigError, RematerializationError, StateError, StorageError
from ds_tba.remat.rules import OPS, PASSING, RULES, Operand, Output, Rule, constant, is_passing

logger = logging.getLogger(__name__)

# Steps of a recipe, and the bytes of those between relative to the result's.
MAX_STEPS, MAX_BETWEEN_FACTOR = 8, 4
# Recipes whose operands are made again themselves, one behind the other.
MAX_DEPTH = 4
# Copies of parameters take no larger part of the result's bytes, each.
MAX_COPIED_PART = 1 / 16
# What is remembered: sites, outputs that are not looked at again, and forms of tensors without a recipe.
MAX_SITES, MAX_UNSAVED, MAX_REFUSED = 1 << 18, 1 << 16, 4096
# Visits of a site after which it is compared again at the latest.
PERIOD = 64
UNSAVED = "an operand that nobody saves"
_NOTE = "ds_tba"
_NORMS: frozenset[CodeType] = frozenset(
    getattr(functional, name).__code__ for name in ("layer_norm", "rms_norm") if hasattr(functional, name)
)

Held = SavedView | SavedCounted | PassedThrough


class NoRecipeError(Exception):
    """A tensor cannot be made again; the text is the reason, in the report's words."""


# ---- sites ----------------------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class Site:
    """An op in the graph whose output can be made again; see [Note: Proof].

    Attributes:
        op: the last of its recipe's.
        key: tells it apart from the others.
        reason: why it is not used; empty where nothing speaks against it.
        visits: how often a tensor was saved here.
        next_visit: that is compared again.
        equal_in: the last step in which it was compared, and equal; None before the first.
        unseen_since: the first step since then in which a tensor was left out and not compared; None without any.
        measured_s: that making the output took, when that was compared last.
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
        """Whether a comparison was equal, and nothing has spoken against the site since."""
        return self.equal_in is not None and not self.reason

    @property
    def is_due(self) -> bool:
        """Whether this visit is to be compared; see [Note: Proof, again]."""
        return not self.is_proven or self.visits >= self.next_visit

    @property
    def seconds(self) -> float | None:
        """Of making the output, as measured; None unless it is proven."""
        return self.measured_s if self.is_proven else None

    def compared(self) -> None:
        """This visit is compared."""
        interval = min(PERIOD, self.visits)
        self.next_visit = self.visits + interval - self.key % max(1, interval // 2)

    def refuse(self, reason: str) -> None:
        """Use it no more."""
        if not self.reason:
            self.reason = reason
            logger.debug("%s is not rematerialized: %s", self.op, reason)


# ---- recipes --------------------------------------------------------------------------------------------------------


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


class Step(NamedTuple):
    """An op and its operands.

    Attributes:
        operands: numbers of earlier steps, objects that hold tensors, constants of the op; None for an operand that is
            left out.
        constants: numbers of the op.
    """

    rule: Rule
    operands: tuple[int | Held | torch.Tensor | None, ...]
    constants: tuple[Any, ...]
    output: Output

    @property
    def nbytes(self) -> int:
        """That it takes; a view takes none."""
        return 0 if self.rule.is_view else self.output.shape.numel() * self.output.dtype.itemsize

    def run(self, operands: list[torch.Tensor | None]) -> torch.Tensor:
        """The output.

        Raises:
            NoRecipeError: it has another shape or dtype than in forward, as that of an op in place may have.
        """
        made = self.rule.make(*operands, *self.constants, self.output)
        if made.shape != self.output.shape or made.dtype != self.output.dtype:
            raise NoRecipeError("made again it has another shape or dtype")
        return made

    def signature(self) -> tuple[Any, ...]:
        """Equal for equal work: the op, its constants, and of all tensors dtype, shape and stride."""
        return (self.rule.make, self.output, self.constants, *(_look(one) for one in self.operands))


def _look(one: int | Held | torch.Tensor | None) -> Any:
    if one is None or isinstance(one, int):
        return one
    if isinstance(one, torch.Tensor):  # a number, in host memory
        return one.item(), one.dtype
    if isinstance(one, SavedView):
        spec = one.spec
        return spec.dtype, spec.shape, spec.stride, spec.storage_offset
    return one.held.dtype, one.held.shape, one.held.stride(), type(one).__name__


class Recipe(NamedTuple):
    """How the storage of a saved tensor is made again.

    Attributes:
        site: whose output it is.
        steps: each behind those it needs; the last gives the storage itself.
        spec: how the storage was laid out.
        kernels: that made it.
        depth: how many storages lie behind each other that can be made one from the other, with this one.
    """

    site: Site
    steps: tuple[Step, ...]
    spec: ViewSpec
    kernels: Kernels | None
    depth: int

    @property
    def scratch_bytes(self) -> int:
        """Intermediate bytes held while it runs, at most."""
        return sum(step.nbytes for step in self.steps[:-1])

    @property
    def work_bytes(self) -> int:
        """At most, of all that is in memory at once while the storage is made and compared."""
        return 2 * self.steps[-1].nbytes + self.scratch_bytes + sum(_work_bytes(one) for one in set(self.records()))

    @property
    def sources(self) -> tuple[StorageKey, ...]:
        """The saved storages that it is made of."""
        return tuple(dict.fromkeys(record.key for record in self.records()))

    def held(self) -> Iterator[Held]:
        """What it needs, each once."""
        return iter({id(one): one for step in self.steps for one in step.operands if isinstance(one, Held)}.values())

    def records(self) -> Iterator[SavedStorage]:
        """The saved storages that it is made of, as often as they are held."""
        return (held.record for held in self.held() if isinstance(held, SavedView))

    def bound(self, share: Callable[[SavedView], SavedView]) -> Recipe:
        """The same with views of its own."""
        return self._with({id(one): share(one) for one in self.held() if isinstance(one, SavedView)})

    def copied(self, cache: Keeper) -> Recipe:
        """The same with copies of its own of parameters and buffers, as they are now."""
        copies: dict[int, Held] = {}
        for one in self.held():
            if _is_of_a_module(one):
                with torch.no_grad():
                    copy = one.held.detach().clone()
                copies[id(one)] = SavedCounted(cache, copy, nbytes_of(copy), "")
        return self._with(copies) if copies else self

    def _with(self, own: Mapping[int, Held]) -> Recipe:
        steps = (step._replace(operands=tuple(own.get(id(one), one) for one in step.operands)) for step in self.steps)
        return self._replace(steps=tuple(steps))

    def make(
        self, restore: Callable[[Held], torch.Tensor], clock: Clock | None, marks: list[tuple[Any, Any]]
    ) -> torch.Tensor:
        """The output of the op, laid out as in forward.

        Args:
            restore: gives the tensor that is held; asked for those of one step at a time.
            clock: None where nothing is timed.
            marks: where marks of the clock around each step are added, without what ``restore`` takes.

        Raises:
            NoRecipeError: it cannot be the same bits.
        """
        spec, last = self.spec, self.steps[-1]
        results: list[torch.Tensor] = []
        with _as_in_forward(self.kernels):
            for step in self.steps:
                operands = [
                    results[one] if isinstance(one, int) else restore(one) if isinstance(one, Held) else one
                    for one in step.operands
                ]
                before = None if clock is None else clock.mark()
                result = step.run(operands)
                taken = {one.untyped_storage().data_ptr() for one in operands if one is not None}
                if step is last and result.untyped_storage().data_ptr() in taken:
                    result = result.clone()
                if clock is not None:
                    marks.append((before, clock.mark()))
                results.append(result)
            if result.stride() != spec.stride or result.untyped_storage().nbytes() != last.nbytes:
                strides = zip(result.shape, result.stride(), spec.stride, strict=True)
                is_same_order = all(size == 1 or one == other for size, one, other in strides)
                if not (is_same_order or last.rule.is_rounded_once(last.constants)):
                    raise NoRecipeError("made again it has another order of elements")
                result = result.new_empty_strided(spec.shape, spec.stride, dtype=spec.dtype).copy_(result)
        return result


def _work_bytes(record: SavedStorage) -> int:
    """Of an operand, and where that is made again itself, of what this takes."""
    recipe = record.recipe
    passing_bytes = 0 if record.ticket is None else record.ticket.passing_bytes
    return record.nbytes + passing_bytes if recipe is None else recipe.work_bytes


class Comparison(NamedTuple):
    """A comparison under way, or done.

    Attributes:
        flags: whether any bit differs, and whether the elements do; in host memory, once ``done``.
        done: event; None where it is done.
        marks: of the clock, around each step of the making.
        step: of training, in which the tensor was saved.
        visit: of the site.
        module: path of the module in which the tensor was saved; empty where the site was not proven before.
    """

    recipe: Recipe
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


# ---- all of a run ---------------------------------------------------------------------------------------------------


class Sites:
    """All sites of a run; see [Note: Proof].

    Args:
        cache: whose saved views are operands.
        accelerator: the training device.
        exclude: ops that are not made again.
        running: names the module in an error's message; None names none.

    Attributes:
        step: the number of the step that runs, from 1 on.
    """

    def __init__(
        self,
        cache: Keeper,
        accelerator: Accelerator,
        exclude: frozenset[str] = frozenset(),
        running: RunningModule | None = None,
    ) -> None:
        self.cache = cache
        self.rules = {name: rule for name, rule in RULES.items() if rule.op not in exclude}
        self.step = 1
        self._running = running or RunningModule({})
        self._accelerator = accelerator
        self._is_synchronous = accelerator.is_synchronized_device()
        self._answers = PinnedAnswers(accelerator, 2, torch.bool)
        self._names = PASSING | {name for name, rule in self.rules.items() if rule.operands and not rule.is_view}
        self._sites: dict[int, Site] = {}
        self._numbers: Counter[Any] = Counter()  # of what comes more than once in a forward
        self._unsaved: set[Any] = set()
        self._refused: dict[Any, str] = {}  # without a recipe: the reason, once for each form of tensors
        self._seconds = 0.0  # that making took, by what it took when it was measured
        self._first_node: float = 0
        self._thread: threading.Thread | None = None
        self._has_other_threads = False

    def end_step(self) -> None:
        """Count an optimizer step that is over."""
        self.step += 1

    def begin_forward(self) -> None:
        """A forward begins: nodes of earlier ones are not entered, and sites are told from its first op on."""
        self._first_node = next_sequence_number()
        self._thread = self._thread or threading.current_thread()
        # Each thread counts its nodes itself: with a second one, nobody knows any more which came first.
        self._has_other_threads |= threading.current_thread() != self._thread
        self._numbers.clear()
        if len(self._sites) >= MAX_SITES:  # of lengths that do not come again, say
            self._sites = {key: one for key, one in self._sites.items() if one.unseen_since is not None}

    def is_of_this_forward(self, node: Any) -> bool:
        """Whether a node was made since :meth:`begin_forward`."""
        return bool(node._sequence_nr() >= self._first_node)

    # ---- what can be made again ---------------------------------------------------------------------------------

    def recipe(self, tensor: torch.Tensor) -> Recipe | None:
        """How the storage of a tensor that is being saved could be made again; None where it cannot."""
        made = base_of(tensor)
        if type(made.grad_fn).__name__ not in self._names:
            return None
        # Which of a forward's outputs of one op and shape this is: what was in vain there is not tried again.
        look = type(made.grad_fn), made.shape
        self._numbers[look] += 1
        output = look, self._numbers[look]
        if output in self._unsaved:
            return None
        try:
            recipe = self.find(tensor)
        except NoRecipeError as reason:
            if str(reason) == UNSAVED and len(self._unsaved) < MAX_UNSAVED:
                self._unsaved.add(output)
            self._note_refused(tensor, str(reason))
            return None
        # A node of another PyTorch, or one whose buffers are freed.
        except (AttributeError, LookupError, RuntimeError) as error:
            self._note_refused(tensor, f"its node cannot be read ({type(error).__name__})")
            return None
        is_over = recipe is not None and recipe.site.reason and recipe.site.unseen_since is None
        return None if is_over else recipe

    def find(self, tensor: torch.Tensor) -> Recipe | None:
        """As :meth:`recipe`, whatever was proven; None where no rule is for the op.

        Raises:
            NoRecipeError: there is a rule, and it cannot be used.
        """
        made = base_of(tensor)
        node, number = _made_by(made)
        rule = None if node is None else self.rules.get(type(node).__name__)
        if rule is None or rule.is_view or not rule.operands or number:
            return None
        if self._has_other_threads or threading.current_thread() != (self._thread or threading.current_thread()):
            raise NoRecipeError("forwards run in several threads")
        if made._version or made.storage_offset() or made.untyped_storage().nbytes() != made.numel() * made.itemsize:
            raise NoRecipeError("changed in place, or a part of its storage")
        search = _Search(self)
        search.add(node, rule, 0)
        steps, spec, nbytes = tuple(search.steps), ViewSpec.of(made), search.steps[-1].nbytes
        kernels = Kernels.present() if self._is_synchronous else None
        recipe = Recipe(_NOWHERE, steps, spec, kernels, 1)
        if any(_is_of_a_module(one) and nbytes_of(one.held) > MAX_COPIED_PART * nbytes for one in recipe.held()):
            raise NoRecipeError("a parameter or buffer of a module")
        if recipe.scratch_bytes > MAX_BETWEEN_FACTOR * nbytes:
            raise NoRecipeError("too many steps")
        depth = 1 + max((one.makeable.depth for one in recipe.records() if one.makeable is not None), default=0)
        if depth > MAX_DEPTH:
            raise NoRecipeError("too many recipes behind each other")
        return recipe._replace(site=self.site_of(recipe), depth=depth)

    def site_of(self, recipe: Recipe) -> Site:
        """The site with such a recipe that comes next in this forward."""
        signature = (*(step.signature() for step in recipe.steps), recipe.spec.stride, recipe.kernels)
        place = hash(signature), position_in_code()
        self._numbers[place] += 1
        key = hash((place, self._numbers[place]))
        site = self._sites.get(key)
        if site is None:
            site = Site(recipe.steps[-1].rule.op, key)
            if len(self._sites) < MAX_SITES:
                self._sites[key] = site
            else:
                site.reason = "too many sites"
        site.visits += 1
        return site

    # ---- proof --------------------------------------------------------------------------------------------------

    def compare(self, recipe: Recipe, tensor: torch.Tensor) -> Comparison | None:
        """Make the storage of a tensor that is being saved, and compare; None where that shows that it cannot be made.

        Args:
            recipe: with views of its own.
        """
        site, marks = recipe.site, list[tuple[Any, Any]]()
        try:
            made = recipe.make(self._restore, self._accelerator.clock, marks)
            with _as_in_forward(None):
                saved = base_of(tensor).detach()
                bits = integers_of(saved)
                differs = integers_of(made) != bits
                # NaN is NaN: the payload may depend on its place in memory, and plain training goes on with either.
                if saved.is_floating_point() or saved.is_complex():
                    differs = (
                        differs & ~_both_nan(made, saved) if not self._is_synchronous or differs.any() else differs
                    )
                flags = torch.stack((differs.any(), bits.amin() != bits.amax()))
            if not self._is_synchronous:
                host = self._answers.take()
                self._accelerator.copy(flags.view(torch.uint8), host.view(torch.uint8))
                flags = host
        except (NoRecipeError, LookupError, RuntimeError, ValueError, TypeError) as error:
            if isinstance(error, StorageError) or is_out_of_memory(error):
                return None  # backward will want the operand, too; or another time
            is_told = isinstance(error, NoRecipeError)
            site.refuse(str(error) if is_told else f"{type(error).__name__} while it was made again")
            return None
        site.compared()
        module = self._running.path() if site.is_proven else ""
        return Comparison(recipe, flags, moment(self._accelerator), marks, self.step, site.visits, module)

    def read(self, comparison: Comparison) -> bool:
        """Whether no bit differed. Waits for the device.

        Raises:
            RematerializationError: one did, at a site where tensors were left out since none had.
        """
        site = comparison.recipe.site
        if comparison.done is not None:
            comparison.done.synchronize()
        site.measured_s = sum(self._accelerator.clock.elapsed_s(*marks) for marks in comparison.marks)
        is_other, has_values = comparison.flags.tolist()
        if not is_other:
            if has_values:
                site.equal_in = comparison.step
                site.unseen_since = None if comparison.visit == site.visits else comparison.step
            return True
        site.refuse("made again it differs")
        since, site.unseen_since = site.unseen_since, None
        if since is not None:
            raise RematerializationError(_differs(comparison, since))
        return False

    def left_out(self, recipe: Recipe) -> None:
        """A storage is not saved, and was not compared, or is not known to be equal yet."""
        if recipe.site.unseen_since is None:
            recipe.site.unseen_since = self.step

    # ---- in backward --------------------------------------------------------------------------------------------

    def make(self, recipe: Recipe) -> torch.Tensor:
        """Make a storage again (uint8, 1-D).

        Raises:
            ActivationModifiedError, ActivationLostError, ActivationCorruptionError: as ``SavedView.restore``.
        """
        site = recipe.site
        try:
            made = storage_bytes(recipe.make(self._restore, None, []))
        except ActivationModifiedError as error:  # perhaps of a tensor that nobody else wants any more
            raise ActivationModifiedError(
                f"{error} Output of {site.op} was to be made again from it, not saved: "
                f"{_remedy(recipe)} if your model may change it."
            ) from error
        except NoRecipeError as error:
            raise StateError(f"{site.op}, equal in forward: {error}; this is a bug in ds_tba") from error
        self._seconds += site.measured_s
        return made

    def _restore(self, held: Held) -> torch.Tensor:
        """An operand, for the current stream; another may have allocated it."""
        operand = held.restore()
        if not self._is_synchronous and operand.device == self._accelerator.device():
            self._accelerator.share(operand, self._accelerator.current_stream())
        return operand

    # ---- what is noted as tensors are saved ---------------------------------------------------------------------

    def note(self, tensor: torch.Tensor, held: SavedView | SavedCounted) -> None:
        """A tensor was saved: what recipes may want to know of it later; see [Note: Operands]."""
        node: Any = tensor.grad_fn
        # One that was changed in place may have had other values when the next op took it.
        if isinstance(held, SavedView) and node is not None and not tensor._version:
            node.metadata[_NOTE, tensor.output_nr] = weakref.ref(held)
        # The statistics of a norm, whose node does not hold its epsilon. Only a fused RMS norm's have a gradient.
        is_of_norm = node is None or type(node).__name__ == "FusedRmsNormBackward0"
        if is_of_norm and has_plain_storage(tensor) and tensor.shape[-1:] == (1,):
            held.eps = _epsilon_in_frames()

    # ---- for the report -----------------------------------------------------------------------------------------

    def summary(self) -> dict[str, Any]:
        """For the report."""
        sites = list(self._sites.values())
        refused = [site.reason for site in sites if site.reason] + list(self._refused.values())
        return {
            "rematerialized_s": self._seconds,
            "rematerialized_sites": dict(Counter(site.op for site in sites if site.is_proven)),
            "refused_sites": dict(Counter(refused)),
        }

    def _note_refused(self, tensor: torch.Tensor, reason: str) -> None:
        form = (reason, tensor.dtype, tensor.shape)
        if form not in self._refused and len(self._refused) < MAX_REFUSED:
            self._refused[form] = reason
            logger.debug("a tensor of %s is not rematerialized: %s", form_of(tensor), reason)


_NOWHERE = Site("", 0)


def _both_nan(made: torch.Tensor, saved: torch.Tensor) -> torch.Tensor:
    """Return where both are NaN, for each number that ``integers_of`` gives."""
    if made.is_complex():
        made, saved = torch.view_as_real(made.resolve_conj()), torch.view_as_real(saved.resolve_conj())
    return made.isnan() & saved.isnan()


def _differs(comparison: Comparison, since: int) -> str:
    site = comparison.recipe.site
    steps = f"step {since}" if since >= comparison.step else f"steps {since} to {comparison.step}"
    where = f", saved in {comparison.module}," if comparison.module else ""
    return (
        f"what {site.op} has made{where} is made again in backward instead of being saved, and that is no longer "
        f"the same: it was in step {site.equal_in}, so gradients of {steps} of this run may be wrong. Something has "
        "changed the tensor, or what it is made of, without autograd's knowledge (through .data, or under "
        f"torch.no_grad()). Go back to a checkpoint from before step {since} of this run, and "
        f"{_remedy(comparison.recipe)}."
    )


def _remedy(recipe: Recipe) -> str:
    ops = sorted({step.rule.op for step in recipe.steps} & OPS)
    names = ", ".join(f'"{op}"' for op in ops)
    return f'set "{BLOCK}": {{"rematerialize": {{"exclude": [{names}]}}}}, or "rematerialize": false'


# ---- the search in the graph ----------------------------------------------------------------------------------------


class _Search:
    """The steps of one recipe, as they are found.

    Attributes:
        steps: each behind those it needs.
    """

    def __init__(self, sites: Sites) -> None:
        self.steps: list[Step] = []
        self._sites = sites
        self._entered = 0
        self._found: dict[tuple[int, int], tuple[Any, int]] = {}  # with the node, so that its id stays its own
        self._is_copied: list[bool] = []  # of each step: whether its strides may be others than in forward

    def add(self, node: Any, rule: Rule, number: int) -> int:
        """The number of the step that makes the output of a node; the same for the same output."""
        known = self._found.get((id(node), number))
        if known is not None:
            return known[1]
        self._entered += 1  # before those it needs: what is too large is not looked at to its end
        if self._entered > MAX_STEPS:
            raise NoRecipeError("too many steps")
        if not self._sites.is_of_this_forward(node):
            raise NoRecipeError("made in an earlier forward")
        operands = [self._operand(node, one) for one in rule.operands]
        if rule.listed:
            operands += [self._held(saved) for saved in _of_node(node, f"_raw_saved_{rule.listed}")]
        constants = tuple([constant(_of_node(node, f"_saved_{name}")) for name in rule.constants])
        is_copied = any(self._is_copied[one] for one in operands if isinstance(one, int))
        if is_copied and not rule.is_rounded_once(constants):
            raise NoRecipeError("behind a copy that may have another order of elements")
        if rule.needs_epsilon:
            constants += (_epsilon(node),)
        metadata = node._input_metadata[number]
        output = Output(torch.Size(metadata.shape), metadata.dtype, number)
        self.steps.append(Step(rule, tuple(operands), constants, output))
        self._is_copied.append(is_copied or rule.is_copy)
        self._found[id(node), number] = node, len(self.steps) - 1
        return len(self.steps) - 1

    def _operand(self, node: Any, operand: Operand) -> int | Held | torch.Tensor | None:
        if operand.attribute:
            found = self._attribute(node, operand.attribute)
            if found is not None:
                return found
        made_by, number = (None, 0) if operand.edge is None else node.next_functions[operand.edge]
        if made_by is None:
            if operand.is_optional:
                return None
            raise NoRecipeError(UNSAVED)
        return self._output(made_by, number)

    def _output(self, node: Any, number: int) -> int | Held | torch.Tensor:
        """The output of a node, for another one that has it as input."""
        if type(node).__name__ == "AccumulateGrad":
            is_parameter = isinstance(node.variable, torch.nn.Parameter)
            raise NoRecipeError("a parameter" if is_parameter else "an input of the model")
        noted = node.metadata.get((_NOTE, number)) if self._sites.is_of_this_forward(node) else None
        view = None if noted is None else noted()
        if view is not None:
            return self._usable(view)
        if is_passing(node):
            passed, number = node.next_functions[0]
            if passed is None:
                raise NoRecipeError(UNSAVED)
            return self._output(passed, number)
        rule = self._sites.rules.get(type(node).__name__)
        if rule is None or (number and not rule.is_view):
            raise NoRecipeError(UNSAVED)
        if rule.result and self._sites.is_of_this_forward(node):
            found = self._attribute(node, rule.result)
            if found is not None:
                return found
        if not rule.operands:
            raise NoRecipeError(UNSAVED)
        return self.add(node, rule, number)

    def _attribute(self, node: Any, name: str) -> Held | torch.Tensor | None:
        """What a node holds; None where it holds nothing."""
        return self._held(_of_node(node, f"_raw_saved_{name}"))

    def _held(self, saved: Any) -> Held | torch.Tensor | None:
        data = saved.data
        if data is None:
            return None
        if saved.unpack_hook is None:
            if _is_number(data):  # autograd calls no hooks for those
                return data
            raise NoRecipeError("saved without our hooks")
        held = data if isinstance(data, Held) else getattr(data, "held", None)
        if not isinstance(held, Held):
            raise NoRecipeError("saved by hooks of the user")
        return self._usable(held)

    def _usable(self, held: Held) -> Held:
        if not held.is_of(self._sites.cache):
            raise NoRecipeError("saved by hooks of another engine")
        if not held.is_unmodified:
            raise NoRecipeError("an operand was changed in place")
        tensor = held.held
        if tensor is None:
            return held
        if not has_plain_storage(tensor.data if isinstance(tensor, torch.nn.Parameter) else tensor):
            raise NoRecipeError("an operand that is not dense")
        if is_parameter(tensor) or is_owned(tensor):
            if not tensor.numel() or not tensor.is_contiguous() or not isinstance(held, PassedThrough):
                raise NoRecipeError("a parameter or buffer of a module")  # ZeRO-3 may have let go of it
        elif isinstance(held, PassedThrough) and tensor.dim():
            raise NoRecipeError("an operand that is not on the device")
        if is_input(tensor):
            raise NoRecipeError("an input of the model")
        return held


def _of_node(node: Any, name: str) -> Any:
    """An attribute of a node, of which each PyTorch has its own: 2.14 holds no epsilon of a group norm any more."""
    try:
        return getattr(node, name)
    except AttributeError:
        raise NoRecipeError(f"{type(node).__name__}, which has no {name} in this PyTorch") from None


def _is_of_a_module(held: Held) -> TypeGuard[PassedThrough]:
    """Whether it is a parameter or buffer, whose owner may change it at any time."""
    return isinstance(held, PassedThrough) and (is_parameter(held.held) or is_owned(held.held))


def _made_by(tensor: torch.Tensor) -> tuple[Any, int]:
    """The node that made a tensor, and the number of the tensor among its outputs."""
    node, number = tensor.grad_fn, tensor.output_nr
    while node is not None and is_passing(node):
        node, number = node.next_functions[0]
    return node, number


def _is_number(tensor: torch.Tensor) -> bool:
    """Whether a tensor without hooks is one that PyTorch has made of a number, which is nobody else's."""
    return not tensor.dim() and not tensor._version and tensor.device.type == "cpu"


def _epsilon_in_frames() -> tuple[Any] | None:
    """The ``eps`` of PyTorch's function of a norm, in a tuple, if one saves its statistics at this moment."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and str(frame.f_globals.get("__name__")).startswith(("ds_tba.", "contextlib")):
        frame = frame.f_back
    return (frame.f_locals["eps"],) if frame is not None and frame.f_code in _NORMS else None


def _epsilon(node: Any) -> Any:
    name = "result2" if hasattr(node, "_raw_saved_result2") else "result1"
    held = _of_node(node, f"_raw_saved_{name}").data
    held = held if isinstance(held, Held) else getattr(held, "held", None)
    if not isinstance(held, SavedCounted | SavedView) or held.eps is None:
        raise NoRecipeError("a norm whose eps is not known")
    return held.eps[0]


# ---- from the config ------------------------------------------------------------------------------------------------


def open_sites(
    config: OffloadConfig, cache: Keeper, accelerator: Accelerator, running: RunningModule | None = None
) -> Sites | None:
    """The sites of a run; None where the config or PyTorch leaves nothing to rematerialize.

    Raises:
        ConfigError: as :func:`excluded_ops`.
    """
    if not config.rematerialize_enabled:
        return None
    exclude = excluded_ops(config)
    if not shows_graph():
        told = "nothing is rematerialized: PyTorch %s does not show what its graph holds, as 2.7 and newer do"
        logger.info(told, torch.__version__)
        return None
    return Sites(cache, accelerator, exclude, running)


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


# ---- which module runs ----------------------------------------------------------------------------------------------

_OURS = (__name__.partition(".")[0] + ".", "contextlib")


def position_in_code() -> int:
    """A hash of where the caller's thread is: the innermost module that runs, and the calls inside it; 0 outside."""
    path: list[Any] = []
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not MODULE_CALL:
        if not str(frame.f_globals.get("__name__")).startswith(_OURS):  # of which there are more in a recorded step
            path.append((id(frame.f_code), frame.f_lasti))
        frame = frame.f_back
    return 0 if frame is None else hash((*path, id(frame.f_locals["self"])))
