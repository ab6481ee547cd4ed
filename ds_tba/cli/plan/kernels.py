"""The kernels of the training device, for a forward that runs elsewhere: which tensors are saved depends on the kernel.

PyTorch runs plain kernels on the meta device. A CUDA device has fused kernels for attention (which save the inputs, the
output and a log-sum-exp per row, not the probabilities), dropout (a mask of one byte per element) and RMS norm (a
factor per row); the CPU has one for attention without dropout.

[Note: Which attention] PyTorch's rules are applied. CUDA: flash for 16-bit dtypes without a mask, memory-efficient for
others, plain products for shapes that neither supports. CPU: flash without dropout, plain products else. Blind spot:
cuDNN's attention, which saves as much as flash does.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from functools import partial
from typing import Any

import torch
from torch.library import Library
from torch.nn import functional

_aten = torch.ops.aten
FLASH_HEAD_DIM = 256
# The flash kernel pads heads to a multiple of so many elements, the memory-efficient kernel the rows of a mask.
_MULTIPLE = 8


class Attention(IntEnum):
    """The numbers are PyTorch's (``sdp_backend``)."""

    MATH = 0
    FLASH = 1
    EFFICIENT = 2


@contextmanager
def device_kernels(target: str, runs_on: str) -> Iterator[set[Attention]]:
    """Have operations inside save what the kernels of another device would save; yields the attention kernels that ran.

    Changes PyTorch's dispatch table for tensors of ``runs_on`` that need a gradient, in all threads.

    Args:
        target: the training device, ``"cuda"`` or ``"cpu"``.
        runs_on: device of the tensors, ``"meta"`` or ``"cpu"``. The CPU runs its own attention and norm.
    """
    taken: set[Attention] = set()
    key = f"Autograd{'Meta' if runs_on == 'meta' else 'CPU'}"
    library: Any = Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    try:
        if runs_on == "meta":
            library.impl("scaled_dot_product_attention", partial(_attend, target, taken), key)
        if target == "cuda":
            library.impl("dropout", _dropout, key)
        if target == "cuda" and runs_on == "meta" and hasattr(_aten, "_fused_rms_norm_backward"):
            # Autograd's own node saves the tensors, if there is a kernel below it. ``library.impl`` refuses one for the
            # meta device where an operation has a composite kernel, too, which CUDA does not run.
            library.m.impl("_fused_rms_norm", "Meta", _rms_norm, False)
            library.impl("_fused_rms_norm_backward", _rms_norm_backward, "Meta")
        yield taken
    finally:
        library._destroy()


def _attend(
    target: str,
    taken: set[Attention],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """``scaled_dot_product_attention`` of a device."""
    chosen = attention_of(target, query, key, value, attn_mask, dropout_p)
    taken.add(chosen)
    mask = attn_mask
    if mask is not None and mask.dtype is torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype)  # the kernels save the bias that a mask becomes
    if chosen is Attention.FLASH and target == "cpu":
        attend = _aten._scaled_dot_product_flash_attention_for_cpu
        return attend(query, key, value, dropout_p, is_causal, attn_mask=mask, scale=scale)[0]  # type: ignore[no-any-return]
    if chosen is Attention.FLASH:
        width = query.shape[-1]
        if missing := -width % _MULTIPLE:
            scale = scale or width**-0.5
            query, key, value = (functional.pad(one, (0, missing)) for one in (query, key, value))
        attend = _aten._scaled_dot_product_flash_attention
        out: torch.Tensor = attend(query, key, value, dropout_p, is_causal, scale=scale)[0]
        return out[..., :width] if missing else out
    if chosen is Attention.EFFICIENT:
        bias = _padded_bias(mask, query, key)
        attend = _aten._scaled_dot_product_efficient_attention
        return attend(query, key, value, bias, True, dropout_p, is_causal, scale=scale)[0]  # type: ignore[no-any-return]
    options: dict[str, Any] = {"is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
    return _aten._scaled_dot_product_attention_math(query, key, value, mask, dropout_p, **options)[0]  # type: ignore[no-any-return]


def attention_of(
    device: str,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout_p: float,
) -> Attention:
    """The kernel that a device runs for this call; see [Note: Which attention]."""
    if any(one.dim() != 4 or one.stride(-1) != 1 for one in (query, key, value)):
        return Attention.MATH
    is_one_width = query.shape[-1] == key.shape[-1] == value.shape[-1]
    is_as_many_heads = query.shape[1] == key.shape[1] == value.shape[1]
    if device == "cpu":
        is_trained = mask is not None and mask.requires_grad
        is_flash = is_one_width and not dropout_p and not is_trained
        return Attention.FLASH if is_flash else Attention.MATH
    is_half = query.dtype in (torch.float16, torch.bfloat16)
    if mask is None and is_half and is_one_width and query.shape[-1] <= FLASH_HEAD_DIM:
        return Attention.FLASH
    if is_as_many_heads and query.dtype is not torch.float64:
        return Attention.EFFICIENT
    return Attention.MATH


def _padded_bias(bias: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor | None:
    if bias is None:
        return None
    columns = key.shape[-2]
    if missing := -columns % _MULTIPLE:
        bias = functional.pad(bias.expand(*bias.shape[:-1], columns), (0, missing))[..., :columns]
    return bias.expand(query.shape[0], query.shape[1], query.shape[-2], columns)


def _dropout(tensor: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    if not train or p == 0.0 or not tensor.numel():
        return tensor
    return torch.native_dropout(tensor, p, True)[0]


def _rms_norm(
    tensor: torch.Tensor, normalized_shape: Any, weight: torch.Tensor | None, eps: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    rows = [*tensor.shape[: tensor.dim() - len(normalized_shape)], *[1] * len(normalized_shape)]
    return torch.empty_like(tensor), torch.empty(rows, dtype=torch.float32, device=tensor.device)


def _rms_norm_backward(
    grad: torch.Tensor, tensor: torch.Tensor, shape: Any, factors: torch.Tensor, weight: Any, wanted: list[bool]
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    of_weight = torch.empty_like(weight) if weight is not None and wanted[1] else None
    return torch.empty_like(tensor) if wanted[0] else None, of_weight
