"""Seconds of an optimizer update and of an iteration, calculated from rates: stock, and shared with the device.

Pure arithmetic; nothing here was measured. A rank holds its part of all parameters; master (p), moments (m, v) and
gradients (g) are fp32 in host memory, the model's parameters are on the device.

[Note: Bytes] Of host memory and of the link, for each parameter, where the model's parameters have ``w`` bytes (2 in
bf16 and fp16). Stock DeepSpeed goes over everything several times, one after the other:

=================  =====================================================================================
unscaling          8: reads and writes g, also where the factor is exactly 1
CPUAdam            28: reads p, m, v, g (16) and writes p, m, v (12)
cast               4 + w: reads p, writes a new tensor; nothing where w is 4
write-back         w over the link, blocking, from memory that is not pinned: at the rate of such copies
=================  =====================================================================================

Interleaved, all of these run at once, so the slowest gives the time:

=================  =====================================================================================
host, memory       28 for CPUAdam, and 2 w: the cast to pinned memory, and the device's read of it. Unscaling reads
                   the slice that CPUAdam reads next, so it costs 4 for the write, only where the factor is not 1
host, link         w up
device, memory     12 read (p, m, v) and 12 written, and 4 read for g where it is on the host. Where such a g is
                   multiplied by a factor, 4 written
device, link       the same: 12 or 16 up, 12 or 16 down
device, kernels    about 100 of its own memory: operations of PyTorch that are not fused
=================  =====================================================================================

[Note: The link] Both directions are taken to run at once. Measure their rates so, and those of the host while the link
is busy: on one A100 node copies ran at 25 GB/s in each direction alone, and at 11 up and 24 down together.

[Note: Chunks] The first chunk of the device is uploaded before anything can be written back, and the last is written
back after everything was uploaded: one chunk's time is added.

[Note: Gradients] In backward, stock DeepSpeed moves ``w`` bytes down and ``w`` up in every micro-step, and 4 down in
the last, on one stream. With direct gradients and a single micro-step only the 4 are left. Gradients that stay on the
device are not moved at all; there micro-steps are summed, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

ADAM_BYTES = 28
UNSCALE_BYTES = 8
MASTER_BYTES = 4
STATE_BYTES = 12
GRADIENT_BYTES = 4
# Of device memory, for each element of the formula in PyTorch's operations.
DEVICE_ADAM_BYTES = 100
# Documented, for what was not measured: CPUAdam on one core, and copies through the driver's staging.
HOST_ADAM_PER_CORE_S = 1e9
PAGEABLE_BYTES_PER_S = 10e9
# Of forward and backward.
BACKWARD_PART = 2 / 3
_FLOPS, _RECOMPUTING_FLOPS = 6, 8
_HALVINGS = 60


@dataclass(frozen=True, slots=True)
class Rates:
    """What one rank has of the machine, while everything is busy; see [Note: The link].

    Attributes:
        host_adam_per_s: elements that the host's cores update and cast, if memory is no limit.
        dram_bytes_per_s: of host memory, reads and writes together.
        up_bytes_per_s: from pinned host memory to the device.
        down_bytes_per_s: back.
        device_adam_per_s: elements that the device updates, without copies.
        pageable_bytes_per_s: to the device from memory that is not pinned.
    """

    host_adam_per_s: float
    dram_bytes_per_s: float
    up_bytes_per_s: float
    down_bytes_per_s: float
    device_adam_per_s: float
    pageable_bytes_per_s: float = PAGEABLE_BYTES_PER_S

    @classmethod
    def of(
        cls, host_cores: int, dram_bytes_per_s: float, link_bytes_per_s: float, device_memory_bytes_per_s: float
    ) -> Rates:
        """The rates of a rank with so many cores, a part of the host's memory, and a link alike in both directions."""
        return cls(
            host_cores * HOST_ADAM_PER_CORE_S,
            dram_bytes_per_s,
            link_bytes_per_s,
            link_bytes_per_s,
            device_memory_bytes_per_s / DEVICE_ADAM_BYTES,
            min(PAGEABLE_BYTES_PER_S, link_bytes_per_s),
        )


# ---- the update -----------------------------------------------------------------------------------------------------


