"""Finds the repeated layers of a model, and runs chosen ones of them under PyTorch's non-reentrant checkpoint.

A checkpoint (``torch.utils.checkpoint``, ``use_reentrant=False``) restores PyTorch's random numbers and autocast, and
cannot see what else a block reads or changes. So a block runs again to its end, and a digest of its output is compared
with that of its first run: on a CPU at once, on a device, which answers late, as the backward ends that runs it again.

[Note: Repeated layers] A repeated layer is a child of a ``ModuleList``, ``Sequential`` or ``ModuleDict`` with at least
one sibling of the same class and shape, and with modules inside. The outermost win: the experts of a mixture are part
of their layer. But stages that differ in shape (Swin, ResNet) are no layers, nor is a ``Sequential`` in which something
repeats; what repeats inside of them is. A lone layer that is called many times (ALBERT's) has to be named.

[Note: In the place of forward] Our forward stands in the place of a block's own only while the model's forward runs:
outside of that the model is the user's, to copy, inspect or change. It does nothing in code that ``torch.compile``
compiles, nor where others' hooks are inside of ours: in a checkpoint of the user's, say, or in another block.

[Note: Parameters] ZeRO-3 gathers a parameter when backward needs it, and frees it after the forward of its module. So
parameters never get to the checkpoint, which would hold the memory that is freed; and what backward has gathered stays
while a block runs again (:func:`_gathered_stay`). A Function reads the parameter itself (``hooks.py``, [Note:
Originals]): the checkpoint's own alias would become ``.grad`` where a backward returns it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial, update_wrapper
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.utils import checkpoint as checkpointing
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import CheckpointError, checkpoint, set_checkpoint_early_stop

from ds_tba.config import matching
from ds_tba.core.hooks import (
    in_backward,
    innermost_hooks,
    is_being_compiled,
    saves_through_ours,
    skip_frames,
    uncompiled,
)
from ds_tba.core.residency import Residency
from ds_tba.core.saved import PassedThrough
from ds_tba.core.tensors import has_plain_storage, integers_of
from ds_tba.errors import RecomputationError

# Containers that nobody calls, and those that hold layers.
_UNCALLED = (nn.ModuleList, nn.ModuleDict)
_CONTAINERS = (*_UNCALLED, nn.Sequential)

_NO_TENSORS = (type(None), int, float, complex, str, bytes, range, torch.dtype, torch.device, torch.memory_format)
_OUR_NUMBER = -1  # among those that ZeRO-3 gives to modules, which start at 0
_COLUMNS = 1024

_LEAVE_OUT = 'Leave it out by naming the others in "recompute", or set "recompute": false'
_REPAIR = (
    "As under any checkpoint, a block may not change what it reads (a counter, an adapter that is switched, a cache of "
    "keys and values: use_cache=False), nor draw random numbers but from PyTorch's default generators. "
    f"{_LEAVE_OUT}."
)

# ---- finding blocks -------------------------------------------------------------------------------------------------


def find_blocks(model: nn.Module, patterns: Sequence[str] | None) -> dict[str, nn.Module]:
    """Return the repeated layers of a model by their paths, in its order; see [Note: Repeated layers].

    A module that stands in several places has its first path. Of modules inside of each other the outermost win.

    Args:
        patterns: of their paths, or None to find them.

    Raises:
        ConfigError: a pattern names no module.
    """
    modules = {path: module for path, module in model.named_modules() if path and not isinstance(module, _UNCALLED)}
    if patterns is not None:
        wanted = {modules[path] for path in matching([*modules], patterns, "blocks")}
    else:
        repeated = {one for container in model.modules() for one in _repeated(container)}
        wanted = {
            one for one in repeated if not isinstance(one, nn.Sequential) or len(repeated & {*one.modules()}) == 1
        }
    found: dict[str, nn.Module] = {}
    for path, module in modules.items():
        if module in wanted and not path.startswith(tuple(f"{outer}." for outer in found)):
            found[path] = module
    return found


def _repeated(container: nn.Module) -> Iterator[nn.Module]:
    """Yield the members of which a neighbour of the same class has half of the parameters, by name and shape.

    Not all: the first layer of T5 has a table that the others lack, the first of a ResNet stage a wider input.
    """
    neighbours: dict[type[nn.Module], tuple[nn.Module, set[tuple[str, torch.Size]]]] = {}
    for member in container._modules.values() if isinstance(container, _CONTAINERS) else ():
        if member is None or not member._modules or isinstance(member, _UNCALLED):
            continue
        # ZeRO-3 has taken the parameters apart; it leaves the shape that each had beside it.
        shapes = {(name, getattr(one, "ds_shape", one.shape)) for name, one in member.named_parameters()}
        neighbour, its_shapes = neighbours.get(type(member), (None, set()))
        if neighbour is not None and 2 * len(shapes & its_shapes) >= max(len(shapes), len(its_shapes)):
            yield from (neighbour, member)
        neighbours[type(member)] = member, shapes


# ---- running them ---------------------------------------------------------------------------------------------------

_Digests: TypeAlias = dict[tuple[object, ...], torch.Tensor]
"""The digests of all tensors that a block returns, each on its tensor's device, by number, dtype and shape."""
Listener: TypeAlias = Callable[[str, list[torch.Tensor]], AbstractContextManager[None]]
"""Returns the context of a pass through a block, from the block's path and inputs; see ``Recorder.passing``."""


