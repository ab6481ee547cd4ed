"""Every known way to get a gradient wrong, each as a small training step that runs with and without the cache.

A scenario is a function of ``saving`` (a context manager factory for the forward) that returns the tensors to compare,
or a forward of leaves that yields its loss (:func:`trained`). A mutation yields, then changes what was saved.
Used by ``test_hazards.py`` and, because ``assert`` does nothing there, run as a program under ``python -O``.
"""

from __future__ import annotations

import gc
import itertools
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from inspect import isgeneratorfunction, signature
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

from ds_tba.core.cache import TensorCache
from ds_tba.device.accelerator import Accelerator
from ds_tba.errors import ActivationModifiedError
from ds_tba.storage.backends import PosixBackend
from ds_tba.storage.nvme import Lanes, NvmeStore
from ds_tba.storage.path import SwapFile
from ds_tba.storage.staging import StagingRing
from support.awkward import Read, function, lstm_cell
from support.leftovers import after_a_while, held

Saving = Callable[[], AbstractContextManager[Any]]
# Takes ``saving`` and returns what is to be compared; or takes leaves, and yields: see ``trained``.
Scenario = Callable[..., Iterable[Tensor]]
MIN_BYTES = 4096  # so that small tensors are offloaded too
SIDE = 64
SQUARE = (SIDE, SIDE)
COPIES_END_S = 10.0


class Wrong(Exception):
    """A scenario did not do what it must."""


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape or (SIDE, SIDE), requires_grad=True)


def grads(*tensors: Tensor) -> list[Tensor]:
    return [tensor.grad for tensor in tensors if tensor.grad is not None]


def grads_after(loss: Tensor, *leaves: Tensor) -> list[Tensor]:
    """Gradients after backward, while what the caller has made in its forward is still alive."""
    loss.backward()
    return grads(*leaves)


SHAPES: dict[Scenario, tuple[tuple[int, ...], ...]] = {}


def of(*shapes: tuple[int, ...]) -> Callable[[Scenario], Scenario]:
    """Return a decorator for a forward that takes leaves of these shapes; without it they are squares."""

    def noted(forward: Scenario) -> Scenario:
        SHAPES[forward] = shapes
        return forward

    return noted


def leaves_of(forward: Scenario) -> list[Tensor]:
    return [leaf(*shape) for shape in SHAPES.get(forward) or [SQUARE] * len(signature(forward).parameters)]


def trained(forward: Scenario, saving: Saving) -> list[Tensor]:
    """Go forward, and back twice: while what the forward has made is alive, and once it is gone.

    A forward yields its loss. Compared are also the gradients of leaves that it yields before the loss, and what it
    yields after backward.
    """
    found = []
    for is_alive in (True, False):
        leaves = leaves_of(forward)
        running = iter(forward(*leaves))
        with saving():
            while (loss := next(running)).is_leaf:
                leaves.append(loss)
        if not is_alive:
            running = iter(())
        loss.backward()
        found += [*running, *grads(*leaves)]
    return found


# ---- views and identity ---------------------------------------------------------------------------------------------


@of((4, SIDE, SIDE))
def views_of_one_storage_with_equal_shape_and_stride(x: Tensor) -> Iterator[Tensor]:
    y = x * 2
    yield (y[0] * y[1]).sum() + (y[2] * y[3]).exp().sum()


def a_tensor_and_its_transpose(x: Tensor) -> Iterator[Tensor]:
    y = x.sin()
    loss = (y @ y.t()).pow(2).sum() + y.t().contiguous().mul(y).sum()
    yield loss + (y[:32, :48] ** 3).sum() + (y[32:, 16:] ** 3).sum()


@of((8, SIDE, SIDE))
def strides_are_kept(x: Tensor) -> Iterator[Tensor]:
    seen: list[Tensor] = []

    def gradient(grad: Tensor, read: Read) -> Tensor:
        (a,) = read()
        seen.append(torch.tensor([*a.shape, *a.stride(), a.storage_offset()]))
        return grad * a

    strided = function(lambda a: (a.clone(), [a]), gradient)
    y = x * 3
    yield sum(strided(view).sum() for view in (y.permute(2, 0, 1), y[2:, ::2, 1:], y.as_strided((8, 9), (3, 1), 5)))
    yield from sorted(seen, key=lambda row: row.tolist())


@of(SQUARE, (1, SIDE))
def stride_0_broadcasts(x: Tensor, row: Tensor) -> Iterator[Tensor]:
    wide = (row * 2).expand(SIDE, SIDE)
    yield (wide * x).sum() + (x.mean().expand(SIDE, SIDE) * x).sum()


def reused_addresses(x: Tensor) -> Iterator[Tensor]:
    """The allocator hands out the same address for one temporary after the other."""
    loss = torch.zeros(())
    for power in range(20):
        loss = loss + (x + power).sin().mul(x.cos() * power).sum()
    yield loss


def dtypes_and_odd_sizes() -> Iterator[Tensor]:
    dtypes = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64)
    yield from (leaves := [torch.randn(4097, dtype=dtype, requires_grad=True) for dtype in dtypes])
    yield sum((x * x * x).abs().sum() for x in leaves)


@of((SIDE * SIDE,))
def bool_and_integer_tensors(x: Tensor) -> Iterator[Tensor]:
    index = torch.randperm(SIDE * SIDE)
    yield (torch.where(x > 0, x, x * 2)[index] * x.gather(0, index)).sum() + x.masked_fill(x < 0, 0).pow(2).sum()


def complex_conjugates() -> Iterator[Tensor]:
    yield (x := torch.randn(SIDE, SIDE, dtype=torch.complex64, requires_grad=True))
    yield (x.conj() @ x.mT.conj() * x).abs().sum()


@of((0, SIDE), SQUARE)
def empty_tensors(x: Tensor, y: Tensor) -> Iterator[Tensor]:
    yield (x * x).sum() + (y * y).sum() + (x @ y).sum()


