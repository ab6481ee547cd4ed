"""What the tests of others who offload activations check, written anew: each behaviour is a row.

torchtune's and TRL's ``OffloadActivations``, Megatron-Core's fine-grained offloading, DeepSpeed's checkpointing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import peft
import programs_deepspeed as programs
import pytest
import torch
from compare import compare
from models import MODELS
from support import hazards
from support.hazards import Saving, leaf
from support.runs import plain_config
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from ds_tba.core.cache import TensorCache
from ds_tba.core.saved import RecordState
from ds_tba.core.tensors import stamp_of

SIDE, KIB = 128, 1 << 10
BYTES = SIDE * SIDE * 4  # of one activation
Says = Callable[[str], None]


def row(peer: str, behaviour: str) -> Any:
    return pytest.mark.compatible("Peers' own behaviours", f"{peer}: {behaviour}")


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[TensorCache]:
    with hazards.nvme_cache(tmp_path) as cache:
        yield cache


def moved(cache: TensorCache) -> set[int]:
    """Stamps of the storages of the last forward that are not kept."""
    records = cache.forward.by_key.values()
    return {record.key.storage for record in records if record.state is not RecordState.KEPT}


def exact(scenario: Callable[[Saving], list[Tensor]], cache: TensorCache) -> str:
    """The same gradients as without, nothing left behind; what the table says of it."""
    hazards.check(scenario, cache)
    return f"bit-equal, {moved_bytes(cache) // KIB} KiB moved"


def moved_bytes(cache: TensorCache) -> int:
    return sum(store.stats.offloaded_bytes for store in cache.stores)


# ---- torchtune ------------------------------------------------------------------------------------------------------


@row("torchtune", "the same gradients for a stack of linear layers")
def test_layers(cache: TensorCache, row_says: Says) -> None:
    def scenario(saving: Saving) -> list[Tensor]:
        model = nn.Sequential(nn.Linear(SIDE, 4 * SIDE), nn.ReLU(), nn.Linear(4 * SIDE, SIDE), nn.ReLU())
        x = torch.rand(SIDE, SIDE)
        for _ in range(2):
            with saving():
                loss = model(x).sum()
            loss.backward()
        return hazards.grads(*model.parameters())

    row_says(exact(scenario, cache))
    assert moved_bytes(cache) >= 2 * 4 * BYTES


class ReturnsAView(torch.autograd.Function):
    """Its gradient is a view of what it unpacked, which the next node in backward still reads."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x.detach().clone())
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (saved,) = ctx.saved_tensors
        return saved.view(-1).view_as(saved)


@row("torchtune", "a gradient that is a view of an unpacked tensor outlives it")
def test_a_view_of_what_was_unpacked(cache: TensorCache, row_says: Says) -> None:
    def scenario(saving: Saving) -> list[Tensor]:
        x = leaf(SIDE, SIDE)
        with saving():
            y = x
            for _ in range(20):  # more than staging holds, so that memory given back is filled again
                y = ReturnsAView.apply((y * y.detach().sin()).tanh().mul(x))
            loss = y.sum()
        return hazards.grads_after(loss, x)

    row_says(exact(scenario, cache))
    assert moved_bytes(cache) > 40 * BYTES


@row("torchtune", "a tensor saved by two operations, whose backwards lie far apart")
def test_a_tensor_used_twice(cache: TensorCache, row_says: Says) -> None:
    def scenario(saving: Saving) -> list[Tensor]:
        x, weight = leaf(SIDE, SIDE), leaf(SIDE, SIDE)
        with saving():
            shared = x.exp()
            early = shared @ weight
            late = early
            for _ in range(12):
                late = late.sigmoid()
            loss = (late * shared).sum()
        return hazards.grads_after(loss, x, weight)

    row_says(exact(scenario, cache))
    assert cache.stats.deduplicated_bytes > 0


