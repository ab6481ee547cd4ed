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
while a block runs again (:func:`_gathered_stay`). A Function reads the parameter itself (``functions.py``, [Note:
Originals]): the checkpoint's own alias would become ``.grad`` where a backward returns it.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn
from torch.utils import checkpoint as checkpointing
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import CheckpointError, checkpoint, set_checkpoint_early_stop

from ds_tba.core.hooks import innermost_hooks, is_being_compiled, skip_frames, uncompiled_hooks
from ds_tba.core.saved import PassedThrough
from ds_tba.core.tensors import has_plain_storage, integers_of
from ds_tba.device.memory import digest_of
from ds_tba.errors import ActivationModifiedError, RecomputationError, StateError
from ds_tba.recompute.blocks import Block

_ABSENT = object()
_NO_BACKWARD = -1  # autograd's number of the backward in this thread when there is none
_OUR_NUMBER = -1  # among those that ZeRO-3 gives to modules, which start at 0
_COLUMNS = 1024
_HOST = "cpu"

_REPAIR = (
    "As under any checkpoint, a block may not change what it reads (a counter, an adapter that is switched, a cache of "
    "keys and values: use_cache=False), nor draw random numbers but from PyTorch's default generators. Leave it out "
    'by naming the others in "recompute", or set "recompute": false.'
)


class PassListener(Protocol):
    """Is told of each pass through a block in a recorded micro-step: the recorder."""

    def enter(self, path: str, inputs: Sequence[torch.Tensor]) -> None: ...

    def leave(self) -> None: ...


class Recomputations(Protocol):
    """Counts the device memory of what blocks save when they run again: the cache."""

    def count_again(self, tensor: torch.Tensor) -> None: ...

    def end_recomputations(self) -> None: ...


class _Forward(threading.local):
    """The forward of a micro-step, in the thread that runs it."""

    is_open = False
    listener: PassListener | None = None


class Blocks:
    """The blocks of one model.

    Args:
        blocks: from :func:`ds_tba.recompute.blocks.find_blocks`.

    Attributes:
        chosen: paths of those that run under a checkpoint.
    """

    def __init__(self, blocks: Sequence[Block], cache: Recomputations, chosen: Collection[str] = ()) -> None:
        self.all = tuple(blocks)
        self.chosen = frozenset(chosen)
        self.cache = cache
        self.running = _Forward()
        self.answers: list[tuple[str, torch.Tensor]] = []  # of the device: whether the output of a block differs
        self._placed = [_InPlace(self, block) for block in blocks]

    @contextmanager
    def forward(self, listener: PassListener | None = None) -> Iterator[None]:
        """Open the forward of a micro-step. With a listener it is told of all passes, and none is checkpointed."""
        skip_frames((_InPlace.__call__,))
        running = self.running
        before, running.is_open, running.listener = (running.is_open, running.listener), True, listener
        try:
            with ExitStack() as placed:
                for one in self._placed:
                    if listener is not None or one.block.path in self.chosen:
                        placed.enter_context(one.placed())
                yield
        finally:
            running.is_open, running.listener = before

    def end_backward(self) -> None:
        """Read the answers of the device.

        Raises:
            RecomputationError: a block returned other bytes when it ran again, and the gradients are wrong.
        """
        self.cache.end_recomputations()
        answers, self.answers = self.answers, []
        for path, differs in answers:
            if differs.item():
                raise _differs(path)