def a_slice_of_a_large_data_set(weight: Tensor) -> Iterator[Tensor]:
    data = torch.randn(4000, SIDE)
    yield (data[100:120] @ weight).pow(2).sum() + data[500:580].matmul(weight).sin().sum()


def a_batch_buffer_that_is_resized(saving: Saving) -> list[Tensor]:
    """What was saved is gone by then; that a copy of it was taken leaves no mark on the buffer."""
    data, buffer, weight = torch.randn(4 * SIDE, SIDE), torch.empty(0), leaf()
    for rows in (2 * SIDE, SIDE, 4 * SIDE):
        torch.index_select(data, 0, torch.arange(rows), out=buffer.resize_(0))
        with saving():
            loss = (buffer @ weight).sin().sum()
        loss.backward()
    return grads(weight)


# ---- parameters -----------------------------------------------------------------------------------------------------


@of((2 * SIDE, SIDE))
def parameters_their_transposes_and_buffers(x: Tensor) -> Iterator[Tensor]:
    model = nn.Sequential(nn.Linear(SIDE, 2 * SIDE), nn.BatchNorm1d(2 * SIDE), nn.ReLU(), nn.Linear(2 * SIDE, SIDE))
    tied = nn.Parameter(model[0].weight.detach().clone())
    flat = nn.Parameter(torch.randn(2 * SIDE * SIDE))  # as under FSDP: weights are views of it
    yield from (tied, flat, *model.parameters())
    one, two = flat.view(2, SIDE, SIDE).unbind()
    yield (model(x) @ tied.t()).pow(2).mean() + (x @ tied.t()).mean() + ((x @ one).tanh() @ two).mean()


def regathered_parameters(saving: Saving) -> list[Tensor]:
    """ZeRO-3 frees a parameter after forward and gathers it into new storage before backward."""
    weight = nn.Parameter(torch.randn(SIDE, SIDE))
    full, x = weight.data.clone(), leaf()

    def gradients(grad: Tensor, read: Read) -> tuple[Tensor, Tensor]:
        a, w = read()
        return grad @ w.t(), a.t() @ grad

    with saving():
        loss = function(lambda a, w: (a @ w, [a, w]), gradients)(x.sin(), weight).pow(2).sum()
    weight.data = torch.empty(0)
    weight.data = full.clone()
    return grads_after(loss, x, weight)


# ---- in place -------------------------------------------------------------------------------------------------------


def a_function_that_mutates_after_saving(x: Tensor) -> Iterator[Tensor]:
    doubles = function(lambda a: (a.mul_(2), [a]), lambda grad, read: grad * read()[0])
    yield doubles(x * 1.5).pow(2).sum()


def one_storage_at_two_versions(saving: Saving) -> list[Tensor]:
    """A buffer that is changed between two saves: each save must come back with its own bytes, or raise."""
    x = leaf()
    out = []
    buffer = torch.ones(SIDE, SIDE)
    for step in range(3):
        with torch.no_grad():
            buffer.add_(step)
        with saving():
            loss = (x * buffer).sin().sum()
        out += [grad.clone() for grad in grads_after(loss, x)]
    return out


def in_place_before_the_save(x: Tensor) -> Iterator[Tensor]:
    y = x * 2
    y.add_(1).relu_()
    yield (y * y).sum()


@of((SIDE, 4 * SIDE))
def siblings_that_share_bytes_but_not_a_version_counter(x: Tensor) -> Iterator[Tensor]:
    yield lstm_cell(x * 1.5, x[:, :SIDE]).sum()


def data_changed_between_two_saves(x: Tensor) -> Iterator[Tensor]:
    """`.data` goes around the version counter; what is saved after the change must be what is there then."""
    y = x * 2
    twin = y.data
    twin.mul_(3)
    yield (y * x.detach()).sum() + (twin * x).sum()


def a_gradient_that_is_a_view_of_what_was_unpacked(x: Tensor) -> Iterator[Tensor]:
    """The next node in backward still reads it; more than staging holds, so that memory given back is filled again."""
    returns_a_view = function(
        lambda a: (a.clone(), [a.detach().clone()]), lambda grad, read: read()[0].view(-1).view_as(grad)
    )
    y = x
    for _ in range(20):
        y = returns_a_view((y * y.detach().sin()).tanh().mul(x))
    yield y.sum()


# ---- graphs ---------------------------------------------------------------------------------------------------------


def retain_graph(saving: Saving) -> list[Tensor]:
    x = leaf()
    with saving():
        loss = (x.exp() @ x.sin()).pow(2).sum()
    loss.backward(retain_graph=True)
    loss.backward(retain_graph=True)
    return grads_after(loss, x)


def double_backward(saving: Saving) -> list[Tensor]:
    x = leaf()
    with saving():
        loss = (x.exp() @ x.t()).sin().sum()
        (first,) = torch.autograd.grad(loss, x, create_graph=True)
        penalty = first.pow(2).sum()
    penalty.backward()
    with saving():
        loss = (x.exp() @ x.t()).sin().sum()
    (first,) = torch.autograd.grad(loss, x, create_graph=True)
    first.pow(2).sum().backward()
    return [*grads(x), first.detach()]


def a_graph_dropped_without_backward(saving: Saving) -> list[Tensor]:
    x = leaf()
    for _ in range(5):
        with saving():
            loss = (x.exp() * x.sin()).sum()
        del loss
    with saving():
        loss = (x.exp() * x.sin()).sum()
    return grads_after(loss, x)


def partial_backward(saving: Saving) -> list[Tensor]:
    x, y = leaf(), leaf()
    with saving():
        one, two = (x.exp() * y).sum(), (y.sin() * x).sum()
    (first,) = torch.autograd.grad(one, x)
    del two
    return [first]


