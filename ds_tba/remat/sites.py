"""Sites: the ops whose outputs may be rematerialized, and their proof, bit for bit, before they are used.

Knows recipes and an accelerator; cannot see plans, nor where storages go.

[Note: Words] A *site* is an op in the graph whose output can be rematerialized, told from others by its work (ops,
numbers, dtypes, shapes, strides), the module that runs, the lines of it, and how often that has come in a forward. A
*recipe* has the ops to run, and their operands.

[Note: Proof] When an output is saved at a site that is not proven, it is made from its operands, while forward has
both, and every bit is compared. Only where none differs is the tensor not saved, in that very forward. If one differs,
or making it raises, the site is not used any more. Of equal elements (zeros, say) that proves nothing for the next
time.

[Note: Proof, again] What autograd does not record may begin at any time. So each site is compared again: at its second
visit, its fourth, then ever more seldom, but once in ``PERIOD`` visits at least, each site in a turn of its own. Where
one differs, and tensors were left out at that site since one was equal, ``RematerializationError`` says since when
gradients may be wrong. What begins and ends between two comparisons of a site is not seen.

[Note: Late answers] A device is not waited for: a comparison is read once the device has done it (``store.py``).
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Hashable
from typing import Any

import torch

from ds_tba.config import BLOCK
from ds_tba.core.saved import Keeper
from ds_tba.core.tensors import ViewSpec, as_uint8, base_of, integers_of, nbytes_of, next_sequence_number
from ds_tba.device.accelerator import Accelerator, is_out_of_memory, moment
from ds_tba.errors import ActivationModifiedError, ConfigError, RematerializationError, StateError, StorageError
from ds_tba.remat.recipe import AsInForward, Comparison, Recipe, Search, Site, is_of_a_module, kernels, past_hooks
from ds_tba.remat.rules import OPS, RULES, NoRecipeError
from ds_tba.remat.where import RunningModule, position_in_code

# Bytes of the steps between relative to the result's.
MAX_BETWEEN_FACTOR = 4
# Recipes whose operands are rematerialized themselves, one behind the other.
MAX_DEPTH = 4
# Copies of parameters take no larger part of the result's bytes, each.
MAX_COPIED_PART = 1 / 16
# The store remembers at most so many sites, and so many forms of tensors without a recipe.
MAX_SITES, MAX_REFUSED = 1 << 18, 4096


class Sites:
    """All sites of a run; see [Note: Proof].

    Raises:
        ConfigError: ``rematerialize.exclude`` names an op that there is no rule for.
    """

    def __init__(
        self,
        cache: Keeper,
        accelerator: Accelerator,
        exclude: frozenset[str] = frozenset(),
        running: RunningModule | None = None,
    ) -> None:
        if exclude - OPS:
            raise ConfigError(
                f'"{BLOCK}.rematerialize.exclude" names {", ".join(sorted(exclude - OPS))}: the ops are '
                f"{', '.join(sorted(OPS))}."
            )
        self.rules = {name: rule for name, rule in RULES.items() if rule.op not in exclude}
        self.step = 1  # number of the one that runs, from 1 on
        self._running = running or RunningModule()  # for errors
        self.accelerator = accelerator
        self._is_synchronous = accelerator.is_synchronous
        self._sites: dict[int, Site] = {}
        self._numbers: Counter[Hashable] = Counter()  # of what comes more than once in a forward
        self._refused: set[tuple[str, torch.dtype, torch.Size]] = set()  # without a recipe: why, for each form
        self._seconds = 0.0  # that making took, by what it took when it was measured
        self._cache = cache  # owner of the saved views that are operands
        self._first_node = 0  # of the forward that runs
        self._threads: list[threading.Thread] = []  # that run forwards: no more than two

    def end_step(self) -> None:
        """Count an optimizer step that is over."""
        self.step += 1

    def begin_forward(self) -> None:
        """Begin a forward: enter no nodes of earlier ones, and count sites from its first op on."""
        self._first_node = next_sequence_number()
        if threading.current_thread() not in self._threads:
            self._threads = [threading.current_thread(), *self._threads[:1]]
        self._numbers.clear()  # counted on, no site would be met again
        if len(self._sites) >= MAX_SITES:  # of lengths that do not come again, say
            self._sites = {key: one for key, one in self._sites.items() if one.unseen_since is not None}

    # ---- what can be rematerialized ---------------------------------------------------------------------------------

    def recipe(self, tensor: torch.Tensor) -> Recipe | None:
        """Return a recipe for the storage of a tensor that is being saved; None without one."""
        try:
            recipe = self.find(tensor)
        except NoRecipeError as refusal:
            reason = str(refusal)
        # A node of another PyTorch, or one whose buffers are freed.
        except (AttributeError, LookupError, RuntimeError) as error:
            reason = f"its node cannot be read ({type(error).__name__})"
        else:
            return None if recipe is not None and recipe.site.reason else recipe
        if len(self._refused) < MAX_REFUSED:
            self._refused.add((reason, tensor.dtype, tensor.shape))
        return None

    def find(self, tensor: torch.Tensor) -> Recipe | None:
        """Return a recipe, whatever was proven; None where no rule is for the op.

        Raises:
            NoRecipeError: there is a rule, and it cannot be used.
        """
        made = base_of(tensor)
        node, number = past_hooks(made.grad_fn, made.output_nr)
        rule = self.rules.get(type(node).__name__)
        if node is None or rule is None or rule.is_view or not rule.operands or number:
            return None
        # Each thread counts its nodes itself: of two, nobody knows which node came first.
        if {*self._threads, threading.current_thread()} != {threading.current_thread()}:
            raise NoRecipeError("forwards run in several threads")
        if made._version or made.storage_offset() or made.untyped_storage().nbytes() != made.numel() * made.itemsize:
            raise NoRecipeError("changed in place, or a part of its storage")
        if made.is_complex():
            raise NoRecipeError("complex numbers")
        search = Search(self._cache, self.rules, self._first_node)
        search.add(node, rule)
        present = kernels() if self._is_synchronous else None
        recipe = Recipe(_NOWHERE, tuple(search.steps), ViewSpec.of(made), present)
        if any(is_of_a_module(one) and nbytes_of(one.held) > MAX_COPIED_PART * recipe.nbytes for one in recipe.held):
            raise NoRecipeError("a parameter or buffer of a module")
        if recipe.scratch_bytes > MAX_BETWEEN_FACTOR * recipe.nbytes:
            raise NoRecipeError("too many steps")
        if recipe.depth > MAX_DEPTH:
            raise NoRecipeError("too many recipes behind each other")
        recipe.site = self.site_of(recipe)
        return recipe

    def site_of(self, recipe: Recipe) -> Site:
        """Return the site with such a recipe that comes next in this forward."""
        signature = (*(step.signature() for step in recipe.steps), recipe.spec.stride, recipe.kernels)
        place = hash(signature), position_in_code()  # branches of one shape may not stand for each other
        self._numbers[place] += 1
        key = hash((place, self._numbers[place]))
        site = self._sites.get(key)
        if site is None:
            site = self._sites[key] = Site(recipe.steps[-1].rule.op, key)
        site.visits += 1
        return site

    # ---- proof --------------------------------------------------------------------------------------------------

    def compare(self, recipe: Recipe, tensor: torch.Tensor) -> Comparison | None:
        """Make the storage of a tensor that is being saved, and compare; None where that shows that it cannot be made.

        Args:
            recipe: with views of its own.
        """
        site, accelerator = recipe.site, self.accelerator
        try:
            with AsInForward():
                restored = self._restore(recipe)
                before = accelerator.mark()
                made = recipe.make(restored)
                marks = before, accelerator.mark()
                saved = base_of(tensor).detach()
                bits = integers_of(saved)
                differs = integers_of(made) != bits
                # NaN is NaN: the payload may depend on its place in memory, and plain training goes on with either.
                has_nan = saved.is_floating_point()
                if has_nan and (not self._is_synchronous or differs.any()):  # asking a device would wait for it
                    differs &= ~(made.isnan() & saved.isnan())
                flags = torch.stack((differs.any(), bits.amin() != bits.amax()))  # equal elements (zeros) prove nothing
            if not self._is_synchronous:
                host = self.accelerator.pinned(flags.numel())
                self.accelerator.copy(flags.view(torch.uint8), host)
                flags = host.view(torch.bool)
        except (NoRecipeError, LookupError, RuntimeError, ValueError, TypeError) as error:
            # The error of another site, whose answer came while room was made, must be heard.
            if isinstance(error, RematerializationError) or is_out_of_memory(error):
                raise
            if isinstance(error, StorageError):  # backward will want the operand, too
                return None
            is_told = isinstance(error, NoRecipeError)
            site.reason = str(error) if is_told else f"{type(error).__name__} while it was recomputed"
            return None
        site.compared()
        module = self._running.path() if site.is_proven else ""
        return Comparison(recipe, flags, moment(self.accelerator), marks, self.step, site.visits, module)

    def read(self, comparison: Comparison) -> bool:
        """Return whether no bit differed. Waits for the device.

        Raises:
            RematerializationError: one did, at a site where tensors were left out since none had.
        """
        site = comparison.recipe.site
        comparison.done.synchronize()
        site.measured_s = self.accelerator.elapsed_s(*comparison.marks)
        is_other, has_values = comparison.flags.tolist()
        if not is_other:
            if has_values:
                site.equal_in = comparison.step
                if comparison.visit == site.visits:
                    site.unseen_since = None
                elif site.unseen_since is not None:  # perhaps of later visits; what is compared late was not left out
                    site.unseen_since = comparison.step
            return True
        site.reason = site.reason or "it differs when recomputed"
        since, site.unseen_since = site.unseen_since, None  # one error for each: it is used no more
        if since is not None:
            raise RematerializationError(_differs(comparison, since))
        return False

    def left_out(self, recipe: Recipe) -> None:
        """Note that a storage is not saved, and was not compared, or is not known to be equal yet."""
        if recipe.site.unseen_since is None:
            recipe.site.unseen_since = self.step

    # ---- in backward --------------------------------------------------------------------------------------------

    def make(self, recipe: Recipe) -> torch.Tensor:
        """Rematerialize a storage (uint8, 1-D).

        Raises:
            ActivationModifiedError, ActivationLostError, ActivationCorruptionError: as ``SavedView.restore``.
        """
        site = recipe.site
        if recipe.kernels not in (None, kernels()):
            raise StateError(
                f"the output of {site.op} is recomputed in backward, but since forward the number of threads, oneDNN "
                f"or torch.set_flush_denormal was changed, with which kernels round differently. Change them outside "
                f"of steps, or {_remedy(recipe)}."
            )
        try:
            with AsInForward():
                made = as_uint8(recipe.make(self._restore(recipe)).untyped_storage())
        except ActivationModifiedError as error:  # perhaps of a tensor that nobody else wants any more
            raise ActivationModifiedError(
                f"{error} Output of {site.op} was to be recomputed from it, not saved: "
                f"{_remedy(recipe)} if your model may change it."
            ) from error
        self._seconds += site.measured_s
        return made

    def _restore(self, recipe: Recipe) -> dict[int, torch.Tensor]:
        """Return the operands, for the current stream; another may have allocated them."""
        restored = {id(one): one.restore() for one in recipe.held}
        for operand in restored.values():
            if not self._is_synchronous and operand.device == self.accelerator.device():
                self.accelerator.share(operand, self.accelerator.current_stream())  # or it is reused under the op
        return restored

    # ---- for the report -----------------------------------------------------------------------------------------

    def summary(self) -> dict[str, Any]:
        """Return the fields of the report."""
        sites = list(self._sites.values())
        refused = [site.reason for site in sites if site.reason] + [reason for reason, *_ in self._refused]
        return {
            "rematerialized_s": self._seconds,
            "rematerialized_sites": dict(Counter(site.op for site in sites if site.is_proven)),
            "refused_sites": dict(Counter(refused)),
        }


_NOWHERE = Site("", 0)


def _differs(comparison: Comparison, since: int) -> str:
    site = comparison.recipe.site
    steps = f"step {since}" if since >= comparison.step else f"steps {since} to {comparison.step}"
    where = f", saved in {comparison.module}," if comparison.module else ""
    return (
        f"what {site.op} has made{where} is recomputed in backward instead of being saved, and that is no longer "
        f"the same: it was in step {site.equal_in}, so gradients of {steps} of this run may be wrong. Something has "
        "changed the tensor, or what it is made of, without autograd's knowledge (through .data, or under "
        f"torch.no_grad()). Go back to a checkpoint from before step {since} of this run, and "
        f"{_remedy(comparison.recipe)}."
    )


def _remedy(recipe: Recipe) -> str:
    ops = sorted({step.rule.op for step in recipe.steps} & OPS)
    names = ", ".join(f'"{op}"' for op in ops)
    return f'set "{BLOCK}": {{"rematerialize": {{"exclude": [{names}]}}}}, or "rematerialize": false'
