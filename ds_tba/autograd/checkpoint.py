"""One pass through a module whose forward runs again in backward, instead of keeping what autograd saves in it.

Knows ``torch.utils.checkpoint`` and what it leaves to its caller to get every bit right; does not know who asks for it,
nor whether the module was found fit for it.

[Note: Forward alone] The module's ``forward`` runs again, on the arguments that it got, and not ``__call__``: hooks
of the module that change its arguments must not change them twice. ZeRO-3's hooks have gathered the module's own
parameters already, because backward reaches the module's outputs first. Where backward does not (a router's loss, taken
from inside), the own parameters are not there, and only then the hooks run too.

[Note: Parameters stay] The checkpoint would keep an alias of each parameter from the recomputation to its use. Under
ZeRO-3 that is the memory of a gathered parameter, which its owner believes free and may use again; it would also keep
all parameters of a block in memory at once. So parameters never get to the checkpoint: autograd holds them as it does
without one. And parameters that backward has gathered when it asks for the first saved tensor, inside a module of the
block, must not be let go by the forward that runs again (:func:`_gathered_stay`), because backward goes on to use them.

[Note: To the end] A checkpoint stops running a forward again once it has all saved tensors; the modules that run at
that moment end with an exception, and hooks after forward (with which ZeRO-3 lets go of parameters) are not called. So
where a module inside has such hooks, the forward runs to its end. That costs the operations after the last saved
tensor: in a block that ends in a linear layer without dropout, that layer. This holds for our checkpoint alone: one
that the user has inside the block stops as it does without us, and under ZeRO-3 it must, or its modules would let go of
parameters that backward is using.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.modules import module as module_hooks
from torch.utils import checkpoint as checkpointing
from torch.utils.checkpoint import CheckpointError, checkpoint, set_checkpoint_early_stop

from ds_tba.autograd.comparison import drawn_from, python_rng_states, set_python_rng_states, version_of
from ds_tba.autograd.forward_state import StateReader
from ds_tba.autograd.originals import keep_originals
from ds_tba.autograd.tensors import uncompiled_hooks
from ds_tba.errors import ActivationModifiedError, RecomputationError, StateError

Hooks = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]

# Since PyTorch 2.8; without it nobody can tell whose hooks are the innermost.
_innermost_hooks: Callable[[bool], Hooks | None] | None = getattr(
    torch._C._autograd, "_top_saved_tensors_default_hooks", None
)
CAN_RECOMPUTE = _innermost_hooks is not None

_ABSENT = object()

# Our number among those that ZeRO-3 gives to modules, which start at 0.
_OUR_NUMBER = -1


def innermost_hooks() -> Hooks | None:
    """The pack and unpack functions that autograd calls at this point, if any."""
    return _innermost_hooks(False) if _innermost_hooks is not None else None


def early_stop() -> Any:
    """What :func:`set_checkpoint_early_stop` has set; each checkpoint takes it over when it is made."""
    return getattr(checkpointing, "_enable_checkpoint_early_stop", True)


# ---- arguments ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Place:
    position: int


class Arguments:
    """The arguments of one call, taken apart into tensors and the rest.

    Tuples, lists and dicts are looked into; of other objects only the reference is held. A tensor that is passed
    twice is one tensor, also when the arguments are put together again: attention asks whether query *is* key.

    Attributes:
        tensors: in order of appearance, positional arguments first.
        others: objects that are not plain values, of which nobody knows whether forward changes them.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.tensors: list[torch.Tensor] = []
        self.others: list[Any] = []
        self._places: dict[int, _Place] = {}
        self._form: tuple[tuple[Any, ...], dict[str, Any]] = self._apart((args, kwargs))
        self._places.clear()

    def together(self, tensors: Sequence[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Args and kwargs with ``tensors`` in place of the own; containers are new ones."""
        together: tuple[tuple[Any, ...], dict[str, Any]] = _together(self._form, tensors)
        return together

    def forget_tensors(self) -> None:
        """Let go of the tensors, but not of their places."""
        self.tensors = []

    def _apart(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            place = self._places.get(id(value))
            if place is None:
                place = self._places[id(value)] = _Place(len(self.tensors))
                self.tensors.append(value)
            return place
        if type(value) in (tuple, list):
            return type(value)([self._apart(one) for one in value])
        if type(value) is dict:
            return {key: self._apart(one) for key, one in value.items()}
        if not isinstance(value, _PLAIN):
            self.others.append(value)
        return value


_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, type)


def _together(form: Any, tensors: Sequence[torch.Tensor]) -> Any:
    kind = type(form)
    if kind is _Place:
        return tensors[form.position]
    if kind in (tuple, list):
        return kind([_together(one, tensors) for one in form])
    if kind is dict:
        return {key: _together(one, tensors) for key, one in form.items()}
    return form


# ---- memory ---------------------------------------------------------------------------------------------------------


class Account(Protocol):
    """Counts what forwards hold that run again, within the budget: the cache."""

    def has_room(self, nbytes: int) -> bool:
        """Whether so many bytes more fit, once room was made for them."""

    def count_again(self, tensor: torch.Tensor) -> None:
        """Such a forward saves a tensor."""


@contextmanager
def counting(account: Account | None) -> Iterator[None]:
    """Count what the innermost hooks, those of a checkpoint that runs a forward again, are given to hold."""
    if account is None:
        yield
        return
    pack, unpack = hooks_of_checkpoint()

    def counted(tensor: torch.Tensor) -> Any:
        account.count_again(tensor)
        return pack(tensor)

    with uncompiled_hooks(counted, unpack):
        yield


# ---- the pass -------------------------------------------------------------------------------------------------------


class Conditions:
    """The conditions that a forward finds beside its tensors: compared, and restored, where it runs again.

    Args:
        reader: of the module's state.
        others: objects among the arguments; see :class:`Arguments`.

    Raises:
        UnreadableError: nobody could tell whether the state changes until backward.
    """

    def __init__(self, module: nn.Module, reader: StateReader, others: Sequence[Any]) -> None:
        self._module = module
        self._reader = reader
        self._others = others
        self._state = reader.read(others)
        self._rng_states: tuple[Any, Any] | None = python_rng_states()
        self._shapes = _own_shapes(module)
        self._modes = [child.training for child in module.modules()]

    def changed(self) -> str | None:
        """State that is not as it was, in words."""
        return self._reader.changed_since(self._state, self._others)

    def end_forward(self) -> str | None:
        """The pass is over: what its forward has changed, in words."""
        changed = self.changed()
        if self._rng_states is not None and drawn_from(self._rng_states, python_rng_states()) is None:
            self._rng_states = None
        return changed

    def has_own_parameters(self) -> bool:
        """Whether the module's own parameters are there; see [Note: Forward alone]."""
        return _own_shapes(self._module) == self._shapes

    @contextmanager
    def restored(self) -> Iterator[None]:
        """As the forward found it, but for the state and for what a checkpoint brings back."""
        with _modes(self._module, self._modes), _gathered_stay(self._module), _rng_states(self._rng_states):
            yield


class RecomputedPass:
    """A pass whose forward runs again when backward wants a tensor that was saved in it.

    Args:
        path: of the module, for messages.
        forward: the module's, as it is without us.
        arguments: of this pass.
        conditions: in which the pass begins.
        again: entered around each run in backward.

    Attributes:
        changed: the state that its forward has changed, in words.
    """

    def __init__(
        self,
        path: str,
        module: nn.Module,
        forward: Callable[..., Any],
        arguments: Arguments,
        conditions: Conditions,
        again: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._path = path
        self._module = module
        self._forward = forward
        self._arguments = arguments
        self._again = again
        self._conditions = conditions
        self._is_first = True
        self.changed: str | None = None

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The pass in forward, with the arguments as the caller gave them.

        Args:
            args, kwargs: those that ``arguments`` was made of.
        """

        def function(*tensors: torch.Tensor) -> Any:
            if not self._is_first:
                return self._run_again(tensors)
            self._is_first = False
            given = first.pop()
            with set_checkpoint_early_stop(others_stop_early), self._saving():
                return self._forward(*given[0], **given[1])

        first = [(args, kwargs)]  # popped, or the checkpoint would hold the tensors of which it saves the inputs
        tensors = self._arguments.tensors
        self._arguments.forget_tensors()
        others_stop_early = early_stop()
        with set_checkpoint_early_stop(False) if self._runs_to_its_end() else nullcontext():
            result = checkpoint(function, *tensors, use_reentrant=False, preserve_rng_state=True)
        self.changed = self._conditions.end_forward()
        return result

    def _runs_to_its_end(self) -> bool:
        """Whether the second run may not stop at the last saved tensor; see [Note: To the end]."""
        return _has_hooks_inside(self._module)

    def _saving(self) -> AbstractContextManager[None]:
        """Entered around the first forward and each other, inside the hooks of the checkpoint."""
        return parameters_stay(self._path)

    def _run_again(self, tensors: Sequence[torch.Tensor]) -> Any:
        changed = self.changed or self._conditions.changed()
        if changed is not None:
            raise ActivationModifiedError(
                f"the block {self._path!r} cannot run again with the same result, because {changed} was modified after "
                "the block's forward began: do not modify it between forward and backward, or set "
                '"recompute": false.'
            )
        with self._again(), self._conditions.restored(), self._saving():
            return self._forward_again(tensors)

    def _forward_again(self, tensors: Sequence[torch.Tensor]) -> Any:
        args, kwargs = self._arguments.together(tensors)
        if self._conditions.has_own_parameters():
            return self._forward(*args, **kwargs)
        return self._through_hooks(args, kwargs)

    def _through_hooks(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """With the module's hooks, which bring parameters; without gradients, so that nothing they save is counted."""

        def forward(*_: Any, **__: Any) -> Any:
            with torch.enable_grad():  # with the arguments as they are: hooks have changed them in forward already
                return self._forward(*args, **kwargs)

        with replaced_forward(self._module, forward), torch.no_grad():
            return nn.Module.__call__(self._module, *args, **kwargs)


@contextmanager
def replaced_forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Another forward inside the context; afterwards the module is as it was."""
    before = replace_forward(module, forward)
    try:
        yield
    finally:
        restore_forward(module, before)


def replace_forward(module: nn.Module, forward: Callable[..., Any]) -> Any:
    """Set a forward on this one module; returns the argument for :func:`restore_forward`."""
    # Past __setattr__, which some modules (torch.compile's) hand on to what they wrap.
    before = module.__dict__.get("forward", _ABSENT)
    module.__dict__["forward"] = forward
    return before


def restore_forward(module: nn.Module, before: Any) -> None:
    """Undo :func:`replace_forward`."""
    if before is _ABSENT:
        del module.__dict__["forward"]
    else:
        module.__dict__["forward"] = before


@dataclass(frozen=True, slots=True)
class _Parameter:
    tensor: torch.Tensor
    version: int


@contextmanager
def parameters_stay(path: str) -> Iterator[None]:
    """Keep parameters from the checkpoint whose hooks are the innermost; see [Note: Parameters stay].

    Args:
        path: of the block, for messages.
    """
    checkpoint_pack, checkpoint_unpack = hooks_of_checkpoint()
    originals = keep_originals()

    def pack(tensor: torch.Tensor) -> Any:
        if isinstance(tensor, nn.Parameter):
            return _Parameter(tensor, version_of(tensor))
        return checkpoint_pack(tensor)

    def unpack(held: Any) -> torch.Tensor:
        if not isinstance(held, _Parameter):
            return _recomputed(path, checkpoint_unpack, held)
        if version_of(held.tensor) != held.version:
            raise ActivationModifiedError(
                f"a parameter of shape {tuple(held.tensor.shape)} that backward needs was modified by an in-place "
                f"operation: it is at version {version_of(held.tensor)}, and was saved at version {held.version}."
            )
        originals.add(held.tensor, is_held=True)
        return held.tensor

    with uncompiled_hooks(pack, unpack):
        yield


def hooks_of_checkpoint() -> Hooks:
    """The innermost hooks, inside a checkpoint of ours."""
    hooks = innermost_hooks()
    if hooks is None:
        raise StateError("a pass is recomputed outside of a checkpoint; this is a bug in ds_tba")
    return hooks


def _recomputed(path: str, unpack: Callable[[Any], torch.Tensor], held: Any) -> torch.Tensor:
    try:
        return unpack(held)
    except CheckpointError as error:
        raise RecomputationError(
            f"the forward of the block {path!r} saved other tensors when it ran again in backward than the first time, "
            "though it gave the same bytes when that was verified: it depends on something that changed since, "
            f'such as a context that it entered or a setting. Set "recompute": false. ({_first_line(error)})'
        ) from error


def _first_line(error: Exception) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)


@contextmanager
def _rng_states(states: tuple[Any, Any] | None) -> Iterator[None]:
    """Python's and NumPy's random numbers as forward found them, if it has drawn any; afterwards they go on."""
    if states is None:
        yield
        return
    now = python_rng_states()
    set_python_rng_states(states)
    try:
        yield
    finally:
        set_python_rng_states(now)


@contextmanager
def _gathered_stay(module: nn.Module) -> Iterator[None]:
    """Keep parameters that backward has gathered from being let go by the forward that runs again.

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


@contextmanager
def _modes(module: nn.Module, modes: Sequence[bool]) -> Iterator[None]:
    """Training or evaluation as it was in forward, for every module inside."""
    other = [
        (child, child.training)
        for child, training in zip(module.modules(), modes, strict=True)
        if child.training != training
    ]
    for child, training in other:
        child.training = not training
    try:
        yield
    finally:
        for child, training in other:
            child.training = training


def _has_hooks_inside(module: nn.Module) -> bool:
    return bool(module_hooks._global_forward_hooks) or any(
        child._forward_hooks for child in module.modules() if child is not module
    )
