"""Fewer copies of gradients between host and device, put on a built ZeRO-3 optimizer whose update is on the host.

Stock ZeRO-3 copies each gradient partition into a host buffer of its own dtype (the low-precision buffer: it
accumulates micro-steps), back onto the device, and in fp32 into the host's gradient, which the optimizer reads. With
one micro-step per step nothing reads the first copy, so that for the call that makes it the buffer is replaced by
device memory: a *direct* gradient. A *kept* gradient has its low-precision buffer in device memory for good, and the
fp32 copy is made only when somebody asks the host.

[Note: What stock would read] Whoever asks must get stock's bits.

Direct: the low-precision buffer is read where a later micro-step of the same step adds to it, and where the boundary is
named afterwards. Until the step it can be filled exactly, from the fp32 gradient that was made from it by widening; so
it is, before its readers and before anybody may write that gradient. The step multiplies the fp32 gradient: after it
the buffer's old content is lost. One reader is left: stock adds the gradient of a parameter that had none in the first
micro-step of a step to what an earlier step left behind. That is refused, not guessed.

Kept: stock's fp32 gradient is the widened low-precision one, after the step times the step's factor, rounded once.
While that holds it need not be on the host. It is put there before the low-precision gradient changes (but where the
change ends in a new fp32 gradient), before it is used once more, and before anybody may read or write it. Stock uses
the old one when a parameter has no gradient in the last micro-step of a step.

fp16 scans the low-precision buffer for overflow in each step: there nothing is replaced.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from ds_tba.errors import IncompatibleError
from ds_tba.update.overrides import Overrides

OPTIMIZER = "DeepSpeedZeroOptimizer_Stage3"
BUFFERS = f"_{OPTIMIZER}__param_id_to_grad_partition"
METHODS = (
    "_finalize_offload_gradient_accumulation",
    "_get_fp32_grad_state_partition",
    "_offload_grad_partition_at_boundary",
    "_pre_step",
    "get_fp32_grad_partitions",
    "partition_grads",
    "unscale_and_clip_grads",
    "update_fp32_grad_for_param_vectorized",
)
NEEDED = (
    *METHODS,
    BUFFERS,
    "_constant_buffered_norm2",
    "_get_param_partition_rank",
    "dtype",
    "fp16_groups",
    "fp32_partitioned_groups_flat",
    "get_param_id",
    "grad_position",
    "gradient_accumulation_dtype",
    "is_gradient_accumulation_boundary",
    "master_weights_and_grads_dtype",
    "micro_step_id",
    "offload_optimizer",
    "reduce_and_partition_stream",
    "swap_optimizer",
)
PIECE_ELEMENTS = 1 << 24  # of a kept gradient that are widened at a time on their way to the host


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
    if getattr(zero, "use_muon", False):
        return "Muon reads and writes the host's gradients in its step"
    return None


@dataclass(slots=True, eq=False)
class _Kept:
    """A parameter whose low-precision gradient is in device memory.

    Attributes:
        start, stop: its place in its sub-group.
        real_elements: those that are not padding.
        buffer, host_buffer: the low-precision gradient, and where stock has it.
        factor: stock's fp32 gradient is the one in ``buffer`` times this; None: not so, it is on the host.
        on_host: whether the host's fp32 gradient is stock's.
        is_zero: all of both gradients is zero, and nothing has written either.
        zero_padding: the padding of both gradients is zero.
    """

    sub_group: int
    start: int
    stop: int
    real_elements: int
    buffer: torch.Tensor
    host_buffer: torch.Tensor
    factor: float | None
    on_host: bool
    is_zero: bool
    zero_padding: bool


@dataclass(slots=True, eq=False)
class _Region:
    """The kept parameters of one sub-group: its last ones, from the element ``first`` on."""

    first: int
    gradients: torch.Tensor
    parameters: list[_Kept] = field(default_factory=list)

    def within(self, start: int, stop: int) -> Iterator[_Kept]:
        """Those of which some elements are in a range of the sub-group."""
        for at in range(bisect_right(self.parameters, start, key=lambda one: one.stop), len(self.parameters)):
            if self.parameters[at].start >= stop:
                break
            yield self.parameters[at]


class Gradients:
    """What is changed about the gradients of one optimizer. See [Note: What stock would read].

    An update that is not stock's takes every gradient from :meth:`on_device` or :meth:`on_host`, and ends with
    :meth:`after_step`. Its own override of ``unscale_and_clip_grads`` is put on after this one, which brings what is
    kept to the host for a step that stock takes.

    Args:
        zero: a ``DeepSpeedZeroOptimizer_Stage3`` with its update on the host.
        device: where gradients are kept.
        direct: whether gradients skip the host's low-precision buffer where they can.
        device_gradient_bytes: device memory for gradients that are kept, whole parameters from the end of the last
            sub-group on, as many as fit.

    Attributes:
        direct_bytes: copies between host and device saved by ``direct`` so far.
        kept_bytes: device memory held for kept gradients.
        settled_bytes: fp32 gradients of kept parameters put on the host so far.

    Raises:
        IncompatibleError: :func:`obstacle` names one.
    """

    def __init__(self, zero: Any, device: torch.device, *, direct: bool, device_gradient_bytes: int) -> None:
        reason = obstacle(zero)
        if reason is not None:
            raise IncompatibleError(
                f'gradients cannot stay out of the host\'s buffers: {reason}; set "direct_gradients" to false and '
                '"device_gradient_bytes" to 0'
            )
        self._zero = zero
        self._direct = direct
        self._skips = False  # the low-precision buffer, in the call under way
        # By DeepSpeed's id of a parameter: its partition's place in the fp32 gradients, from which the buffer that was
        # skipped in this step can still be filled.
        self._owed: dict[int, tuple[int, int, int]] = {}
        self._lost: set[int] = set()  # skipped in a step that is over
        self._kept: dict[int, _Kept] = {}  # by DeepSpeed's id of the parameter
        self._regions: dict[int, _Region] = {}  # by sub-group
        self._views_are_out = False
        self._is_reducing = True  # for all that is known
        self.direct_bytes = 0
        self.kept_bytes = 0
        self.settled_bytes = 0
        self._keep(device, device_gradient_bytes)
        self._overrides = Overrides(zero)
        for name in METHODS:
            self._overrides.put(name, getattr(self, name.lstrip("_") + "_with"))

    @torch.no_grad()
    def remove(self) -> None:
        """Take everything off again; the host has all that it has under stock."""
        self._fill(list(self._owed))
        for number in self._lost:
            # Stock adds to it only by mistake, and then nothing is the right thing to add to.
            self._buffers[number].zero_()
        self._lost.clear()
        self.settle()
        for number, kept in self._kept.items():
            kept.host_buffer.copy_(kept.buffer)
            self._buffers[number] = kept.host_buffer
        self._kept.clear()
        self._regions.clear()
        self.kept_bytes = 0
        self._overrides.remove()

    # ---- for the update ---------------------------------------------------------------------------------------------

    def on_device(self, sub_group: int, start: int, stop: int) -> torch.Tensor | None:
        """The low-precision gradient of some elements, from which stock's fp32 gradient is made by widening.

        Not to be changed; it is good until the step returns. None: ask :meth:`on_host`.
        """
        region = self._regions.get(sub_group)
        if region is None or start < region.first or any(one.factor != 1.0 for one in region.within(start, stop)):
            return None
        self._wait_for_reduction()
        return region.gradients[start - region.first : stop - region.first]

    def on_host(self, sub_group: int, start: int, stop: int) -> torch.Tensor:
        """The host's fp32 gradient of some elements, put there first where it was only on the device. Blocks then."""
        self._wait_for_reduction()
        if sub_group in self._regions:
            for kept in self._regions[sub_group].within(start, stop):
                self._put_on_host(kept)
        return self._gradient(sub_group, start, stop)

    def settle(self) -> None:
        """Put every fp32 gradient on the host that is only on the device. Blocks."""
        self._wait_for_reduction()
        for kept in self._kept.values():
            self._put_on_host(kept)

    def after_step(self, factor: float) -> None:
        """The update has used each gradient times ``factor``, which is what stock leaves behind.

        Of what was on the device: gradients that the host alone has are multiplied by whoever calls this. It does not
        matter whether those that both have were multiplied on the host.
        """
        for kept in self._kept.values():
            if kept.factor == 1.0 and factor != 1.0 and not kept.is_zero:
                kept.factor, kept.on_host = factor, False

    # ---- backward ---------------------------------------------------------------------------------------------------

    def partition_grads_with(
        self, stock: Callable[..., Any], params: list[Any], partitions: list[torch.Tensor]
    ) -> None:
        """One parameter at a time, so that no more scratch is held than for one.

        Returns nothing, as stock's annotation has it: what stock does return, its buffers, would be gone.
        """
        for param, partition in zip(params, partitions, strict=False):
            kept = self._kept.get(param.ds_id)
            if kept is None:
                self._partition(stock, param, partition)
                continue
            if partition.numel() > kept.real_elements:
                kept.zero_padding = False
            if kept.real_elements and not self._stays(kept, partition.numel()):
                self._put_on_host(kept, non_blocking=True)  # in the stream in which the buffer is written next
                kept.factor, kept.is_zero = None, False
            self._is_reducing = True
            stock([param], [partition])

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
            self._is_reducing = True
            stock([param], [partition])
        finally:
            buffers[number] = buffer
            self._skips = False

    def offload_grad_partition_at_boundary_with(
        self, stock: Callable[..., Any], param: Any, gradient: torch.Tensor, *more: Any
    ) -> None:
        """Stock's copy into the fp32 gradient: leave it out, or note what the low-precision buffer lacks."""
        zero, kept = self._zero, self._kept.get(param.ds_id)
        if kept is not None and self._stays(kept, gradient.numel()):
            zero.norm_for_param_grads[zero.get_param_id(param)] = zero._constant_buffered_norm2(gradient)
            kept.factor, kept.on_host, kept.is_zero = 1.0, False, False
            return
        stock(param, gradient, *more)
        if self._skips:
            sub_group, start, _ = zero.grad_position[zero.get_param_id(param)]
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

    def unscale_and_clip_grads_with(self, stock: Callable[..., None], sub_group: int, *args: Any) -> None:
        """A step that stock takes, on the host."""
        if sub_group in self._regions:
            self._wait_for_reduction()
            for kept in self._regions[sub_group].parameters:
                self._put_on_host(kept)
                kept.factor = kept.factor if kept.is_zero else None
        stock(sub_group, *args)

    # ---- access to the fp32 gradients: whoever gets one may write it -------------------------------------------------

    def get_fp32_grad_state_partition_with(self, stock: Callable[..., Any], param: Any, *args: Any, **more: Any) -> Any:
        """One parameter's."""
        self._give_out([param.ds_id])
        return stock(param, *args, **more)

    def get_fp32_grad_partitions_with(self, stock: Callable[[], Any]) -> Any:
        """All, as views, which may be read at any time from now on: from now on nothing is kept from the host."""
        self._give_out([*self._owed, *self._kept])
        self._views_are_out = True
        return stock()

    def update_fp32_grad_for_param_vectorized_with(
        self, stock: Callable[..., Any], update_func: Any, param_list: Iterable[Any]
    ) -> Any:
        """Those of a list, through a function of the user."""
        params = list(param_list)
        self._give_out([param.ds_id for param in params])
        return stock(update_func, params)

    def _give_out(self, numbers: list[int]) -> None:
        """What the parameters of these ids have on the device goes to the host, where it may be written."""
        self._fill(numbers)
        kept_ones = [self._kept[number] for number in numbers if number in self._kept]
        if kept_ones:
            self._wait_for_reduction()
        for kept in kept_ones:
            self._put_on_host(kept)
            kept.factor, kept.is_zero, kept.zero_padding = None, False, False

    # ---- helpers ----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _keep(self, device: torch.device, nbytes: int) -> None:
        """Move the low-precision buffers of the last parameters to the device."""
        zero, buffers = self._zero, self._buffers
        chosen: dict[int, list[Any]] = {}
        for sub_group, param in reversed([(at, one) for at, group in enumerate(zero.fp16_groups) for one in group]):
            nbytes -= buffers[param.ds_id].nbytes
            if nbytes < 0:
                break
            chosen.setdefault(sub_group, []).insert(0, param)
        if chosen:
            self._wait_for_reduction()
        for sub_group, params in chosen.items():
            first = zero.grad_position[zero.get_param_id(params[0])][1]
            elements = sum(buffers[param.ds_id].numel() for param in params)
            gradients = torch.zeros(elements, dtype=zero.gradient_accumulation_dtype, device=device)
            region = self._regions[sub_group] = _Region(first, gradients)
            self.kept_bytes += gradients.nbytes
            for param in params:
                kept = self._kept[param.ds_id] = self._new(param, region)
                region.parameters.append(kept)
                kept.buffer.copy_(kept.host_buffer)
                buffers[param.ds_id] = kept.buffer

    def _new(self, param: Any, region: _Region) -> _Kept:
        """A parameter in a region."""
        zero, host_buffer = self._zero, self._buffers[param.ds_id]
        sub_group, start, elements = zero.grad_position[zero.get_param_id(param)]
        gradient = self._gradient(sub_group, start, start + elements)
        real_elements = min(elements, max(0, param.ds_numel - elements * zero._get_param_partition_rank(param)))
        is_zero = not host_buffer.any() and not gradient.any()
        return _Kept(
            sub_group=sub_group,
            start=start,
            stop=start + elements,
            real_elements=real_elements,
            buffer=region.gradients[start - region.first : start - region.first + elements],
            host_buffer=host_buffer,
            factor=1.0 if is_zero else None,
            on_host=True,
            is_zero=is_zero,
            zero_padding=not host_buffer[real_elements:].any() and not gradient[real_elements:].any(),
        )

    def _stays(self, kept: _Kept, elements: int) -> bool:
        """Whether the call under way ends in a new fp32 gradient that need not be on the host.

        Where the last rank's partition comes without its padding, stock leaves the padding of its gradient as it is.
        """
        whole = kept.stop - kept.start
        known = elements == whole or (elements == kept.real_elements and kept.zero_padding)
        return known and not self._views_are_out and bool(self._zero.is_gradient_accumulation_boundary())

    @torch.no_grad()
    def _put_on_host(self, kept: _Kept, non_blocking: bool = False) -> None:
        """Copy what stock's fp32 gradient is; in the current stream, which must come after the reduction."""
        if kept.on_host:
            return
        gradient = self._gradient(kept.sub_group, kept.start, kept.stop)
        for start in range(0, gradient.numel(), PIECE_ELEMENTS):
            piece = slice(start, start + PIECE_ELEMENTS)
            value = kept.buffer[piece].to(torch.float32)
            if kept.factor is not None and kept.factor != 1.0:
                value = value * kept.factor
            gradient[piece].copy_(value, non_blocking=non_blocking)
        kept.on_host = True
        self.settled_bytes += gradient.nbytes
        if kept.factor != 1.0:
            kept.factor = None

    @torch.no_grad()
    def _fill(self, numbers: Iterable[int]) -> None:
        """Give the low-precision buffers of parameters what stock would have put there in this step. Blocks; rare."""
        owed = [number for number in numbers if number in self._owed]
        if owed:
            self._wait_for_reduction()
        for number in owed:
            sub_group, start, elements = self._owed.pop(number)
            self._buffers[number][:elements].copy_(self._gradient(sub_group, start, start + elements))

    def _gradient(self, sub_group: int, start: int, stop: int) -> torch.Tensor:
        """The host's fp32 gradient."""
        gradient: torch.Tensor = self._zero.fp32_partitioned_groups_flat[sub_group].grad
        return gradient[start:stop]

    @property
    def _buffers(self) -> dict[int, torch.Tensor]:
        """The low-precision buffers, by DeepSpeed's id of the parameter."""
        buffers: dict[int, torch.Tensor] = getattr(self._zero, BUFFERS)
        return buffers

    def _wait_for_reduction(self) -> None:
        """Block until what backward has queued is done. Once: kernels of the step may follow in that stream."""
        stream = self._zero.reduce_and_partition_stream
        if stream is not None and self._is_reducing:
            stream.synchronize()
        self._is_reducing = False


class StockGradients:
    """Nothing is changed: all gradients are on the host.

    Args:
        zero: a ``DeepSpeedZeroOptimizer_Stage3``.
    """

    direct_bytes = 0
    kept_bytes = 0

    def __init__(self, zero: Any) -> None:
        self._zero = zero

    def on_device(self, sub_group: int, start: int, stop: int) -> torch.Tensor | None:
        """None: on the host."""
        return None

    def on_host(self, sub_group: int, start: int, stop: int) -> torch.Tensor:
        """The host's fp32 gradient of some elements."""
        gradient: torch.Tensor = self._zero.fp32_partitioned_groups_flat[sub_group].grad
        return gradient[start:stop]

    def settle(self) -> None:
        """Nothing to do."""

    def after_step(self, factor: float) -> None:
        """Nothing to do."""

    def remove(self) -> None:
        """Nothing to do."""
