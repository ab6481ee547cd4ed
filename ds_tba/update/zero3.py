"""Takes over the update inside of ZeRO-3's ``step``, and gives it back; the only file that knows its methods.

``DeepSpeedZeroOptimizer_Stage3.step`` (``deepspeed/runtime/zero/stage3.py`` of 0.19.8) stays as it is. It settles
overflow, the gradients' norm and the loss scale, and then, for each sub-group in order, calls ``_prepare_sub_group``,
``unscale_and_clip_grads``, ``_optimizer_step``, ``_reassign_or_swap_out_partitioned_parameters`` and
``_release_sub_group``. Nothing in this loop is a collective, and every gradient is final before it. So the methods are
overridden on the instance: all calls of the loop but the last only take notes, and the last updates all sub-groups at
once. Outside of a step, and in steps that are left to DeepSpeed, the originals run.

[Note: Interrupted updates] While the loop runs, the optimizer is marked as half updated, and so it stays if the loop
does not end. Until a checkpoint is loaded with its optimizer states, :func:`refuse_half_updated` stops whoever would
use or save the model; the overrides that refuse and that clear the mark stay until then, also after ``remove``. Ranks
compare at the end of the loop, so that all are marked where one is: the others would wait for it in the next
collective.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, TypeGuard

import torch
from torch.optim import optimizer as torch_optimizer

from ds_tba.config import UPDATE_BLOCK
from ds_tba.device.accelerator import advise_huge_pages
from ds_tba.errors import IncompatibleError
from ds_tba.update import HALF_UPDATED, refuse_half_updated
from ds_tba.update.formula import Hyper
from ds_tba.update.host import SubGroup
from ds_tba.update.updater import Updater

CLASS_NAME = "DeepSpeedZeroOptimizer_Stage3"
ADAM_NAME = "DeepSpeedCPUAdam"
_UNSCALE, _STEP_OF_OPTIMIZER = "unscale_and_clip_grads", "_optimizer_step"
_REASSIGN, _RELEASE = "_reassign_or_swap_out_partitioned_parameters", "_release_sub_group"
# The methods that the loop of `step` calls, in order, in all supported versions: none of them may be somebody else's.
_LOOP = ("_prepare_sub_group", _UNSCALE, _STEP_OF_OPTIMIZER, _REASSIGN, _RELEASE)
_OVERRIDDEN = (*_LOOP[1:], "step")


HighestOfRanks = Callable[[int], int]
"""A collective of all ranks, in host memory, that returns the highest number that any of them has."""

Method = Callable[..., Any]
"""A method of DeepSpeed's optimizer, or ours in its place."""


def refuse_unsupported(zero: Any) -> None:
    """Refuse an engine's ``optimizer`` whose update cannot be taken over.

    Raises:
        IncompatibleError: naming what stands in the way, and the way out.
    """
    for problem, repair in _problems(zero):
        raise IncompatibleError(f'"{UPDATE_BLOCK}" {problem}: {repair}, or remove "{UPDATE_BLOCK}".')


