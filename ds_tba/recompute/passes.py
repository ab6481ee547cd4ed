"""Runs a pass through a block so that backward recomputes what autograd would have saved in it.

It runs under ``torch.utils.checkpoint`` (``use_reentrant=False``), which restores PyTorch's random numbers and
autocast, and raises where the forward saves other tensors when it runs again. This file adds what a checkpoint leaves
to its caller. It cannot see state: a forward that reads or changes more than its arguments and PyTorch's generators may
give other bytes the second time, as under any checkpoint. One digest per block shows that in its first recomputation,
and nothing does in later ones. Kernels of a device may give other bytes by themselves: there it is a warning, unless
PyTorch is told to take deterministic ones.

[Note: Forward alone] The module's ``forward`` runs again, on the arguments that it got, and not ``__call__``: hooks
of the module that change its arguments must not change them twice. ZeRO-3's hooks have gathered the module's own
parameters already, because backward reaches the module's outputs first. Where backward does not (a router's loss, taken
from inside), the own parameters are not there, and only then the hooks run too.

[Note: Parameters stay] The checkpoint would keep an alias of each parameter from the recomputation to its use. Under
ZeRO-3 that is the memory of a gathered parameter, which its owner believes free and may use again; it would also keep
all parameters of a block in memory at once. So parameters never get to the checkpoint: autograd holds them as it does
without one. And parameters that backward has gathered when it asks for the first saved tensor, inside a module of the
block, must not be freed by the forward that runs again (:func:`_gathered_stay`), because backward goes on to use them.

[Note: To the end] A checkpoint stops running a forward again once it has all saved tensors; the modules that run at
that moment end with an exception, and hooks after forward (with which ZeRO-3 frees parameters) are not called. So
where a module inside has such hooks, the forward runs to its end. That costs the operations after the last saved
tensor: in a block that ends in a linear layer without dropout, that layer. This holds for our checkpoint alone: one
that the user has inside the block stops as it does without us, and under ZeRO-3 it must, or its modules would free
parameters that backward is using.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn
from torch.nn.modules import module as module_hooks
from torch.utils import checkpoint as checkpointing
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import CheckpointError, checkpoint, set_checkpoint_early_stop

from ds_tba.core.hooks import innermost_hooks, uncompiled_hooks
from ds_tba.core.tensors import has_plain_storage, integers_of
from ds_tba.device.memory import digest_of
from ds_tba.errors import ActivationModifiedError, RecomputationError, StateError

logger = logging.getLogger(__name__)

_ABSENT = object()

# Our number among those that ZeRO-3 gives to modules, which start at 0.
_OUR_NUMBER = -1

_REPAIR = (
    "as under any checkpoint, it may not change what it reads (a counter, a cache of keys and values), nor draw random "
    'numbers but from PyTorch\'s default generators. Leave it out by naming the others in "blocks", or set '
    '"recompute": false.'
)
_KERNELS = (
    "kernels of this device may do that (sums in any order, another plan of cuDNN), and then gradients differ in their "
    "last bits, as under any checkpoint. A forward that changes what it reads does it, too, and then they are wrong: "
    "torch.use_deterministic_algorithms(True) tells one from the other, as this is an error then."
)
# The devices whose kernels give the same bits each time.
_REPEATABLE = frozenset({"cpu"})


_UNPACKED_TWICE = "already unpacked once"  # in the message of torch/utils/checkpoint.py


class ForwardMethod(Protocol):
    """The ``forward`` of a module."""

    def __call__(self, *args: object, **kwargs: object) -> object:
        """Run it."""


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """A repeated layer.

    Attributes:
        path: of the module in the model, such as ``"model.layers.3"``.
        module: the layer.
    """

    path: str
    module: nn.Module


class Recomputations(Protocol):
    """Device memory for what passes save that run again: the cache."""

    def begin_recomputation(self, saved_bytes: int) -> None:
        """Make room for what a pass saves that runs again, and count it."""

    def count_again(self, tensor: torch.Tensor) -> None:
        """Count a tensor that such a pass saves."""


def _is_no_container(value: object) -> bool:
    return type(value) not in (tuple, list, dict)


class Arguments:
    """The arguments of one call, taken apart into tensors and the rest.

    A checkpoint saves the tensors that it is given by position through autograd's hooks, which may move them; others
    would stay in memory. Tuples, lists and dicts are looked into; of other objects only the reference is held. A tensor
    that is passed twice is one tensor, also when the arguments are put together again: attention asks whether query
    *is* key.

    Attributes:
        tensors: in order of appearance, positional arguments first.
        others: all that is no tensor, and None in the places of tensors.
    """

    def __init__(self, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        values, self._form = tree_flatten((args, kwargs), is_leaf=_is_no_container)
        unique = {id(one): one for one in values if isinstance(one, torch.Tensor)}
        self.tensors: list[torch.Tensor] = list(unique.values())
        positions = {key: position for position, key in enumerate(unique)}
        self._places = [(at, positions[id(one)]) for at, one in enumerate(values) if isinstance(one, torch.Tensor)]
        self.others: list[object] = [None if isinstance(one, torch.Tensor) else one for one in values]

    def take_tensors(self) -> list[torch.Tensor]:
        """Return the tensors, and hold nothing but their places from now on."""
        tensors, self.tensors = self.tensors, []
        return tensors

    def with_tensors(self, tensors: Sequence[torch.Tensor]) -> tuple[tuple[object, ...], dict[str, object]]:
        """Return args and kwargs with ``tensors`` in place of the own; containers are new ones."""
        values = [*self.others]
        for at, position in self._places:
            values[at] = tensors[position]
        args, kwargs = tree_unflatten(values, self._form)
        return args, kwargs


class RecomputedPass:
    """A pass whose forward runs again when backward wants a tensor that was saved in it.

    Args:
        forward: the module's, as it is without us.
        arguments: of this pass.
        compared: paths of the blocks whose output was the same in a recomputation, bit for bit.
        cache: counts what each run in backward saves.

    Attributes:
        path: of the block, for messages.
    """

    def __init__(
        self, block: Block, forward: ForwardMethod, arguments: Arguments, compared: set[str], cache: Recomputations
    ) -> None:
        self.path = block.path
        self._module = block.module
        self._forward = forward
        self._arguments = arguments
        self._compared = compared
        self._cache = cache
        self._saved_bytes = 0
        self._shapes = _own_shapes(block.module)
        self._versions: list[int] = []  # of the parameters after the last run, which may change them (max_norm)
        self._digest: list[_Digest] | None = None

    def run(self, args: tuple[object, ...], kwargs: dict[str, object], saved_bytes: int) -> object:
        """Run the pass in forward, with the arguments as the caller gave them.

        Args:
            args, kwargs: those that ``arguments`` was made of.
            saved_bytes: by each run in backward.
        """
        self._saved_bytes = saved_bytes

        def function(*tensors: torch.Tensor) -> object:
            if not given:
                return self._run_again(tensors)
            args, kwargs = given.pop()  # or the checkpoint would hold the tensors of which it saves the inputs
            with set_checkpoint_early_stop(others_stop_early), self._saving():  # or a user's checkpoint inside ran on
                return self._forward(*args, **kwargs)

        given = [(args, kwargs)]
        others_stop_early: Any = getattr(checkpointing, "_enable_checkpoint_early_stop", True)
        is_checked = self.path not in self._compared
        # Checked, it must have an output; for hooks see [Note: To the end].
        to_the_end = is_checked or _has_hooks_inside(self._module)
        with set_checkpoint_early_stop(False) if to_the_end else nullcontext():
            result = checkpoint(function, *self._arguments.take_tensors(), use_reentrant=False, preserve_rng_state=True)
        self._digest = _digest(result) if is_checked else None
        self._versions = _versions_of(self._module)
        return result

    def _run_again(self, tensors: Sequence[torch.Tensor]) -> object:
        if _versions_of(self._module) != self._versions:
            # Autograd would find it at the parameters that it has saved, and knows none of those inside a checkpoint.
            raise ActivationModifiedError(
                f"a parameter of the block {self.path!r} was modified by an in-place operation between its forward "
                "and its recomputation in backward (by an optimizer that steps inside backward, say): modify it after "
                'backward, or set "recompute": false.'
            )
        self._cache.begin_recomputation(self._saved_bytes)  # at once: what it saves then finds the room
        args, kwargs = self._arguments.with_tensors(tensors)
        with _gathered_stay(self._module), self._saving(is_again=True):
            if _own_shapes(self._module) == self._shapes:
                result = self._forward(*args, **kwargs)
            else:
                result = self._through_hooks(args, kwargs)
        self._versions = _versions_of(self._module)
        if self._digest is not None and self.path not in self._compared:
            found = _digest(result)
            if found != self._digest:
                differs = f"the forward of the block {self.path!r} returned other bytes when it ran again in backward"
                is_other_form = [one.form for one in found] != [one.form for one in self._digest]
                if is_other_form or not _kernels_may_differ(result):
                    raise RecomputationError(f"{differs} than the first time: {_REPAIR}")
                logger.warning("%s: %s", differs, _KERNELS)
            self._compared.add(self.path)
        return result

    def _through_hooks(self, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        """Run with the module's hooks, which gather parameters; without gradients, as nothing they save is wanted."""
        results: list[object] = []

        def forward(*_: object, **__: object) -> object:
            with torch.enable_grad():  # with the arguments as they are: hooks have changed them in forward already
                results.append(self._forward(*args, **kwargs))
            return results[-1]

        with replaced_forward(self._module, forward), torch.no_grad():
            nn.Module.__call__(self._module, *args, **kwargs)
        return results.pop()  # not what hooks made of it

    @contextmanager
    def _saving(self, *, is_again: bool = False) -> Iterator[None]:
        """Keep parameters from the checkpoint's hooks, inside of which this is, and tell what they get in backward."""
        path, hooks = self.path, innermost_hooks()
        if hooks is None:
            raise StateError("a pass is recomputed outside of a checkpoint; this is a bug in ds_tba")
        checkpoint_pack, checkpoint_unpack = hooks

        def pack(tensor: torch.Tensor) -> object:
            if isinstance(tensor, nn.Parameter):
                return tensor
            if tensor.is_nested and tensor.layout is torch.strided:  # a checkpoint cannot ask its shape
                return tensor.detach()  # an output would hold its own graph
            if is_again:
                self._cache.count_again(tensor)
            return checkpoint_pack(tensor)

        def unpack(held: object) -> torch.Tensor:
            if isinstance(held, torch.Tensor):
                return held
            try:
                return checkpoint_unpack(held)
            except CheckpointError as error:
                if _UNPACKED_TWICE in str(error):
                    raise RecomputationError(
                        f"a custom Function in the block {path!r} reads ctx.saved_tensors twice in one backward, for "
                        "which no checkpoint has them, PyTorch's neither: have it read them once, leave the block out "
                        'by naming the others in "blocks", or set "recompute": false.'
                    ) from error
                lines = (line for line in str(error).splitlines() if line.strip())
                raise RecomputationError(
                    f"the forward of the block {path!r} saved other tensors when it ran again in backward than the "
                    f"first time: {_REPAIR} ({next(lines, type(error).__name__)})"
                ) from error

        inside: Any = uncompiled_hooks(pack, unpack)
        # To a selective checkpoint inside they are none of a user's hooks, and what it saves stays with it.
        inside.pack_hook._checkpoint_internal, inside.pack_hook._user_hooks = True, None
        with inside:
            yield


