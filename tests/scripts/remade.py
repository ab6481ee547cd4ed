"""Models on which rematerialization may go wrong late, under DeepSpeed's engine: without the block and with it.

    python remade.py DIR STAGE CASE[:PLACEMENT] [CASE[:PLACEMENT] ...]

For each case, prints whether all losses, gradients and parameters of all steps have the same
bits, or with what error the run with
the block ended. Wants the variables that the launcher sets.
"""

import gc
import hashlib
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import deepspeed
import torch
from torch import Tensor, nn
from torch.nn.functional import silu

ROWS, WIDTH = 23, 33
BUCKET = 1 << 20  # elements; DeepSpeed's default reserves gigabytes
STEPS = 10
# What is checked in turn comes again within so many steps.
ALL_CHECKED = 64
LATE = 3


class Gated(nn.Module):
    """A gate as of many models: what is made again without any doubt."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def made(self, y: Tensor) -> Tensor:
        return silu(self.gate(y)) * self.up(y)

    def forward(self, y: Tensor) -> Tensor:
        return y + self.down(self.made(y))


class Plain(nn.Module):
    """A gate, what the case adds, and a loss.

    Attributes:
        padding: of the batch, where there is any.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.gated = Gated()
        self.padding: Tensor | None = None

    def inside(self, y: Tensor) -> Tensor:
        return y

    def forward(self, x: Tensor) -> Any:
        y = self.inside(self.gated(self.first(x)))
        return self.last(y).float().pow(2).mean()


def normed(h: Tensor) -> Tensor:
    """Return Llama's norm: in fp32, whatever comes."""
    wide = h.float()
    return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)


class AddsInPlace(Plain):
    """A sum in place whose second operand has a wider dtype, and is zero at first."""

    def __init__(self) -> None:
        super().__init__()
        self.other, self.bias = Gated(), nn.Parameter(torch.zeros(WIDTH))

    def inside(self, y: Tensor) -> Tensor:
        h = self.other.made(y)
        h += self.bias
        return self.other.down(normed(h))


class MultipliesInPlace(Plain):
    """A product in place, likewise; one at first."""

    def __init__(self) -> None:
        super().__init__()
        self.other, self.scale = Gated(), nn.Parameter(torch.ones(WIDTH))

    def inside(self, y: Tensor) -> Tensor:
        h = self.other.made(y)
        h.mul_(self.scale)
        return self.other.down(normed(h))


def sigmoid(h: Tensor) -> Tensor:
    return torch.sigmoid(h)


def narrow_rsqrt(h: Tensor) -> Tensor:
    return torch.rsqrt(h.bfloat16() + 1.0).clamp(max=2.0).float()


class Formats(Plain):
    """An op over another order of the elements than that of its operand.

    A CPU computes the last elements, behind those that fill its vectors, in another way; which elements those are
    follows from the order. Few enough that they may be equal in a first step: 29, 19, 15, 11 and 1. Each branch has
    another shape, hence another site.
    """

    branches = ((11, sigmoid), (5, sigmoid), (9, sigmoid), (13, sigmoid), (7, narrow_rsqrt))

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(3 * torch.randn(channels, WIDTH) for channels, _ in self.branches)

    def reordered(self, h: Tensor) -> Tensor:
        raise NotImplementedError

    def inside(self, y: Tensor) -> Tensor:
        for weight, (_, op) in zip(self.weights, self.branches, strict=True):
            h = (y[:, None] * weight).unflatten(2, (3, -1))  # batch, channels, 3, 11
            made = op(self.reordered(silu(h) * h))
            y = y + self.back(made * made).mean(1).flatten(1) * 0.1
        return y

    def back(self, h: Tensor) -> Tensor:
        return h


class ChannelsLast(Formats):
    def reordered(self, h: Tensor) -> Tensor:
        return h.contiguous(memory_format=torch.channels_last)


class ChannelsLastByTo(Formats):
    def reordered(self, h: Tensor) -> Tensor:
        return h.to(memory_format=torch.channels_last)


class PermutedClone(Formats):
    def reordered(self, h: Tensor) -> Tensor:
        return h.permute(0, 2, 3, 1).clone()

    def back(self, h: Tensor) -> Tensor:
        return h.permute(0, 3, 1, 2)


class Carried(Plain):
    """The graph of one forward is a part of the next one's."""

    def __init__(self) -> None:
        super().__init__()
        self.side, self.bias = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.zeros(WIDTH))
        self.h: Tensor | None = None

    def forward(self, x: Tensor) -> Any:
        h, self.h = self.h, silu(self.side(x)) + self.bias
        y = self.gated(self.first(x))
        if h is not None:
            y = y * torch.sigmoid(h)
        return self.last(y).float().pow(2).mean()


class TwoLosses(Plain):
    """Two losses, each with a backward of its own and a step after it.

    Under autocast both are made with one copy of each weight.
    """

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.one, self.two = nn.Linear(WIDTH, WIDTH + 7), nn.Linear(WIDTH + 7, 1), nn.Linear(WIDTH + 7, 1)

    def forward(self, x: Tensor) -> Any:
        trunk = self.trunk(self.gated(self.first(x)))
        return tuple(head.float().pow(2).mean() for head in (self.one(trunk.tanh()), self.two(silu(trunk))))


class Clamped(Plain):
    """A change that autograd does not record, of what is first too large in a late step."""

    def __init__(self) -> None:
        super().__init__()
        self.other = Gated()

    def inside(self, y: Tensor) -> Tensor:
        h = self.other.made(y)
        with torch.no_grad():
            if bool((h > 8.0).any()):
                h.clamp_(max=8.0)
        return self.other.down(torch.relu(h))


