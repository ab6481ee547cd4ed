"""DeepSpeed's CPUAdam, bit for bit, in torch's operations, for a device.

Every operation of CPUAdam's vector code (``csrc/includes/cpu_adam.h``, ``Step_AVX``) is rounded once, in fp32, and so
is each one here; a fused multiply-add is ``add`` with ``alpha``. The same is true of unscaling and clipping before it,
and of the cast after it. A device that rounds in another way would train another model: :func:`is_exact` finds that
out at the start, on random numbers. A NaN equals a NaN, whatever its sign and payload, which no device promises.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

# Elements of one piece on the CPU: torch neither splits it among threads nor takes much memory for it in float64.
_PIECE_ELEMENTS = 1 << 14
# DeepSpeed counts its C++ objects from 0: ours is never one of its own.
_TRIAL_ID = -1
# Some blocks of a device's kernel, and a part of one: the last block may take another path.
_TRIAL_ELEMENTS = (1 << 14) + 3 * 128
# The unscaling of fp16, which is a power of two, and products of unscaling and clipping.
_TRIAL_FACTORS = (2.0**-16, 0.1, 1 / 3, 3.7e-7)
# Bits of fp32 that a cast drops.
_DROPPED_BITS = {torch.bfloat16: 16, torch.float16: 13}


@dataclass(frozen=True, slots=True)
class Hyper:
    """The hyperparameters of one update."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    bias_correction: bool = True
    adamw: bool = True

    @property
    def numbers(self) -> tuple[float, ...]:
        """What CPUAdam's ``adam_update`` takes between the step and the tensors."""
        return self.lr, self.beta1, self.beta2, self.eps, self.weight_decay, self.bias_correction


@dataclass(frozen=True, slots=True)
class Scalars:
    """The numbers of one step, all of them exact in fp32, as Python's floats."""

    beta1: float
    one_minus_beta1: float
    beta2: float
    one_minus_beta2: float
    eps: float
    step_size: float  # -lr / (1 - beta1^t), which is negative
    root_scale: float  # 1 / sqrt(1 - beta2^t)
    decay: float | None  # -lr x weight decay for AdamW, the weight decay for Adam; None where there is none
    adamw: bool


class Powers:
    """The powers of the betas that CPUAdam's C++ object hides, and that depend on all calls so far.

    A step after the one before, with the same betas, multiplies the powers; any other step computes them anew, which
    rounds in another way. There is one of these for each C++ object, and each call here stands for one ``adam_update``.
    """

    def __init__(self, beta1: float, beta2: float) -> None:
        # At first the optimizer's defaults, with which its C++ object was created.
        self._betas = (np.float32(beta1), np.float32(beta2))
        self._powers = (np.float32(1), np.float32(1))
        self._step = 0

    def scalars(self, step: int, hyper: Hyper) -> Scalars:
        """Return the numbers with which CPUAdam computes this call; ``step`` counts from 1, this step included."""
        betas = (np.float32(hyper.beta1), np.float32(hyper.beta2))
        if betas == self._betas and step == self._step + 1:  # running products, as CPUAdam's: pow() differs
            self._powers = (self._powers[0] * betas[0], self._powers[1] * betas[1])
        elif betas != self._betas or step != self._step:  # the second group of a step has the same powers
            self._powers = (_power(betas[0], step), _power(betas[1], step))
        self._betas, self._step = betas, step
        return _scalars(betas, self._powers, hyper)


def _power(base: np.float32, exponent: int) -> np.float32:
    """Return what ``std::pow`` gives for a float and an integer: it computes in double."""
    return np.float32(math.pow(float(base), exponent))


def _scalars(betas: tuple[np.float32, np.float32], powers: tuple[np.float32, np.float32], hyper: Hyper) -> Scalars:
    """Compute the numbers as ``update_state`` and ``Step_AVX`` do, in fp32 throughout."""
    one, lr, weight_decay = np.float32(1), np.float32(hyper.lr), np.float32(hyper.weight_decay)
    correction1 = root_scale = one
    with np.errstate(all="ignore"):  # a beta that fp32 rounds to 1 divides by zero, in C++ too
        if hyper.bias_correction:
            correction1 = one - powers[0]
            root_scale = one / np.sqrt(one - powers[1])  # in FP32, as CPUAdam computes it
        step_size = -lr / correction1
    decay = None
    if weight_decay > 0:
        decay = float(-lr * weight_decay) if hyper.adamw else float(weight_decay)
    return Scalars(
        beta1=float(betas[0]),
        one_minus_beta1=float(one - betas[0]),
        beta2=float(betas[1]),
        one_minus_beta2=float(one - betas[1]),
        eps=float(np.float32(hyper.eps)),
        step_size=float(step_size),
        root_scale=float(root_scale),
        decay=decay,
        adamw=hyper.adamw,
    )