class Blocks:
    """The blocks of one model, by their paths in it."""

    def __init__(self, blocks: Mapping[str, nn.Module], cache: Residency, chosen: Collection[str] = ()) -> None:
        self.chosen = frozenset(chosen)  # paths of those that run under a checkpoint
        self.cache = cache
        self.open = threading.local()  # with a ``listener``, perhaps None, while a forward of the thread is open
        self._places = [_InPlace(self, path, block) for path, block in blocks.items()]

    @contextmanager
    def forward(self, listener: Listener | None = None) -> Iterator[None]:
        """Open the forward of a micro-step. With a listener it is told of all passes, and none is checkpointed."""
        skip_frames((_InPlace.__call__,))
        self.open.listener = listener
        with ExitStack() as places:
            places.callback(vars(self.open).pop, "listener", None)  # one inside of it has ended both
            for one in self._places:
                if listener is not None or one.path in self.chosen:
                    places.enter_context(one.placed())
            yield


class _InPlace:
    """Stands in the place of a block's ``forward``: one object for all forwards, or compiled code is compiled again."""

    def __init__(self, blocks: Blocks, path: str, block: nn.Module) -> None:
        self.path = path
        self.block = block
        self.blocks = blocks
        self.own: Any = block.forward
        update_wrapper(self, self.own, updated=())  # whoever inspects the signature sees the module's own

    @contextmanager
    def placed(self) -> Iterator[None]:
        """Take the place, and leave it as it was, unless somebody has taken it meanwhile."""
        attributes = self.block.__dict__  # past __setattr__, which torch.compile's module hands on
        if attributes.get("forward") is self:  # a forward around this one has the place
            yield
            return
        before = {"forward": attributes["forward"]} if "forward" in attributes else {}
        self.own, attributes["forward"] = self.block.forward, self
        try:
            yield
        finally:
            if attributes.get("forward") is self:
                del attributes["forward"]
                attributes.update(before)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        own, blocks = self.own, self.blocks
        is_compiled = torch.compiler.is_compiling() or is_being_compiled()  # first: what is called below would be, too
        if is_compiled or not (saves_through_ours() and hasattr(blocks.open, "listener") and torch.is_grad_enabled()):
            return own(*args, **kwargs)
        # A checkpoint saves tensors only where they are arguments by position: so those of containers are taken out.
        values, tree = tree_flatten((args, kwargs), is_leaf=lambda one: type(one) not in (tuple, list, dict))
        if blocks.open.listener is None:
            return self._checkpointed(own, [(args, kwargs)], values, tree)
        with blocks.open.listener(self.path, [one for one in values if isinstance(one, torch.Tensor)]):
            return own(*args, **kwargs)

    def _checkpointed(self, own: Any, given: list[Any], values: list[Any], tree: Any) -> Any:
        """Run a pass under a checkpoint, which calls it in forward, and in backward with the values it has saved."""
        first: list[_Digests] = []  # none before forward is over, which may take a gradient of its own
        users_stop: Any = getattr(checkpointing, "_enable_checkpoint_early_stop", None)

        def one_pass(*values: Any) -> Any:
            if given:
                args, kwargs = given.pop()  # with lists of the caller's, to fill; and they are held no longer
                with set_checkpoint_early_stop(users_stop), self._saving():
                    output = own(*args, **kwargs)
                first.append(_digests(self.path, output))
                return output
            args, kwargs = tree_unflatten(values, tree)
            with _gathered_stay(self.block), self._saving(self.blocks.cache):
                output = own(*args, **kwargs)
            if first:
                _compare(self.path, first[0], _digests(self.path, output))
            return output

        with set_checkpoint_early_stop(False):
            return checkpoint(one_pass, *values, use_reentrant=False)

    @contextmanager
    def _saving(self, counting: Residency | None = None) -> Iterator[None]:
        """Keep parameters from the checkpoint's hooks, inside of which this is, and name the block in its errors."""
        checkpoint_pack, checkpoint_unpack = innermost_hooks()  # type: ignore[misc] # the checkpoint's, so not None

        def pack(tensor: torch.Tensor) -> object:
            if isinstance(tensor, nn.Parameter):
                return PassedThrough(tensor)
            if counting is not None:  # it runs again
                counting.count_again(tensor)
            return checkpoint_pack(tensor)

        def unpack(held: object) -> torch.Tensor:
            try:
                return held.restore() if isinstance(held, PassedThrough) else checkpoint_unpack(held)
            except CheckpointError as error:
                why = f"PyTorch cannot recompute the block {self.path!r}: {' '.join(str(error).split())}"
                raise RecomputationError(f"{why} {_REPAIR}") from error

        inside: Any = torch.autograd.graph.saved_tensors_hooks(partial(uncompiled, pack), partial(uncompiled, unpack))
        # To a selective checkpoint inside they are none of a user's hooks, and what it saves stays with it.
        inside.pack_hook._checkpoint_internal, inside.pack_hook._user_hooks = True, None
        with inside:
            yield

    def __reduce__(self) -> tuple[object, ...]:
        return partial, (self.own,)  # a deep copy that is made in forward runs its own


