"""Runs one random training (``trainings.py``) with us and without, and tells every difference."""

from __future__ import annotations

import gc
import itertools
import logging
import random
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import xxhash
from support.doubles import Accelerator, Warnings
from support.late_device import LateDevice
from support.leftovers import after_a_while, held
from torch import Tensor, nn

from ds_tba.config import AioConfig, OffloadConfig
from ds_tba.core.tensors import as_uint8
from ds_tba.errors import ActivationModifiedError, DsTbaError
from ds_tba.offloader import ActivationOffloader
from ds_tba.plan.agreement import Alone
from ds_tba.plan.controller import Controller
from ds_tba.plan.feedback import Action
from programs import parts
from programs.kind import Failure, Outcome
from programs.trainings import MIN_BYTES, Program, Step

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))  # has the planners of the papers

TOKENS = 100
HELD_STEPS = 3  # for which a graph without a backward is held
SETTLE_S = 3.0
LATE_S = 0.0002
COLLECT_EVENTS = 7
GIVES_WAY = "cannot be held"  # says the line of a budget that must be exceeded
SURPRISE_PART = 0.5  # of the steps under a plan
CLOCK_FACTORS = (1.0, 1.0, 1.0, 0.0, -1.0, 1e4)


# ---- what is compared -----------------------------------------------------------------------------------------------


class Tape:
    """Observations of a training, in order: labels and fingerprints of all bits."""

    def __init__(self) -> None:
        self.step = 0  # the step under way, which is a part of each observation
        self.entries: list[tuple[int, str, str]] = []
        self.messages: dict[int, str] = {}  # of errors, by the number of their entry
        self.ours: list[str] = []  # errors that only we raise
        self.is_finite = True

    def note(self, label: str, value: Any) -> None:
        """A tensor's bits, or anything else by its text."""
        self.entries.append((self.step, label, _fingerprint(value)))

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Errors are part of what a program does: the situation counts, not the words."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - compared with those of the other side
            self.messages[len(self.entries)] = f"{type(error).__name__}: {str(error)[:400]}"
            self.note("raises", kind_of(error))
            if isinstance(error, DsTbaError) and not isinstance(error, ActivationModifiedError):
                self.ours.append("".join(traceback.format_exception(error))[-1500:])

    def different(self, other: Tape) -> list[int]:
        pairs = enumerate(itertools.zip_longest(self.entries, other.entries))
        return [place for place, (one, two) in pairs if one != two]

    def difference(self, other: Tape) -> str | None:
        different = self.different(other)
        if not different:
            return None
        first, longer = different[0], max(self.entries, other.entries, key=len)
        labels = ", ".join(dict.fromkeys(f"step {longer[place][0]} {longer[place][1]}" for place in different[:4]))
        found = f"first at: {labels}; {len(different)} of {len(longer)} observations"
        for tape, whose in ((self, "the reference"), (other, "ours")):
            if first in tape.messages:
                found += f"; {whose} raises {tape.messages[first]}"
        return found


def kind_of(error: BaseException) -> str:
    """Return the same words for the same situation."""
    text = str(error)
    if "modified by an inplace operation" in text or "has been modified inplace" in text:  # of a view made in no_grad
        return "modified"
    if "backward through the graph a second time" in text or "after they have already been freed" in text:
        return "freed"
    if text.startswith("derivative for"):
        return "no derivative"
    return "RuntimeError" if isinstance(error, RuntimeError) else type(error).__name__


def _fingerprint(value: Any) -> str:
    if not isinstance(value, Tensor):
        return str(value)
    copy = value.detach().clone(memory_format=torch.contiguous_format)
    bits = as_uint8(copy.untyped_storage()).numpy()
    return f"{value.dtype} {tuple(value.shape)} {xxhash.xxh3_64_hexdigest(bits)}"


# ---- the two sides --------------------------------------------------------------------------------------------------


class Plain:
    """Training without us."""

    device: LateDevice | None = None

    def watch(self, net: nn.Module) -> None:
        """The model is made."""

    def saving(self, *inputs: Tensor) -> AbstractContextManager[Any]:
        """Around a forward."""
        return nullcontext()

    def note_micro_step(self) -> None:
        """After a backward."""

    def note_step(self) -> None:
        """After an optimizer step."""

    def end(self) -> list[Failure]:
        """All graphs are gone."""
        return []