def _versions_of(module: nn.Module) -> list[int]:
    """Return the version counters; -1 for an inference tensor, which has none."""
    return [-1 if one.is_inference() else one._version for one in module.parameters()]


class _Digest(NamedTuple):
    """A tensor's form, and a digest of its bytes (None of a tensor that has no block of them)."""

    form: tuple[object, ...]
    bits: int | None


def _kernels_may_differ(result: object) -> bool:
    """Return whether kernels may give other bits each time: those of a device, unless PyTorch refuses such kernels."""
    if torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled():
        return False
    tensors = (one for one in tree_flatten(result)[0] if isinstance(one, torch.Tensor))
    return any(one.device.type not in _REPEATABLE for one in tensors)


def _digest(result: object) -> list[_Digest]:
    """Return forms and digests of the tensors in an output. Waits for the device."""
    found: list[_Digest] = []
    with torch.no_grad():
        for tensor in tree_flatten(result)[0]:
            if not isinstance(tensor, torch.Tensor):
                continue
            form = (type(tensor), tensor.dtype, tensor.layout, tensor.is_quantized)
            if not has_plain_storage(tensor) or tensor.is_quantized or tensor.is_meta:
                found.append(_Digest(form, None))
                continue
            data = integers_of(tensor).contiguous().cpu()
            found.append(_Digest((*form, tensor.shape), digest_of(data.reshape(-1).view(torch.uint8))))
    return found


