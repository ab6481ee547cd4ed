"""The object at ``engine.interleaved_optimizer_update``: takes over the update inside of ZeRO-3's ``step``.

The only file that knows the methods of DeepSpeed's optimizer.

``DeepSpeedZeroOptimizer_Stage3.step`` (``deepspeed/runtime/zero/stage3.py`` of 0.19.8) stays as it is. It settles
overflow, the gradients' norm and the loss scale, and then, for each sub-group in order, calls ``_prepare_sub_group``,
``unscale_and_clip_grads``, ``_optimizer_step``, ``_reassign_or_swap_out_partitioned_parameters`` and
``_release_sub_group``. Nothing in this loop is a collective, and every gradient is final before it. So the methods are
overridden on the instance: all calls of the loop but the last only take notes, and the last updates all sub-groups at
once. Outside of a step, and in steps that are left to DeepSpeed, the originals run.

[Note: Interrupted updates] While the loop runs, the optimizer is marked as half updated, and so it stays if the loop
does not end. Until a checkpoint is loaded with its optimizer states, :func:`refuse_half_updated` stops whoever would
use or save the model; the overrides that refuse and that clear the mark stay until then, also after ``close``. Ranks
compare at the end of the loop, so that all are marked where one is: the others would wait for it in the next
collective.
"""

from __future__ import annotations

import atexit
import functools
import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, TypeGuard

import torch
from torch.optim import optimizer as torch_optimizer

from ds_tba.config import UPDATE_BLOCK
from ds_tba.device.accelerator import Accelerator
from ds_tba.errors import IncompatibleError
from ds_tba.report import ReportFile
from ds_tba.update import HALF_UPDATED, UpdateConfig, refuse_half_updated
from ds_tba.update.device import DevicePipeline, uploads_before
from ds_tba.update.formula import Hyper, Powers, is_exact
from ds_tba.update.host import SLICE_ELEMENTS, HostUpdate, SubGroup, WriteBack
from ds_tba.update.pinning import CudaDriver, Registry
from ds_tba.update.updater import Updater, UpdateReport

