"""Functions of autograd that save or change tensors in ways that are hard for saved-tensor hooks. Knows torch only.

Here because the hazards and the random programs both train with them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Read = Callable[[], tuple[Any, ...]]


def function(
    makes: Callable[..., tuple[Tensor, Sequence[Tensor | None]]], gradients: Callable[[Tensor, Read], Any]
) -> Callable[..., Tensor]:
    """Return a Function of the user's, to be called.

    Args:
        makes: returns the output and what is to be saved; an output that is the first input was changed in place.
        gradients: gets the gradient and a call that reads what was saved; returns gradients of the first inputs.
    """

    class Made(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Tensor:
            made, saved = makes(*inputs)
            ctx.save_for_backward(*saved)
            if made is inputs[0]:
                ctx.mark_dirty(made)
            ctx.count = len(inputs)
            return made

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
            found = gradients(grad, lambda: ctx.saved_tensors)
            found = found if isinstance(found, tuple) else (found,)
            return (*found, *[None] * (ctx.count - len(found)))

    return Made.apply


# Autograd may take the memory of the gradient that this returns, which is the saved tensor itself.
returns_what_it_saved = function(lambda a, constant: ((a * constant).sum(), [constant]), lambda _, read: read()[0])


def lstm_cell(gates: Tensor, state: Tensor) -> Tensor:
    """Do as PyTorch's own LSTM and GRU cells: change chunks in place, each with a version counter of its own."""
    i, f, g, o = gates.unsafe_chunk(4, 1)
    i.sigmoid_()
    f.sigmoid_()
    g.tanh_()
    o.sigmoid_()
    return o * (f * state + i * g).tanh()
