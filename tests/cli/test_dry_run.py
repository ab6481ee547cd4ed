"""What ``ds_tba plan`` says of bytes, against runs of the same models with values."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from support.estimate_models import ALL

from ds_tba.cli.plan.dry_run import dry_run
from ds_tba.cli.plan.model import Subject, loss_of
from ds_tba.cli.plan.training import Device, DryRun, Training
from ds_tba.config import OffloadConfig
from ds_tba.core.cache import TensorCache
from ds_tba.core.tensors import mark_owned
from ds_tba.errors import ConfigError, ModelError
from ds_tba.plan.recorder import Recorder, Scene
from ds_tba.plan.trace import PathRates, Resources, Trace
from ds_tba.recompute.blocks import find_blocks
from ds_tba.recompute.checkpoint import Blocks
from ds_tba.remat.where import RunningModule

BATCH, SEQUENCE = 4, 96
MIN_BYTES = 16384
PATHS = (PathRates(1e9, 1e9, 1e9, 1e9),)
MACHINE = Resources(PATHS, 1e10, 1e10, 1 << 24)
TOLERANCE = 0.02

Make = Callable[[int, int], Any]


def estimated(make: Make, device: str, dtype: torch.dtype | None = None, **block: Any) -> DryRun:
    offload = OffloadConfig.model_validate({"placement": "keep", "min_tensor_bytes": MIN_BYTES, **block})
    training = Training({}, offload, dtype)
    machine = Device(device, "made up", None, 1e12, 1e11, 1e10)

    def recipe(batch: int, sequence: int) -> Subject:
        model, inputs = make(batch, sequence)
        names = list(inspect.signature(model.forward).parameters)
        by_name = inputs if isinstance(inputs, dict) else dict(zip(names, inputs, strict=False))
        return Subject(model, by_name)

    return dry_run(recipe, BATCH, SEQUENCE, training, machine, PATHS)


@dataclass
class Real:
    trace: Trace
    peak_saved_bytes: int
    packed_tensors: int


class NoClock:
    def mark(self) -> float:
        return 0.0

    def elapsed_s(self, earlier: float, later: float) -> float:
        return 0.0


def ready(make: Make, device: str, dtype: torch.dtype) -> tuple[torch.nn.Module, Any]:
    torch.manual_seed(0)
    model, inputs = make(BATCH, SEQUENCE)
    model = model.to(device=device, dtype=dtype).train()
    for module in model.modules():
        mark_owned(module)

    def moved(one: torch.Tensor) -> torch.Tensor:
        return one.to(device, dtype if one.is_floating_point() else None)

    if isinstance(inputs, dict):
        return model, lambda: model(**{name: moved(one) for name, one in inputs.items()})
    return model, lambda: model(*[moved(one) for one in inputs])


def trained(make: Make, device: str, dtype: torch.dtype) -> Real:
    """The model really run, with values, its saved tensors kept."""
    model, forward = ready(make, device, dtype)
    cache = TensorCache([], device, MIN_BYTES)
    running = RunningModule()
    running.watch(model)
    recorder = Recorder(Scene(cache, NoClock(), running))
    with (
        cache.saving(around=recorder.around),
        Blocks(find_blocks(model, None), cache).forward(recorder),
    ):
        output = forward()
    loss_of(output).backward()
    recorder.end()
    cache.settle()
    return Real(recorder.trace(MACHINE), cache.stats.saved.peak, cache.stats.packed_tensors)


def bytes_by_block(trace: Trace) -> list[int]:
    """Outside first, then pass by pass; what several save counts in each of them."""
    found = [0] * (1 + len(trace.blocks))
    for storage in trace.storages:
        for block in storage.blocks:
            found[block + 1] += storage.nbytes
    return found


def assert_alike(found: DryRun, real: Real) -> None:
    assert found.packed_tensors == real.packed_tensors
    assert found.peak_saved_bytes == pytest.approx(real.peak_saved_bytes, rel=TOLERANCE)
    assert bytes_by_block(found.trace) == pytest.approx(bytes_by_block(real.trace), rel=TOLERANCE)
    assert [block.module for block in found.trace.blocks] == [block.module for block in real.trace.blocks]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", list(ALL))
def test_bytes_are_those_of_a_run_on_the_cpu(name: str, dtype: torch.dtype) -> None:
    found, real = estimated(ALL[name], "cpu", dtype), trained(ALL[name], "cpu", dtype)
    assert not [note for note in found.notes if "recomputed" in note]
    assert len(found.trace.blocks) == (6 if name == "t5" else 3)
    assert sum(bytes_by_block(real.trace)) > 20 * MIN_BYTES
    assert_alike(found, real)


def attention_s_bytes(run: DryRun) -> int:
    """Storages of one number for each pair of tokens."""
    pairs = BATCH * 4 * SEQUENCE * SEQUENCE
    return sum(one.nbytes for one in run.trace.storages if one.nbytes in (2 * pairs, 4 * pairs))


def test_dropout_and_attention_are_the_training_device_s() -> None:
    cpu, cuda = (estimated(ALL["bert"], device, torch.bfloat16) for device in ("cpu", "cuda"))
    assert cpu.attention == ["math"] and cuda.attention == ["efficient"]  # the mask; the dropout on the CPU
    assert attention_s_bytes(cpu) > 0 and attention_s_bytes(cuda) == 0
    masks = [one for one in cuda.trace.storages if one.nbytes == BATCH * SEQUENCE * 64]
    assert len(masks) == 1 + 2 * 3  # one byte for each element
    gpt = estimated(ALL["gpt"], "cuda", torch.bfloat16)
    assert gpt.attention == ["flash"]


def test_what_the_config_keeps_by_name_is_not_moved_and_its_blocks_are_not_recomputed() -> None:
    make = ALL["gpt2"]
    all_of_it, kept = estimated(make, "meta").trace, estimated(make, "meta", **{"except": ["*.0.mlp"]}).trace
    stays = [one for one in kept.storages if not one.is_movable and one.nbytes >= MIN_BYTES and ".0.mlp" in one.module]
    assert all_of_it.movable_bytes - kept.movable_bytes == sum(one.nbytes for one in stays) > 0
    assert [one.module for one in kept.blocks] == [one.module for one in all_of_it.blocks][1:]
    with pytest.raises(ConfigError, match=r"'\*.mpl', which matches no module of the model: the nearest are .*mlp"):
        estimated(make, "meta", only=["*.mpl"])


def test_a_model_that_needs_values_is_refused_and_told_why() -> None:
    def make(batch: int, sequence: int) -> Any:
        model, inputs = ALL["gpt"](batch, sequence)

        class Peeking(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner = model

            def forward(self, words: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
                return self.inner(words, targets) * (1.0 if words.sum().item() >= 0 else 2.0)

        return Peeking(), inputs

    with pytest.raises(ModelError, match=r"meta tensors.*the values of tensors"):
        estimated(make, "cpu", torch.float32)


def test_buffers_are_the_model_s_and_not_saved_bytes() -> None:
    class Scaled(torch.nn.Module):
        def __init__(self, sequence: int) -> None:
            super().__init__()
            self.register_buffer("scale", torch.ones(sequence, 4096))
            self.inner = torch.nn.Linear(64, 4096)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x) * self.scale

    def make(batch: int, sequence: int) -> Any:
        return Scaled(sequence), (torch.zeros(batch, sequence, 64),)

    found = estimated(make, "cpu", torch.float32)
    assert found.saved_bytes == BATCH * SEQUENCE * 64 * 4  # the input of the product; the buffer is larger


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", list(ALL))
def test_bytes_are_those_of_a_run_on_a_gpu(name: str, dtype: torch.dtype) -> None:
    assert_alike(estimated(ALL[name], "cuda", dtype), trained(ALL[name], "cuda", dtype))


def test_temporaries_are_logits_and_gradients_and_nothing_that_is_saved_or_was_there() -> None:
    """A product whose result is not saved: its gradient, and the result itself until the loss is made of it."""
    classes, rows, width = 4096, 256, 32

    def make(batch: int, sequence: int) -> Any:
        return torch.nn.Linear(width, classes, bias=False), (torch.randn(rows, width),)

    run = estimated(make, "cpu")
    logits_bytes, weight_bytes = 4 * rows * classes, 4 * classes * width
    assert run.temporary_bytes >= logits_bytes
    # The gradient of a sum is one number, expanded: backward has it whole for the product, and the weight's beside it.
    assert run.temporary_bytes <= logits_bytes + 2 * weight_bytes + 4096