class Counted(Plain):
    """Without us, but with hooks that refuse what was modified, and tell which saved tensors are never let go.

    Autograd leaks some itself: where an operator's backward cannot be differentiated, or a hook has raised.
    """

    def __init__(self) -> None:
        self.left: weakref.WeakSet[Callable[[], Tensor]] = weakref.WeakSet()

    def saving(self, *inputs: Tensor) -> AbstractContextManager[Any]:
        return torch.autograd.graph.saved_tensors_hooks(self._hold, lambda restore: restore())

    def _hold(self, tensor: Tensor) -> Callable[[], Tensor]:
        held, version = tensor if tensor.grad_fn is None else tensor.detach(), tensor._version

        def restore() -> Tensor:
            if held._version != version:
                raise RuntimeError("modified by an inplace operation")
            return held

        self.left.add(restore)
        return restore


class Ours(Plain):
    """Training with an offloader, as an engine would drive it."""

    def __init__(self, program: Program, directory: str, budget_bytes: int | None = None) -> None:
        self._program = program
        self._budget_bytes = budget_bytes
        self._failures: list[Failure] = []
        self._others = set(threading.enumerate())
        self.peaks: list[int] = []  # bytes of activations of each step
        self.warnings = Warnings()
        logging.getLogger("ds_tba").addHandler(self.warnings)
        self.device = LateDevice(longest_pause_s=LATE_S) if program.device == "late" else None
        config = OffloadConfig.model_validate(program.block(directory, budget_bytes))
        self.offloader = ActivationOffloader(config, AioConfig(), self.device or Accelerator())

    def watch(self, net: nn.Module) -> None:
        from planners import PLANNERS

        self.offloader.watch(net, Alone(), PLANNERS[self._program.planner])
        if self.offloader.controller is not None:
            _surprise(self.offloader.controller, self._program)

    def saving(self, *inputs: Tensor) -> AbstractContextManager[Any]:
        return self.offloader.saving(inputs)

    def note_micro_step(self) -> None:
        self.offloader.note_micro_step()

    def note_step(self) -> None:
        self.offloader.note_step()
        if self._budget_bytes is not None and not self._failures:
            self._check_budget(self._budget_bytes)
        if self._program.lengths:
            self.offloader.cache.settle()
        self.peaks.append(self.offloader.report().step_peak_saved_bytes)

    def _check_budget(self, budget_bytes: int) -> None:
        """Kept so far, or a warning has said what gives way."""
        report = self.offloader.report()
        if report.peak_saved_bytes > budget_bytes and not any(GIVES_WAY in text for text in self.warnings.texts):
            text = f"step {len(self.peaks)}: {report.peak_saved_bytes} bytes under {budget_bytes}, and nothing was said"
            text += f"; plans so far: {report.plans}"
            self._failures.append(Failure("budget", text))

    def end(self) -> list[Failure]:
        """Close the offloader, and return what it had left."""
        try:
            left = after_a_while(lambda: held(self.offloader.cache), SETTLE_S)
            self._failures += [Failure("left", left)] if left else []
        finally:
            self.offloader.close()
            if self.device is not None:
                self.device.end()
            logging.getLogger("ds_tba").removeHandler(self.warnings)
        alive = after_a_while(self._alive, SETTLE_S)
        return self._failures + ([Failure("threads", f"alive after close: {alive}")] if alive else [])

    def _alive(self) -> str:
        """Threads of ours that were not there before."""
        others = set(threading.enumerate()) - self._others
        return ", ".join(one.name for one in others if one.name.startswith("ds_tba"))


def _surprise(controller: Controller, program: Program) -> None:
    """Have the control look, record or mistake the time; see ``Program.surprises``."""
    chance = random.Random(f"surprises {program.seed}")
    if program.surprises == "clock":
        clock: Any = controller._machine.accelerator
        elapsed_s = clock.elapsed_s
        clock.elapsed_s = lambda *marks: chance.choice(CLOCK_FACTORS) * elapsed_s(*marks)
    elif program.surprises:
        action = Action.PLAN if program.surprises == "looks" else Action.RECORD
        feedback: Any = controller.feedback
        feedback.decide = lambda *_: action if chance.random() < SURPRISE_PART else Action.GO_ON


# ---- the training ---------------------------------------------------------------------------------------------------