class ReturnsItsInput(torch.autograd.Function):
    """Its output is its input, changed in place and saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x.clamp_(min=0)
        ctx.mark_dirty(x)
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * (x > 0)


@row("torchtune", "an output that is the input, changed in place and saved")
def test_an_output_that_is_the_input(cache: TensorCache, row_says: Says) -> None:
    def scenario(saving: Saving) -> list[Tensor]:
        x, weight = leaf(SIDE, SIDE), leaf(SIDE, SIDE)
        with saving():
            y = x
            for _ in range(3):
                y = ReturnsItsInput.apply(y @ weight)
            loss = y.square().sum()
        return hazards.grads_after(loss, x, weight)

    row_says(exact(scenario, cache))
    assert moved_bytes(cache) > 0


# ---- TRL ------------------------------------------------------------------------------------------------------------


@row("TRL", "views of one storage are written once")
def test_views_are_written_once(cache: TensorCache, row_says: Says) -> None:
    def scenario(saving: Saving) -> list[Tensor]:
        x = leaf(SIDE, SIDE)
        with saving():
            y = x + 1
            views = (y, y.t(), y.view(-1, 2 * SIDE), y[: SIDE // 2], y.unsqueeze(0), y.view_as(y))
            loss = sum((view * view).sum() for view in views)
            assert moved_bytes(cache) - before in (0, BYTES)
        return hazards.grads_after(loss, x)

    before = moved_bytes(cache)
    row_says(exact(scenario, cache))
    assert moved_bytes(cache) - before == BYTES


@row("TRL", "a Hugging Face model with LoRA: parameters, adapters and their transposes stay where they are")
def test_parameters_stay(cache: TensorCache, row_says: Says) -> None:
    parameters: set[int] = set()

    def scenario(saving: Saving) -> list[Tensor]:
        base = MODELS["Llama"].build()
        model = peft.get_peft_model(base, peft.LoraConfig(target_modules=["q_proj", "v_proj"], lora_dropout=0.1))
        batch = MODELS["Llama"].batch(4, torch.Generator().manual_seed(1))
        with saving():
            loss = model(**batch).loss
            parameters.update(stamp_of(one.untyped_storage()) for one in model.parameters())
            assert not parameters & moved(cache)
        return hazards.grads_after(loss, *model.parameters())

    row_says(exact(scenario, cache))
    assert moved_bytes(cache) > 0 and cache.stats.passed_through_tensors > 0


@row("TRL", "a mask that is broadcast costs no more than its own bytes")
def test_broadcast_masks(cache: TensorCache, row_says: Says) -> None:
    def scenario(saving: Saving) -> list[Tensor]:
        scores = leaf(4, 8, SIDE, SIDE)
        with saving():
            causal = torch.ones(SIDE, SIDE).tril()[None, None].expand(4, 8, SIDE, SIDE)
            padding = (torch.rand(4, 1, 1, SIDE) > 0.2).float().expand(4, 8, SIDE, SIDE)
            loss = (scores * causal * padding).sum()
        return hazards.grads_after(loss, scores)

    row_says(exact(scenario, cache))
    assert moved_bytes(cache) == BYTES  # the causal mask; the other one is small


@row("TRL", "a region under hooks of the user that do nothing is left alone")
def test_a_region_of_the_user(cache: TensorCache, row_says: Says) -> None:
    def scenario(saving: Saving) -> list[Tensor]:
        x = leaf(SIDE, SIDE)
        with saving():
            y = x.exp().sin()
            before = moved_bytes(cache)
            with saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
                z = y.cos().tanh()
            assert moved_bytes(cache) == before
            loss = (z * y).sum()
        return hazards.grads_after(loss, x)

    row_says(exact(scenario, cache))
    assert moved_bytes(cache) > 0


@row("TRL", "tensors below the smallest size stay in memory")
def test_small_tensors(cache: TensorCache, row_says: Says) -> None:
    def scenario(saving: Saving) -> list[Tensor]:
        x = leaf(hazards.MIN_BYTES // 4 - 1)
        with saving():
            loss = x.exp().sin().sum()
        return hazards.grads_after(loss, x)

    exact(scenario, cache)
    assert moved_bytes(cache) == 0 and cache.stats.kept_bytes["small"] > 0
    row_says("bit-equal, all kept")


@row("TRL", "weights that are views of one flat parameter, as under FSDP, are not moved")
def test_a_flat_parameter(cache: TensorCache, row_says: Says) -> None:
    def scenario(saving: Saving) -> list[Tensor]:
        flat, x = nn.Parameter(torch.randn(2 * SIDE * SIDE + 2 * SIDE) / SIDE), leaf(SIDE, SIDE)
        with saving():
            weights, biases = flat.split([2 * SIDE * SIDE, 2 * SIDE])
            y = x
            for weight, bias in zip(weights.view(2, SIDE, SIDE).unbind(), biases.view(2, SIDE).unbind(), strict=True):
                y = nn.functional.linear(y, weight, bias).tanh()
            loss = y.square().sum()
            assert stamp_of(flat.untyped_storage()) not in moved(cache)
        return hazards.grads_after(loss, flat, x)

    row_says(exact(scenario, cache))
    assert moved_bytes(cache) > 0


# ---- Megatron-Core --------------------------------------------------------------------------------------------------


@row("Megatron-Core", "memory is freed after each layer's backward, and not at the end")
def test_memory_is_given_back(cache: TensorCache, row_says: Says) -> None:
    layers, resident, alive = 16, [], []
    x = leaf(SIDE, SIDE)

    def note(grad: Tensor) -> None:
        resident.append(cache.stats.resident.now)
        alive.append(cache.live_records)

    with cache.saving():
        y = x
        for _ in range(layers):
            y = y.sin()
            y.register_hook(note)
        loss = y.sum()
    del y
    saved_bytes = cache.stats.saved.now
    loss.backward()
    assert alive == sorted(alive, reverse=True) and alive[-1] <= 2
    assert saved_bytes == layers * BYTES
    row_says(f"{saved_bytes // KIB} KiB saved, at most {max(resident) // KIB} KiB in memory during backward")
    hazards.check_nothing_is_left(cache, "memory")


def in_flight(order: str) -> Callable[[Saving], list[Tensor]]:
    """A scenario with forwards and backwards of two model chunks, in this order: "f0 f1 b0", say."""

    def scenario(saving: Saving) -> list[Tensor]:
        chunks = [nn.Sequential(nn.Linear(SIDE, SIDE), nn.GELU(), nn.Dropout(0.2), nn.Linear(SIDE, SIDE))] * 2
        losses: dict[str, Tensor] = {}
        for step in order.split():
            if step[0] == "f":
                with saving():
                    losses[step[1:]] = chunks[int(step[1:]) % 2](torch.randn(SIDE, SIDE)).square().mean()
            else:
                losses.pop(step[1:]).backward()
        return hazards.grads(*chunks[0].parameters())

    return scenario


@pytest.mark.parametrize(
    "order",
    [
        pytest.param(
            "f0 f1 f2 b0 f3 b1 f4 b2 f5 b3 b4 b5",
            marks=row("Megatron-Core", "several micro-batches in flight, one forward and one backward in turn"),
        ),
        pytest.param(
            "f0 f2 f1 f3 b1 f4 b3 f5 b0 b2 b5 b4",
            marks=row("Megatron-Core", "several micro-batches in flight, two chunks of the model in turn"),
        ),
    ],
)
def test_micro_batches_in_flight(order: str, cache: TensorCache, row_says: Says) -> None:
    row_says(exact(in_flight(order), cache))
    assert moved_bytes(cache) >= 6 * BYTES


class Experts(nn.Module):
    """Each token goes to one expert; how many an expert gets changes with every batch."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(SIDE, 2 * SIDE), nn.SiLU(), nn.Linear(2 * SIDE, SIDE)) for _ in range(count)
        )

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            (places,) = torch.where(chosen == index)
            out = out.index_add(0, places, expert(x[places]))
        return out


