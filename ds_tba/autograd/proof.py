"""Whether a block's forward may run a second time: proven in the run, before a plan relies on it.

Knows single passes; does not know models, ranks, nor who wants to know.

[Note: Two proofs] First passes are *watched*. A forward that leaves a trace (``forward_state.py``), or whose state
others change until backward, is never run again. Then passes that left none are *verified*. A verified pass saves as
usual, and runs inside a checkpoint as well, which is the one of a recomputation. When backward first wants a saved
tensor of the pass, the checkpoint runs the forward again, to its end. Each tensor that this gives is compared with the
saved one, which is what backward gets, and the result with digests of the first result. Meanwhile the second tensors
take the memory of one block's activations, if the budget has it, each until it is compared. The checkpoint's inputs
are saved through the hooks around the pass, as those of a recomputation; the second tensors never reach these hooks.

[Note: Random numbers] A checkpoint restores PyTorch's default generators. That does not help a forward which puts
another state into them (``fork_rng``, the trackers of tensor-parallel training) or draws from a generator that is
hidden, and whose second run would take numbers that the training has not drawn yet. So verifying begins with a run
under a dispatch mode, which stops *before* an operation that would draw such numbers. The mode is not used in a forward
of the training: PyTorch computes some operations in another way under a mode. Nor is it used where ``torch.compile`` is
found inside, which must not run under one; there the bytes alone decide.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointError

from ds_tba.autograd.checkpoint import (
    CAN_RECOMPUTE,
    Account,
    Arguments,
    Conditions,
    RecomputedPass,
    counting,
    hooks_of_checkpoint,
    innermost_hooks,
)
from ds_tba.autograd.comparison import (
    LeavesTraceError,
    RandomGuard,
    Run,
    difference,
    drawn_from,
    gradient_identity,
    hooks_of,
    modes,
    nothing_saved,
    outputs_of,
    python_rng_states,
    set_python_rng_states,
    version_of,
)
from ds_tba.autograd.forward_state import CACHE, State, StateReader, UnreadableError
from ds_tba.autograd.tensors import VersionWitness, has_plain_storage, is_parameter, stamp_of, uncompiled_hooks
from ds_tba.errors import IncompatibleError

# Forwards whose passes are watched where the first found an obstacle: a first forward may set up state for good.
_MAX_WATCHED_FORWARDS = 2

# Reasons for which nothing can be recomputed, each with the way out.
_OLD_PYTORCH = f"recomputing needs PyTorch 2.8, and this is {torch.__version__}: update PyTorch"
_NOTHING_SAVED = (
    "its forward saves nothing but its inputs, so recomputing it would free nothing: if the model checkpoints its "
    "layers itself (gradient_checkpointing), turn that off to have plans choose"
)
_NO_CACHE = " (if of keys and values for generating, train with use_cache=False: model.config.use_cache = False)"

Kind = tuple[bool, frozenset[type]]
"""Of a pass: whether the module trains, and the classes of the objects among its arguments and of PyTorch's modes."""


def kind_of(module: nn.Module, arguments: Arguments) -> Kind:
    """The kind of a pass; each is proven by itself."""
    return module.training, frozenset(type(one) for one in (*arguments.others, *modes()))


def name_of(kind: Kind) -> str:
    """The same on every rank."""
    training, classes = kind
    return f"{'training' if training else 'evaluation'}({', '.join(sorted(one.__qualname__ for one in classes))})"


