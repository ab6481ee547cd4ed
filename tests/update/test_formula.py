"""The update in torch's operations against DeepSpeed's CPUAdam, bit for bit."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from deepspeed.ops.op_builder import CPUAdamBuilder

from ds_tba.update import formula
from ds_tba.update.formula import Hyper, Powers, Scalars, is_exact, same_bits, update_
from ds_tba.update.updater import GRAIN_ELEMENTS

CPU = torch.device("cpu")
HYPER = Hyper(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1)
NEXT_ID = -10  # DeepSpeed's are from 0 on, is_exact's is -1


@pytest.fixture(scope="module")
def op() -> Any:
    return CPUAdamBuilder().load()


@contextmanager
def adams(op: Any, count: int, beta1: float, beta2: float, *, adamw: bool = True) -> Iterator[list[Any]]:
    """C++ objects of one kind, as functions that update."""
    ids = [NEXT_ID - number for number in range(count)]
    for opt_id in ids:
        op.create_adam(opt_id, 1e-3, beta1, beta2, 1e-8, 0.0, adamw, False)
    try:
        yield [partial(op.adam_update, opt_id) for opt_id in ids]
    finally:
        for opt_id in ids:
            op.destroy_adam(opt_id)


class State(NamedTuple):
    """Master parameters and moments."""

    master: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor

    @classmethod
    def fresh(cls, elements: int, generator: torch.Generator) -> State:
        return cls(torch.randn(elements, generator=generator), torch.zeros(elements), torch.zeros(elements))

    def clone(self) -> State:
        return State(*(one.clone() for one in self))

    def part(self, start: int, stop: int) -> State:
        return State(*(one[start:stop] for one in self))

    def host_update(self, adam: Callable[..., object], step: int, hyper: Hyper, gradient: torch.Tensor) -> None:
        adam(step, *hyper.numbers, self.master, gradient, self.exp_avg, self.exp_avg_sq)

    def update(self, gradient: torch.Tensor, scalars: Scalars) -> None:
        """Ours, where the gradient must stay as it is."""
        before = gradient.clone()
        update_(*self, gradient, torch.full_like(gradient, torch.nan), scalars)
        assert gradient.view(torch.int32).equal(before.view(torch.int32))


def differing(expected: State, found: State) -> int:
    """How many elements are not the same bits; a NaN is a NaN."""
    return sum(
        int(((a.view(torch.int32) != b.view(torch.int32)) & ~(a.isnan() & b.isnan())).sum())
        for a, b in zip(expected, found, strict=True)
    )


def gradient_of(elements: int, generator: torch.Generator) -> torch.Tensor:
    """Of many magnitudes, with zeros and denormals."""
    gradient = torch.randn(elements, generator=generator) * 10 ** (3 * torch.randn(elements, generator=generator) - 4)
    gradient[::17] = 0
    gradient[1::19] *= 1e-36
    return gradient


@pytest.mark.usefixtures("one_thread")  # which puts back how many there were
@pytest.mark.parametrize("adamw", [True, False], ids=["AdamW", "L2"])
@pytest.mark.parametrize(
    ("elements", "steps", "threads"),
    [(128, 20, 1), (1000, 20, 1), (70_001, 20, 1), (3_000_077, 3, 1), (3_000_077, 3, 2)],
)
def test_steps_are_those_of_cpu_adam(op: Any, elements: int, steps: int, threads: int, adamw: bool) -> None:
    """CPUAdam on everything, and ours with a second C++ object for the tail. OpenMP's threads are torch's, too."""
    torch.set_num_threads(threads)
    generator = torch.Generator().manual_seed(elements)
    expected = State.fresh(elements, generator)
    found, powers = expected.clone(), Powers(HYPER.beta1, HYPER.beta2)
    end = elements - elements % GRAIN_ELEMENTS
    with adams(op, 2, HYPER.beta1, HYPER.beta2, adamw=adamw) as (stock, ours):
        for step in range(1, steps + 1):
            hyper = replace(HYPER, adamw=adamw, lr=1e-3 * min(step / 5, 2 - step / 15))
            gradient = gradient_of(elements, generator)
            expected.host_update(stock, step, hyper, gradient)
            found.part(0, end).update(gradient[:end], powers.scalars(step, hyper))
            found.part(end, elements).host_update(ours, step, hyper, gradient[end:])
            assert differing(expected, found) == 0, f"step {step}"
    assert not expected.master.isnan().any()


@pytest.mark.parametrize("seed", range(30))
def test_a_call_without_elements_takes_the_object_to_its_step(op: Any, seed: int) -> None:
    """One object gets all of the sub-groups, the other some of them or parts, and calls without elements."""
    chance, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    sizes = [128 * chance.randrange(1, 6) + chance.randrange(128) for _ in range(4)]
    betas = [(0.9, chance.choice([0.999, 0.999, 0.95])) for _ in sizes]
    expected = [State.fresh(size, generator) for size in sizes]
    found, powers = [one.clone() for one in expected], Powers(0.9, 0.999)
    with adams(op, 2, 0.9, 0.999) as (stock, ours):
        for step in [1, 2, 3, 4, 5, 50, 51, 52]:
            for mine, theirs, (beta1, beta2) in zip(found, expected, betas, strict=True):
                hyper = replace(HYPER, beta1=beta1, beta2=beta2)
                gradient = gradient_of(len(mine.master), generator)
                theirs.host_update(stock, step, hyper, gradient)
                scalars = powers.scalars(step, hyper)
                end = len(gradient) - len(gradient) % GRAIN_ELEMENTS
                cut = 128 * chance.randrange(end // 128 + 1)
                mine.part(0, 0).host_update(ours, step, hyper, gradient[:0])
                for start, stop in chance.sample([(0, cut), (end, len(gradient))], 2):
                    mine.part(start, stop).host_update(ours, step, hyper, gradient[start:stop])
                mine.part(cut, end).update(gradient[cut:end], scalars)
                assert differing(theirs, mine) == 0, f"step {step}"


BETAS = [0.0, 0.5, 0.9, 0.95, 0.99, 0.999, 0.9999, 1 - 1e-9]  # fp32 makes 1 of the last
LRS = [0.0, 1e-42, 1e-8, 1e-3, 0.3]
EPS = [0.0, 1e-15, 1e-8, 1e-3]
DECAYS = [0.0, 1e-50, 1e-30, 0.01, 0.1, -0.1]
AWKWARD = [torch.inf, -torch.inf, torch.nan, 1e38, 1e25, 1e-45, -0.0, 0.0]


@pytest.mark.parametrize("block", range(10))
def test_hyperparameters_at_random(op: Any, block: int) -> None:
    for seed in range(40 * block, 40 * block + 40):
        chance, generator = random.Random(seed), torch.Generator().manual_seed(seed)
        elements = 128 * chance.randrange(1, 9)
        created_with = betas = chance.choice(BETAS), chance.choice(BETAS)
        adamw, step = chance.random() < 0.5, chance.choice([0, 0, 7, 100, 10**6])
        master = torch.randn(elements, generator=generator)
        expected = State(master, master.flip(0), master.square().flip(0))
        master[:3] = torch.tensor([0.0, -0.0, 1e-40])
        for one in expected:
            one[chance.randrange(9) :: 9] = chance.choice(AWKWARD)
        found, powers = expected.clone(), Powers(*created_with)
        with adams(op, 1, *created_with, adamw=adamw) as (stock,):
            for _ in range(6):
                step = chance.choice([step + 1, step + 1, step + 1, max(step, 1), step + 50, 1])
                if chance.random() < 0.3:
                    betas = chance.choice(BETAS), chance.choice(BETAS)
                hyper = Hyper(
                    chance.choice([*LRS, chance.random()]), *betas, chance.choice(EPS), chance.choice(DECAYS),
                    chance.random() < 0.8, adamw,
                )  # fmt: skip
                gradient = gradient_of(elements, generator)
                gradient[2 :: chance.choice([50, 10_000])] = chance.choice(AWKWARD)
                expected.host_update(stock, step, hyper, gradient)
                found.update(gradient, powers.scalars(step, hyper))
                assert differing(expected, found) == 0, f"seed {seed}, step {step}, {hyper}"


def without_decay(*arguments: Any) -> None:
    update_(*arguments[:5], replace(arguments[5], decay=None))


def raw_square_root(*arguments: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(formula, "_square_root", lambda source, target: torch.sqrt(source, out=target))
        update_(*arguments)


def flushes_denormals(*arguments: Any) -> None:
    update_(*arguments)
    arguments[1][arguments[1].abs() < 1.2e-38] = 0


def spoils_the_gradient(*arguments: Any) -> None:
    update_(*arguments)
    arguments[3].copy_(arguments[4])


def without_fma(*arguments: Any) -> None:
    master, scratch, scalars = arguments[0].clone(), arguments[4], arguments[5]
    update_(*arguments)
    if scalars.decay is not None and scalars.adamw:
        arguments[0].copy_(master + scalars.decay * master + scalars.step_size * scratch)
    else:
        arguments[0].copy_(master + scalars.step_size * scratch)


def rounds_the_middle_up(source: torch.Tensor, target: torch.Tensor) -> None:
    if target.dtype != torch.bfloat16:
        target.copy_(source)
        return
    bits = source.view(torch.int32)
    target.copy_(torch.where(source.isfinite(), bits + 0x8000 & -(1 << 16), bits).view(torch.float32))


def rounds_the_middle_of_fp16_down(source: torch.Tensor, target: torch.Tensor) -> None:
    bits = source.float().view(torch.int32)
    is_middle = (bits & 0x1FFF) == 0x1000
    target.copy_((bits - is_middle.int()).view(torch.float32) if target.dtype == torch.float16 else source)


def saturates(source: torch.Tensor, target: torch.Tensor) -> None:
    greatest = torch.finfo(target.dtype).max
    target.copy_(source.clamp(-greatest, greatest) if target.dtype == torch.bfloat16 else source)


def loses_denormals_of_fp16(source: torch.Tensor, target: torch.Tensor) -> None:
    target.copy_(source)
    if target.dtype == torch.float16:
        target[target.abs() < torch.finfo(torch.float16).tiny] = 0


def multiplies_in_double(factor: float, gradient: torch.Tensor) -> None:
    gradient.copy_(gradient.double() * factor)


def multiplies_without_denormals(factor: float, gradient: torch.Tensor) -> None:
    gradient.mul_(factor)
    gradient[gradient.abs() < torch.finfo(torch.float32).tiny] = 0


WRONG: dict[str, list[Callable[..., None]]] = {
    "update_": [without_decay, raw_square_root, flushes_denormals, spoils_the_gradient, without_fma],
    "cast": [rounds_the_middle_up, rounds_the_middle_of_fp16_down, saturates, loses_denormals_of_fp16],
    "scale": [multiplies_in_double, multiplies_without_denormals],
}


@pytest.mark.parametrize(("name", "wrong"), [(name, wrong) for name, many in WRONG.items() for wrong in many])
@pytest.mark.parametrize("adamw", [True, False], ids=["AdamW", "L2"])
def test_the_trial_finds_what_rounds_in_another_way(
    op: Any, name: str, wrong: Callable[..., None], adamw: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(formula, name, wrong)
        assert not is_exact(op, CPU, adamw=adamw)
    assert is_exact(op, CPU, adamw=adamw)


def test_a_trial_that_fails_ends_its_object() -> None:
    alive: list[int] = []

    def fails(*_: Any) -> None:
        assert alive
        raise RuntimeError("out of memory")

    op = SimpleNamespace(
        create_adam=lambda opt_id, *_: alive.append(opt_id), adam_update=fails, destroy_adam=alive.remove
    )
    with pytest.raises(RuntimeError, match="out of memory"):
        is_exact(op, CPU, adamw=True)
    assert not alive


def test_bits_are_compared() -> None:
    zero = torch.tensor([0.0, torch.nan])
    assert same_bits(zero, -zero[:].neg()) and same_bits(zero, torch.tensor([0.0, -torch.nan]))
    assert not same_bits(zero, torch.tensor([-0.0, torch.nan]))
    assert not same_bits(zero, torch.tensor([torch.nan, torch.nan]))
