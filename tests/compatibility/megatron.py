"""A stand-in for Megatron-LM: what its layers do to autograd, written anew, small, and for the CPU.

Linear layers split over the ranks of a tensor-parallel group, by Functions that save views, gather their input again in
backward and add gradients of weights to a ``main_grad``; a sequence split over the same ranks; dropout by random states
with names; a checkpoint that sets those states; outputs whose memory is given up as soon as the next stage has them.
Tensors are (length, batch, width).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from programs_plain import outcome
from torch import Tensor, distributed, nn
from torch.autograd import Function

WIDTH, HEADS, LENGTH, WORDS, LAYERS, BATCH = 64, 4, 32, 128, 3, 2
DROPOUT = 0.1


class RandomStates:
    """States of the random generator with names: dropout inside of split layers differs from rank to rank."""

    def __init__(self) -> None:
        self._states: dict[str, Tensor] = {}

    def add(self, name: str, seed: int) -> None:
        before = torch.get_rng_state()
        torch.manual_seed(seed)
        self._states[name] = torch.get_rng_state()
        torch.set_rng_state(before)

    @contextmanager
    def fork(self, name: str = "tensor parallel") -> Iterator[None]:
        """Draw from this state inside; the usual one is as before afterwards."""
        before = torch.get_rng_state()
        torch.set_rng_state(self._states[name])
        try:
            yield
        finally:
            self._states[name] = torch.get_rng_state()
            torch.set_rng_state(before)

    def all(self) -> tuple[Tensor, dict[str, Tensor]]:
        """The usual state, and those with names."""
        return torch.get_rng_state(), dict(self._states)

    def restore(self, states: tuple[Tensor, dict[str, Tensor]]) -> None:
        torch.set_rng_state(states[0])
        self._states = dict(states[1])


@dataclass(eq=False)
class Parallel:
    """The group that shares each layer, and what its ranks keep for all layers.

    Attributes:
        splits_sequence: whether each rank has a part of the sequence outside of the split layers.
        gathered: memory for gathered inputs, which every layer fills anew.
    """

    splits_sequence: bool
    states: RandomStates = field(default_factory=RandomStates)
    gathered: dict[torch.Size, Tensor] = field(default_factory=dict)
    rank: int = field(default_factory=distributed.get_rank)
    size: int = field(default_factory=distributed.get_world_size)

    def gather(self, part: Tensor, *, into_shared_memory: bool = False) -> Tensor:
        """All parts of a sequence."""
        parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(self.size)]
        distributed.all_gather(parts, part.contiguous())
        whole = torch.cat(parts)
        if not into_shared_memory:
            return whole
        memory = self.gathered.setdefault(whole.shape, torch.empty_like(whole))
        return memory.copy_(whole)

    def sum(self, x: Tensor) -> Tensor:
        x = x.contiguous().clone()
        distributed.all_reduce(x)
        return x

    def sum_part(self, x: Tensor) -> Tensor:
        """The own part of the sequence, summed over the ranks."""
        return self.own(self.sum(x))

    def own(self, x: Tensor) -> Tensor:
        return x.chunk(self.size)[self.rank].contiguous()

    def dropout(self, x: Tensor, *, is_split: bool) -> Tensor:
        with self.states.fork() if is_split else nullcontext():
            return nn.functional.dropout(x, DROPOUT)


# ---- Functions ------------------------------------------------------------------------------------------------------


class FromRegion(Function):
    """The sum over the ranks of what a layer that is split by rows gives; of it the own part, where they are split."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, parallel: Parallel) -> Tensor:
        ctx.parallel = parallel
        return parallel.sum_part(x) if parallel.splits_sequence else parallel.sum(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return (ctx.parallel.gather(grad) if ctx.parallel.splits_sequence else grad), None


class SplitLinear(Function):
    """A linear layer whose weight is split over the ranks; its gradient goes into ``main_grad``.

    Of a gathered input only the own part is saved, as a view; it is gathered again in backward.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, parallel: Parallel, gathers: bool) -> Tensor:
        ctx.save_for_backward(x.view(-1, x.shape[-1]), weight)
        ctx.parallel, ctx.gathers, ctx.shape, ctx.has_bias = parallel, gathers, x.shape, bias is not None
        whole = parallel.gather(x, into_shared_memory=True) if gathers and parallel.splits_sequence else x
        out = torch.matmul(whole, weight.t())
        return out if bias is None else out + bias

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        whole = x.view(ctx.shape)
        if ctx.gathers and ctx.parallel.splits_sequence:
            whole = ctx.parallel.gather(whole, into_shared_memory=True)
        of_input = grad.matmul(weight)
        rows = grad.reshape(-1, grad.shape[-1])
        weight.main_grad.addmm_(rows.t(), whole.reshape(-1, whole.shape[-1]))
        weight.is_added_to_main_grad = True
        if ctx.gathers:
            of_input = ctx.parallel.sum_part(of_input) if ctx.parallel.splits_sequence else ctx.parallel.sum(of_input)
        return of_input, torch.zeros_like(weight), rows.sum(0) if ctx.has_bias else None, None, None


class CausalSoftmax(Function):
    """Saves its output; changes the gradient in place."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, scale: float) -> Tensor:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        chances = (scores * scale).masked_fill_(later, -math.inf).softmax(-1)
        ctx.save_for_backward(chances)
        ctx.scale = scale
        return chances

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (chances,) = ctx.saved_tensors
        inner = (grad * chances).sum(-1, keepdim=True)
        return (grad - inner).mul_(chances).mul_(ctx.scale), None


class GeluOfBiased(Function):
    """GELU of the sum of an input and a bias, which is made again in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, bias)
        return nn.functional.gelu(x + bias, approximate="tanh")

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, bias = ctx.saved_tensors
        of_both = torch.ops.aten.gelu_backward(grad, x + bias, approximate="tanh")
        return of_both, of_both.flatten(0, 1).sum(0)


class SplitCrossEntropy(Function):
    """The loss of scores that are split over the words; backward makes the gradient of the saved softmax, in place."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, words: Tensor, parallel: Parallel) -> Tensor:
        most = scores.max(-1).values
        distributed.all_reduce(most, distributed.ReduceOp.MAX)
        scores = scores - most.unsqueeze(-1)
        count = scores.shape[-1]
        masked = words - parallel.rank * count
        is_elsewhere = (masked < 0) | (masked >= count)
        masked[is_elsewhere] = 0
        chosen = scores.gather(-1, masked.unsqueeze(-1)).squeeze(-1)
        chosen[is_elsewhere] = 0.0
        exponents = scores.exp_()
        total = parallel.sum(exponents.sum(-1))
        chosen = parallel.sum(chosen)
        exponents.div_(total.unsqueeze(-1))
        ctx.save_for_backward(exponents, is_elsewhere, masked.view(-1))
        return total.log() - chosen

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        softmax, is_elsewhere, masked = ctx.saved_tensors
        rows = softmax.view(-1, softmax.shape[-1])
        rows[torch.arange(rows.shape[0]), masked] -= 1.0 - is_elsewhere.view(-1).float()
        return softmax.mul_(grad.unsqueeze(-1)), None, None


class Viewless(Function):
    """The same bytes in a tensor that is no view: its base would keep more memory, and could not be given up."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return viewless(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def viewless(x: Tensor) -> Tensor:
    out = torch.empty((1,), dtype=x.dtype, device=x.device)
    out.data = x.data
    return out


class Checkpoint(Function):
    """Runs a function again in backward, from the same random states.

    Where ``parallel`` is to share the input, each rank keeps a part of it: the memory of the input itself is given up.
    """

    @staticmethod
    def forward(ctx: Any, function: Callable[[Tensor], Tensor], parallel: Parallel, shares: bool, x: Tensor) -> Tensor:
        ctx.function, ctx.parallel, ctx.shares, ctx.shape = function, parallel, shares, x.shape
        ctx.states = parallel.states.all()
        with torch.no_grad():
            out = function(x)
        if shares:
            x.data = parallel.own(x.data.view(-1)).clone()
        ctx.save_for_backward(x)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        if ctx.shares:
            x.data = ctx.parallel.gather(x.data).view(ctx.shape)
        x = x.detach().requires_grad_()
        now = ctx.parallel.states.all()
        ctx.parallel.states.restore(ctx.states)
        with torch.enable_grad():
            out = ctx.function(x)
        ctx.parallel.states.restore(now)
        torch.autograd.backward(out, grad)
        return None, None, None, x.grad


# ---- layers ---------------------------------------------------------------------------------------------------------


def split_weight(rows: int, columns: int, parallel: Parallel) -> nn.Parameter:
    """A part of a weight; of ranks that draw from states of their own."""
    with parallel.states.fork():
        weight = nn.Parameter(torch.randn(rows, columns) / math.sqrt(WIDTH))
    weight.main_grad = torch.zeros_like(weight)
    return weight


class ColumnLinear(nn.Module):
    """Split by its outputs."""

    def __init__(self, out: int, parallel: Parallel, *, adds_bias: bool = True) -> None:
        super().__init__()
        self.parallel, self.adds_bias = parallel, adds_bias
        self.weight = split_weight(out // parallel.size, WIDTH, parallel)
        self.bias = nn.Parameter(torch.zeros(out // parallel.size))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = SplitLinear.apply(x, self.weight, self.bias if self.adds_bias else None, self.parallel, True)
        return out


class RowLinear(nn.Module):
    """Split by its inputs."""

    def __init__(self, width: int, parallel: Parallel) -> None:
        super().__init__()
        self.parallel = parallel
        self.weight = split_weight(WIDTH, width // parallel.size, parallel)
        self.bias = nn.Parameter(torch.zeros(WIDTH))
        self.bias.is_of_split_sequence = parallel.splits_sequence

    def forward(self, x: Tensor) -> Tensor:
        out = FromRegion.apply(SplitLinear.apply(x, self.weight, None, self.parallel, False), self.parallel)
        return out + self.bias


class Norm(nn.LayerNorm):
    def __init__(self, parallel: Parallel) -> None:
        super().__init__(WIDTH)
        self.weight.is_of_split_sequence = self.bias.is_of_split_sequence = parallel.splits_sequence


class Block(nn.Module):
    def __init__(self, parallel: Parallel) -> None:
        super().__init__()
        self.parallel = parallel
        self.norm1, self.norm2 = Norm(parallel), Norm(parallel)
        self.qkv, self.out = ColumnLinear(3 * WIDTH, parallel), RowLinear(WIDTH, parallel)
        self.up, self.down = ColumnLinear(4 * WIDTH, parallel, adds_bias=False), RowLinear(4 * WIDTH, parallel)

    def attend(self, qkv: Tensor) -> Tensor:
        length, batch, _ = qkv.shape
        heads = HEADS // self.parallel.size
        parts = qkv.view(length, batch * heads, 3 * WIDTH // HEADS).split(WIDTH // HEADS, dim=-1)
        query, key, value = [part.transpose(0, 1) for part in parts]
        scores = torch.bmm(query, key.transpose(1, 2))
        chances = CausalSoftmax.apply(scores, (WIDTH // HEADS) ** -0.5)
        context = torch.bmm(self.parallel.dropout(chances, is_split=True), value)
        return context.transpose(0, 1).contiguous().view(length, batch, -1)

    def forward(self, x: Tensor) -> Tensor:
        is_split = self.parallel.splits_sequence
        x = x + self.parallel.dropout(self.out(self.attend(self.qkv(self.norm1(x)))), is_split=is_split)
        inner = GeluOfBiased.apply(self.up(self.norm2(x)), self.up.bias)
        return Viewless.apply(x + self.parallel.dropout(self.down(inner), is_split=is_split))


class Net(nn.Module):
    """A decoder over all ranks.

    Args:
        checkpoint: "" for none, "full" for each block, or "shared": each rank keeps a part of each input.
        is_first_stage: returns the last block's output instead of the loss.
    """

    def __init__(self, parallel: Parallel, checkpoint: str = "", *, is_first_stage: bool = False) -> None:
        super().__init__()
        self.parallel, self.checkpoint, self.is_first_stage = parallel, checkpoint, is_first_stage
        self.words = split_weight(WORDS // parallel.size, WIDTH, parallel)
        self.blocks = nn.ModuleList(Block(parallel) for _ in range(LAYERS))
        self.norm = Norm(parallel)

    def embed(self, text: Tensor) -> Tensor:
        count = WORDS // self.parallel.size
        own = text - self.parallel.rank * count
        is_elsewhere = (own < 0) | (own >= count)
        x = nn.functional.embedding(own.masked_fill(is_elsewhere, 0), self.words)
        x[is_elsewhere] = 0.0
        return FromRegion.apply(x, self.parallel)

    def forward(self, text: Tensor) -> Tensor:
        x = self.parallel.dropout(self.embed(text), is_split=self.parallel.splits_sequence)
        for block in self.blocks:
            x = Checkpoint.apply(block, self.parallel, self.checkpoint == "shared", x) if self.checkpoint else block(x)
        if self.is_first_stage:
            return Viewless.apply(x)
        scores = SplitLinear.apply(self.norm(x), self.words, None, self.parallel, True)
        return SplitCrossEntropy.apply(scores[:-1].contiguous(), text[1:], self.parallel).mean()


class FromMainGrads(torch.optim.AdamW):
    """Adds what is in ``main_grad``, and sums what belongs to a split sequence over the ranks."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            if getattr(parameter, "is_added_to_main_grad", False):
                # The weight of the embedding has a gradient of the usual kind, too.
                parameter.grad = parameter.main_grad.clone() if parameter.grad is None else (
                    parameter.grad + parameter.main_grad
                )  # fmt: skip
                parameter.main_grad.zero_()
                parameter.is_added_to_main_grad = False
            elif getattr(parameter, "is_of_split_sequence", False):
                distributed.all_reduce(parameter.grad)
        super().step()


# ---- training -------------------------------------------------------------------------------------------------------


class Groups:
    """The groups that DeepSpeed asks for: all ranks share the model, and each has all of the data."""

    def __init__(self) -> None:
        self._alone = [distributed.new_group([rank]) for rank in range(distributed.get_world_size())]

    def get_model_parallel_rank(self) -> int:
        return distributed.get_rank()

    def get_model_parallel_world_size(self) -> int:
        return distributed.get_world_size()

    def get_model_parallel_group(self) -> Any:
        return distributed.group.WORLD

    def get_data_parallel_rank(self) -> int:
        return 0

    def get_data_parallel_world_size(self) -> int:
        return 1

    def get_data_parallel_group(self) -> Any:
        return self._alone[distributed.get_rank()]


def started(config: dict[str, Any], *, splits_sequence: bool, **more: Any) -> Any:
    """An engine for a new model."""
    import deepspeed

    deepspeed.init_distributed()
    torch.manual_seed(0)
    parallel = Parallel(splits_sequence)
    parallel.states.add("tensor parallel", 1 + parallel.rank)
    model = Net(parallel, **more)
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=FromMainGrads(model.parameters(), lr=1e-3), config=config, mpu=Groups()
    )
    torch.manual_seed(100)  # the same on each rank: what they share must get the same dropout
    return engine