def an_exception_between_forward_and_backward(saving: Saving) -> list[Tensor]:
    x = leaf()
    for _ in range(3):
        with suppress(KeyError), saving():
            y = (x.exp() * x.sin()).matmul(x)
            raise KeyError("in forward")
        del y
    with saving():
        loss = (x.exp() * x.sin()).sum()
    return grads_after(loss, x)


def an_exception_in_backward(saving: Saving) -> list[Tensor]:
    def fail(grad: Tensor, read: Read) -> Tensor:
        raise KeyError("in backward")

    x = leaf()
    with saving():
        loss = (function(lambda a: (a.clone(), []), fail)(x.exp() * x.sin()) * x.cos()).sum()
    with suppress(KeyError):
        loss.backward()
    del loss
    x.grad = None
    with saving():
        loss = (x.exp() * x.sin()).sum()
    return grads_after(loss, x)


def eval_and_no_grad_passes(saving: Saving) -> list[Tensor]:
    model, x = nn.Sequential(nn.Linear(SIDE, SIDE), nn.Dropout(0.5), nn.Linear(SIDE, SIDE)), leaf()
    with saving():
        loss = model(x).pow(2).sum()
    model.eval()
    with torch.no_grad(), saving():
        plain = model(x).sum()
    with torch.inference_mode(), saving():
        inference = model(x.detach()).sum().item()
    with saving():
        evaluated = model(x).sum()
    loss.backward()
    evaluated.backward()
    return [*grads(x, *model.parameters()), plain, torch.tensor(inference)]


def a_shape_change_in_mid_run(saving: Saving) -> list[Tensor]:
    weight = leaf()
    out = []
    for rows in (128, 128, 64, 200, 3, 128, 1000, 128):
        x = torch.randn(rows, SIDE)
        with saving():
            loss = (x @ weight).exp().matmul(weight.t()).sin().sum()
        out += [grad.clone() for grad in grads_after(loss, weight)]
    return out


def branches(saving: Saving) -> list[Tensor]:
    """Backward does not run in the reverse order of forward; twice, so that the learned order is used."""
    x = leaf()
    for _ in range(3):
        with saving():
            a, b = x.exp(), x.sin()
            for _ in range(4):
                a, b = (b * a).tanh(), (a @ b).tanh()
            loss = a.sum() + (b * x).sum()
        loss.backward()
    return grads(x)


def a_backward_in_inference_mode(saving: Saving) -> list[Tensor]:
    """What is made there has no version counter."""
    x = leaf()
    with saving():
        loss = (x.exp() * x.sin()).matmul(x).sum()
    with torch.inference_mode():
        loss.backward()
    return [grad.clone() for grad in grads(x)]


def full_backward_hooks_and_a_graph_of_gradients(saving: Saving) -> list[Tensor]:
    model = nn.Sequential(nn.Linear(SIDE, SIDE), nn.Tanh(), nn.Linear(SIDE, SIDE))
    seen: list[Tensor] = []
    for layer in model:
        layer.register_full_backward_hook(lambda _, _grad_in, grad_out: seen.append(grad_out[0].detach().clone()))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the cycle, and of hooks whose inputs have no gradient
        with saving():
            loss = model(torch.randn(SIDE, SIDE)).pow(2).sum()
        loss.backward(create_graph=True)
    found = [one.detach().clone() for one in grads(*model.parameters())]
    model.zero_grad()  # breaks the cycle of a parameter, its gradient and the graph
    return found + seen


@of(SQUARE, (4, 4))
def attributes_of_an_activation_that_a_function_saves(x: Tensor, narrow: Tensor) -> Iterator[Tensor]:
    """One that leaves, one too small for that."""

    def gradients(grad: Tensor, read: Read) -> Tensor:
        return grad * read()[0].scale

    scaled = function(lambda x: (x * x.scale, (x,)), gradients)
    loss = torch.zeros(())
    for scale, one in ((2.0, x), (3.0, narrow)):
        hidden = one.exp()
        hidden.scale = scale
        loss = loss + scaled(hidden).sum()
    del hidden
    yield loss


def twice_through_an_instance_norm_and_a_relu_in_place(saving: Saving) -> list[Tensor]:
    net, x = nn.Sequential(nn.InstanceNorm2d(3), nn.ReLU(True)), leaf(2, 3, 32, 32)
    with saving():
        (first,) = torch.autograd.grad(net(x).pow(2).sum(), x, create_graph=True)
        (again,) = torch.autograd.grad(first.pow(2).sum(), x)
    return [first.detach(), again]


def parts_of_one_model_that_another_scores_together(saving: Saving) -> list[Tensor]:
    """The gradient of the whole goes back part by part."""
    one, other = nn.Linear(SIDE, SIDE), nn.Linear(SIDE, 1)
    parts = []
    for _ in range(3):
        with saving():
            parts.append(one(torch.randn(SIDE, SIDE)).sin())
    whole = torch.cat(parts)
    with saving():
        score = other(whole).tanh().sum()
    (slope,) = torch.autograd.grad(score, whole)
    for part, its_slope in zip(parts, slope.split(SIDE), strict=True):
        part.backward(its_slope)
    return [slope, *grads(*one.parameters())]


@of((4, 16, 128))
def strides_of_gradients_through_einsum(x: Tensor) -> Iterator[Tensor]:
    weights, seen = torch.randn(4, 16, 128), list[Tensor]()
    values = x * 2
    values.register_hook(lambda grad: seen.append(torch.tensor(grad.stride())))
    loss = torch.einsum("bhc,bhc->bc", weights, values) + torch.einsum("bhc,bhc->bc", values.sin(), values)
    yield loss.sum()
    yield from seen


# ---- other hooks, checkpoints, random numbers -----------------------------------------------------------------------


def hooks_opened_inside_ours(x: Tensor) -> Iterator[Tensor]:
    y = x.exp()
    with saved_tensors_hooks(lambda t: (t.clone(),), lambda held: held[0]):
        z = (y * x.sin()).exp()
    with save_on_cpu():
        w = (z.tanh() * y).matmul(x)
    yield (w * z).sum()