class _InPlace:
    """Stands in the place of a block's ``forward``: one object for all forwards, or compiled code is compiled again."""

    def __init__(self, blocks: Blocks, block: Block) -> None:
        self.block = block
        self._blocks = blocks
        self._own: Any = block.module.forward
        functools.update_wrapper(self, self._own, updated=())  # whoever inspects the signature sees the module's own

    @contextmanager
    def placed(self) -> Iterator[None]:
        attributes = self.block.module.__dict__  # past __setattr__, which torch.compile's module hands on
        before = attributes.get("forward", _ABSENT)
        if before is self:  # a forward inside of a forward
            yield
            return
        self._own = self.block.module.forward
        attributes["forward"] = self
        try:
            yield
        finally:
            if attributes.get("forward") is self:
                del attributes["forward"]
                attributes.update({} if before is _ABSENT else {"forward": before})

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        own, running = self._own, self._blocks.running
        if torch.compiler.is_compiling() or is_being_compiled() or not running.is_open:
            return own(*args, **kwargs)
        if not torch.is_grad_enabled() or torch._C._current_graph_task_id() != _NO_BACKWARD:
            return own(*args, **kwargs)
        tensors, form = _taken_apart(args, kwargs)
        if running.listener is None:
            run = RecomputedPass(self.block, own, form, (args, kwargs), self._blocks)
            with set_checkpoint_early_stop(False):
                return checkpoint(run, *tensors, use_reentrant=False)
        running.listener.enter(self.block.path, tensors)
        try:
            return own(*args, **kwargs)
        finally:
            running.listener.leave()

    def __reduce__(self) -> tuple[object, ...]:
        return _itself, (self._own,)  # a deep copy that is made in forward runs its own


def _itself(forward: object) -> object:
    return forward