def stock_update_s(elements: float, rates: Rates, *, parameter_bytes: int = 2) -> float:
    """Seconds of stock DeepSpeed's update.

    Args:
        elements: parameters of the rank.
        parameter_bytes: of one parameter on the device.
    """
    cast_bytes = MASTER_BYTES + parameter_bytes if parameter_bytes != MASTER_BYTES else 0
    adam_s = max(1 / rates.host_adam_per_s, ADAM_BYTES / rates.dram_bytes_per_s)
    passes_s = (UNSCALE_BYTES + cast_bytes) / rates.dram_bytes_per_s
    return elements * (passes_s + adam_s + parameter_bytes / rates.pageable_bytes_per_s)


def interleaved_update_s(
    elements: float,
    rates: Rates,
    device_share: float,
    *,
    device_gradients: float = 0.0,
    chunk_elements: int = 0,
    clipped: bool = False,
    parameter_bytes: int = 2,
) -> float:
    """Seconds of an update that host and device share.

    Args:
        elements: parameters of the rank.
        device_share: the part of them that the device updates.
        device_gradients: the part of all gradients that stay on the device; of its share all, where it is larger.
        chunk_elements: see [Note: Chunks]; 0 leaves that time out.
        clipped: gradients are multiplied by a factor other than 1, by clipping or a loss scale.
        parameter_bytes: of one parameter on the device.
    """
    host_share = 1 - device_share
    from_host = device_share - min(device_gradients, device_share)  # of the device's, with gradients on the host
    down_bytes = STATE_BYTES * device_share + (GRADIENT_BYTES * from_host if clipped else 0)
    device_up_bytes = STATE_BYTES * device_share + GRADIENT_BYTES * from_host
    host_bytes = ADAM_BYTES + 2 * parameter_bytes + (GRADIENT_BYTES if clipped else 0)
    s_per_element = max(
        host_share / rates.host_adam_per_s,
        (host_share * host_bytes + device_up_bytes + down_bytes) / rates.dram_bytes_per_s,
        (device_up_bytes + host_share * parameter_bytes) / rates.up_bytes_per_s,
        down_bytes / rates.down_bytes_per_s,
        device_share / rates.device_adam_per_s,
    )
    chunk_s = 0.0
    if device_share:
        one_s = device_up_bytes / rates.up_bytes_per_s + down_bytes / rates.down_bytes_per_s
        one_s = one_s / device_share + 1 / rates.device_adam_per_s
        chunk_s = min(chunk_elements, device_share * elements) * one_s
    return elements * s_per_element + chunk_s


def best_share(
    elements: float,
    rates: Rates,
    *,
    device_gradients: float = 0.0,
    chunk_elements: int = 0,
    clipped: bool = False,
    parameter_bytes: int = 2,
) -> float:
    """The device's share that takes least time; arguments as of :func:`interleaved_update_s`."""

    def update_s(share: float, chunk: int = 0) -> float:
        return interleaved_update_s(
            elements,
            rates,
            share,
            device_gradients=device_gradients,
            chunk_elements=chunk,
            clipped=clipped,
            parameter_bytes=parameter_bytes,
        )

    # Without the chunk's time this is convex in the share, as a maximum of convex terms: the least lies on the side of
    # the lower of two points. With that time, a share of nearly 0 may be worse than none.
    low, high = 0.0, 1.0
    for _ in range(_HALVINGS):
        third = (high - low) / 3
        if update_s(low + third) <= update_s(high - third):
            high -= third
        else:
            low += third
    return min((0.0, low, high, 1.0), key=lambda share: update_s(share, chunk_elements))


# ---- the iteration --------------------------------------------------------------------------------------------------


def compute_s(parameters: float, tokens: float, flops_per_s: float, *, recomputes: bool = False) -> float:
    """Seconds of forward and backward, by the products of the parameters alone; attention is left out.

    Args:
        parameters: of the whole model.
        tokens: of one rank in a step.
        flops_per_s: that the device sustains.
        recomputes: forward runs again in backward.
    """
    return (_RECOMPUTING_FLOPS if recomputes else _FLOPS) * parameters * tokens / flops_per_s