def our_hooks_inside_others(saving: Saving) -> list[Tensor]:
    x = leaf()
    with saved_tensors_hooks(lambda t: (t.clone(),), lambda held: held[0]):
        y = x.exp()
        with saving():
            z = (y * x.sin()).exp()
        loss = (z * y).sum()
    return grads_after(loss, x)


def hooks_of_the_users_within_a_checkpoint(saving: Saving) -> list[Tensor]:
    """A part of it is not made again; a forward that nobody goes back through comes before it."""
    x, weight = leaf(), leaf()

    def part(a: Tensor) -> Tensor:
        a = torch.relu(a @ weight)
        with saved_tensors_hooks(lambda tensor: tensor.detach(), lambda tensor: tensor):
            return a + (a @ weight).sin()

    for _ in range(2):
        with saving():
            loss = checkpoint(part, x * 2, use_reentrant=False).sum()
    return grads_after(loss, x, weight)


@of((2 * SIDE, SIDE), (2 * SIDE, SIDE))
def dropout_under_recompute(*leaves: Tensor) -> Iterator[Tensor]:
    loss = torch.zeros(())
    block = nn.Sequential(nn.Linear(SIDE, 4 * SIDE), nn.GELU(), nn.Dropout(0.3), nn.Linear(4 * SIDE, SIDE))
    yield from block.parameters()
    for x, reentrant in zip(leaves, (False, True), strict=True):
        y = x * 1.5
        for _ in range(3):
            y = y + checkpoint(block, y, use_reentrant=reentrant)
        loss = loss + y.pow(2).sum()
    yield loss


def autocast(saving: Saving) -> list[Tensor]:
    model, x = nn.Sequential(nn.Linear(SIDE, 4 * SIDE), nn.GELU(), nn.Linear(4 * SIDE, SIDE)), leaf(128, SIDE)
    for _ in range(2):
        with torch.autocast(x.device.type, torch.bfloat16), saving():
            loss = model(model(x)).float().pow(2).sum()
        loss.backward()
    return grads(x, *model.parameters())


@of((4, 128, SIDE))
def attention(x: Tensor) -> Iterator[Tensor]:
    layer = nn.TransformerEncoderLayer(SIDE, 4, 4 * SIDE, batch_first=True, dropout=0.1)
    yield from layer.parameters()
    yield layer(layer(x)).pow(2).sum()


def vmap(x: Tensor) -> Iterator[Tensor]:
    rows = torch.func.vmap(lambda row: (row.exp() * row).sum())(x * 2)
    yield rows.sin().sum()


def sparse_tensors(x: Tensor) -> Iterator[Tensor]:
    table = nn.Embedding(500, SIDE, sparse=True)
    yield (torch.sparse.mm(torch.eye(SIDE).to_sparse(), x) * table(torch.arange(SIDE))).sum()
    yield table.weight.grad.to_dense()  # type: ignore[union-attr]


# ---- what has no memory of its own, and what is the user's own ------------------------------------------------------


def zero_tensors_of_forward_mode(x: Tensor) -> Iterator[Tensor]:
    """Their storage claims bytes, and there is no memory behind it."""
    adds_saved = function(lambda a, b: (a * 2, [b]), lambda grad, read: grad * 2 + torch.zeros_like(grad).add(*read()))
    zero = torch._efficientzerotensor((SIDE, SIDE))
    yield adds_saved(x.sin(), zero).sum() + (x.cos() * zero).sum()


def forward_mode_inside_reverse_mode(x: Tensor, tangent: Tensor) -> Iterator[Tensor]:
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, tangent)
        along = forward_ad.unpack_dual((dual.sin() * dual).exp()).tangent
        loss = along.square().sum()
    yield loss


@of((30, SIDE), (50, SIDE), SQUARE)
def strided_nested_tensors(short: Tensor, long: Tensor, weight: Tensor) -> Iterator[Tensor]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they are a prototype
        both = torch.nested.as_nested_tensor([short, long], layout=torch.strided)
        inside = nn.functional.linear(both, weight).relu()
    yield torch.nested.to_padded_tensor(inside * inside, 0.0).sum()


def a_buffer_refilled_while_an_older_graph_is_held(saving: Saving) -> list[Tensor]:
    """Neither numpy nor ``.data`` bumps the version; the older forward's bytes must not stand for the newer one's."""
    weight, buffer = leaf(), torch.zeros(SIDE, SIDE)
    held, found = [], []
    for round_number in range(4):
        if round_number % 2:
            buffer.numpy()[:] = round_number + 1
        else:
            buffer.data.copy_(torch.full((SIDE, SIDE), round_number + 1.0))
        with saving():
            loss = (weight * buffer).exp().mean()
        if round_number % 2:
            loss.backward()
            found.append(weight.grad.clone())
            weight.grad = None
        held.append(loss)  # without a backward, every other time
    return found


def a_function_that_returns_a_saved_leaf(saving: Saving) -> list[Tensor]:
    """A gradient that is the very tensor must not become ``.grad`` as it is: the optimizer would change both."""
    a, b = nn.Parameter(torch.randn(SIDE, SIDE)), leaf()
    returns_saved = function(lambda a, b: ((a * b).sum(), [b, a]), lambda _, read: read())
    for _ in range(3):
        with saving():
            loss = returns_saved(a, b)
        loss.backward()
    for tensor in (a, b):
        tensor.grad.mul_(2)
    return [*grads(a, b), a, b]