@contextmanager
def replaced_forward(module: nn.Module, forward: ForwardMethod) -> Iterator[None]:
    """Have a forward on this one module, unless another takes its place meanwhile."""
    # Past __setattr__, which some modules (torch.compile's) hand on to what they wrap.
    attributes = module.__dict__
    before = attributes.get("forward", _ABSENT)
    attributes["forward"] = forward
    try:
        yield
    finally:
        if attributes.get("forward") is forward:
            del attributes["forward"]
            if before is not _ABSENT:
                attributes["forward"] = before


@contextmanager
def _gathered_stay(module: nn.Module) -> Iterator[None]:
    """Keep parameters that backward has gathered from being freed by the forward that runs again.

    ZeRO-3 keeps at a parameter the numbers of the modules that use it, and frees its memory after the last. We are one
    more user, and leave the set as it was.
    """
    users = [users for one in module.parameters() if (users := getattr(one, "ds_active_sub_modules", None))]
    before = [set(one) for one in users]
    for one in users:
        one.add(_OUR_NUMBER)
    try:
        yield
    finally:
        for one, then in zip(users, before, strict=True):
            one.discard(_OUR_NUMBER)
            one |= then


def _own_shapes(module: nn.Module) -> list[torch.Size]:
    return [one.shape for one in module._parameters.values() if one is not None]


def _has_hooks_inside(module: nn.Module) -> bool:
    return bool(module_hooks._global_forward_hooks) or any(
        child._forward_hooks for child in module.modules() if child is not module
    )