CLASS_NAME = "DeepSpeedZeroOptimizer_Stage3"
ADAM_NAME = "DeepSpeedCPUAdam"
_UNSCALE, _STEP_OF_OPTIMIZER = "unscale_and_clip_grads", "_optimizer_step"
_REASSIGN, _RELEASE = "_reassign_or_swap_out_partitioned_parameters", "_release_sub_group"
# The methods that the loop of `step` calls, in order, in all supported versions, and what we override beside them: none
# of them may be somebody else's.
_METHODS = ("_prepare_sub_group", _UNSCALE, _STEP_OF_OPTIMIZER, _REASSIGN, _RELEASE, "step", "state_dict",
            "load_state_dict")  # fmt: skip


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
    adam = type(zero.optimizer).__name__
    if adam != ADAM_NAME or getattr(zero, "zenflow", False):  # so, too, with Muon, and with ZenFlow's own Adam
        yield (
            f"computes what {ADAM_NAME} computes without ZenFlow, and the optimizer is {adam}",
            'set "optimizer": {"type": "AdamW"} (or "Adam") in ds_config.json, without "torch_adam" and "zenflow"',
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
    if any(state.get("step") for state in zero.optimizer.state.values()):
        yield "must see all steps of the optimizer, which has taken some already", "build the engine with a new one"
    if changed := _changed_methods(zero):
        yield f"relies on methods that somebody else has replaced ({', '.join(changed)})", "do without the other one"


def _changed_methods(zero: Any) -> list[str]:
    """Return the methods that somebody else has replaced, on the class or on the object."""
    kind, adam = type(zero), type(zero.optimizer)
    changed = [name for name in _METHODS if name in vars(zero) or not _is_upstream(getattr(kind, name, None))]
    return [*changed, *([] if _is_upstream(adam.step) else [f"{adam.__name__}.step"])]


def _is_upstream(method: object) -> bool:
    """Return whether a method and what it wraps are DeepSpeed's or torch's, by their globals: ``wraps`` copies none."""
    while method is not None:
        if getattr(method, "__globals__", {}).get("__name__", "").partition(".")[0] not in ("deepspeed", "torch"):
            return False
        method = getattr(method, "__wrapped__", None)
    return True


class InterleavedUpdate:
    """The updates of one ZeRO-3 optimizer, on host and device at once.

    Raises:
        ConfigError: the report cannot be written where the config says.
        IncompatibleError: the optimizer is one whose update cannot be taken over.
    """

    shared_keys = "interleaved_optimizer_update"  # see ``ranks.py``: no rank gets here without it

    def __init__(self, config: UpdateConfig, accelerator: Accelerator, zero: Any, *, rank: int = 0) -> None:
        refuse_unsupported(zero)
        self._zero, self._pid = zero, os.getpid()  # the engine's ``optimizer``, a ``DeepSpeedZeroOptimizer_Stage3``
        self._factors: list[float] = []
        self._is_ours = self._is_in_loop = self._is_closed = False
        # A collective of all ranks, in host memory, that returns the highest number that any of them has; called once
        # in each step that updates. See [Note: Interrupted updates].
        self.highest_of_ranks: Callable[[int], int] = lambda number: number  # until others are told of
        self._updater = _updater_of(config, accelerator, zero, rank)
        self._overrides = {
            _UNSCALE: self._unscale, _STEP_OF_OPTIMIZER: self._optimizer_step, _REASSIGN: self._reassign,
            _RELEASE: self._release, "step": self._step, "state_dict": self._state_dict,
            "load_state_dict": self._load_state_dict,
        }  # fmt: skip
        self._stock: dict[str, Callable[..., Any]] = {name: getattr(zero, name) for name in self._overrides}
        vars(zero).update(self._overrides)
        if self._updater.registry is not None:
            weakref.finalize(self, self._updater.registry.close)
        # Through a weak reference, or the interpreter would keep the engine until its exit.
        self._at_exit = functools.partial(_close, weakref.ref(self))
        atexit.register(self._at_exit)
        # With a limit whole sub-groups are pinned first, whose moments come with the first step.
        if config.pinned_bytes is None:
            self._updater.pin(self._pinnable())

    def report(self) -> UpdateReport:
        """Return the counters so far."""
        return self._updater.report()

    def start_line(self) -> str:
        """Return the start-up line of the log."""
        config = self._updater.config
        share = config.device_share
        words = "on host and device, whoever is faster takes more" if share is None else f"{share:.0%} on the device"
        return f"optimizer updates: {words}, in chunks of {config.chunk_bytes >> 20} MiB of parameters"

    def close(self) -> None:
        """Give the update back to DeepSpeed, unpin memory and write the last report. Idempotent.

        The methods of a half updated optimizer go back with the next load: until then they refuse.
        """
        if self._is_closed or os.getpid() != self._pid:
            return
        self._is_closed = True
        atexit.unregister(self._at_exit)
        if not getattr(self._zero, HALF_UPDATED, False):
            self._give_back()
        self._updater.close()

    def _give_back(self) -> None:
        for name, ours in self._overrides.items():
            if vars(self._zero).get(name) is ours:  # else somebody has wrapped it since
                delattr(self._zero, name)
        self._overrides.clear()  # which hold this object

    def _pinnable(self) -> list[torch.Tensor]:
        """Return the present tensors of all sub-groups; see :attr:`SubGroup.arrays`."""
        arrays = [array for master in self._zero.fp32_partitioned_groups_flat for array in self._arrays(master)]
        return [array for array in arrays if isinstance(array, torch.Tensor)]

    # ---- the guard: see [Note: Interrupted updates] -------------------------------------------------------------

    def _step(self, *args: object, **more: object) -> None:
        refuse_half_updated(self._zero)
        try:
            self._stock["step"](*args, **more)
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
        return self._stock["state_dict"](*args, **more)

    def _load_state_dict(
        self, state_dict_list: object, load_optimizer_states: bool = True, *rest: object, **more: object
    ) -> None:
        self._stock["load_state_dict"](state_dict_list, load_optimizer_states, *rest, **more)
        if self._updater.registry is not None:  # arrays that were replaced would stay until the next step
            self._updater.registry.keep(self._pinnable())
        # Without them the moments are still those of the interrupted step.
        if load_optimizer_states:
            setattr(self._zero, HALF_UPDATED, False)
            if self._is_closed:
                self._give_back()

    # ---- the methods that the loop of `step` calls --------------------------------------------------------------

    def _unscale(self, sub_group_id: int, total_norm: object) -> None:
        if self._overrides and sub_group_id == 0:
            # Before the first change: an interrupt that comes between the two would leave a mixed model unmarked.
            setattr(self._zero, HALF_UPDATED, True)
            self._is_in_loop = True
            self._factors = []
            problem = self._problem_of_step()
            self._is_ours = problem is None
            if problem is not None:
                self._updater.counts.stock_steps += 1
                self._updater.counts.fall_back(*problem)
        if not (self._overrides and self._is_ours):  # or given back, and called by somebody who has wrapped it
            self._stock[_UNSCALE](sub_group_id, total_norm)
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
            self._stock[_STEP_OF_OPTIMIZER](sub_group_id)
            state = self._zero.optimizer.state[self._zero.fp32_partitioned_groups_flat[sub_group_id]]
            self._updater.powers.scalars(int(state["step"]), self._hyper(sub_group_id))
            return
        # A step without parameters: schedulers count the calls, and would warn of a step that was never taken.
        self._zero.optimizer.step()

    def _reassign(self, sub_group_id: int) -> None:
        if not self._is_ours:
            self._stock[_REASSIGN](sub_group_id)

    def _release(self, sub_group_id: int, timer_names: object) -> None:
        is_last = sub_group_id == len(self._zero.fp16_groups) - 1
        if is_last and self._is_ours:
            self._is_ours = False
            self._update()
        self._stock[_RELEASE](sub_group_id, timer_names)
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
        lr, (beta1, beta2), eps, decay = (group[key] for key in ("lr", "betas", "eps", "weight_decay"))
        numbers = float(lr), float(beta1), float(beta2), float(eps), float(decay)
        return Hyper(*numbers, bool(group["bias_correction"]), optimizer.adam_w_mode)

    def _sub_group(self, sub_group_id: int) -> SubGroup:
        """Count a step and return the sub-group; new moments are as in ``deepspeed/ops/adam/cpu_adam.py``."""
        zero = self._zero
        master = zero.fp32_partitioned_groups_flat[sub_group_id]
        state = zero.optimizer.state[master]
        if len(state) == 0:
            moments = {name: torch.zeros_like(master.data) for name in ("exp_avg", "exp_avg_sq")}
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
                self._stock[_REASSIGN](number)
            else:
                zero._unflatten_partitioned_parameters(number)


def _is_plain(array: object) -> TypeGuard[torch.Tensor]:
    """Return whether it is an fp32 tensor in host memory, in one piece."""
    return (
        isinstance(array, torch.Tensor)
        and array.device.type == "cpu"
        and array.dtype == torch.float32
        and array.dim() == 1
        and array.is_contiguous()
    )


def _updater_of(config: UpdateConfig, accelerator: Accelerator, zero: Any, rank: int) -> Updater:
    """Build the parts of the update."""
    file = ReportFile("report.path", config.report.path, rank)
    counts, adam, device = UpdateReport(rank=rank), zero.optimizer, accelerator.device()
    needs_trial = config.exact and config.device_share != 0
    if needs_trial and not is_exact(adam.ds_opt_adam, device, adamw=adam.adam_w_mode):
        counts.fall_back(
            "not exact",
            "the device does not give the bits of this processor's CPUAdam, so that the host updates everything; "
            'set "exact": false to accept other roundings',
        )
        config = config.model_copy(update={"device_share": 0.0})
    chunk_elements = min(config.chunk_elements, max(one.numel() for one in zero.fp32_partitioned_groups_flat))
    write_back = None
    if not (accelerator.is_synchronous or zero.offload_param):
        queued_bytes = 0 if config.device_share == 0 else uploads_before(chunk_elements)
        write_back = WriteBack(accelerator, zero.dtype, SLICE_ELEMENTS, queued_bytes)
    return Updater(
        config,
        accelerator,
        HostUpdate(adam.ds_opt_adam, adam.opt_id, write_back),
        DevicePipeline(accelerator, device, chunk_elements, config.device_buffer_bytes),
        Powers(*adam.defaults["betas"]),
        Registry(CudaDriver(), config.pinned_bytes) if device.type == "cuda" else None,
        target_on_device=not zero.offload_param,
        counts=counts,
        file=file,
    )


def _close(update: weakref.ref[InterleavedUpdate]) -> None:
    present = update()
    if present is not None:
        present.close()