def a_function_that_wants_the_parameter_itself(saving: Saving) -> list[Tensor]:
    """It reads an attribute of the parameter, as ZeRO-3 does, whatever else it has saved before that."""
    x, weight = leaf(), nn.Parameter(torch.randn(SIDE, SIDE))
    weight.of_the_user = True

    def look(grad: Tensor, read: Read) -> tuple[Tensor, Tensor]:
        x, _, weight = read()
        if not hasattr(weight, "of_the_user"):
            raise Wrong("a Function did not get the parameter that it saved")
        return grad @ weight.t(), x.t() @ grad

    multiplies = function(lambda x, weight, first: (x @ weight, [x, first, weight]), look)
    jagged = torch.nested.nested_tensor_from_jagged(leaf() * 2, torch.tensor([0, 30, SIDE]))
    for first in (None, (leaf() * 2).to_sparse(), jagged):
        with saving():
            loss = multiplies(x.sin(), weight, first).square().sum() + leaf().exp().sum()
        loss.backward()
    return grads(x, weight)


def two_forwards_before_one_backward(saving: Saving) -> list[Tensor]:
    """And others before and after it, in another order than their forwards."""
    x = leaf()
    losses = []
    for scale in range(4):
        with saving():
            losses.append((x * scale).sin().matmul(x.cos()).sum())
    losses[1].backward()
    (losses[0] + losses[3]).backward()
    losses[2].backward()
    return grads(x)


# ---- bytes that no version tells of ---------------------------------------------------------------------------------


def the_noise_of_rrelu(x: Tensor) -> Iterator[Tensor]:
    """Autograd packs the noise before the kernel fills it."""
    yield sum(nn.functional.rrelu(x * scale, training=True).sum() for scale in (1, -2, 3))


def overwritten_by_a_function_after_a_save(x: Tensor) -> Iterator[Tensor]:
    """Through ``.data``, as a raw kernel does. The first save is a metric's, whose backward never runs."""

    def overwrite(a: Tensor, first: int) -> tuple[Tensor, list[Tensor]]:
        a.data[first:].mul_(3)
        return a.sum(), [a]

    overwrites = function(overwrite, lambda grad, read: grad * read()[0])
    loss = torch.zeros(())
    for first in (0, SIDE - 1):
        y = x * 2
        metric = y.exp().sum() + torch.logsumexp(y, 0).sum()
        loss = loss + overwrites(y, first) + (y * y).sum()
    del metric
    yield loss


def overwritten_without_a_function_after_a_save(x: Tensor) -> Iterator[Tensor]:
    y, row = x * 2, torch.randn(SIDE, SIDE)
    metric = y.exp().sum() + (x * row).sum()
    y.data.mul_(3)
    row.data[3, 5] = 100  # a single element of a buffer
    loss = (y * y).sum() + (x * row).sum()
    del metric
    yield loss


def slices_that_are_filled_before_their_first_use(x: Tensor) -> Iterator[Tensor]:
    """As ``dist.broadcast`` into the slots of a contrastive loss, or the buffers of ring attention: no version."""
    buffer = torch.zeros(4, SIDE, SIDE)
    loss = torch.zeros(())
    for index in range(len(buffer)):
        buffer[index].data.copy_(torch.randn(SIDE, SIDE) / (index + 1))
        loss = loss + (x * buffer[index]).exp().mean() + (x @ buffer[index]).mean()
    yield loss + (x * buffer.sum(0)).mean()


def a_part_of_a_buffer_that_gradients_flow_into(saving: Saving) -> list[Tensor]:
    """The rank's own keys have a gradient, the others are received. The buffer lives until backward: see the limits."""
    x = leaf()
    with saving():
        keys = torch.zeros(2, SIDE, SIDE)
        keys[0] = x * 2
        loss = (keys[0] * x).sum() + keys[0].exp().mean()
        keys.data[1].copy_(torch.randn(SIDE, SIDE))
        loss = loss + (keys[1] * x).sum()
    return grads_after(loss, x)


def filled_after_the_function_that_saves_it(x: Tensor) -> Iterator[Tensor]:
    """As an asynchronous collective that a Function begins, and its caller waits for."""

    def begin(a: Tensor) -> tuple[Tensor, list[Tensor]]:
        out = torch.zeros_like(a)
        return out, [out]

    received = function(begin, lambda grad, read: grad * read()[0])(x)
    received.data.copy_(x.detach() * 3)
    yield (received * received).sum()


def a_function_that_saves_sparse_and_jagged_tensors(x: Tensor) -> Iterator[Tensor]:
    def gradient(grad: Tensor, read: Read) -> Tensor:
        a, coo, jagged = read()
        return grad * a * coo.to_dense() + jagged.values().sum()

    saves = function(lambda a, *others: (a * 2, [a, *others]), gradient)
    jagged = torch.nested.nested_tensor_from_jagged(torch.randn(SIDE, SIDE), torch.tensor([0, 30, SIDE]))
    yield saves(x.sin(), torch.randn(SIDE, SIDE).to_sparse(), jagged).sum()


def _saves_twice(*, writes: bool) -> Callable[..., Tensor]:
    """A Function that saves a tensor and a view of it; backward writes into the one and reads the other."""

    def gradient(grad: Tensor, read: Read) -> Tensor:
        b, transposed = read()
        if writes:
            b.data.mul_(3)
        return grad * transposed.t()

    return function(lambda a, b: (a * b, [b, b.t()]), gradient)


def two_views_that_one_function_saves(x: Tensor) -> Iterator[Tensor]:
    y, writes = leaf(), _saves_twice(writes=True)
    yield writes(x, (y * 2).detach()).sum() + writes(x, torch.randn(SIDE, SIDE)).sum()


def data_that_is_exchanged_after_the_save(x: Tensor, y: Tensor) -> Iterator[Tensor]:
    loss = torch.zeros(())
    for one, size in ((x, SIDE), (y, 8)):
        b = torch.randn(SIDE, SIDE)
        loss = loss + _saves_twice(writes=False)(one, b).sum()
        b.data = torch.zeros(size, size)
        loss = loss + one.sin().sum()
    yield loss


def a_storage_that_is_freed_and_filled_again_before_backward(saving: Saving) -> list[Tensor]:
    """As resharding does with what it gathers again."""
    x, weight = leaf(), torch.randn(SIDE, SIDE)
    whole = weight.clone()
    with saving():
        y = x @ weight
        weight.untyped_storage().resize_(0)
        loss = y.sin().sum()
    weight.untyped_storage().resize_(whole.nbytes)
    weight.data.copy_(whole)
    return grads_after(loss, x)