def gradient_transfer_s(
    elements: float,
    rates: Rates,
    *,
    micro_steps: int = 1,
    direct: bool = False,
    device_gradients: float = 0.0,
    parameter_bytes: int = 2,
) -> float:
    """Seconds that gradients are on the link in the backward of one step; see [Note: Gradients].

    Args:
        elements: parameters of the rank.
        micro_steps: of the step. With several, gradients that go to the host do so in the stock way.
        direct: the block's ``direct_gradients``.
        device_gradients: the part of all gradients that stay on the device.
        parameter_bytes: of one gradient on the device.
    """
    moved = elements * (1 - min(device_gradients, 1.0))
    if direct and micro_steps == 1:
        return moved * GRADIENT_BYTES / rates.down_bytes_per_s
    down_bytes = micro_steps * parameter_bytes + GRADIENT_BYTES
    return moved * (down_bytes / rates.down_bytes_per_s + micro_steps * parameter_bytes / rates.up_bytes_per_s)


def iteration_s(computing_s: float, gradient_s: float, update_s: float, *, overlapped: bool = True) -> float:
    """Seconds of one step: forward, backward, update.

    Args:
        computing_s: of forward and backward.
        gradient_s: see :func:`gradient_transfer_s`.
        update_s: of the update.
        overlapped: gradients are on the link while backward computes.
    """
    if not overlapped:
        return computing_s + gradient_s + update_s
    backward_s = BACKWARD_PART * computing_s
    return computing_s - backward_s + max(backward_s, gradient_s) + update_s


# ---- predictions ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Work:
    """One step of one rank.

    Attributes:
        elements: parameters that the rank updates.
        computing_s: of forward and backward.
        micro_steps, parameter_bytes, clipped, chunk_elements: see the functions above.
    """

    elements: float
    computing_s: float
    micro_steps: int = 1
    parameter_bytes: int = 2
    clipped: bool = False
    chunk_elements: int = 0


@dataclass(frozen=True, slots=True)
class Variant:
    """A way to do the update.

    Attributes:
        name: for people.
        device_share: None takes the best one.
        device_gradients: the part of all gradients that stay on the device, at most.
        direct: the block's ``direct_gradients``.
    """

    name: str
    device_share: float | None
    device_gradients: float = 0.0
    direct: bool = True


@dataclass(frozen=True, slots=True)
class Predicted:
    """A variant's times, beside those of stock DeepSpeed. Calculated, not measured.

    Attributes:
        device_share: None for stock.
        device_gradient_bytes: of device memory, for gradients that stay there.
        update_faster, iteration_faster: stock's time divided by this one's.
    """

    name: str
    device_share: float | None
    device_gradient_bytes: float
    update_s: float
    iteration_s: float
    update_faster: float
    iteration_faster: float


# Without gradients on the device, and with as many as the device's share has.
VARIANTS = (
    Variant("device_share 0", 0.0),
    Variant("best share", None),
    Variant("best share, gradients stay", None, 1.0),
)
STOCK = "stock DeepSpeed"


def predict(work: Work, rates: Rates, variants: Sequence[Variant] = VARIANTS) -> list[Predicted]:
    """Times of stock DeepSpeed, then of each variant."""
    stock_s = stock_update_s(work.elements, rates, parameter_bytes=work.parameter_bytes)
    moved_s = gradient_transfer_s(
        work.elements, rates, micro_steps=work.micro_steps, parameter_bytes=work.parameter_bytes
    )
    stock_iteration_s = iteration_s(work.computing_s, moved_s, stock_s)
    found = [Predicted(STOCK, None, 0.0, stock_s, stock_iteration_s, 1.0, 1.0)]
    for variant in variants:
        kept = variant.device_gradients
        given: dict[str, Any] = {
            "device_gradients": kept,
            "chunk_elements": work.chunk_elements,
            "clipped": work.clipped,
            "parameter_bytes": work.parameter_bytes,
        }
        share = variant.device_share
        if share is None:
            share = best_share(work.elements, rates, **given)
        update_s = interleaved_update_s(work.elements, rates, share, **given)
        moved_s = gradient_transfer_s(
            work.elements,
            rates,
            micro_steps=work.micro_steps,
            direct=variant.direct,
            device_gradients=min(kept, share),
            parameter_bytes=work.parameter_bytes,
        )
        whole_s = iteration_s(work.computing_s, moved_s, update_s)
        kept_bytes = min(kept, share) * work.elements * work.parameter_bytes
        found.append(
            Predicted(
                variant.name, share, kept_bytes, update_s, whole_s, stock_s / update_s, stock_iteration_s / whole_s
            )
        )
    return found
