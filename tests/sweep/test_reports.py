"""Public bug reports of people who offload or checkpoint activations: what each reporter did, with us.

``docs/evidence/reports.md`` has a row for each, and names its test; most of those are older than this file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import programs_hf
import pytest
import report_programs
import torch
from compare import RECOMPUTED, compare
from programs_hf import FINE, checkpointing, config_of
from support import hazards
from support.hazards import Saving, leaf
from support.runs import plain_config
from torch import Tensor, nn
from torch.nn import functional

from ds_tba.core.cache import TensorCache
from ds_tba.device.accelerator import CpuAccelerator
from ds_tba.remat.sites import Sites
from ds_tba.remat.store import RematStore

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "evidence" / "reports.md"
ROW = re.compile(
    r"^\| \[(?P<repository>[^ \]]+) #(?P<number>\d+)\]\((?P<url>[^)]+)\) \|.*\| (?P<tests>[^|]+) \|$", re.M
)
TEST = re.compile(r"\[`(?P<name>test_\w+)`\]\(\.\./\.\./(?P<path>tests/[\w/]+\.py)\)")
SIDE = 64


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[TensorCache]:
    """Everything of 4 KiB and more goes to the drive, but for what can be made again."""
    with hazards.nvme_cache(tmp_path) as cache:
        cache.rematerialize(RematStore(cache, Sites(cache, CpuAccelerator())))
        yield cache


def moved_bytes(cache: TensorCache) -> int:
    return sum(store.stats.offloaded_bytes for store in cache.stores)


# ---- the page -------------------------------------------------------------------------------------------------------


def test_each_row_names_a_test_that_exists() -> None:
    rows = list(ROW.finditer(PAGE.read_text()))
    assert len(rows) == sum(line.startswith("| [") for line in PAGE.read_text().splitlines())
    assert len({(row["repository"], row["number"]) for row in rows}) == len(rows) >= 30
    for row in rows:
        assert row["url"].endswith(f"/{row['number']}") and f"/{row['repository'].split('/')[0]}/" in row["url"]
        tests = list(TEST.finditer(row["tests"]))
        assert tests, row[0]
        for test in tests:
            assert f"def {test['name']}(" in (ROOT / test["path"]).read_text(), row[0]


# ---- views and identity ---------------------------------------------------------------------------------------------


def test_ms_swift_10157_a_square_transpose_and_a_smaller_slice(cache: TensorCache) -> None:
    def scenario(saving: Saving) -> list[Tensor]:
        x = leaf(SIDE, SIDE)
        with saving():
            y = x.tan()
            loss = (y * y.t()).exp().sum() + (y[:32, :48] ** 3).sum() + (y[32:, 16:] ** 3).sum()
        return hazards.grads_after(loss, x)

    hazards.check(scenario, cache)
    assert moved_bytes(cache) > 0


def test_trl_5694_slices_that_begin_within_their_storage(cache: TensorCache) -> None:
    def scenario(saving: Saving) -> list[Tensor]:
        logits, labels = leaf(4, SIDE, 100), torch.randint(0, 100, (4, SIDE))
        with saving():
            wide = logits.tan()
            shifted = wide[:, :-1].transpose(1, 2)
            loss = functional.cross_entropy(shifted, labels[:, 1:]) + (wide[1:, 3:, ::3] ** 2).sum()
        return hazards.grads_after(loss, logits)

    hazards.check(scenario, cache)
    assert moved_bytes(cache) > 0


def test_trl_6241_memory_that_the_allocator_hands_out_again(cache: TensorCache) -> None:
    def scenario(saving: Saving) -> list[Tensor]:
        x = leaf(SIDE, SIDE)
        addresses = set()
        with saving():
            loss = torch.zeros(())
            for power in range(1, 25):
                passing = (x * power).tan()  # freed as soon as it lies on the drive
                addresses.add(passing.data_ptr())
                loss = loss + (passing**2).sum()
        return hazards.grads_after(loss, x)

    hazards.check(scenario, cache)
    assert cache.stats.packed_tensors >= 24 and moved_bytes(cache) >= 20 * SIDE * SIDE * 4


def test_trl_5700_a_forward_that_nobody_goes_back_through(cache: TensorCache) -> None:
    model = nn.Sequential(nn.Linear(SIDE, SIDE), nn.Tanh(), nn.Linear(SIDE, SIDE))
    for _ in range(3):
        with cache.saving():
            scores = model(torch.randn(SIDE, SIDE)).exp().sum()
        assert cache.live_records > 0
        del scores
    hazards.check_nothing_is_left(cache, "forwards without backward")


# ---- ten that nobody here had read before ---------------------------------------------------------------------------


@pytest.mark.engine
@pytest.mark.parametrize("report", report_programs.REPORTS)
def test_report_under_an_engine(report: str, tmp_path: Path) -> None:
    """PyTorch #115255, torchtune #2709, DeepSpeed #598."""
    compare(report_programs.reported, plain_config(2), tmp_path, report=report)


@pytest.mark.engine
def test_transformers_47254_frozen_norms_under_zero_3_made_again(tmp_path: Path) -> None:
    """What a checkpoint raised about there; here with ``"recompute": true``."""
    compared = compare(report_programs.recomputed, plain_config(3), tmp_path, block=RECOMPUTED, must_move=False)
    assert compared.recomputed_bytes > 0, compared


