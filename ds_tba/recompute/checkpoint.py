"""Runs chosen blocks of a model under PyTorch's non-reentrant checkpoint, and compares what they return each time.

A checkpoint (``torch.utils.checkpoint``, ``use_reentrant=False``) restores PyTorch's random numbers and autocast. It
cannot see state: a block that reads or changes more than its arguments gives other bytes when it runs again. So a
digest of the output of each pass is compared with that of the run in backward, at once on a CPU, and on a device at the
end of the micro-step, before anybody uses the gradients. Therefore a block runs again to its end; a checkpoint of the
user's inside of it stops where it stops without us.

[Note: In the place of forward] Our forward stands in the place of a block's own only while the model's forward runs:
outside of that the model is the user's, to copy, inspect or change. Code that ``torch.compile`` compiles runs without.

[Note: Parameters] ZeRO-3 gathers a parameter when backward needs it, and frees it after the forward of its module. So
parameters never get to the checkpoint, which would hold the memory that is freed; and what backward has gathered stays
while a block runs again (:func:`_gathered_stay`). A Function reads the parameter itself (``hooks.py``, [Note:
Originals]): the checkpoint's own alias would become ``.grad`` where a backward returns it.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn
from torch.utils import checkpoint as checkpointing
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import CheckpointError, checkpoint, set_checkpoint_early_stop

from ds_tba.core.hooks import innermost_hooks, is_being_compiled, is_in_checkpoint, skip_frames, uncompiled_hooks
from ds_tba.core.residency import Residency
from ds_tba.core.saved import PassedThrough
from ds_tba.core.tensors import has_plain_storage, integers_of
from ds_tba.device.accelerator import digest_of
from ds_tba.errors import ActivationModifiedError, RecomputationError

_NO_BACKWARD = -1  # autograd's number of the backward in this thread when there is none
_OUR_NUMBER = -1  # among those that ZeRO-3 gives to modules, which start at 0
_COLUMNS = 1024
_HOST = "cpu"

_LEAVE_OUT = 'Leave it out by naming the others in "recompute", or set "recompute": false'
_REPAIR = (
    "As under any checkpoint, a block may not change what it reads (a counter, an adapter that is switched, a cache of "
    "keys and values: use_cache=False), nor draw random numbers but from PyTorch's default generators. "
    f"{_LEAVE_OUT}."
)


class PassListener(Protocol):
    """Is told of each pass through a block in a recorded micro-step: the recorder."""

    def enter(self, path: str, inputs: Sequence[torch.Tensor]) -> None: ...

    def leave(self) -> None: ...


class _Forwards(threading.local):
    """The forwards that are open in this thread: for each who is told of passes, and None for a checkpointed one."""

    def __init__(self) -> None:
        self.listeners: list[PassListener | None] = []


class Blocks:
    """The blocks of one model, by their paths in it.

    Attributes:
        chosen: paths of those that run under a checkpoint.
    """

    def __init__(self, blocks: Mapping[str, nn.Module], cache: Residency, chosen: Collection[str] = ()) -> None:
        self.chosen = frozenset(chosen)
        self.cache = cache
        self.forwards = _Forwards()
        self._places = [_InPlace(self, path, block) for path, block in blocks.items()]
        self._answers: list[tuple[str, torch.Tensor]] = []  # of the device: whether the output of a block differs

    @contextmanager
    def forward(self, listener: PassListener | None = None) -> Iterator[None]:
        """Open the forward of a micro-step. With a listener it is told of all passes, and none is checkpointed."""
        skip_frames((_InPlace.__call__,))
        with ExitStack() as places:
            self.forwards.listeners.append(listener)
            places.callback(self.forwards.listeners.pop)
            for one in self._places:
                if listener is not None or one.path in self.chosen:
                    places.enter_context(one.placed())
            yield

    def compare(self, path: str, first: Sequence[_Digest], again: Sequence[_Digest]) -> None:
        """Compare what a pass has returned with what it returns again, on its device.

        Raises:
            RecomputationError: the host knows already that it differs.
        """
        if [one.form for one in first] != [one.form for one in again]:
            raise _differs(path)
        pairs = zip(first, again, strict=True)
        self._answers += [(path, (one.sums != other.sums).any()) for one, other in pairs]
        if all(one.sums.device.type == _HOST for one in first):
            self._read_answers()

    def end_backward(self) -> None:
        """End the recomputations of a backward, and read the answers of the device.

        Raises:
            RecomputationError: a block returned other bytes when it ran again, and the gradients are wrong.
        """
        self.cache.end_recomputations()
        self._read_answers()

    def _read_answers(self) -> None:
        answers, self._answers = self._answers, []
        for path, differs in answers:
            if differs.item():
                raise _differs(path)


def _differs(path: str) -> RecomputationError:
    return RecomputationError(f"the output of the block {path!r} differs when its forward runs again: {_REPAIR}")


class _InPlace:
    """Stands in the place of a block's ``forward``: one object for all forwards, or compiled code is compiled again."""

    def __init__(self, blocks: Blocks, path: str, block: nn.Module) -> None:
        self.path = path
        self.block = block
        self.blocks = blocks
        self.own: Any = block.forward
        functools.update_wrapper(self, self.own, updated=())  # whoever inspects the signature sees the module's own

    @contextmanager
    def placed(self) -> Iterator[None]:
        """Take the place, and leave it as it was, unless somebody has taken it meanwhile."""
        attributes = self.block.__dict__  # past __setattr__, which torch.compile's module hands on
        before = attributes.get("forward")  # an attribute of its own
        if before is self:  # a forward around this one has the place
            yield
            return
        self.own, attributes["forward"] = self.block.forward, self
        try:
            yield
        finally:
            if attributes.get("forward") is self:
                del attributes["forward"]
                attributes.update({} if before is None else {"forward": before})

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        own, listeners = self.own, self.blocks.forwards.listeners
        if torch.compiler.is_compiling() or is_being_compiled() or not listeners:
            return own(*args, **kwargs)
        if not torch.is_grad_enabled() or torch._C._current_graph_task_id() != _NO_BACKWARD:
            return own(*args, **kwargs)
        if is_in_checkpoint():  # a checkpoint of the model's own, which runs the block again
            return own(*args, **kwargs)
        # A checkpoint saves tensors only where they are arguments by position: so those of containers are taken out.
        values, tree = tree_flatten((args, kwargs), is_leaf=lambda one: type(one) not in (tuple, list, dict))
        listener = listeners[-1]
        if listener is None:
            one_pass = _Pass(self, (args, kwargs), tree)
            with set_checkpoint_early_stop(False):
                return checkpoint(one_pass, *values, use_reentrant=False)
        listener.enter(self.path, [one for one in values if isinstance(one, torch.Tensor)])
        try:
            return own(*args, **kwargs)
        finally:
            listener.leave()

    def __reduce__(self) -> tuple[object, ...]:
        return functools.partial, (self.own,)  # a deep copy that is made in forward runs its own