class ClampedAlways(Clamped):
    """Likewise, asking nobody."""

    def inside(self, y: Tensor) -> Tensor:
        h = self.other.made(y)
        with torch.no_grad():
            h.clamp_(max=8.0)
        return self.other.down(torch.relu(h))


class Masked(Plain):
    """A change through ``data``, with the first batch that is padded."""

    def __init__(self) -> None:
        super().__init__()
        self.other = Gated()

    def inside(self, y: Tensor) -> Tensor:
        h = self.other.made(y)
        if self.padding is not None:
            h.data.masked_fill_(self.padding[:, None], 0.0)
        return self.other.down(h)


@dataclass(frozen=True)
class Case:
    """How a model is trained.

    Attributes:
        grows_late: the batches from step ``LATE`` on are much larger in value.
        pads_late: they have padding.
    """

    model: Callable[[], Plain]
    autocast: bool = False
    grows_late: bool = False
    pads_late: bool = False
    steps: int = STEPS


MANY = 30  # until a difference that comes by chance has come
LONG = LATE + ALL_CHECKED + 8
CASES = {
    "adds_in_place": Case(AddsInPlace, autocast=True),
    "multiplies_in_place": Case(MultipliesInPlace, autocast=True),
    "channels_last": Case(ChannelsLast, steps=MANY),
    "channels_last_by_to": Case(ChannelsLastByTo, steps=MANY),
    "permuted_clone": Case(PermutedClone, steps=MANY),
    "carried_graph": Case(Carried),
    "step_between_backwards": Case(TwoLosses, autocast=True),
    "clamped_late": Case(Clamped, grows_late=True, steps=LONG),
    "clamped_always": Case(ClampedAlways, grows_late=True, steps=LONG),
    "masked_late": Case(Masked, pads_late=True, steps=LONG),
}


@dataclass
class Outcome:
    """A run: what is compared, step by step, and how it ended.

    Attributes:
        error: with which it ended early; None where it did not.
        nbytes: rematerialized.
    """

    steps: list[tuple[Any, ...]] = field(default_factory=list)
    error: Exception | None = None
    nbytes: int = 0


def batches(case: Case) -> Iterator[tuple[Tensor, Tensor | None]]:
    chance = torch.Generator().manual_seed(1)
    for step in range(case.steps):
        x = torch.randn(ROWS, WIDTH, generator=chance)
        is_late = step >= LATE
        yield (
            x * (20.0 if is_late and case.grows_late else 1.0),
            (torch.rand(ROWS, generator=chance) < 0.3 if is_late and case.pads_late else None),
        )


def config_of(stage: int, block: dict[str, Any] | None) -> dict[str, Any]:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": ROWS,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": BUCKET, "allgather_bucket_size": BUCKET},
    }
    return config if block is None else {**config, "activation_nvme_offload": block}


def train(case: Case, stage: int, block: dict[str, Any] | None) -> Outcome:
    """All steps, or as many as there are without an error of ours."""
    outcome = Outcome()
    torch.manual_seed(0)
    model = case.model()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config_of(stage, block))
    offloader = getattr(engine, "activation_offloader", None)
    assert (offloader is not None) == (block is not None)
    gradients: list[tuple[str, str]] = []
    for name, parameter in model.named_parameters():
        parameter.register_hook(lambda gradient, name=name: gradients.append((name, digest([gradient]))))
    try:
        for x, padding in batches(case):
            model.padding = padding
            with torch.autocast("cpu", torch.bfloat16) if case.autocast else nullcontext():
                losses = engine(x)
            losses = losses if isinstance(losses, tuple) else (losses,)
            for number, loss in enumerate(losses):
                engine.backward(loss, retain_graph=number + 1 < len(losses))
                engine.step()
            values = [loss.item().hex() for loss in losses]
            outcome.steps.append((*values, *sorted(gradients), digest(parameters(engine))))
            gradients.clear()
    except Exception as error:
        if block is None:
            raise
        outcome.error = error
    if offloader is not None:
        outcome.nbytes = offloader.report().to_dict()["rematerialized_bytes"]
    engine.destroy()
    return outcome


def parameters(engine: Any) -> Iterator[Tensor]:
    for parameter in engine.module.parameters():
        with deepspeed.zero.GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")):
            yield parameter


def digest(tensors: Iterable[Tensor]) -> str:
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().float().cpu().numpy().tobytes())
    return found.hexdigest()


def verdict(plain: Outcome, ours: Outcome) -> str:
    """In words; counts steps from 1."""
    wrong = [number for number, (a, b) in enumerate(zip(plain.steps, ours.steps, strict=False), 1) if a != b]
    differs = f"differs from step {wrong[0]} on" if wrong else "is exact"
    if ours.error is None:
        return f"{differs}, {len(ours.steps)} steps, {ours.nbytes} bytes rematerialized"
    text = str(ours.error).partition("\n")[0]
    return f"{differs}, ends with {type(ours.error).__name__} in step {len(ours.steps) + 1}: {text}"


def main() -> None:
    torch.set_num_threads(1)
    directory, stage, *names = sys.argv[1:]
    for name in names:
        case, _, placement = name.partition(":")
        placement = placement or "keep"
        block: dict[str, Any] = {"enabled": True, "placement": placement, "min_tensor_bytes": 1024}
        if placement != "keep":
            block |= {"nvme_path": directory, "io": {"backend": "posix", "staging_bytes": 8 << 20}}
        plain = train(CASES[case], int(stage), None)
        ours = train(CASES[case], int(stage), block)
        gc.collect()
        sys.stdout.write(f"CASE {name} {verdict(plain, ours)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