@pytest.mark.engine
def test_trl_4280_lora_with_checkpoints_and_noise(tmp_path: Path) -> None:
    arguments = {"prepare": "LoRA", "optim": "adafactor", **FINE, **checkpointing(False)}
    compare(programs_hf.trainer, {**config_of(1), "zero_allow_untested_optimizer": True}, tmp_path, **arguments)


def test_torchtune_2456_a_function_that_wants_its_tensor_on_the_cpu(tmp_path: Path) -> None:
    seen: list[Tensor] = []

    class WantsCpu(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            seen.extend(ctx.saved_tensors)
            return grad * 2

    with hazards.nvme_cache(tmp_path) as like:
        cache = TensorCache(like.stores, "cuda:0", 1)
        x = leaf(SIDE, SIDE)
        with cache.saving():
            loss = WantsCpu.apply(x).sum()
        loss.backward()
        assert seen[0].device.type == "cpu" and seen[0].data_ptr() == x.data_ptr()
        assert moved_bytes(cache) == 0


def test_functorch_1027_a_gradient_within_the_forward(cache: TensorCache) -> None:
    def scenario(saving: Saving) -> list[Tensor]:
        x = leaf(SIDE, SIDE)
        with saving():
            y = x.sin().sin()
            (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return [slope.detach(), *hazards.grads_after((slope**2).sum(), x)]

    hazards.check(scenario, cache)
    assert moved_bytes(cache) > 0


def test_functorch_1027_a_transform_is_refused_as_pytorch_does(cache: TensorCache) -> None:
    x = leaf(SIDE, SIDE)
    with cache.saving(), pytest.raises(RuntimeError, match="saved tensor hooks"):
        torch.func.grad(lambda x: x.sin().sin().sum())(x)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph", "ignore:Full backward hook is firing")
def test_pytorch_82528_full_backward_hooks_and_a_graph_of_gradients(cache: TensorCache) -> None:
    def scenario(saving: Saving) -> list[Tensor]:
        model = nn.Sequential(nn.Linear(SIDE, SIDE), nn.Tanh(), nn.Linear(SIDE, SIDE))
        seen: list[Tensor] = []
        for layer in model:
            layer.register_full_backward_hook(lambda _, _grad_in, grad_out: seen.append(grad_out[0].detach().clone()))
        with saving():
            loss = model(torch.randn(SIDE, SIDE)).pow(2).sum()
        loss.backward(create_graph=True)
        found = [one.grad.detach().clone() for one in model.parameters() if one.grad is not None]
        model.zero_grad()  # breaks the cycle of a parameter, its gradient and the graph
        return found + seen

    hazards.check(scenario, cache)
    assert moved_bytes(cache) > 0


def test_pytorch_10532_twice_through_an_instance_norm_and_a_relu_in_place(cache: TensorCache) -> None:
    def scenario(saving: Saving) -> list[Tensor]:
        net = nn.Sequential(nn.InstanceNorm2d(3), nn.ReLU(True))
        x = leaf(2, 3, 32, 32)
        with saving():
            (grad,) = torch.autograd.grad(net(x).pow(2).sum(), x, create_graph=True)
            (again,) = torch.autograd.grad(grad.pow(2).sum(), x)
        return [grad.detach(), again]

    hazards.check(scenario, cache)
    assert moved_bytes(cache) > 0


def test_pytorch_57100_parts_of_one_model_scored_together_by_another(cache: TensorCache) -> None:
    def scenario(saving: Saving) -> list[Tensor]:
        first = nn.Sequential(nn.Linear(SIDE, SIDE), nn.GELU(), nn.Linear(SIDE, SIDE))
        second = nn.Sequential(nn.Linear(SIDE, SIDE), nn.Tanh(), nn.Linear(SIDE, 1))
        parts = []
        for _ in range(3):
            with saving():
                parts.append(first(torch.randn(SIDE, SIDE)))
        whole = torch.cat(parts)
        with saving():
            score = second(whole).sum()
        (slope,) = torch.autograd.grad(score, whole)
        for part, its_slope in zip(parts, slope.split(SIDE), strict=True):
            part.backward(its_slope)
        return [slope, *hazards.grads(*first.parameters())]

    hazards.check(scenario, cache)
    assert moved_bytes(cache) > 0


def test_pytorch_167263_strides_of_gradients_through_einsum(cache: TensorCache) -> None:
    strides: dict[str, list[tuple[int, ...]]] = {"plain": [], "ours": []}

    def scenario(saving: Saving) -> list[Tensor]:
        name = "ours" if saving == cache.saving else "plain"
        x, linear, weights = leaf(4, 4, 4, 128), nn.Linear(128, 128, bias=False), torch.randn(4, 16, 128)
        with saving():
            values = linear(x).view(4, 16, 128)
            values.register_hook(lambda grad: strides[name].append(grad.stride()))
            result = torch.einsum("bhc,bhc->bc", weights, values) + torch.einsum("bhc,bhc->bc", values.sin(), values)
        return hazards.grads_after(result.sum(), x, *linear.parameters())

    hazards.check(scenario, cache)
    assert strides["plain"] and strides["ours"] == strides["plain"]
