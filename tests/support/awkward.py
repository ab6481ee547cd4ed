"""Functions of autograd that save or change tensors in ways that are hard for saved-tensor hooks. Knows torch only.

Here because the hazards and the random programs both train with them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class DoubleInPlace(torch.autograd.Function):
    """Changes its input after saving it."""

    @staticmethod
    def forward(ctx: Any, a: Tensor) -> Tensor:
        ctx.save_for_backward(a)
        a.mul_(2)
        ctx.mark_dirty(a)
        return a

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * ctx.saved_tensors[0]


class ReturnsWhatItSaved(torch.autograd.Function):
    """Autograd may take the memory of the gradient that this returns, which is the saved tensor itself."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, constant: Tensor) -> Tensor:
        ctx.save_for_backward(constant)
        return (a * constant).sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.saved_tensors[0], None