class _Form(NamedTuple):
    """The arguments of a call without their tensors: a checkpoint holds only tensors that it is given by position."""

    values: list[object]
    places: list[tuple[int, int]]
    tree: Any

    def with_tensors(self, tensors: Sequence[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        values = [*self.values]
        for at, position in self.places:
            values[at] = tensors[position]
        args, kwargs = tree_unflatten(values, self.tree)
        return args, kwargs


def _taken_apart(args: tuple[object, ...], kwargs: dict[str, object]) -> tuple[list[torch.Tensor], _Form]:
    """Return each tensor once (attention asks whether query *is* key), also of tuples, lists and dicts."""
    values, tree = tree_flatten((args, kwargs), is_leaf=lambda one: type(one) not in (tuple, list, dict))
    unique = {id(one): one for one in values if isinstance(one, torch.Tensor)}
    number = {key: position for position, key in enumerate(unique)}
    places = [(at, number[id(one)]) for at, one in enumerate(values) if isinstance(one, torch.Tensor)]
    rest = [None if isinstance(one, torch.Tensor) else one for one in values]
    return [*unique.values()], _Form(rest, places, tree)


class RecomputedPass:
    """One pass, which a checkpoint calls in forward and again in backward."""

    def __init__(self, block: Block, own: Any, form: _Form, given: Any, blocks: Blocks) -> None:
        self._block = block
        self._own = own
        self._form = form
        self._given = given  # as the caller gave them; only until forward has run, or it would hold the tensors
        self._blocks = blocks
        self._users_stop = getattr(checkpointing, "_enable_checkpoint_early_stop", None)
        self._digests: list[_Digest] = []
        self._differs: bool | torch.Tensor = False
        self._refusal: CheckpointError | None = None

    def __call__(self, *tensors: torch.Tensor) -> Any:
        if self._given is None:
            return self.run_again(tensors)
        (args, kwargs), self._given = self._given, None
        with set_checkpoint_early_stop(self._users_stop), self._saving(is_again=False):  # type: ignore[arg-type]
            output = self._own(*args, **kwargs)
        self._digests = _digests(output)
        return output

    def run_again(self, tensors: Sequence[torch.Tensor]) -> Any:
        args, kwargs = self._form.with_tensors(tensors)
        with _gathered_stay(self._block.module), self._saving(is_again=True):
            output = self._own(*args, **kwargs)
        self._differs = _differ(self._digests, _digests(output))
        if self._refusal is not None:
            raise self._refused(self._refusal)
        if isinstance(self._differs, torch.Tensor):
            self._blocks.answers.append((self._block.path, self._differs))
        elif self._differs:
            raise _differs(self._block.path)
        return output

    @contextmanager
    def _saving(self, *, is_again: bool) -> Iterator[None]:
        """Keep parameters from the checkpoint's hooks, inside of which this is, and name the block in its errors."""
        hooks = innermost_hooks()
        if hooks is None:
            raise StateError("a block is recomputed outside of a checkpoint; this is a bug in ds_tba")
        checkpoint_pack, checkpoint_unpack = hooks

        def pack(tensor: torch.Tensor) -> object:
            if isinstance(tensor, nn.Parameter):
                return PassedThrough(tensor)
            if is_again:
                self._blocks.cache.count_again(tensor)
            try:
                return checkpoint_pack(tensor)
            except CheckpointError as error:  # run to the end: whether the output differs says more
                self._refusal = error
                return None

        def unpack(held: object) -> torch.Tensor:
            if isinstance(held, PassedThrough):
                try:
                    return held.restore()
                except ActivationModifiedError as error:
                    raise ActivationModifiedError(
                        f"a parameter of the block {self._block.path!r} was modified between its forward and its "
                        f"backward: {error}"
                    ) from error
            try:
                return checkpoint_unpack(held)
            except CheckpointError as error:
                raise self._refused(error) from error

        inside: Any = uncompiled_hooks(pack, unpack)
        # To a selective checkpoint inside they are none of a user's hooks, and what it saves stays with it.
        inside.pack_hook._checkpoint_internal, inside.pack_hook._user_hooks = True, None
        with inside:
            yield

    def _refused(self, error: CheckpointError) -> RecomputationError:
        if self._differs:  # waits for the device
            return _differs(self._block.path)
        words = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        return RecomputationError(
            f"PyTorch cannot recompute the block {self._block.path!r} in backward: {words} {_REPAIR}"
        )


def _differs(path: str) -> RecomputationError:
    return RecomputationError(f"the output of the block {path!r} differs when its forward runs again: {_REPAIR}")


class _Digest(NamedTuple):
    """A tensor's form, and a digest of its bytes: a number of host memory; sums that stay on their device."""

    form: tuple[object, ...]
    bits: int | torch.Tensor | None


def _digests(output: object) -> list[_Digest]:
    with torch.no_grad():
        return [_digest(one) for one in tree_flatten(output)[0] if isinstance(one, torch.Tensor)]


def _digest(tensor: torch.Tensor) -> _Digest:
    form: tuple[object, ...] = type(tensor), tensor.dtype, tensor.layout
    if not has_plain_storage(tensor) or tensor.is_quantized or tensor.is_meta:
        return _Digest(form, None)
    form = (*form, tensor.shape)
    numbers = integers_of(tensor).contiguous().view(-1)
    if tensor.device.type == _HOST:
        return _Digest(form, digest_of(numbers.view(torch.uint8)))
    return _Digest(form, sums_of(numbers))


def sums_of(numbers: torch.Tensor) -> torch.Tensor:
    """Return sums that change with any one number, and where rows trade places; without a copy of all numbers."""
    rows = numbers[: numbers.numel() // _COLUMNS * _COLUMNS].view(-1, _COLUMNS)
    rest = numbers[rows.numel() :].to(torch.int64)
    return torch.cat((rows.sum(0, dtype=torch.int64), rows.sum(1, dtype=torch.int64), rest))


def _differ(first: Sequence[_Digest], again: Sequence[_Digest]) -> bool | torch.Tensor:
    """Return whether outputs differ; a flag on the device where that has to tell."""
    if [one.form for one in first] != [one.form for one in again]:
        return True
    flags: list[torch.Tensor] = []
    for one, other in zip(first, again, strict=True):
        if isinstance(one.bits, torch.Tensor) and isinstance(other.bits, torch.Tensor):
            flags.append(torch.ne(one.bits, other.bits).any())
        elif one.bits != other.bits:
            return True
    return torch.stack(flags).any() if flags else False


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
