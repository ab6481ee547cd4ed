"""Fewer copies of gradients between host and device, put on a built ZeRO-3 optimizer whose update is on the host.

Stock ZeRO-3 copies each gradient partition into a host buffer of its own dtype (the low-precision buffer: it
accumulates micro-steps), back onto the device, and in fp32 into the host's gradient, which the optimizer reads. With
one micro-step per step nothing reads the first copy, so that for the call that makes it the buffer is replaced by
device memory.

[Note: What stock would read] Whoever asks must get stock's bits. The low-precision buffer is read where a later
micro-step of the same step adds to it, and where the boundary is named afterwards. Until the step it can be filled
exactly, from the fp32 gradient that was made from it by widening; so it is, before its readers and before anybody may
write that gradient. The step multiplies the fp32 gradient: after it the buffer's old content is lost. One reader is
left: stock adds the gradient of a parameter that had none in the first micro-step of a step to what the last step left
behind. That is refused, not guessed. fp16 scans the buffer for overflow in each step: there nothing is replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import torch

from ds_tba.errors import IncompatibleError

OPTIMIZER = "DeepSpeedZeroOptimizer_Stage3"
BUFFERS = f"_{OPTIMIZER}__param_id_to_grad_partition"
METHODS = (
    "_finalize_offload_gradient_accumulation",
    "_get_fp32_grad_state_partition",
    "_offload_grad_partition_at_boundary",
    "_pre_step",
    "get_fp32_grad_partitions",
    "partition_grads",
    "update_fp32_grad_for_param_vectorized",
)
NEEDED = (
    *METHODS,
    BUFFERS,
    "dtype",
    "fp32_partitioned_groups_flat",
    "get_param_id",
    "grad_position",
    "is_gradient_accumulation_boundary",
    "master_weights_and_grads_dtype",
    "micro_step_id",
    "offload_optimizer",
    "reduce_and_partition_stream",
    "swap_optimizer",
)


def obstacle(zero: Any) -> str | None:
    """Why gradients of this optimizer must go the stock way; None where they need not."""
    missing = [name for name in NEEDED if not hasattr(zero, name)]
    if missing:
        return f"this version of DeepSpeed's ZeRO-3 optimizer has no {', '.join(missing)}"
    owner = next((one for one in type(zero).__mro__ if "partition_grads" in vars(one)), type(zero))
    if owner.__name__ != OPTIMIZER or "partition_grads" in vars(zero):
        return f"partition_grads of {type(zero).__name__} is not the one of {OPTIMIZER}"
    if not zero.offload_optimizer or zero.swap_optimizer:
        return '"offload_optimizer" is not on "cpu"'
    if zero.dtype == torch.float16:
        return "fp16 scans the host's gradient buffer for overflow in each step"
    if zero.master_weights_and_grads_dtype != torch.float32:
        return f"the optimizer's gradients are {zero.master_weights_and_grads_dtype}, not torch.float32"
    return None


class Gradients:
    """What is changed about the gradients of one optimizer. See [Note: What stock would read].

    Args:
        zero: a ``DeepSpeedZeroOptimizer_Stage3`` with its update on the host.
        direct: whether gradients skip the host's low-precision buffer where they can.

    Attributes:
        direct_bytes: copies between host and device saved by ``direct`` so far.

    Raises:
        IncompatibleError: :func:`obstacle` names one.
    """

    def __init__(self, zero: Any, *, direct: bool) -> None:
        reason = obstacle(zero)
        if reason is not None:
            raise IncompatibleError(
                f'gradients cannot be kept from the host\'s buffers: {reason}; set "direct_gradients" to false'
            )
        self._zero = zero
        self._direct = direct
        self._skips = False  # the low-precision buffer, in the call under way
        # By DeepSpeed's id of a parameter: its partition's place in the fp32 gradients, from which the buffer that was
        # skipped in this step can still be filled.
        self._owed: dict[int, tuple[int, int, int]] = {}
        self._lost: set[int] = set()  # skipped in a step that is over
        self.direct_bytes = 0
        self._overrides = _Overrides(zero)
        for name in METHODS:
            self._overrides.put(name, getattr(self, name.lstrip("_") + "_with"))

    def remove(self) -> None:
        """Take everything off again."""
        self._fill(list(self._owed))
        for number in self._lost:
            # Stock adds to it only by mistake, and then nothing is the right thing to add to.
            self._buffers[number].zero_()
        self._lost.clear()
        self._overrides.remove()

    @property
    def _buffers(self) -> dict[int, torch.Tensor]:
        """The low-precision buffers, by DeepSpeed's id of the parameter."""
        buffers: dict[int, torch.Tensor] = getattr(self._zero, BUFFERS)
        return buffers

    # ---- backward ---------------------------------------------------------------------------------------------------

    def partition_grads_with(
        self, stock: Callable[..., Any], params: list[Any], partitions: list[torch.Tensor]
    ) -> None:
        """One parameter at a time, so that no more scratch is held than for one.

        Returns nothing, as stock's annotation has it: what stock does return, its buffers, would be gone.
        """
        for param, partition in zip(params, partitions, strict=False):
            self._partition(stock, param, partition)

    def _partition(self, stock: Callable[..., Any], param: Any, partition: torch.Tensor) -> None:
        zero, number, buffers = self._zero, param.ds_id, self._buffers
        if zero.micro_step_id > 0:
            if number in self._lost:
                raise IncompatibleError(
                    f"the parameter of shape {tuple(param.ds_shape)} and ds_id {number} has its first gradient of this "
                    f"step in micro-step {zero.micro_step_id}: DeepSpeed adds it to its gradient of an earlier step, "
                    'which was not kept; set "direct_gradients" to false'
                )
            self._fill([number])
        buffer = buffers[number]
        self._skips = self._direct and zero.micro_step_id == 0 and zero.is_gradient_accumulation_boundary()
        if not self._skips and zero.micro_step_id == 0:  # stock fills the buffer anew
            self._owed.pop(number, None)
            self._lost.discard(number)
        try:
            if self._skips:
                # Of the current stream's pool, and used in that stream only.
                buffers[number] = torch.empty_like(buffer, device=partition.device)
            stock([param], [partition])
        finally:
            buffers[number] = buffer
            self._skips = False

    def offload_grad_partition_at_boundary_with(
        self, stock: Callable[..., Any], param: Any, gradient: torch.Tensor, *more: Any
    ) -> None:
        """Stock's copy into the fp32 gradient: note what the low-precision buffer lacks."""
        stock(param, gradient, *more)
        if self._skips:
            sub_group, start, _ = self._zero.grad_position[self._zero.get_param_id(param)]
            self._owed[param.ds_id] = sub_group, start, gradient.numel()
            self._lost.discard(param.ds_id)
            self.direct_bytes += 2 * gradient.numel() * gradient.element_size()

    def finalize_offload_gradient_accumulation_with(self, stock: Callable[[], None]) -> None:
        """The boundary is named after backward: the low-precision buffers are read."""
        self._fill(list(self._owed))
        stock()

    # ---- the step ---------------------------------------------------------------------------------------------------

    def pre_step_with(self, stock: Callable[[], None]) -> None:
        """From here on the fp32 gradients may change."""
        stock()
        self._lost |= set(self._owed)
        self._owed.clear()

    # ---- access to the fp32 gradients: whoever gets one may write it -------------------------------------------------

    def get_fp32_grad_state_partition_with(self, stock: Callable[..., Any], param: Any, *args: Any, **more: Any) -> Any:
        """One parameter's."""
        self._fill([param.ds_id])
        return stock(param, *args, **more)

    def get_fp32_grad_partitions_with(self, stock: Callable[[], Any]) -> Any:
        """All."""
        self._fill(list(self._owed))
        return stock()

    def update_fp32_grad_for_param_vectorized_with(
        self, stock: Callable[..., Any], update_func: Any, param_list: Iterable[Any]
    ) -> Any:
        """Those of a list, through a function of the user."""
        params = list(param_list)
        self._fill([param.ds_id for param in params])
        return stock(update_func, params)

    # ---- helpers ----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _fill(self, numbers: Iterable[int]) -> None:
        """Give the low-precision buffers of parameters what stock would have put there in this step. Blocks; rare."""
        owed = [number for number in numbers if number in self._owed]
        if owed:
            self._wait_for_reduction()
        for number in owed:
            sub_group, start, elements = self._owed.pop(number)
            gradient = self._zero.fp32_partitioned_groups_flat[sub_group].grad
            self._buffers[number][:elements].copy_(gradient[start : start + elements])

    def _wait_for_reduction(self) -> None:
        """Block until the gradients that backward has queued are where they go."""
        stream = self._zero.reduce_and_partition_stream
        if stream is not None:
            stream.synchronize()


class _Overrides:
    """Methods of one object replaced by functions that get the method as it was first."""

    def __init__(self, target: Any) -> None:
        self._target = target
        self._put: dict[str, Any] = {}
        self._before: dict[str, Any] = {}
        self._active = True

    def put(self, name: str, function: Callable[..., Any]) -> None:
        """Replace a method."""
        method = getattr(self._target, name)
        if name in vars(self._target):
            self._before[name] = method

        def override(*args: Any, **more: Any) -> Any:
            return function(method, *args, **more) if self._active else method(*args, **more)

        self._put[name] = override
        setattr(self._target, name, override)

    def remove(self) -> None:
        """Every method as it was. One that somebody has wrapped since stays, and only hands calls on."""
        self._active = False
        for name, override in self._put.items():
            if vars(self._target).get(name) is not override:
                continue
            with suppress(AttributeError):
                delattr(self._target, name)
            if name in self._before:
                setattr(self._target, name, self._before[name])