# The memory of what it returns may become that of ``.grad``.
returns_its_constant = function(lambda a, constant: (a * constant, [constant]), lambda _, read: read()[0])


def a_saved_tensor_that_becomes_a_gradient(saving: Saving) -> list[Tensor]:
    out = []
    for constant in (torch.randn(SIDE, SIDE), (leaf() * 2).detach(), torch.randn(8)):
        x, losses = leaf(*constant.shape), []
        for _ in range(3):
            with saving():
                losses.append(returns_its_constant(x, constant * 1).sum() + returns_its_constant(x, constant).sum())
        for loss in losses:
            loss.backward(retain_graph=True)
            x.grad.mul_(0.5)  # type: ignore[union-attr]
        losses.pop().backward()
        x.grad.data.mul_(0.5)  # type: ignore[union-attr]
        losses.pop().backward()
        out += [*grads(x), constant]
        x.grad = None
    return out


def a_conjugate_that_a_function_saves() -> Iterator[Tensor]:
    """It is an operand of what is rematerialized, and its mark is not in its bytes."""
    x, w = (torch.randn(SIDE, SIDE, dtype=torch.complex64, requires_grad=True) for _ in range(2))
    yield from (x, w)
    absolute = function(lambda a: (a.abs(), [a]), lambda grad, read: grad * read()[0].resolve_conj())
    conjugate = (x * 2).conj()
    product = w * conjugate
    loss = (product * product).abs().sum() + absolute(conjugate).sum()
    del product
    yield loss