@contextmanager
def _gathered_stay(module: nn.Module) -> Iterator[None]:
    """Keep parameters that backward has gathered from being freed by the forward that runs again.

    ZeRO-3 keeps at a parameter the numbers of the modules that use it. We are one more, and leave the set as it was.
    """
    all_users = (getattr(one, "ds_active_sub_modules", None) for one in module.parameters())
    before = [(users, {*users}) for users in all_users if users]
    for users, _ in before:
        users.add(_OUR_NUMBER)
    try:
        yield
    finally:
        for users, then in before:
            users.discard(_OUR_NUMBER)
            users |= then


# ---- comparing them -------------------------------------------------------------------------------------------------


def _digests(path: str, output: object) -> _Digests:
    """Return the digests of all tensors that a block returns.

    Raises:
        RecomputationError: it returns an object in which tensors may be, or one that is no plain tensor, so that their
            bytes cannot be compared.
    """
    digests: _Digests = {}
    for one in tree_flatten(output)[0]:
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            plain = one.detach() if torch.is_tensor(one) else None  # a parameter, say, is plain then
            if plain is not None and has_plain_storage(plain) and not plain.is_quantized:
                digests[len(digests), plain.dtype, plain.shape] = digest_of(plain)
            elif not isinstance(one, _NO_TENSORS):
                raise RecomputationError(
                    f"the block {path!r} returns a {type(one).__name__} ({getattr(one, 'layout', 'no tensor')}), which "
                    "cannot be compared when it runs again: have it return plain tensors, in tuples, lists or dicts. "
                    f"{_LEAVE_OUT}."
                )
    return digests


def _compare(path: str, first: _Digests, again: _Digests) -> None:
    """Compare what a pass has returned with what it returns again, each pass for itself: backwards may be nested.

    Raises:
        RecomputationError: they differ, and the gradients are wrong. On a device the backward that is under way raises.
    """

    def read() -> None:
        if first.keys() != again.keys() or not all(torch.equal(first[form], again[form]) for form in first):
            raise RecomputationError(f"the output of the block {path!r} differs when its forward runs again: {_REPAIR}")

    is_late = any(one.device.type != "cpu" for one in (*first.values(), *again.values()))
    if is_late and in_backward():
        torch.autograd.Variable._execution_engine.queue_callback(read)  # which is not called after an error
    else:
        read()


def digest_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return sums that change with any one element, and where rows trade places; without a copy of all elements."""
    numbers = integers_of(tensor).contiguous().view(-1)
    rows = numbers[: numbers.numel() // _COLUMNS * _COLUMNS].view(-1, _COLUMNS)
    rest = numbers[rows.numel() :].to(torch.int64)
    return torch.cat((rows.sum(0, dtype=torch.int64), rows.sum(1, dtype=torch.int64), rest))