class _Pass:
    """One pass, which a checkpoint calls in forward, and in backward with the values that it has saved."""

    def __init__(self, placed: _InPlace, given: tuple[tuple[Any, ...], dict[str, Any]], tree: Any) -> None:
        self._given: Any = given  # until forward has run, which may fill a list of the caller's
        self._tree = tree
        self._users_stop: Any = getattr(checkpointing, "_enable_checkpoint_early_stop", None)
        self._placed, self._own = placed, placed.own
        self._digests: list[_Digest] | None = None  # until forward is over: it may take a gradient of its own

    def __call__(self, *values: Any) -> Any:
        own, placed = self._own, self._placed
        if self._given is not None:
            (args, kwargs), self._given = self._given, None  # or they would be held
            with set_checkpoint_early_stop(self._users_stop), self._saving(is_again=False):
                output = own(*args, **kwargs)
            self._digests = _digests(placed.path, output)
            return output
        args, kwargs = tree_unflatten(values, self._tree)
        with _gathered_stay(placed.block), self._saving(is_again=True):
            output = own(*args, **kwargs)
        if self._digests is not None:
            placed.blocks.compare(placed.path, self._digests, _digests(placed.path, output))
        return output

    @contextmanager
    def _saving(self, *, is_again: bool) -> Iterator[None]:
        """Keep parameters from the checkpoint's hooks, inside of which this is, and name the block in its errors."""
        placed = self._placed
        checkpoint_pack, checkpoint_unpack = innermost_hooks()  # type: ignore[misc] # the checkpoint's, so not None

        def pack(tensor: torch.Tensor) -> object:
            if isinstance(tensor, nn.Parameter):
                return PassedThrough(tensor)
            if is_again:
                placed.blocks.cache.count_again(tensor)
            return checkpoint_pack(tensor)

        def unpack(held: object) -> torch.Tensor:
            try:
                return held.restore() if isinstance(held, PassedThrough) else checkpoint_unpack(held)
            except CheckpointError as error:
                told = f"PyTorch cannot recompute the block {placed.path!r} in backward: {error} {_REPAIR}"
                raise RecomputationError(" ".join(told.split())) from error
            except ActivationModifiedError as error:
                raise ActivationModifiedError(f"what the block {placed.path!r} reads was modified: {error}") from error

        inside: Any = uncompiled_hooks(pack, unpack)
        # To a selective checkpoint inside they are none of a user's hooks, and what it saves stays with it.
        inside.pack_hook._checkpoint_internal, inside.pack_hook._user_hooks = True, None
        with inside:
            yield


class _Digest(NamedTuple):
    """A tensor's form, and a digest of its bytes, on the tensor's device."""

    form: tuple[object, ...]
    sums: torch.Tensor


def _digests(path: str, output: object) -> list[_Digest]:
    """Return the digests of all tensors that a block returns.

    Raises:
        RecomputationError: one is no plain tensor, so that its bytes cannot be compared.
    """
    digests: list[_Digest] = []
    for tensor in tree_flatten(output)[0]:
        if not isinstance(tensor, torch.Tensor):
            continue
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            plain = tensor.detach()  # a parameter, say, is one
            if not has_plain_storage(plain) or plain.is_quantized:
                raise RecomputationError(
                    f"the block {path!r} returns a tensor of type {type(tensor).__name__} and layout {tensor.layout}, "
                    f"whose bytes cannot be compared when it runs again. {_LEAVE_OUT}."
                )
            numbers = integers_of(plain).contiguous().view(-1)
            is_on_host = plain.device.type == _HOST
            sums = torch.tensor(digest_of(numbers.view(torch.uint8)) - (1 << 63)) if is_on_host else sums_of(numbers)
        digests.append(_Digest((plain.dtype, plain.shape), sums))
    return digests


def sums_of(numbers: torch.Tensor) -> torch.Tensor:
    """Return sums that change with any one number, and where rows trade places; without a copy of all numbers."""
    rows = numbers[: numbers.numel() // _COLUMNS * _COLUMNS].view(-1, _COLUMNS)
    rest = numbers[rows.numel() :].to(torch.int64)
    return torch.cat((rows.sum(0, dtype=torch.int64), rows.sum(1, dtype=torch.int64), rest))


@contextmanager
def _gathered_stay(module: nn.Module) -> Iterator[None]:
    """Keep parameters that backward has gathered from being freed by the forward that runs again.

    ZeRO-3 keeps at a parameter the numbers of the modules that use it. We are one more, and leave the set as it was.
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