class Training:
    """A program's steps, on one side. Each kind of step is a method, with the step as its argument."""

    def __init__(self, program: Any, side: Plain, tape: Tape) -> None:
        self._program = program
        self._side = side
        self._tape = tape
        parts.reset_states(program.seed)
        self._data = torch.Generator().manual_seed(program.seed + 2)
        self._net: Any = self._new_net()
        side.watch(self._net)
        self._optimizer: Any = self._new_optimizer()
        self._buffers: dict[int, tuple[Tensor, Any]] = {}
        self._held: list[tuple[int, Tensor]] = []
        self._inputs: list[Tensor] = []
        self._grads: dict[str, Tensor | None] = {}

    def _new_net(self) -> nn.Module:
        program = self._program
        if program.lengths:
            return parts.Lengths(program.lengths, program.width)
        return parts.Net(program.stem, program.blocks, program.width, TOKENS)

    def _new_optimizer(self) -> Any:
        kind = torch.optim.AdamW if self._program.optimizer == "AdamW" else torch.optim.SGD
        return kind(self._net.parameters(), lr=1e-3)

    def go_on(self, steps: Iterable[Step]) -> None:
        for step in steps:
            number = self._tape.step
            self._held = [held for held in self._held if held[0] > number]
            errors = len(self._tape.messages)
            with self._tape.guarded():
                self._inputs = []
                self._do(step, number)
            if len(self._tape.messages) > errors:  # how far a backward comes that fails is nobody's business
                self._net.tap, self._net.fails, self._net.tapped = None, False, None
                self._optimizer.zero_grad()
            else:
                self._note_grads()
                self._optimizer.step()
                self._optimizer.zero_grad(set_to_none=self._program.set_to_none)
                self._side.note_step()
            self._tape.step += 1

    def _do(self, step: Step, number: int) -> None:
        getattr(self, step.kind)(step, number)

    def run(self) -> None:
        """All steps, then what has become of the model."""
        self.go_on(self._program.steps)
        self._note_states()
        # What is left after this is left by us: gradients and states of the model may hold memory that we handed out.
        self._optimizer.zero_grad(set_to_none=True)
        for module in self._net.modules():
            if isinstance(module, parts.Memory):
                module.memory = torch.zeros(1)

    # ---- kinds of steps -----------------------------------------------------------------------------------------

    def usual(self, step: Step, number: int) -> None:
        """Micro-batches, each with its backward."""
        for _ in range(step.micro_steps):
            self._backward(self._forward(self._batch(step.rows)))

    def several(self, step: Step, number: int) -> None:
        """Several forwards before a backward of their sum, or one of each."""
        losses = [self._forward(self._fresh(step.rows)) for _ in range(step.micro_steps)]
        if step.how == "sum":
            self._backward(sum(losses[1:], losses[0]))
            return
        while losses:
            self._backward(losses.pop(0 if step.how == "in order" else -1))

    def lengths(self, step: Step, number: int) -> None:
        """Micro-steps of forwards of several lengths before one backward, and graphs that are kept."""
        for rows in step.forwards:
            self._backward(torch.stack([self._forward(self._fresh(one)) for one in rows]).sum())
        self._held.clear()
        self._held += [(number + 2, self._forward(self._fresh(step.rows))) for _ in range(step.keeps)]

    def dropped(self, step: Step, number: int) -> None:
        """A graph without a backward, before the usual one."""
        self._drop(self._forward(self._fresh(step.rows)), step.how, number)
        self.usual(step, number)

    def between(self, step: Step, number: int) -> None:
        """A graph without a backward, between the forward and the backward of another."""
        loss = self._forward(self._batch(step.rows))
        self._drop(self._forward(self._fresh(step.rows)), step.how, number)
        self._backward(loss)

    def after(self, step: Step, number: int) -> None:
        """A graph without a backward, after the usual one; what it moves may still be under way when it dies."""
        self.usual(step, number)
        self._drop(self._forward(self._fresh(step.rows)), step.how, number)

    def refill(self, step: Step, number: int) -> None:
        """A buffer filled anew, past its version counter, while an older graph still has it saved."""
        self._drop(self._forward(self._batch(step.rows)), step.how, number, least_steps=1)
        self._backward(self._forward(self._batch(step.rows)))

    def retain(self, step: Step, number: int) -> None:
        loss = self._forward(self._batch(step.rows))
        self._backward(loss, retain_graph=True)
        self._backward(loss)

    def double(self, step: Step, number: int) -> None:
        """A penalty on gradients."""
        loss = self._forward(self._batch(step.rows))
        wanted = self._wanted(step.pick)
        with self._side.saving() if step.how == "inside" else nullcontext():
            found = torch.autograd.grad(loss, wanted, create_graph=True, allow_unused=True)
            penalty = sum(one.square().sum() for one in found if one is not None)
        self._backward(loss + 0.01 * penalty)

    def evaluate(self, step: Step, number: int) -> None:
        """Passes without gradients in between."""
        loss = self._forward(self._batch(step.rows))
        self._look(24)
        self._net.eval()
        self._look(step.rows)
        self._net.train()
        self._backward(loss)

    def idle(self, step: Step, number: int) -> None:
        """A step of the optimizer without a forward, or without one that has a backward."""
        if step.how == "evaluation":
            self._look(step.rows)

    def raises(self, step: Step, number: int) -> None:
        """Something else fails between forward and backward; the script goes on."""
        with suppress(KeyError):
            loss = self._forward(self._batch(step.rows))
            raise KeyError("between forward and backward")
        del loss
        self.usual(step, number)

    def fails(self, step: Step, number: int) -> None:
        """A forward ends in an error; the script goes on."""
        self._net.fails = True
        with suppress(parts.Failure):
            self._forward(self._batch(step.rows))
        self._net.fails = False
        self.usual(step, number)

    def inputs(self, step: Step, number: int) -> None:
        loss = self._forward(self._batch(step.rows))
        wanted = self._wanted(step.pick)
        if step.how == "grad":
            found = torch.autograd.grad(loss, wanted, allow_unused=True)
            self._side.note_micro_step()
            for one in found:
                self._tape.note("autograd.grad", one)
        else:
            self._backward(loss, inputs=wanted)

    def mutate(self, step: Step, number: int) -> None:
        """A tensor inside the model changes before backward, which autograd refuses if it was saved."""
        self._net.tap = min(step.pick, len(self._net.blocks))
        loss = self._forward(self._batch(step.rows))
        tapped, self._net.tapped, self._net.tap = self._net.tapped, None, None
        with torch.no_grad():
            tapped.add_(1)
        del tapped
        self._backward(loss)

    # ---- their parts --------------------------------------------------------------------------------------------

    def _forward(self, batch: Tensor) -> Tensor:
        with self._side.saving(batch):
            loss: Tensor = self._net(batch)
        self._tape.note("loss", loss)
        self._tape.is_finite = bool(loss.isfinite())
        return loss

    def _look(self, rows: int) -> None:
        with torch.no_grad():
            self._forward(self._fresh(rows))

    def _backward(self, loss: Tensor, **options: Any) -> None:
        loss.backward(**options)
        self._side.note_micro_step()

    def _fresh(self, rows: int) -> Tensor:
        if self._program.stem == "embedding":
            return torch.randint(0, TOKENS, (rows,), generator=self._data)
        batch = torch.randn(rows, self._program.width, generator=self._data)
        return self._as_input(batch)

    def _batch(self, rows: int) -> Tensor:
        """The next batch: fresh, or in the buffer of its length, whose version counter does not move."""
        if self._program.batches == "fresh":
            return self._fresh(rows)
        values = torch.randn(rows, self._program.width, generator=self._data)
        if rows not in self._buffers:
            memory = values.clone().numpy()
            self._buffers[rows] = (torch.from_numpy(memory), memory)
        buffer, memory = self._buffers[rows]
        if self._program.batches == "numpy":
            memory[:] = values.numpy()
        else:
            buffer.data.copy_(values)
        return self._as_input(buffer)

    def _as_input(self, batch: Tensor) -> Tensor:
        if self._program.input_grad:
            batch.requires_grad_()
            self._inputs.append(batch)
        return batch

    def _wanted(self, pick: int) -> list[Tensor]:
        """A few parameters, of one block, and an input."""
        block = self._net.blocks[pick % len(self._net.blocks)]
        return [*block.parameters()][:3] + self._inputs[:1]

    def _drop(self, loss: Tensor, how: str, number: int, least_steps: int = 0) -> None:
        if how == "cycle":
            cycle: list[Any] = [loss]
            cycle.append(cycle)
        elif how == "held" or least_steps:
            steps = HELD_STEPS if how == "held" else least_steps
            self._held.append((number + steps, loss))

    # ---- what is noted ------------------------------------------------------------------------------------------

    def _note_grads(self) -> None:
        owned = {tensor.data_ptr(): name for name, tensor in self._tensors()}
        for name, parameter in self._net.named_parameters():
            grad = parameter.grad
            self._tape.note(f"grad of {name}", grad)
            if grad is not None and grad.data_ptr() in owned:
                self._tape.note(f"grad of {name} is", owned[grad.data_ptr()])
            if not self._program.set_to_none:
                same = grad is not None and grad is self._grads.get(name)
                self._tape.note(f"grad of {name} is the same tensor", same)
                self._grads[name] = grad
        for batch in self._inputs:
            self._tape.note("grad of the input", batch.grad)
            batch.grad = None

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        """All of the model: parameters, buffers and plain attributes; and the inputs."""
        yield from self._net.named_parameters()
        yield from self._net.named_buffers()
        for path, module in self._net.named_modules():
            for name, value in vars(module).items():
                if isinstance(value, Tensor):
                    yield f"{path}.{name}", value
        for batch in self._inputs:
            yield "the input", batch

    def _note_states(self) -> None:
        self._inputs = []
        for name, tensor in self._tensors():
            self._tape.note(f"at the end {name}", tensor)
        for path, module in self._net.named_modules():
            if isinstance(module, parts.Counter):
                self._tape.note(f"at the end {path}.count", module.count)
        for name, value in parts.states().items():
            self._tape.note(f"at the end {name}", value)