def _problems(zero: Any) -> Iterator[tuple[str, str]]:
    """Yield obstacles and the ways out, beyond those that ``parse_update_block`` finds in the config."""
    kind = type(zero).__name__
    if kind != CLASS_NAME:
        yield (
            f"works with ZeRO-3 and its optimizer offload, and the optimizer is {kind}",
            'set "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}, without "super_offload"',
        )
        return
    if getattr(zero, "zenflow", False):
        yield "cannot be combined with ZenFlow, whose updates are other ones", 'remove "zenflow"'
    adam = type(zero.optimizer).__name__
    if adam != ADAM_NAME:
        yield (
            f"computes what {ADAM_NAME} computes, and the optimizer is {adam}",
            'set "optimizer": {"type": "AdamW"} (or "Adam") in ds_config.json, without "torch_adam"',
        )
        return
    if zero.partial_offload < 1 or any(device != "cpu" for device in zero.subgroup_to_device.values()):
        yield (
            "shares the update out by itself, and offload_optimizer.ratio keeps a part of it on the device for good",
            'set "ratio": 1.0',
        )
    if zero.master_weights_and_grads_dtype != torch.float32 or not zero.optimizer.fp32_optimizer_states:
        yield (
            "needs master weights and optimizer states in fp32",
            'remove "bf16_master_weights_and_grads", "fp16_master_weights_and_grads" and "bf16_optimizer_states"',
        )
    if getattr(zero, "torch_autocast_gradscaler", None):
        yield "cannot be combined with the gradient scaler of torch_autocast in fp16", "autocast to bfloat16"
    if getattr(zero, "use_muon", False):
        yield "does not know Muon", "train with AdamW"
    if any(state.get("step") for state in zero.optimizer.state.values()):
        yield "must see all steps of the optimizer, which has taken some already", "build the engine with a new one"
    yield from _changed_methods(zero)


def _changed_methods(zero: Any) -> Iterator[tuple[str, str]]:
    """Yield the methods that somebody else has replaced, on the class or on the object."""
    repair = "do without the other one"
    for owner, names in ((type(zero), (*_LOOP, "step")), (type(zero.optimizer), ("step",))):
        foreign = [name for name in names if not _is_upstream(getattr(owner, name, None))]
        if foreign:
            yield f"relies on {owner.__name__}, of which somebody else has replaced {', '.join(foreign)}", repair
    replaced = sorted(set(_OVERRIDDEN) & set(vars(zero)))
    if replaced:
        names_of = ", ".join(replaced)
        yield f"replaces methods of {CLASS_NAME} that somebody else has replaced already ({names_of})", repair


def _is_upstream(method: object) -> bool:
    """Return whether a method and what it wraps are DeepSpeed's or torch's, by their globals: ``wraps`` copies none."""
    while method is not None:
        if getattr(method, "__globals__", {}).get("__name__", "").partition(".")[0] not in ("deepspeed", "torch"):
            return False
        method = getattr(method, "__wrapped__", None)
    return True


class Overrides:
    """Methods of one object that are replaced by ours.

    Attributes:
        stock: the methods that were there before, by name.
    """

    def __init__(self, target: object) -> None:
        self._target = target
        self.stock: dict[str, Method] = {}
        # By name: the override, and what the object itself had before, which is nothing where the class has the method.
        self._put: dict[str, tuple[Method, Method | None]] = {}
        self._active = True

    def put(self, name: str, ours: Method) -> None:
        """Replace a method."""
        stock = self.stock[name] = getattr(self._target, name)

        def override(*args: object, **more: object) -> object:
            return (ours if self._active else stock)(*args, **more)

        self._put[name] = override, vars(self._target).get(name)
        setattr(self._target, name, override)

    def remove(self) -> None:
        """Give every method back. One that somebody has wrapped since stays, and only calls the stock method."""
        self._active = False
        for name, (override, before) in self._put.items():
            if vars(self._target).get(name) is override:
                delattr(self._target, name)
                if before is not None:
                    setattr(self._target, name, before)