@dataclass(eq=False)
class Evidence:
    """Findings from the passes through one block.

    Attributes:
        reader: of the block's state.
        traceless: kinds of passes that left no trace.
        proven: of those, kinds that were verified: both runs gave the same bytes.
        obstacle: why it cannot be run again, as far as is known.
    """

    reader: StateReader
    traceless: set[Kind] = field(default_factory=set)
    proven: set[Kind] = field(default_factory=set)
    obstacle: str | None = None if CAN_RECOMPUTE else _OLD_PYTORCH
    _watches: int = 0 if CAN_RECOMPUTE else _MAX_WATCHED_FORWARDS
    _verifications: dict[Kind, VerifiedPass] = field(default_factory=dict)

    @property
    def is_settled(self) -> bool:
        """Whether the obstacle is there for good."""
        return self.obstacle is not None and self._watches >= _MAX_WATCHED_FORWARDS

    @property
    def unverified(self) -> set[Kind]:
        """Kinds of passes that left no trace and are to be verified."""
        return self.traceless - self.proven if self.obstacle is None else set()

    def is_to_be_watched(self, kind: Kind) -> bool:
        """Whether a pass of that kind has something to show."""
        return not self.is_settled and (self.obstacle is not None or kind not in self.traceless)

    def is_to_be_verified(self, kind: Kind) -> bool:
        """Whether a pass of that kind may be verified, which each kind is once in a step."""
        return kind in self.unverified and kind not in self._verifications

    def learn(self, watches: Sequence[Watch]) -> None:
        """Take over the findings of one forward of the model."""
        found = next((watch.obstacle for watch in watches if watch.obstacle is not None), None)
        if not self.is_settled:
            self.obstacle = found
        self._watches += 1
        if found is None:
            self.traceless |= {watch.kind for watch in watches}

    def add_obstacle(self, obstacle: str) -> None:
        """Take over an obstacle found after the forward in which the pass was watched."""
        if self.obstacle is None:
            self.obstacle = obstacle

    def settle(self, obstacle: str) -> None:
        """Set an obstacle for good, unless there is one already."""
        if not self.is_settled:
            self.obstacle, self._watches = obstacle, _MAX_WATCHED_FORWARDS

    def begin_verification(self, kind: Kind, verified: VerifiedPass) -> None:
        """A pass is verified in this step."""
        self._verifications[kind] = verified

    def end_verifications(self) -> None:
        """The step is over: kinds whose second run showed no difference are proven."""
        if self.obstacle is None:
            self.proven |= {kind for kind, verified in self._verifications.items() if verified.has_run}
        for verified in self._verifications.values():
            verified.end()
        self._verifications.clear()


class Watch:
    """Looks for a reason why the forward of one pass must not run again.

    Attributes:
        obstacle: the reason.
        has_saved: whether autograd has saved anything in the pass that is neither a parameter nor an input.
    """

    def __init__(self, evidence: Evidence, arguments: Arguments, kind: Kind) -> None:
        self._evidence = evidence
        self._others = arguments.others
        self._inputs: list[VersionWitness] = []
        self._state: State | None = None
        self._of_inputs = {stamp_of(one.untyped_storage()) for one in arguments.tensors if has_plain_storage(one)}
        self.kind = kind
        self.obstacle: str | None = None
        self.has_saved = False

    def saves(self, tensor: torch.Tensor) -> None:
        """Autograd saves a tensor in the pass."""
        if not (self.has_saved or is_parameter(tensor)):
            is_input = has_plain_storage(tensor) and stamp_of(tensor.untyped_storage()) in self._of_inputs
            self.has_saved = not is_input

    @contextmanager
    def forward(self, tensors: Sequence[torch.Tensor]) -> Iterator[None]:
        """Around the pass in forward; ``tensors`` are those among its arguments."""
        reader = self._evidence.reader
        try:
            state = reader.read(self._others, with_bytes=True)
        except UnreadableError as error:
            self.obstacle = f"it refers to {error}"
            yield
            return
        rng_states, versions = python_rng_states(), [version_of(one) for one in tensors]
        touched = (*tensors, *reader.parameters())
        hooks, gradients = [hooks_of(one) for one in touched], [gradient_identity(one) for one in touched]
        yield
        changed = reader.changed_since(state, self._others, with_bytes=True)
        drawn = drawn_from(rng_states, python_rng_states())
        if changed is not None:
            self.obstacle = f"its forward changes {changed}{_NO_CACHE if changed.endswith(CACHE) else ''}"
        elif drawn is not None:
            self.obstacle = f"its forward draws numbers from {drawn}"
        elif [version_of(one) for one in tensors] != versions:
            self.obstacle = "its forward changes an input in place"
        elif [hooks_of(one) for one in touched] != hooks:
            self.obstacle = "its forward registers a hook on an input or a parameter"
        elif [gradient_identity(one) for one in touched] != gradients:
            self.obstacle = "its forward changes a gradient"
        else:
            self._state = state
        self._inputs = [VersionWitness(one) for one in tensors if _is_plain(one)]

    def end_forward(self) -> None:
        """The forward of the whole model is over."""
        if self.obstacle is None and self._is_input_changed():
            self.obstacle = "an input of it is changed in place later in the model's forward"
        elif self.obstacle is None and not self.has_saved:
            self.obstacle = _NOTHING_SAVED

    def backward(self) -> None:
        """Backward first wants a saved tensor of the pass."""
        state, self._state = self._state, None
        if state is None:
            return
        changed = self._evidence.reader.changed_since(state, self._others, with_bytes=True)
        if changed is not None:
            self.add_obstacle(f"{changed} is changed between forward and backward")
        elif self._is_input_changed():
            self.add_obstacle("an input of it is changed in place between forward and backward")

    def add_obstacle(self, obstacle: str) -> None:
        """An obstacle was found in backward."""
        self.obstacle = self.obstacle or obstacle
        self._evidence.add_obstacle(obstacle)

    def _is_input_changed(self) -> bool:
        return any(one.current != one.version for one in self._inputs)