def train(program: Program, side: Plain) -> Tape:
    """Return the tape of a program on one side; nothing else of it is left."""
    tape = Tape()
    with parts.playing(side.device):
        Training(program, side, tape).run()
    return tape


@contextmanager
def collecting(how: str) -> Iterator[None]:
    """When garbage is collected: as usual, often, or in no other thread than those that begin inside."""
    thresholds, chance = gc.get_threshold(), random.Random(0)

    def collect(*_: object) -> None:
        """At one of so many events of a thread, whatever that is doing then."""
        if chance.random() * COLLECT_EVENTS < 1:
            gc.collect(1)

    if how == "often":
        gc.set_threshold(20, 5, 5)
    if how == "in lanes":
        gc.disable()
        threading.setprofile(collect)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.enable()
        threading.setprofile(None)


# ---- one draw -------------------------------------------------------------------------------------------------------


def check(program: Program, directory: str) -> Outcome:
    return run(program, directory)[0]


def run(program: Program, directory: str) -> tuple[Outcome, Ours]:
    """Run a program without us, with us, and where its budget is a part of the peak with everything kept before that.

    Return what is wrong, and the side with us.
    """
    outcome = Outcome()
    reference = train(program, Plain())
    outcome.tally["steps that must fail"] = len(reference.messages)
    outcome.tally["not finite"] = not reference.is_finite
    budget_bytes = program.budget_bytes
    if program.budget_part is not None:
        kept = replace(program, placement="keep", device="cpu", host_bytes=0, planner="adaptive")
        side = Ours(kept, directory)
        _compare(outcome, reference, kept, side, "kept: ")
        budget_bytes = max(MIN_BYTES, int(program.budget_part * side.offloader.report().peak_saved_bytes))
    with collecting(program.collector):
        side = Ours(program, directory, budget_bytes)
        _compare(outcome, reference, program, side, "")
    if any(one.kind == "difference" for one in outcome.failures):
        again = reference.difference(train(program, Plain()))
        if again is not None:
            outcome.failures.append(Failure("harness", f"the reference differs from itself, {again}"))
    if any(one.kind == "left" for one in outcome.failures):
        train(program, counted := Counted())
        gc.collect()
        if counted.left:
            outcome.failures = [one for one in outcome.failures if one.kind != "left"]
    outcome.tally["plans"] = side.offloader.report().plans
    return outcome, side


def _compare(outcome: Outcome, reference: Tape, program: Program, side: Ours, prefix: str) -> None:
    try:
        tape = train(program, side)
    except Exception as error:  # noqa: BLE001 - a failure like others
        outcome.failures.append(Failure("error", prefix + "".join(traceback.format_exception(error))[-1500:]))
    else:
        difference = reference.difference(tape)
        outcome.failures += [Failure("difference", prefix + difference)] if difference is not None else []
        outcome.failures += [Failure("error", prefix + text) for text in tape.ours]
    outcome.failures += [Failure(one.kind, prefix + one.text) for one in side.end()]