def texts() -> Iterator[Tensor]:
    chance = torch.Generator().manual_seed(1)
    while True:
        yield torch.randint(0, WORDS, (LENGTH, BATCH), generator=chance)


def trained(
    config: dict[str, Any], splits_sequence: bool = False, checkpoint: str = "", steps: int = 5
) -> dict[str, Any]:
    """The usual loop."""
    engine, losses = started(config, splits_sequence=splits_sequence, checkpoint=checkpoint), []
    batches = texts()
    for _ in range(steps * engine.gradient_accumulation_steps()):
        loss = engine(next(batches))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return ended(engine, losses)


class SentOn(Function):
    """Stands for the loss of the next stage: backward begins with the gradient that it sends back.

    The output's memory is given up by then, and with it its shape; autograd goes by the shape that it noted.
    """

    @staticmethod
    def forward(ctx: Any, out: Tensor, sent: Tensor) -> Tensor:
        ctx.sent = sent
        return out.new_zeros(())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.sent.grad * grad, None


def trained_as_first_stage(
    config: dict[str, Any], splits_sequence: bool = False, checkpoint: str = "", steps: int = 5, in_flight: int = 2
) -> dict[str, Any]:
    """Train as the first of two stages of a pipeline: forwards run ahead, and free what they returned.

    The micro-batches of a step come back in the order in which they went.
    """
    engine = started(config, splits_sequence=splits_sequence, checkpoint=checkpoint, is_first_stage=True)
    batches, losses = texts(), []
    for _ in range(steps):
        under_way: list[tuple[Tensor, Tensor]] = []
        for micro_batch in range(engine.gradient_accumulation_steps() + in_flight):
            if micro_batch < engine.gradient_accumulation_steps():
                out = engine(next(batches))
                sent = out.detach().clone().requires_grad_()
                out.data = torch.empty((1,), dtype=out.dtype)
                under_way.append((out, sent))
            if micro_batch >= in_flight:
                out, sent = under_way.pop(0)
                loss = sent.sin().square().mean()
                loss.backward()
                losses.append(loss.item())
                engine.backward(SentOn.apply(out, sent))
                engine.step()
    return ended(engine, losses)


def ended(engine: Any, losses: list[float]) -> dict[str, Any]:
    result = outcome(engine, losses)
    engine.destroy()
    return result