def _is_plain(tensor: torch.Tensor) -> bool:
    return type(tensor) is torch.Tensor and tensor.layout is torch.strided and not tensor.is_inference()


def watched(
    watch: Watch, forward: Callable[..., Any], arguments: Arguments, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """A pass that runs and saves as usual, and is watched.

    Args:
        args, kwargs: those that ``arguments`` was made of.
    """
    with watch.forward(arguments.tensors), _telling(watch):
        return forward(*args, **kwargs)


@contextmanager
def _telling(watch: Watch) -> Iterator[None]:
    """Tell the watch of what is saved, and of every unpack, of which only the first means anything to it."""
    outer = innermost_hooks()
    if outer is None:  # autograd holds what is saved, and tells nobody
        watch.has_saved = True
        yield
        return
    outer_pack, outer_unpack = outer

    def pack(tensor: torch.Tensor) -> Any:
        watch.saves(tensor)
        return outer_pack(tensor)

    def unpack(held: Any) -> torch.Tensor:
        tensor = outer_unpack(held)
        watch.backward()
        return tensor

    with uncompiled_hooks(pack, unpack):
        yield


class VerifiedPass(RecomputedPass):
    """A pass that saves as usual, and whose forward also runs again in backward, to be compared.

    Args:
        path, module, forward, arguments, conditions: see :class:`RecomputedPass`.
        watch: of this pass.
        is_strict: other ranks may wait for the forward in backward.

    Attributes:
        has_run: whether the forward ran again.
    """

    def __init__(
        self,
        path: str,
        module: nn.Module,
        forward: Callable[..., Any],
        arguments: Arguments,
        conditions: Conditions,
        watch: Watch,
        evidence: Evidence,
        account: Account | None,
        *,
        is_strict: bool,
    ) -> None:
        super().__init__(path, module, forward, arguments, conditions, nullcontext)
        self._account = account
        self._watch = watch
        self._evidence = evidence
        self._is_strict = is_strict
        self._outer = innermost_hooks() or (_as_it_is, _as_it_is)
        self._unpack_again: Callable[[Any], torch.Tensor] = _as_it_is
        self._saved: weakref.WeakSet[_Saved] = weakref.WeakSet()
        self._first_run, self._second_run = Run(), Run()
        self._is_over = False
        self.has_run = False

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The pass in forward."""
        with self._watch.forward(self._arguments.tensors):
            result = super().run(args, kwargs)
            self._first_run.outputs = outputs_of(result)
        return result

    def _runs_to_its_end(self) -> bool:
        return True  # its result is compared, too

    @contextmanager
    def _saving(self) -> Iterator[None]:
        """Save what backward gets as usual, and let the checkpoint count it."""
        checkpoint_pack, self._unpack_again = hooks_of_checkpoint()
        outer_pack, _ = self._outer

        def pack(tensor: torch.Tensor) -> _Saved:
            self._watch.saves(tensor)
            is_own = self._first_run.add(tensor)
            saved = _Saved(outer_pack(tensor))
            saved.is_parameter = is_own
            if not (is_own or self._is_over):
                try:
                    saved.holder = checkpoint_pack(tensor)
                except Exception as error:  # noqa: BLE001 - a checkpoint cannot hold every tensor; forward goes on
                    self._stop(f"a checkpoint cannot hold what its forward saves: {_first_line(error)}")
            self._saved.add(saved)
            return saved

        with uncompiled_hooks(pack, self._unpack):
            yield

    @contextmanager
    def _saving_again(self) -> Iterator[None]:
        """Let the checkpoint have what the second run saves, but for parameters, of which it knows nothing."""
        checkpoint_pack, checkpoint_unpack = hooks_of_checkpoint()

        def pack(tensor: torch.Tensor) -> Any:
            return tensor if self._second_run.add(tensor) else checkpoint_pack(tensor)

        with uncompiled_hooks(pack, checkpoint_unpack):
            yield

    # ---- in backward --------------------------------------------------------------------------------------------

    def _unpack(self, saved: _Saved) -> torch.Tensor:
        tensor: torch.Tensor = self._outer[1](saved.held)
        if saved.is_parameter:
            return tensor
        if not self.has_run:  # also in a backward after the step, when nothing runs again: the watch learns from it
            self._watch.backward()
            if self._watch.obstacle is not None:
                (self._evidence.settle if self._is_over else self._stop)(self._watch.obstacle)
                return tensor
        if self._is_over:
            return tensor
        task = torch._C._current_graph_task_id()
        if saved.holder is None:
            if saved.task == task:
                self._stop("its backward takes a saved tensor twice, which a checkpoint does not allow")
            return tensor  # in another backward through the same graph
        saved.task = task
        self._compare(saved, tensor)
        return tensor

    def _compare(self, saved: _Saved, tensor: torch.Tensor) -> None:
        holder, saved.holder = saved.holder, None
        try:
            again = self._unpack_again(holder) if self.has_run else self._first_again(holder)
            different = difference(tensor, again)
        except Exception as error:  # noqa: BLE001 - a forward may raise anything, and backward has what it needs
            self._fail(_reason(error))
            return
        if different is not None:
            self._fail(f"run again, its forward gave {different}")

    def _first_again(self, holder: Any) -> torch.Tensor:
        """Run the forward again, and look whether that left a trace."""
        nbytes = self._first_run.held_bytes
        if not (self._account is None or self._account.has_room(nbytes) or self._is_strict):
            raise LeavesTraceError(f"activation_budget_bytes has no room for the {nbytes} bytes that a trial takes")
        self.has_run = True
        reader, others = self._evidence.reader, self._arguments.others
        state, rng_states = reader.read(others, with_bytes=True), python_rng_states()
        try:
            again = self._unpack_again(holder)
        finally:
            drawn = drawn_from(rng_states, python_rng_states())
            if drawn is not None:
                set_python_rng_states(rng_states)
        changed = reader.changed_since(state, others, with_bytes=True)
        if changed is not None:
            raise LeavesTraceError(f"run again, its forward changed {changed}")
        if drawn is not None:
            raise LeavesTraceError(f"run again, its forward drew numbers from {drawn}")
        first, second = self._first_run, self._second_run
        if second.parameters != first.parameters[: len(second.parameters)]:
            raise LeavesTraceError("run again, its forward used other parameters")
        if first.outputs is None or second.outputs is None:
            raise LeavesTraceError("its forward returns something that cannot be compared")
        if first.outputs != second.outputs:
            raise LeavesTraceError("run again, its forward returned other bytes")
        return again

    def _run_again(self, tensors: Sequence[torch.Tensor]) -> Any:
        with self._conditions.restored():
            if not self._evidence.reader.is_compiled:
                with nothing_saved(), RandomGuard():
                    self._forward_again(tensors)
            with counting(self._account), self._saving_again():
                result = self._forward_again(tensors)
            self._second_run.outputs = outputs_of(result)
            return result

    def _fail(self, reason: str) -> None:
        self._evidence.settle(reason)
        self.end()

    def _stop(self, reason: str) -> None:
        """There is a trace, so the forward must not run again. Other ranks may run it now, and wait for this one."""
        if self._is_strict and not self.has_run:
            raise IncompatibleError(
                f"every rank is to run the block {self._path!r} again here, to verify that it can be recomputed, and "
                f'on this rank it cannot, which it did not show before: {reason}. Set "recompute": false.'
            )
        self._fail(reason)

    def end(self) -> None:
        """Compare no more, and let go of the checkpoint's part of the pass.

        Its closure and this pass refer to each other, so that a graph which was dropped without a backward would live
        until garbage is collected.
        """
        self._is_over = True
        for saved in list(self._saved):
            saved.holder = None
        self._unpack_again = _as_it_is


class _Saved:
    """Held by autograd in place of one tensor of a verified pass."""

    __slots__ = ("__weakref__", "held", "holder", "is_parameter", "task")

    def __init__(self, held: Any) -> None:
        self.held = held
        self.holder: Any = None  # the checkpoint's, until the tensor was compared
        self.is_parameter = False
        self.task = -1  # the backward that took the tensor


def _as_it_is(one: Any) -> Any:
    return one


def _reason(error: Exception) -> str:
    if isinstance(error, LeavesTraceError):
        return str(error)
    if isinstance(error, CheckpointError):
        return "run again, its forward saved other tensors"
    return f"run again, its forward raised {_first_line(error)}"


def _first_line(error: Exception) -> str:
    line = next((line for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {line}"