class Zero3Update:
    """Takes the updates of one ZeRO-3 optimizer over.

    Args:
        zero: a ``DeepSpeedZeroOptimizer_Stage3`` that :func:`refuse_unsupported` has not refused.
        updater: updates all sub-groups.

    Attributes:
        highest_of_ranks: compares all ranks once in each step that updates. See [Note: Interrupted updates].
    """

    def __init__(self, zero: Any, updater: Updater) -> None:
        self._zero = zero
        self._updater = updater
        self._factors: list[float] = []
        self._is_ours = False
        self._is_in_loop = False
        self._is_removed = False
        self.highest_of_ranks: HighestOfRanks = lambda number: number  # until others are told of
        self._overrides = Overrides(zero)
        self._overrides.put(_UNSCALE, self._unscale)
        self._overrides.put(_STEP_OF_OPTIMIZER, self._optimizer_step)
        self._overrides.put(_REASSIGN, self._reassign)
        self._overrides.put(_RELEASE, self._release)
        self._guard = Overrides(zero)
        self._guard.put("step", self._step)
        self._guard.put("state_dict", self._state_dict)
        self._guard.put("load_state_dict", self._load_state_dict)

    def remove(self) -> None:
        """Give the methods back to DeepSpeed; those that guard a half updated model only after the next load."""
        self._is_removed = True
        self._overrides.remove()
        if not getattr(self._zero, HALF_UPDATED, False):
            self._guard.remove()

    def arrays(self) -> list[torch.Tensor]:
        """Return the present tensors of all sub-groups; see :attr:`SubGroup.arrays`."""
        arrays = [array for master in self._zero.fp32_partitioned_groups_flat for array in self._arrays(master)]
        return [array for array in arrays if isinstance(array, torch.Tensor)]

    # ---- the guard: see [Note: Interrupted updates] -------------------------------------------------------------

    def _step(self, *args: object, **more: object) -> None:
        refuse_half_updated(self._zero)
        try:
            self._guard.stock["step"](*args, **more)
        except BaseException:
            if self._is_in_loop:  # the other ranks wait at its end
                self._is_in_loop = False
                for group in self._zero.optimizer.param_groups:
                    group["params"] = []  # as between steps; DeepSpeed's own loop leaves one there, and no load works
                with suppress(RuntimeError):  # other ranks have ended
                    self.highest_of_ranks(1)
            raise

    def _state_dict(self, *args: object, **more: object) -> object:
        refuse_half_updated(self._zero)
        return self._guard.stock["state_dict"](*args, **more)

    def _load_state_dict(
        self, state_dict_list: object, load_optimizer_states: bool = True, *rest: object, **more: object
    ) -> None:
        self._guard.stock["load_state_dict"](state_dict_list, load_optimizer_states, *rest, **more)
        self._updater.unpin_others(self.arrays())
        # Without them the moments are still those of the interrupted step.
        if load_optimizer_states:
            setattr(self._zero, HALF_UPDATED, False)
            if self._is_removed:
                self._guard.remove()

    # ---- the methods that the loop of `step` calls --------------------------------------------------------------

    def _unscale(self, sub_group_id: int, total_norm: object) -> None:
        if sub_group_id == 0:
            # Before the first change: an interrupt that comes between the two would leave a mixed model unmarked.
            setattr(self._zero, HALF_UPDATED, True)
            self._is_in_loop = True
            self._factors = []
            problem = self._problem_of_step()
            self._is_ours = problem is None
            if problem is not None:
                self._updater.leave(*problem)
        if not self._is_ours:
            self._overrides.stock[_UNSCALE](sub_group_id, total_norm)
            return
        # DeepSpeed's own method multiplies a single 1: that gives the factor without a copy of its rule.
        groups = self._zero.fp32_partitioned_groups_flat
        actual, one = groups[sub_group_id], torch.ones(1, dtype=torch.float32, device="cpu")
        groups[sub_group_id] = SimpleNamespace(grad=one)
        try:
            type(self._zero).unscale_and_clip_grads(self._zero, sub_group_id, total_norm)
        finally:
            groups[sub_group_id] = actual
        self._factors.append(float(one))

    def _optimizer_step(self, sub_group_id: int) -> None:
        if not self._is_ours:
            self._overrides.stock[_STEP_OF_OPTIMIZER](sub_group_id)
            state = self._zero.optimizer.state[self._zero.fp32_partitioned_groups_flat[sub_group_id]]
            self._updater.powers.scalars(int(state["step"]), self._hyper(sub_group_id))
            return
        # A step without parameters: schedulers count the calls, and would warn of a step that was never taken.
        self._zero.optimizer.step()

    def _reassign(self, sub_group_id: int) -> None:
        if not self._is_ours:
            self._overrides.stock[_REASSIGN](sub_group_id)

    def _release(self, sub_group_id: int, timer_names: object) -> None:
        is_last = sub_group_id == len(self._zero.fp16_groups) - 1
        if is_last and self._is_ours:
            self._is_ours = False
            self._update()
        self._overrides.stock[_RELEASE](sub_group_id, timer_names)
        if is_last:
            self._is_in_loop = False
            setattr(self._zero, HALF_UPDATED, bool(self.highest_of_ranks(0)))
            refuse_half_updated(self._zero)

    # ---- one update ---------------------------------------------------------------------------------------------

    def _problem_of_step(self) -> tuple[str, str] | None:
        """Return why this step is DeepSpeed's, as reason and words for the log; None if it is ours."""
        optimizer = self._zero.optimizer
        hooks = (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks)
        of_all_optimizers = (torch_optimizer._global_optimizer_pre_hooks, torch_optimizer._global_optimizer_post_hooks)
        if any(hooks + of_all_optimizers):
            return "step hooks", "the optimizer has step hooks, which may read its states: DeepSpeed takes the steps"
        for master in self._zero.fp32_partitioned_groups_flat:
            if not all(_is_plain(array) and array.numel() == master.numel() for array in self._arrays(master)):
                return "other states", (
                    "optimizer states are not fp32 tensors in host memory, of one length: DeepSpeed takes the steps"
                )
        return None

    def _arrays(self, master: torch.Tensor) -> list[object]:
        """Return the tensors of a sub-group, with its moments where there are any yet."""
        state = self._zero.optimizer.state.get(master) or {}
        return [master, master.grad, *([state.get("exp_avg"), state.get("exp_avg_sq")] if state else [])]

    def _hyper(self, sub_group_id: int) -> Hyper:
        optimizer = self._zero.optimizer
        group = optimizer.param_groups[self._zero.sub_group_to_group_id[sub_group_id]]
        return Hyper.of_group(group, adamw=optimizer.adam_w_mode)

    def _sub_group(self, sub_group_id: int) -> SubGroup:
        """Count a step and return the sub-group; new moments are as in ``deepspeed/ops/adam/cpu_adam.py``."""
        zero = self._zero
        master = zero.fp32_partitioned_groups_flat[sub_group_id]
        state = zero.optimizer.state[master]
        if len(state) == 0:
            moments = {name: _zeros_like(master.data) for name in ("exp_avg", "exp_avg_sq")}
            state.update({"step": 0} | moments)  # at once: where memory runs out there is no half of a state
        state["step"] += 1
        target = zero.fp16_partitioned_groups_flat[sub_group_id]
        return SubGroup(
            master.data,
            state["exp_avg"],
            state["exp_avg_sq"],
            master.grad.data,
            None if target is None else target.data,
            self._hyper(sub_group_id),
            int(state["step"]),
            self._factors[sub_group_id],
        )

    def _update(self) -> None:
        """Update all sub-groups, and have DeepSpeed see the new parameters."""
        zero = self._zero
        sub_groups = [self._sub_group(number) for number in range(len(zero.fp16_groups))]
        self._updater.update(sub_groups)
        for number, sub_group in enumerate(sub_groups):
            if sub_group.target is None:
                self._overrides.stock[_REASSIGN](number)
            else:
                zero._unflatten_partitioned_parameters(number)


def _zeros_like(array: torch.Tensor) -> torch.Tensor:
    """Return zeros in huge pages where the kernel has them: it pins these in a fraction of the time of small ones."""
    memory = torch.empty_like(array)
    advise_huge_pages(memory.view(torch.uint8))  # before the first touch, which makes the pages
    return memory.zero_()


def _is_plain(array: object) -> TypeGuard[torch.Tensor]:
    """Return whether it is an fp32 tensor in host memory, in one piece."""
    return (
        isinstance(array, torch.Tensor)
        and array.device.type == "cpu"
        and array.dtype == torch.float32
        and array.dim() == 1
        and array.is_contiguous()
    )