def update_(
    master: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    gradient: torch.Tensor,
    scratch: torch.Tensor,
    scalars: Scalars,
) -> None:
    """Take one step of Adam in place, as ``Step_AVX`` does; a device with streams only queues it.

    All tensors are fp32, 1-D, contiguous, on one device and equally long. Their length must be a multiple of 128:
    CPUAdam rounds the elements that are left over in another way.

    Args:
        gradient: read only.
        scratch: overwritten.
    """
    whole, elements = (master, exp_avg, exp_avg_sq, gradient, scratch), master.numel()
    piece_elements = _PIECE_ELEMENTS if master.device.type == "cpu" else max(elements, 1)
    # A tensor without dimensions stays on the CPU and travels with the kernel's arguments. On the device it would cost
    # a copy for which the host waits.
    eps = torch.tensor(scalars.eps, dtype=torch.float32, device="cpu")
    for start in range(0, elements, piece_elements):
        master, exp_avg, exp_avg_sq, gradient, scratch = (one[start : start + piece_elements] for one in whole)
        if scalars.decay is not None and not scalars.adamw:  # Adam's goes into the moments
            gradient = torch.add(gradient, master, alpha=scalars.decay, out=scratch)
        exp_avg.mul_(scalars.beta1).add_(gradient, alpha=scalars.one_minus_beta1)
        torch.mul(gradient, gradient, out=scratch)
        exp_avg_sq.mul_(scalars.beta2).add_(scratch, alpha=scalars.one_minus_beta2)
        _square_root(exp_avg_sq, scratch)
        torch.add(eps, scratch, alpha=scalars.root_scale, out=scratch)
        torch.div(exp_avg, scratch, out=scratch)
        if scalars.decay is not None and scalars.adamw:  # AdamW decays the weight, and not the gradient
            master.add_(master, alpha=scalars.decay)
        master.add_(scratch, alpha=scalars.step_size)


def cast(source: torch.Tensor, target: torch.Tensor) -> None:
    """Cast parameters to the model's dtype."""
    target.copy_(source)


def scale(factor: float, gradient: torch.Tensor) -> None:
    """Unscale and clip a gradient, in place."""
    gradient.mul_(factor)


def _square_root(source: torch.Tensor, target: torch.Tensor) -> None:
    """Take a correctly rounded root, as CUDA's is. That of torch's CPU in fp32 is not; from double it is."""
    if source.device.type == "cpu":
        target.copy_(source.double().sqrt_())
    else:
        torch.sqrt(source, out=target)


def is_exact(op: Any, device: torch.device, *, adamw: bool) -> bool:
    """Return whether the update on a device, with unscaling and casts, gives the host's bits for random data.

    Args:
        op: DeepSpeed's ``cpu_adam``. A C++ object of its own is created in it, and destroyed.
        adamw: True if the weight decay is AdamW's; else it is added to the gradient.
    """
    generator = torch.Generator("cpu").manual_seed(0)
    if not _is_exact_around(generator, device):
        return False
    hyper = Hyper(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1, adamw=adamw)
    expected = (_trial(generator, 0), _trial(generator, 3), _trial(generator, 6).square_())
    master, exp_avg, exp_avg_sq = (tensor.to(device, copy=True) for tensor in expected)
    scratch = torch.empty_like(master)
    powers = Powers(hyper.beta1, hyper.beta2)
    op.create_adam(_TRIAL_ID, hyper.lr, hyper.beta1, hyper.beta2, hyper.eps, hyper.weight_decay, adamw, False)
    try:
        # Steps in a row, a resumed run, and values that differ between groups and in the course of a schedule.
        for step, lr, decay in ((1, 1e-3, 0.1), (2, 9e-4, 0.1), (3, 3e-5, 0.0), (57, 0.0, 0.1), (58, 7e-4, 0.01)):
            current = replace(hyper, lr=lr, weight_decay=decay)
            gradient = _trial(generator, 4)
            on_device = gradient.to(device, copy=True)
            op.adam_update(_TRIAL_ID, step, *current.numbers, expected[0], gradient, expected[1], expected[2])
            update_(master, exp_avg, exp_avg_sq, on_device, scratch, powers.scalars(step, current))
            if not all(map(same_bits, (*expected, gradient), (master, exp_avg, exp_avg_sq, on_device))):
                return False
    finally:
        op.destroy_adam(_TRIAL_ID)
    return True


def _is_exact_around(generator: torch.Generator, device: torch.device) -> bool:
    """Return whether a device casts and multiplies as the host does."""
    for factor in _TRIAL_FACTORS:
        gradient = _trial(generator, 4)
        on_device = gradient.to(device, copy=True)
        scale(factor, on_device)
        if not same_bits(gradient.mul_(factor), on_device):
            return False
    for dtype, dropped in _DROPPED_BITS.items():
        # Numbers in the middle between two results, and beside it; fp16's denormals, and numbers that overflow.
        bits = torch.cat([_trial(generator, magnitude) for magnitude in (4, -3, -36)]).view(torch.int32)
        middle = bits & -(1 << dropped) | 1 << (dropped - 1)
        master = torch.cat([bits, middle - 1, middle, middle + 1]).view(torch.float32)
        low = torch.empty_like(master, dtype=dtype, device=device)
        cast(master.to(device, copy=True), low)
        if not same_bits(master.to(dtype), low):
            return False
    return True


def _trial(generator: torch.Generator, magnitude: int) -> torch.Tensor:
    """Return numbers about 10 to the minus ``magnitude``, of many orders; zeros and denormals are among them."""
    numbers = torch.randn(_TRIAL_ELEMENTS, generator=generator, dtype=torch.float32, device="cpu")
    exponents = torch.randn(_TRIAL_ELEMENTS, generator=generator, dtype=torch.float32, device="cpu")
    numbers *= 10 ** (2 * exponents - magnitude)
    numbers[::101] = 0
    numbers[::103] *= 1e-36
    return numbers


def same_bits(expected: torch.Tensor, found: torch.Tensor) -> bool:
    """Return whether two tensors of one float dtype are equal bit for bit; any NaN equals any other."""
    found, bits = found.to(expected.device), torch.int32 if expected.dtype.itemsize == 4 else torch.int16
    same = (expected.view(bits) == found.view(bits)) | (expected.isnan() & found.isnan())
    return bool(same.all())