def a_mapped_function_whose_output_is_filled_afterwards(x: Tensor) -> Iterator[Tensor]:
    class SavesItsOutput(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(a: Tensor) -> Tensor:
            return a * 0

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
            ctx.save_for_backward(output)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad * ctx.saved_tensors[0]

    made = torch.vmap(SavesItsOutput.apply)(x * 2)
    made.data.copy_(x.detach() * 3)
    yield (made * made).sum()


def operands_that_backward_overwrites(x: Tensor, y: Tensor) -> Iterator[Tensor]:
    """What others save can be rematerialized from what the Function has saved, large or small."""

    def gradients(grad: Tensor, read: Read) -> tuple[Tensor, Tensor]:
        """Write the gradients into what was saved, as Liger's SwiGLU does."""
        a, b = read()
        sigmoid = torch.sigmoid(a)
        silu = sigmoid * a
        of_a = grad * b * (silu * (1 - sigmoid) + sigmoid)
        b.data.copy_(grad * silu)
        a.data.copy_(of_a)
        return a, b

    overwrites = function(lambda a, b: (nn.functional.silu(a) * b, [a, b]), gradients)
    a, b, scale = x * 2, y.cos(), y.mean(1, keepdim=True) * 2
    saves_them = a.sin().sum() + b.sin().sum() + scale.sin().sum()  # backward does not come there
    total, scaled = a + b, x.detach() * scale
    loss = (total * total * total).sum() + (scaled * scaled * scaled).sum()
    loss = loss + overwrites(a, b).pow(2).sum() + overwrites(scale, scale.exp()).sum()
    del a, b, scale, total, scaled
    yield loss  # its backward comes to the Functions first
    del saves_them


def a_saved_tensor_that_becomes_a_gradient_after_another_read(saving: Saving) -> list[Tensor]:
    """The gradient waits for one that does not come, and others want the bytes that it has."""
    out = []
    returns_nothing_for = function(lambda a, b: (b * 2, [b]), lambda grad, read: (None, grad * read()[0]))
    for constant in (torch.randn(SIDE, SIDE), torch.randn(8)):
        x, y, z = leaf(*constant.shape), leaf(*constant.shape), leaf(*constant.shape)
        with saving():
            loss = returns_nothing_for(x, y * 2).sum() + returns_its_constant(x, constant).sum()
            later = (z * constant).sum()
        loss.backward()
        x.grad.data.mul_(0.5)  # type: ignore[union-attr]
        later.backward()
        out += [*grads(x, y, z), constant]
    return out


# Returns the gradient that it gets, as DeepSpeed's Functions around modules do.
passes_on = function(lambda a: (a.clone(), []), lambda grad, _: grad)


def a_saved_tensor_with_a_graph_that_becomes_a_gradient(saving: Saving) -> list[Tensor]:
    """Without hooks whoever else has saved it refers to the very tensor, so that a copy of it becomes ``.grad``.

    At once; or others unpack what they have saved before the gradient has come to its leaf.
    """
    out = []
    for shape, passes in itertools.product(((SIDE, SIDE), (8,)), (False, True)):
        x, y, z, other = leaf(*shape), leaf(*shape), leaf(*shape), leaf(*shape)
        with saving():
            made = y * 2
            later = (z * made).sum()
            passed, between = passes_on(x) if passes else x, (other * other.detach()).sum()
            loss = between + returns_its_constant(passed, made).sum()
            del made, passed, between
        loss.backward()
        x.grad.data.mul_(0.5)  # type: ignore[union-attr]
        out += [*grads(x, other), *torch.autograd.grad(later, z)]
    return out


def updates_its_state(*, writes_past_version: bool) -> Callable[..., Tensor]:
    """Return a Function whose backward updates a running mean of the user's, as a quantizer of gradients may."""

    def gradient(grad: Tensor, read: Read) -> Tensor:
        a, mean = read()
        of_a = grad * (a + mean)
        (mean.data if writes_past_version else mean).mul_(0.9).add_(a, alpha=0.1)
        return of_a

    return function(lambda a, mean: (a * a, [a, mean]), gradient)


def a_state_that_backward_updates(saving: Saving) -> list[Tensor]:
    x, out = leaf(), []
    for writes_past_version in (False, True):
        updates = updates_its_state(writes_past_version=writes_past_version)
        for shape in ((SIDE, SIDE), (1, SIDE)):
            mean = torch.zeros(shape)
            for _ in range(3):
                with saving():
                    loss = updates(x.mean(0, keepdim=True) if shape[0] == 1 else x * 2, mean).sum()
                loss.backward()
            out.append(mean)
    return [*grads(x), *out]


def a_state_that_was_an_operand(saving: Saving) -> list[Tensor]:
    """Another tensor is made of it again, before backward comes to the Function that updates it."""
    x, out = leaf(), []
    updates = updates_its_state(writes_past_version=True)
    for shape in ((SIDE, SIDE), (1, SIDE)):
        mean = torch.randn(shape)
        for _ in range(3):
            with saving():
                updating = updates(x.mean(0, keepdim=True) if shape[0] == 1 else x * 2, mean)
                doubled = x * 2
                product = doubled * mean
                loss = updating.sum() + (doubled * doubled).sum() + (product * product).sum()
            loss.backward()
        out.append(mean)
    return [*grads(x), *out]


def a_view_of_what_a_function_then_changes(x: Tensor) -> Iterator[Tensor]:
    """Autograd does not tell the node of that view."""

    def change(a: Tensor, first: int) -> tuple[Tensor, list[Tensor]]:
        view = a[first:]
        return a.mul_(0.9), [view]

    changes = function(change, lambda grad, _: grad * 0.9)
    yield changes(x * 2, 1).sin().sum() + changes(x * 3, SIDE - 1).cos().sum()


class KnowsFewFunctions(Tensor):
    """Raises for what it does not know. Autograd asks it nothing when it saves it."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise TypeError(f"{func} of a tensor that knows no functions")


def a_subclass_that_knows_few_functions(x: Tensor) -> Iterator[Tensor]:
    other = torch.randn(SIDE, SIDE).as_subclass(KnowsFewFunctions)
    saves = function(lambda a, _: (a * 2, [a, other]), lambda grad, read: grad * read()[0])
    yield saves(x.sin(), 0).sum()


class ReadsByTheOldName(torch.autograd.Function):
    """``ctx.saved_variables`` is deprecated, and still there."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, constant: Tensor) -> Tensor:
        ctx.save_for_backward(constant)
        return a * constant

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            return ctx.saved_variables[0], None


def a_gradient_that_was_read_by_the_old_name(saving: Saving) -> list[Tensor]:
    x, weight = leaf(), nn.Parameter(torch.randn(SIDE, SIDE))
    with saving():
        loss = ReadsByTheOldName.apply(x, weight).sum() + leaf().exp().sum()
    loss.backward()
    x.grad.mul_(2)  # type: ignore[union-attr]
    return [*grads(x), weight]


@of(SQUARE, (SIDE,))
def a_sparse_tensor_of_an_operand(x: Tensor, y: Tensor) -> Iterator[Tensor]:
    saves = function(lambda a, sparse: (a * 2, [sparse]), lambda grad, read: grad * read()[0].to_dense())
    values = y * 2
    scaled = x * values
    sparse = torch.sparse_coo_tensor(torch.arange(SIDE)[None], values.detach(), (SIDE,))
    yield (scaled * scaled).sum() + saves(x, sparse).sum()


class CopiesResults(TorchDispatchMode):
    """Returns copies of what operations return, as those do that round them. Raises for what backward never calls."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name in ("aten::empty", "aten::set_", "aten::as_strided"):
            raise TypeError(f"{func} is nothing that a model does")
        return tree_map_only(Tensor, Tensor.clone, func(*args, **(kwargs or {})))


def a_mode_around_a_part_of_forward(x: Tensor, y: Tensor) -> Iterator[Tensor]:
    """The mode is on while tensors leave that were saved before."""
    made = x.sin()
    with CopiesResults():
        loss = (made.exp() * y).sum()
    yield loss


def a_mode_around_backward(saving: Saving) -> list[Tensor]:
    x, y = leaf(), leaf()
    saves = function(lambda a: (a * 2, [a]), lambda grad, read: grad * read()[0].cos())
    with saving():
        loss = (saves(x.sin() * y.exp()).tanh() * y).sum()
    with CopiesResults():
        loss.backward()
    return grads(x, y)


def overwritten_between_a_save_and_a_checkpoint(x: Tensor, weight: Tensor) -> Iterator[Tensor]:
    """A checkpoint saves its arguments without a node of its own."""
    y = x * 2
    metric = y.sin()
    y.data.mul_(3)
    loss = checkpoint(lambda a: (a @ weight).sin(), y, use_reentrant=False).sum()
    del metric
    yield loss


SCENARIOS: list[Scenario] = [
    one
    for one in list(globals().values())
    if isgeneratorfunction(one)
    or getattr(one, "__annotations__", None) == {"saving": "Saving", "return": "list[Tensor]"}
]
# All that they save has no graph, or no storage of its own.
MOVE_NOTHING = (
    sparse_tensors, stride_0_broadcasts, empty_tensors, data_changed_between_two_saves, zero_tensors_of_forward_mode,
    strided_nested_tensors, a_function_that_returns_a_saved_leaf, two_views_that_one_function_saves,
    a_mode_around_a_part_of_forward,
)  # fmt: skip


# ---- mutation after the save, behind the yield or in backward, must raise, as autograd's own check does -------------


def mutated_saved_input(x: Tensor) -> Iterator[Tensor]:
    y = x * 2
    yield (y * y).sum()
    y.add_(1)


def mutated_through_a_view(x: Tensor) -> Iterator[Tensor]:
    y = x * 2
    view, loss = y[0], (y * y).sum()
    del y
    yield loss
    view.add_(1)


def mutated_output(x: Tensor) -> Iterator[Tensor]:
    y = x.exp()
    yield y.sum()
    with torch.no_grad():
        y.add_(1)


def mutated_in_backward(x: Tensor) -> Iterator[Tensor]:
    """By a Function that reuses its saved buffer."""
    h = x * 1.5
    doubles = function(lambda a: (a.clone(), [a]), lambda grad, read: grad * read()[0].mul_(2))
    yield h.sin().sum() + doubles(h).sum()


def mutated_between_two_reads(x: Tensor) -> Iterator[Tensor]:
    def gradient(grad: Tensor, read: Read) -> Tensor:
        read()[0].mul_(2)
        return grad * read()[0]

    yield function(lambda a: (a.clone(), [a]), gradient)(x * 1.5).sum()


@of((4,))
def mutated_small(x: Tensor) -> Iterator[Tensor]:
    y = x * 2
    yield (y * y).sum()
    y.add_(1)


def mutated_parameter(x: Tensor) -> Iterator[Tensor]:
    layer = nn.Linear(SIDE, SIDE)
    yield layer(layer(x)).sum()
    with torch.no_grad():
        layer.weight.add_(1)


MUTATIONS: list[Scenario] = [one for name, one in list(globals().items()) if name.startswith("mutated_")]


# ---- running them ---------------------------------------------------------------------------------------------------

# Decorators that run a test over every hazard.
scenarios = pytest.mark.parametrize(
    "scenario",
    [
        pytest.param(one, marks=[pytest.mark.moves_nothing] if one in MOVE_NOTHING else [], id=one.__name__)
        for one in SCENARIOS
    ],
)
mutations = pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda one: one.__name__)


def cache_over(store: NvmeStore | None, *, wait: bool = False) -> TensorCache:
    return TensorCache([] if store is None else [store], "cpu", MIN_BYTES, wait_for_staging=wait)


def on(device: str | None) -> AbstractContextManager[Any]:
    """Where tensors are made that name no device; None leaves it as it is."""
    return nullcontext() if device is None else torch.device(device)


def run(scenario: Scenario, saving: Saving, device: str | None = None) -> list[Tensor]:
    with on(device):
        torch.manual_seed(7)
        found = trained(scenario, saving) if isgeneratorfunction(scenario) else scenario(saving)
        return [tensor.detach().clone() for tensor in found]


def check(scenario: Scenario, cache: TensorCache, device: str | None = None) -> None:
    """Same bits with and without the cache, and nothing left behind."""
    expected = run(scenario, nullcontext, device)
    compare(expected, run(scenario, cache.saving, device), scenario.__name__)
    check_nothing_is_left(cache, scenario.__name__)


def check_made_again(scenario: Scenario, cache: TensorCache, device: str | None = None) -> None:
    """Same bits as often as it runs, over a cache with sites: outputs are compared, compared again, and left out."""
    expected = run(scenario, nullcontext, device)
    for number in range(3):
        compare(expected, run(scenario, cache.saving, device), f"{scenario.__name__}, run {number}")
        cache.end_micro_step()  # reads what is left of the answers
        cache.rematerialization.sites.step += 1
        check_nothing_is_left(cache, scenario.__name__)


def compare(expected: list[Tensor], found: list[Tensor], what: str) -> None:
    """Raise where a run through the cache has other tensors, by a bit, than the run without it."""
    if not expected or len(expected) != len(found):
        raise Wrong(f"{what}: {len(found)} tensors instead of {len(expected)}")
    for index, (one, other) in enumerate(zip(expected, found, strict=True)):
        same = one.dtype == other.dtype and one.shape == other.shape
        if not same or not torch.equal(_bits(one), _bits(other)):
            raise Wrong(f"{what}: tensor {index} differs from the run without the cache")


def check_mutation(mutation: Scenario, cache: TensorCache, device: str | None = None) -> None:
    """Raises as autograd does, and leaves nothing behind."""
    for saving, error in ((nullcontext, RuntimeError), (cache.saving, ActivationModifiedError)):
        with on(device):
            torch.manual_seed(7)
            running = iter(mutation(*leaves_of(mutation)))
            with saving():
                loss = next(running)
            next(running, None)
        try:
            loss.backward()
        except error as raised:
            if "modified by an inplace operation" not in str(raised):
                raise
        else:
            raise Wrong(f"{mutation.__name__}: a mutation after the save went unseen")
        del running, loss
    check_nothing_is_left(cache, mutation.__name__)


def check_nothing_is_left(cache: TensorCache, name: str) -> None:
    left = after_a_while(lambda: held(cache), COPIES_END_S)
    if left:
        raise Wrong(f"{name}: {left} are left")


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().flatten().view(torch.uint8) if tensor.numel() else tensor


@contextmanager
def nvme_cache(directory: Path, accelerator: Accelerator | None = None) -> Iterator[TensorCache]:
    """A cache over a store in ``directory``."""
    accelerator, backend = accelerator or Accelerator(), PosixBackend()
    ring = StagingRing(accelerator, backend, 4 << 20)
    store = NvmeStore([SwapFile(directory, 256 << 20)], backend, ring, Lanes(2, 2), "sampled")
    try:
        asynchronous = None if accelerator.is_synchronous else accelerator
        yield TensorCache([store], accelerator.device(), MIN_BYTES, wait_for_staging=True, accelerator=asynchronous)
    finally:
        store.close()


def main(accelerator: Accelerator, device: str | None = None) -> int:
    with tempfile.TemporaryDirectory(dir=Path(__file__).parents[2]) as directory:
        for scenario in SCENARIOS:
            gc.freeze()  # each check collects garbage: not among all that was imported, a fifth of a second each time
            with nvme_cache(Path(directory), accelerator) as cache:
                check(scenario, cache, device)
        for mutation in MUTATIONS:
            with nvme_cache(Path(directory), accelerator) as cache:
                check_mutation(mutation, cache, device)
    sys.stdout.write(f"{len(SCENARIOS)} scenarios and {len(MUTATIONS)} mutations are exact (debug is {__debug__})\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(Accelerator()))