@row("Megatron-Core", "experts that get other numbers of tokens in every step, or none")
def test_experts(cache: TensorCache, row_says: Says) -> None:
    def scenario(saving: Saving) -> list[Tensor]:
        model = Experts(4)
        for step in range(6):
            chosen = torch.randint(0, 1 + step % 4, (SIDE + 17 * step,))  # in the first step all to one expert
            with saving():
                loss = model(torch.randn(len(chosen), SIDE), chosen).square().mean()
            loss.backward()
        return hazards.grads(*model.parameters())

    row_says(exact(scenario, cache))
    assert moved_bytes(cache) > 6 * BYTES


@row("Megatron-Core", "recomputed layers beside offloaded layers")
def test_together_with_checkpoints(cache: TensorCache, row_says: Says) -> None:
    def scenario(saving: Saving) -> list[Tensor]:
        layers = [nn.Sequential(nn.Linear(SIDE, SIDE), nn.Dropout(0.2), nn.Tanh()) for _ in range(4)]
        x = leaf(SIDE, SIDE)
        with saving():
            y = x
            for index, layer in enumerate(layers):
                y = checkpoint(layer, y, use_reentrant=index % 4 == 1) if index % 2 else layer(y)
            loss = y.square().sum()
        return hazards.grads_after(loss, x, *(one for layer in layers for one in layer.parameters()))

    row_says(exact(scenario, cache))
    assert moved_bytes(cache) > 0


# ---- DeepSpeed ------------------------------------------------------------------------------------------------------


@pytest.mark.engine
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, marks=row("DeepSpeed", "checkpoints with masks, indices, None, numbers and several outputs")),
        pytest.param(
            {"cpu_checkpointing": True},
            marks=row("DeepSpeed", "the same with cpu_checkpointing, and one tensor passed twice"),
        ),
    ],
)
def test_arguments_of_checkpoints(settings: dict[str, bool], tmp_path: Path, row_says: Says) -> None:
    config = plain_config(2, train_micro_batch_size_per_gpu=programs.BATCH, activation_checkpointing=settings)
    row_says(str(compare(programs.with_odd_checkpoints, config, tmp_path)))


@row("DeepSpeed", "a forward that raises, and one without gradients, leave nothing behind")
def test_forwards_without_a_backward(cache: TensorCache, row_says: Says) -> None:
    def scenario(saving: Saving) -> list[Tensor]:
        layers, x = nn.Sequential(nn.Linear(SIDE, SIDE), nn.GELU(), nn.Linear(SIDE, SIDE)), leaf(SIDE, SIDE)
        with pytest.raises(ZeroDivisionError), saving():
            layers(x).sum() / (1 // 0)
        before = moved_bytes(cache)
        with torch.no_grad(), saving():
            layers(x)
        with saving(), torch.no_grad():
            layers(x)
        assert moved_bytes(cache) == before
        with saving():
            loss = layers(x).square().sum()
        return hazards.grads_after(loss, x, *layers.parameters())

    row_says(exact(scenario, cache))
    assert moved_bytes(cache) > 0
