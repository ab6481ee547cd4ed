"""What ``ds_tba plan`` says of bytes, against runs of the same models with values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from support.estimate_models import ALL
from support.placed import fixed
from torch.utils._pytree import tree_leaves

from ds_tba.cli.plan.dry_run import PeakMeter, dry_run
from ds_tba.cli.plan.model import Subject, loss_of
from ds_tba.cli.plan.rows import made_again
from ds_tba.cli.plan.training import Device, DryRun, Training
from ds_tba.config import AioConfig, OffloadConfig, Placement
from ds_tba.core.cache import TensorCache
from ds_tba.core.tensors import mark_inputs, mark_owned
from ds_tba.device.accelerator import CpuAccelerator
from ds_tba.errors import ConfigError, ModelError
from ds_tba.offloader import ActivationOffloader
from ds_tba.plan.recorder import Recorder, Scene
from ds_tba.plan.trace import PathRates, Resources, Trace
from ds_tba.recompute.blocks import find_blocks
from ds_tba.recompute.checkpoint import Blocks
from ds_tba.remat.sites import Sites
from ds_tba.remat.store import RecipeTicket, RematStore
from ds_tba.remat.where import RunningModule

BATCH, SEQUENCE = 4, 96
MIN_BYTES = 16384
PATHS = (PathRates(1e9, 1e9, 1e9, 1e9),)
MACHINE = Resources(PATHS, 1e10, 1e10, 1 << 24)
TOLERANCE = 0.02

Make = Callable[[int, int], Any]


def estimated(
    make: Make, device: str, dtype: torch.dtype | None = None, autocast: torch.dtype | None = None, **block: Any
) -> DryRun:
    offload = OffloadConfig.model_validate({"placement": "keep", "min_tensor_bytes": MIN_BYTES, **block})
    training = Training({}, offload, AioConfig(), dtype, autocast, ())
    machine = Device(device, "made up", None, 1e12, 1e11, 1e10)
    return dry_run(lambda batch, sequence: Subject(*make(batch, sequence)), BATCH, SEQUENCE, training, machine, PATHS)


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
    return Real(recorder.record.trace(MACHINE), cache.stats.saved.peak, cache.stats.packed_tensors)


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
    assert found.runs_on == "meta"
    assert not [note for note in found.notes if "recomputed" in note]
    assert len(found.trace.blocks) == (6 if name == "t5" else 3)
    assert sum(bytes_by_block(real.trace)) > 20 * MIN_BYTES
    assert_alike(found, real)


@pytest.mark.parametrize("name", list(ALL))
def test_totals_are_those_of_the_offloader_s_report(name: str) -> None:
    found = estimated(ALL[name], "cpu", torch.bfloat16)
    _, forward = ready(ALL[name], "cpu", torch.bfloat16)
    config = OffloadConfig.model_validate({"placement": "keep", "min_tensor_bytes": MIN_BYTES})
    offloader = ActivationOffloader(config, AioConfig(), CpuAccelerator())
    with offloader.saving():
        output = forward()
    loss_of(output).backward()
    report = offloader.report()
    offloader.close()
    assert found.packed_tensors == report.packed_tensors
    assert found.peak_saved_bytes == pytest.approx(report.peak_saved_bytes_without, rel=TOLERANCE)


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


# ---- what can be made again -----------------------------------------------------------------------------------------


def really_made_again(
    make: Make,
    dtype: torch.dtype | None,
    *,
    exclude: frozenset[str] = frozenset(),
    within: Callable[[], AbstractContextManager[Any]] = nullcontext,
    prepare: Callable[[torch.nn.Module], None] = lambda _: None,
) -> dict[str, int]:
    """Bytes by op that a step of a run on the CPU makes again."""
    torch.manual_seed(0)
    subject = Subject(*make(BATCH, SEQUENCE)).to("cpu", dtype)
    prepare(subject.model)
    for tensor in tree_leaves(subject.inputs):
        if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
            tensor.normal_()  # equal elements prove nothing
    cache = TensorCache([], "cpu", MIN_BYTES)
    cache.rematerialize(RematStore(cache, Sites(cache, CpuAccelerator(), exclude)))
    found: Counter[str] = Counter()
    for module in subject.model.modules():
        mark_owned(module)
    mark_inputs(subject.inputs)
    with cache.saving(), within():
        output = subject.forward()
    for record in cache.forward.by_key.values():
        if isinstance(record.ticket, RecipeTicket):
            found[record.origin.op] += record.nbytes
    loss_of(output).backward()
    del output
    cache.settle()
    assert sum(found.values()) == cache.stats.rematerialized_bytes
    return dict(found)


def predicted(make: Make, device: str, dtype: torch.dtype | None = None, **others: Any) -> dict[str, int]:
    """The same as the dry run finds it."""
    run = estimated(make, device, dtype, **others)
    found: Counter[str] = Counter()
    for op, storage in zip(run.ops, run.trace.storages, strict=True):
        assert (storage.rematerialize_s is not None) == bool(op)
        if op:
            found[op] += storage.nbytes
    return dict(found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", list(ALL))
def test_bytes_made_again_are_those_of_a_run_on_the_cpu(name: str, dtype: torch.dtype) -> None:
    real = really_made_again(ALL[name], dtype)
    assert sum(real.values()) > 20 * MIN_BYTES
    assert predicted(ALL[name], "cpu", dtype) == real


@pytest.mark.parametrize("name", ["llama", "gpt"])
def test_bytes_made_again_under_autocast_are_those_of_a_run(name: str) -> None:
    real = really_made_again(ALL[name], None, within=lambda: torch.autocast("cpu", torch.bfloat16))
    assert real["cast"] > 0 and predicted(ALL[name], "cpu", autocast=torch.bfloat16) == real


def test_ops_that_the_config_excludes_are_not_made_again() -> None:
    every = predicted(ALL["llama"], "cpu", torch.bfloat16)
    fewer = predicted(ALL["llama"], "cpu", torch.bfloat16, rematerialize={"exclude": ["silu"]})
    # The product of the gate goes on: it is made again from what silu has made, which is saved now.
    assert fewer == {op: nbytes for op, nbytes in every.items() if op != "silu"} and "silu" in every
    assert fewer == really_made_again(ALL["llama"], torch.bfloat16, exclude=frozenset({"silu"}))
    assert predicted(ALL["llama"], "cpu", torch.bfloat16, rematerialize=False) == {}


def test_what_the_config_keeps_by_name_is_not_moved_and_its_blocks_are_not_recomputed() -> None:
    make = ALL["gpt2"]
    all_of_it, kept = estimated(make, "meta").trace, estimated(make, "meta", **{"except": ["*.0.mlp"]}).trace
    stays = [one for one in kept.storages if not one.is_movable and one.nbytes >= MIN_BYTES and ".0.mlp" in one.module]
    assert all_of_it.movable_bytes - kept.movable_bytes == sum(one.nbytes for one in stays) > 0
    assert [one.is_recomputable for one in kept.blocks] == [False, *(True for _ in kept.blocks[1:])]
    with pytest.raises(ConfigError, match=r"'\*.mpl', which matches no module of the model; did you mean .*mlp"):
        estimated(make, "meta", only=["*.mpl"])


def test_a_model_s_input_is_no_operand() -> None:
    class Gated(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)

        def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
            y = torch.relu(self.up(x))
            return self.down(y * gate) + self.down(y * y)

    def make(batch: int, sequence: int) -> Any:
        return Gated(), (torch.rand(batch, sequence, 64), torch.rand(batch, sequence, 64))

    found = predicted(make, "cpu", torch.float32)
    assert found == {"mul": BATCH * SEQUENCE * 64 * 4} == really_made_again(make, torch.float32)


def test_what_cuda_s_kernels_save_is_made_again_by_their_ops() -> None:
    class Normed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm, self.second = torch.nn.Linear(64, 64), torch.nn.RMSNorm(64), torch.nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(self.norm(self.first(x)))

    def make(batch: int, sequence: int) -> Any:
        return Normed(), (torch.rand(batch, sequence, 64),)

    assert predicted(make, "cuda", torch.bfloat16) == {"rms_norm": BATCH * SEQUENCE * 64 * 2}
    assert predicted(ALL["bert"], "cuda", torch.bfloat16).keys() >= {"dropout", "gelu", "layer_norm"}


def test_the_seconds_are_those_of_the_bytes_that_the_ops_move() -> None:
    """A product of two: three tensors of one size. GELU: two."""

    class Two(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            product = self.a(x) * self.b(x)
            return self.b(product) + self.a(torch.nn.functional.gelu(product))

    run = estimated(lambda batch, sequence: (Two(), (torch.rand(batch, sequence, 64),)), "cpu", torch.float32)
    nbytes = BATCH * SEQUENCE * 64 * 4
    found = {op: storage for op, storage in zip(run.ops, run.trace.storages, strict=True) if op}
    assert found["mul"].rematerialize_s == pytest.approx(3 * nbytes / 1e11)
    assert found["gelu"].rematerialize_s == pytest.approx(2 * nbytes / 1e11)
    sources = [run.trace.storages.index(found["mul"])]
    assert found["gelu"].sources == tuple(sources) and len(found["mul"].sources) == 2


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_without_rematerialization_the_dry_run_is_the_same(name: str) -> None:
    with_it, without = (estimated(ALL[name], "cuda", torch.bfloat16, rematerialize=one) for one in (True, False))
    plain = [replace(one, rematerialize_s=None, sources=()) for one in with_it.trace.storages]
    assert plain == list(without.trace.storages) and any(with_it.ops) and not any(without.ops)
    assert replace(with_it, trace=without.trace, ops=without.ops) == without


def test_the_peak_without_a_drive_is_that_of_what_is_saved() -> None:
    run = estimated(ALL["llama"], "cpu", torch.bfloat16)
    again = really_made_again(ALL["llama"], torch.bfloat16)
    keep, cost = fixed(run.trace), fixed(run.trace, Placement.REMATERIALIZE)
    assert made_again(run) == again
    assert cost.rematerialized_bytes == sum(again.values()) and not cost.written_bytes
    assert keep.peak_saved_bytes - sum(again.values()) <= cost.peak_saved_bytes < 0.7 * keep.peak_saved_bytes
    assert cost.step_s == pytest.approx(keep.step_s + cost.rematerialized_s)


def test_a_model_that_needs_values_is_refused_and_told_why() -> None:
    def make(batch: int, sequence: int) -> Any:
        model, inputs = ALL["gpt"](batch, sequence)

        class Peeking(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner = model

            def forward(self, *given: torch.Tensor) -> torch.Tensor:
                return self.inner(*given) * (1.0 if given[0].sum().item() >= 0 else 2.0)

        return Peeking(), inputs

    with pytest.raises(ModelError, match=r"meta tensors.*the values of tensors"):
        estimated(make, "cpu", torch.float32)


def test_autocast_runs_on_the_cpu() -> None:
    plain, found = (estimated(ALL["gpt"], "cpu", autocast=one) for one in (None, torch.bfloat16))
    assert found.runs_on == "cpu" and "torch_autocast" in found.notes[0]
    assert found.saved_bytes < 0.9 * plain.saved_bytes


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


def test_checkpointed_blocks_save_their_inputs_only() -> None:
    from train_gpt import GPT

    def make(batch: int, sequence: int) -> Any:
        _, inputs = ALL["gpt"](batch, sequence)
        again = GPT(64, 3, sequence, recompute=True)
        return again, inputs

    found, real = estimated(make, "cpu", torch.float32), trained(make, "cpu", torch.float32)
    assert_alike(found, real)
    assert found.saved_bytes < 0.3 * estimated(ALL["gpt"], "cpu", torch.float32).saved_bytes


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


@pytest.mark.parametrize("name", list(ALL))
def test_the_peak_of_all_tensors_is_that_of_a_run(name: str) -> None:
    """As an allocator would count them, without parameters and gradients."""
    run = estimated(ALL[name], "cpu", torch.float32)
    model, forward = ready(ALL[name], "cpu", torch.float32)
    for one in model.parameters():
        one.grad = torch.zeros_like(one)
    held = [one.untyped_storage() for each in model.parameters() for one in (each, each.grad) if one is not None]
    with PeakMeter(held) as meter:
        loss_of(forward()).backward()
    assert run.kept_bytes == pytest.approx(meter.peak_bytes, rel=0.1)
