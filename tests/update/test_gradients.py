"""Training with stock gradients and with ours, bit for bit. As a script: one rank that trains all cases.

python test_gradients.py RANK RANKS PORT RESULTS
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

sys.path[:0] = [str(Path(__file__).parents[1])] if __name__ == "__main__" else []

import runs  # noqa: E402

from ds_tba.errors import IncompatibleError  # noqa: E402
from ds_tba.update.gradients import BUFFERS, METHODS, Gradients, obstacle  # noqa: E402

STEPS, WIDTH, ROWS = 5, 24, 4
TIMEOUT_S = 400


class Net(nn.Module):
    """Odd sizes, a parameter that lies in two pieces of the graph, and one that only some micro-steps use."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.wide = nn.Linear(WIDTH, 3 * WIDTH + 1)
        self.narrow = nn.Linear(3 * WIDTH + 1, WIDTH)
        self.sometimes = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor, uses: bool) -> Tensor:
        x = self.narrow(torch.tanh(self.wide(self.first(x))))
        x = self.first(x)
        if uses:
            x = x + self.sometimes(x)
        return self.last(x).float().square().mean()


@dataclass(frozen=True)
class Case:
    """How is trained. ``uses``: per step and micro-step, whether the parameter that is used sometimes is."""

    bf16: bool = True
    clip: float = 0.0
    accumulation: tuple[int, ...] = (1,)
    reduce_scatter: bool = True
    contiguous: bool = True
    overlap: bool = False
    ranks: int = 1
    uses: tuple[bool, ...] = (True,)
    looks: tuple[str, ...] = ("",)
    backwards: int = 1  # per step of the engine, at accumulation 1
    managed: bool = True
    dtype: str | None = None  # of the gradients; None: the model's
    stale: bool = False  # a micro-step adds to a gradient of an earlier step

    @property
    def config(self) -> dict[str, Any]:
        zero = {
            "stage": 3,
            "offload_optimizer": {"device": "cpu"},
            "sub_group_size": 1500,
            "reduce_bucket_size": 1200,
            "reduce_scatter": self.reduce_scatter,
            "contiguous_gradients": self.contiguous,
            "overlap_comm": self.overlap,
            "stage3_param_persistence_threshold": 30,
        }
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": ROWS,
            "gradient_accumulation_steps": self.accumulation[0],
            "gradient_clipping": self.clip,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
            "zero_optimization": zero,
            "bf16": {"enabled": self.bf16},
            "managed_gradient_accumulation": self.managed,
        }
        if self.dtype is not None:
            config["data_types"] = {"grad_accum_dtype": self.dtype}
        return config


SOMETIMES = (True, False, False, True, False, True, True)
CASES = {
    "plain": Case(),
    "float32": Case(bf16=False, clip=0.1),
    "clipped": Case(clip=0.1),
    "gradients in float32": Case(clip=0.1, dtype="fp32", accumulation=(1, 2)),
    "an unused parameter": Case(uses=SOMETIMES),
    "an unused parameter, clipped": Case(clip=0.1, uses=SOMETIMES),
    "accumulation 2": Case(clip=0.1, accumulation=(2,)),
    "accumulation 3, an unused parameter": Case(clip=0.1, accumulation=(3,), uses=SOMETIMES),
    "accumulation changes": Case(clip=0.1, accumulation=(1, 2, 1, 3, 1)),
    "all-reduce": Case(clip=0.1, reduce_scatter=False),
    "no bucket": Case(clip=0.1, contiguous=False),
    "overlap": Case(clip=0.1, overlap=True, accumulation=(1, 2)),
    "backward twice": Case(clip=0.1, backwards=2),
    "adds to the last step's": Case(clip=0.1, accumulation=(1, 1, 2), uses=(*[True] * 4, False, True), stale=True),
    "never used": Case(clip=0.1, uses=(False,)),
    "looks": Case(clip=0.1, looks=("get", "get, after", "partitions"), uses=SOMETIMES),
    "sets": Case(clip=0.1, looks=("set", "local", "vectorized", ""), uses=SOMETIMES),
    "sets, backward twice": Case(clip=0.1, looks=("set", "local", "vectorized", "get"), backwards=2),
    "boundary named afterwards": Case(clip=0.1, accumulation=(2,), managed=False),
    "boundary named again": Case(clip=0.1, looks=("finalize", "set, finalize")),
    "two ranks": Case(clip=0.1, ranks=2, uses=SOMETIMES, looks=("", "get", "set")),
    "two ranks, all-reduce": Case(clip=0.1, ranks=2, reduce_scatter=False, accumulation=(1, 2)),
    "two ranks, no bucket": Case(bf16=False, ranks=2, contiguous=False, looks=("", "get, after")),
    "two ranks, accumulation 3": Case(clip=0.1, ranks=2, accumulation=(3,), uses=SOMETIMES),
}  # fmt: skip


@dataclass
class Run:
    """What one training left to compare, by name."""

    engine: Any
    gradients: Gradients | None
    seen: dict[str, Tensor] = field(default_factory=dict)
    micro_steps: int = 0

    def note(self, name: str, value: Any) -> None:
        assert name not in self.seen
        value = value if isinstance(value, Tensor) else torch.tensor(value)
        self.seen[name] = value.detach().clone()

    def note_state(self, name: str, gradients: bool) -> None:
        """Everything that a step leaves."""
        if gradients and self.gradients is not None:
            self.gradients.settle()
        zero = self.engine.optimizer
        for number, master in enumerate(zero.fp32_partitioned_groups_flat):
            real = self.real_elements(number)
            self.note(f"{name} master {number}", master[real])
            if gradients:
                self.note(f"{name} gradient {number}", master.grad)
            for key, value in zero.optimizer.state[master].items():
                self.note(f"{name} {key} {number}", value)
            self.note(f"{name} parameters {number}", zero.fp16_partitioned_groups_flat[number][real])

    def real_elements(self, sub_group: int) -> Tensor:
        """Where a sub-group is not padding, which DeepSpeed leaves as it finds it in memory."""
        zero, real = self.engine.optimizer, []
        for parameter in zero.fp16_groups[sub_group]:
            elements = parameter.partition_numel()
            place = torch.arange(elements) + elements * self.engine.global_rank
            real.append(place < parameter.ds_numel)
        return torch.cat(real)

    def micro_step(self, uses: bool) -> None:
        torch.manual_seed(1000 * (1 + self.engine.global_rank) + self.micro_steps)
        x = torch.randn(ROWS, WIDTH)
        loss = self.engine(x.bfloat16() if self.engine.bfloat16_enabled() else x, uses)
        self.note(f"loss {self.micro_steps}", loss)
        self.engine.backward(loss)
        for number, norm in enumerate(self.engine.optimizer.norm_for_param_grads.values()):
            self.note(f"norm of {number} in {self.micro_steps}", norm)
        self.micro_steps += 1


def build(case: Case) -> Any:
    import deepspeed

    torch.manual_seed(0)
    net = Net()
    return deepspeed.initialize(model=net, model_parameters=net.parameters(), config=case.config)[0]


def look(run: Run, what: str, name: str) -> None:
    """What a user may ask for or set between backward and step."""
    from deepspeed.utils import safe_get_full_grad, safe_get_local_grad, safe_set_full_grad, safe_set_local_grad

    zero, module = run.engine.optimizer, run.engine.module
    if "partitions" in what:
        for group, partitions in zero.get_fp32_grad_partitions().items():
            for number, partition in partitions.items():
                run.note(f"{name} partition {group} {number}", partition)
    for key, parameter in module.named_parameters():
        if "get" in what:
            run.note(f"{name} {key}", safe_get_full_grad(parameter))
            run.note(f"{name} local {key}", safe_get_local_grad(parameter))
        even = parameter.ds_numel % max(1, torch.distributed.get_world_size()) == 0
        if "set" in what and even and "bias" not in key:
            safe_set_full_grad(parameter, torch.full(parameter.ds_shape, 0.01 * run.micro_steps))
        if "local" in what and "bias" in key:
            safe_set_local_grad(parameter, torch.full_like(parameter.ds_tensor, -0.02))
    if "vectorized" in what:
        zero.update_fp32_grad_for_param_vectorized(lambda gradient, _: gradient * 1.5, [module.wide.weight])
    if "finalize" in what:
        zero.finalize_gradient_accumulation_boundary()


def train(case: Case, put: Callable[[Any], Gradients | None], gradients: bool = True) -> Run:
    """Args: gradients: whether those of all steps are compared, not only those of the last step."""
    engine = build(case)
    engine.optimizer.stale = case.stale
    run = Run(engine, put(engine.optimizer))
    uses = (case.uses * 100).__getitem__
    for step in range(STEPS):
        accumulation = case.accumulation[step % len(case.accumulation)]
        if accumulation != engine.gradient_accumulation_steps():
            engine.set_train_batch_size(accumulation * ROWS * engine.dp_world_size)
        what = case.looks[step % len(case.looks)]
        for micro_step in range(accumulation):
            for _ in range(case.backwards):
                run.micro_step(uses(run.micro_steps))
                if "after" not in what:
                    look(run, what, f"{run.micro_steps} before step {step}")
            if case.managed or micro_step == accumulation - 1:
                engine.step()
        if case.clip:
            run.note(f"norm {step}", engine.get_global_grad_norm())
        if "after" in what:
            look(run, what, f"after step {step}")
        run.note_state(f"step {step}", gradients or step == STEPS - 1)
    return run


def train_on(run: Run) -> None:
    """After ours is taken off."""
    run.engine.set_train_batch_size(2 * ROWS * run.engine.dp_world_size)
    for _ in range(4):
        run.micro_step(True)
        run.engine.step()
    run.note_state("further", gradients=True)


def same(stock: Run, ours: Run) -> None:
    missing = stock.seen.keys() - ours.seen.keys()
    assert not ours.seen.keys() - stock.seen.keys() and all(" gradient " in name for name in missing)
    different = [name for name, value in ours.seen.items() if not torch.equal(value, stock.seen[name])]
    assert not different, f"{len(different)} of {len(stock.seen)} differ: {different[:20]}"


# ---- in one process per rank ----------------------------------------------------------------------------------------

CHECKS: dict[str, Callable[[], None]] = {}


def check(function: Callable[[], None]) -> Callable[[], None]:
    CHECKS[function.__name__.replace("_", " ")] = function
    return function


def drawn(seed: int, ranks: int) -> Case:
    """Any training, to which direct gradients are not put."""
    chance = random.Random(seed)
    looks = ["", "", "get", "get, after", "set", "local", "vectorized", "finalize"]
    return Case(
        bf16=chance.random() < 0.7,
        clip=chance.choice([0.0, 0.1, 0.1]),
        accumulation=tuple(chance.choice([1, 1, 2, 3]) for _ in range(chance.randint(1, 4))),
        reduce_scatter=chance.random() < 0.5,
        contiguous=chance.random() < 0.5,
        ranks=ranks,
        uses=tuple(chance.random() < 0.6 for _ in range(chance.randint(1, 9))),
        looks=tuple(chance.choice(looks) for _ in range(chance.randint(1, 4))),
        backwards=chance.choice([1, 1, 2]),
        stale=True,
    )


CASES |= {f"drawn {seed}": drawn(seed, 1) for seed in range(10)}
CASES |= {f"two ranks, drawn {seed}": drawn(seed, 2) for seed in range(10, 13)}
CPU = torch.device("cpu")
ALL = 1 << 30


def direct(zero: Any) -> Gradients:
    return Gradients(zero, CPU, direct=True, device_gradient_bytes=0)


def kept(zero: Any) -> Gradients:
    return Gradients(zero, CPU, direct=False, device_gradient_bytes=ALL)


class Consumer:
    """An update in slices that takes gradients from the device where it finds them there, mostly."""

    def __init__(self, zero: Any, gradients: Gradients, to_device: float = 0.7) -> None:
        self.zero, self.gradients, self.to_device = zero, gradients, to_device
        self.chance = random.Random(0)
        self.factor, self.from_device = 1.0, 0
        self.stock_step = zero._optimizer_step
        zero.unscale_and_clip_grads = self.note_factor
        zero._optimizer_step = self.step

    def note_factor(self, sub_group: int, total_norm: Tensor) -> None:
        self.factor = 1.0
        if self.zero.clip_grad > 0.0:
            clip = ((total_norm / self.zero.loss_scale) + 1e-6) / self.zero.clip_grad
            self.factor = float(1.0 / (torch.clamp(clip, min=1.0) * self.zero.loss_scale))

    def step(self, sub_group: int) -> None:
        master = self.zero.fp32_partitioned_groups_flat[sub_group]
        host, slices = master.grad, []
        for start in range(0, master.numel(), 128):
            place = sub_group, start, min(start + 128, master.numel())
            gradient = self.gradients.on_device(*place)
            if gradient is not None and self.chance.random() < self.to_device:
                slices.append(gradient.float() * self.factor)
                self.from_device += 1
            else:
                slices.append(self.gradients.on_host(*place).mul_(self.factor).clone())
        master.grad = torch.cat(slices)
        self.stock_step(sub_group)
        master.grad = host
        if sub_group == len(self.zero.fp32_partitioned_groups_flat) - 1:
            self.gradients.after_step(self.factor)


def consumed(zero: Any) -> Gradients:
    gradients = kept(zero)
    zero.consumer = Consumer(zero, gradients)
    return gradients


def half_consumed(zero: Any) -> Gradients:
    half = zero.grad_partitions_flat_buffer.nbytes // 2
    gradients = Gradients(zero, CPU, direct=not zero.stale, device_gradient_bytes=half)
    assert zero.grad_partitions_flat_buffer.nbytes // 4 < gradients.kept_bytes
    zero.consumer = Consumer(zero, gradients)
    return gradients


@cache
def stock_run(case: Case) -> Run:
    run = train(case, lambda _: None)
    train_on(run)
    return run


def compare(case: Case, put: Callable[[Any], Gradients]) -> None:
    """Ours against stock."""
    ours = train(case, put, gradients=put is direct)
    zero, gradients = ours.engine.optimizer, ours.gradients
    assert gradients is not None
    if put is direct:
        assert (gradients.direct_bytes > 0) == (case.managed and 1 in case.accumulation)
    if hasattr(zero, "consumer"):
        assert zero.consumer.from_device > 0 or all(case.looks)
        del zero.consumer, zero.unscale_and_clip_grads, zero._optimizer_step
    gradients.remove()
    assert not set(METHODS) & set(vars(zero))
    train_on(ours)
    same(stock_run(case), ours)


for name, case in CASES.items():
    puts = [kept, consumed, half_consumed] if case.stale else [direct, kept, consumed, half_consumed]
    for put in puts:
        CHECKS[f"{put.__name__.replace('_', ' ')}, {name}"] = partial(compare, case, put)


@check
def nothing_is_copied_into_the_low_precision_buffer() -> None:
    run = Run(engine := build(Case()), direct(engine.optimizer))
    buffer = engine.optimizer.grad_partitions_flat_buffer
    for _ in range(3):
        buffer.fill_(77)
        run.micro_step(True)
        assert (buffer == 77).all()
        engine.step()
        assert (buffer == 77).all()
    assert run.gradients is not None and run.gradients.direct_bytes == 3 * 2 * 2 * buffer.numel()


@check
def the_low_precision_buffer_is_filled_when_micro_steps_follow() -> None:
    run = Run(engine := build(Case(accumulation=(2,))), direct(engine.optimizer))
    buffer = engine.optimizer.grad_partitions_flat_buffer.fill_(77)
    run.micro_step(True)
    assert not (buffer == 77).any() and run.gradients is not None and run.gradients.direct_bytes == 0


@check
def a_gradient_that_stock_adds_to_the_last_step_s_is_refused() -> None:
    run = Run(engine := build(Case(clip=0.1)), direct(engine.optimizer))
    for _ in range(2):
        run.micro_step(True)
        engine.step()
    engine.set_train_batch_size(2 * ROWS)
    run.micro_step(False)
    engine.step()
    with pytest.raises(IncompatibleError, match=r"shape \(24,.*in micro-step 1.*\"direct_gradients\" to false"):
        run.micro_step(True)


def takes_all(case: Case, accumulation: int = 1) -> tuple[Run, Gradients]:
    """An update that has every gradient on the device."""
    run = Run(engine := build(case), kept(engine.optimizer))
    assert run.gradients is not None
    zero = engine.optimizer
    zero.consumer = Consumer(zero, run.gradients, to_device=1.0)
    for _ in range(3):
        for _ in range(accumulation):
            run.micro_step(True)
            engine.step()
    elements = [master.numel() for master in zero.fp32_partitioned_groups_flat]
    assert zero.consumer.from_device == 3 * sum(-(-count // 128) for count in elements)
    assert zero.consumer.factor < 1 and run.gradients.kept_bytes == zero.grad_partitions_flat_buffer.nbytes
    return run, run.gradients


@check
def what_the_device_uses_never_reaches_the_host() -> None:
    run, gradients = takes_all(Case(clip=0.1))
    assert gradients.settled_bytes == 0 and not run.engine.optimizer.grad_partitions_flat_buffer.any()
    assert not any(master.grad.any() for master in run.engine.optimizer.fp32_partitioned_groups_flat)
    gradients.settle()
    assert gradients.settled_bytes == 2 * gradients.kept_bytes  # bfloat16 there, float32 here
    assert all(master.grad.any() for master in run.engine.optimizer.fp32_partitioned_groups_flat)
    gradients.settle()
    assert gradients.settled_bytes == 2 * gradients.kept_bytes


@check
def what_is_padding_on_two_ranks_stays_on_the_device() -> None:
    _, gradients = takes_all(Case(clip=0.1, ranks=2))
    assert gradients.settled_bytes == 0


@check
def accumulation_settles_once_per_step() -> None:
    _, gradients = takes_all(Case(clip=0.1, accumulation=(3,)), accumulation=3)
    assert gradients.settled_bytes == 2 * 2 * gradients.kept_bytes  # before the second and the third step


@check
def only_whole_parameters_from_the_end_that_fit_are_kept() -> None:
    zero = build(Case()).optimizer
    sizes = [one.partition_numel() for group in zero.fp16_groups for one in group]
    for count in range(len(sizes) + 1):
        fits = 2 * sum(sizes[len(sizes) - count :])
        gradients = Gradients(zero, CPU, direct=False, device_gradient_bytes=fits + 1)
        assert gradients.kept_bytes == fits
        elements = zero.fp32_partitioned_groups_flat[-1].numel()
        last = gradients.on_device(len(zero.fp16_groups) - 1, elements - 1, elements)
        assert (last is None) == (count == 0)
        gradients.remove()


@check
def whoever_has_views_of_all_gradients_sees_each_new_one() -> None:
    seen = []
    for put in (lambda _: None, kept):
        run = Run(engine := build(Case(clip=0.1)), put(engine.optimizer))
        run.micro_step(True)
        views = engine.optimizer.get_fp32_grad_partitions()
        for _ in range(2):
            engine.step()
            run.micro_step(True)
            for group, partitions in views.items():
                for number, partition in partitions.items():
                    run.note(f"{run.micro_steps} {group} {number}", partition)
        seen.append(run)
    same(*seen)


class LateStream:
    """Fills tensors when it is waited for; until then they hold something else."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self.late = [(tensor, tensor.clone()) for tensor in tensors]
        for tensor in tensors:
            tensor.fill_(77)

    def synchronize(self) -> None:
        for tensor, value in self.late:
            tensor.copy_(value)
        self.late = []


ASKS: dict[str, Callable[[Gradients, Any], Any]] = {
    "on_device": lambda gradients, zero: gradients.on_device(0, 0, 5),
    "on_host": lambda gradients, zero: gradients.on_host(0, 0, 5),
    "settle": lambda gradients, zero: gradients.settle() or zero.fp32_partitioned_groups_flat[0].grad[:5],
    "remove": lambda gradients, zero: gradients.remove() or zero.fp32_partitioned_groups_flat[0].grad[:5],
    "get": lambda gradients, zero: zero.get_local_fp32_grad_for_param(zero.fp16_groups[0][0])[:5],
    "partitions": lambda gradients, zero: zero.get_fp32_grad_partitions()[0][0][:5],
    "stock": lambda gradients, zero: (
        zero.unscale_and_clip_grads(0, None) or zero.fp32_partitioned_groups_flat[0].grad[:5]
    ),
}


@check
def whoever_asks_waits_for_the_reduction() -> None:
    run = Run(engine := build(Case()), None)
    run.micro_step(True)
    expected = engine.optimizer.fp32_partitioned_groups_flat[0].grad[:5].clone()
    assert expected.any()
    for name, ask in ASKS.items():
        run = Run(engine := build(Case()), kept(engine.optimizer))
        assert run.gradients is not None
        run.micro_step(True)
        late = LateStream([region.gradients for region in run.gradients._regions.values()])
        engine.optimizer.reduce_and_partition_stream = late
        found = ask(run.gradients, engine.optimizer)
        assert torch.equal(found.float(), expected), name
        engine.optimizer.reduce_and_partition_stream = None


@check
def whoever_asks_after_a_buffer_was_filled_in_backward_waits_too() -> None:
    engine = build(Case())
    zero = engine.optimizer
    half = zero.grad_partitions_flat_buffer.nbytes // 2
    gradients = Gradients(zero, CPU, direct=True, device_gradient_bytes=half)
    run, last = Run(engine, gradients), zero.fp32_partitioned_groups_flat[-1].numel()
    for _ in range(2):
        run.micro_step(True)
    zero.reduce_and_partition_stream = LateStream([region.gradients for region in gradients._regions.values()])
    found = gradients.on_device(len(zero.fp16_groups) - 1, last - 1, last)
    zero.reduce_and_partition_stream = None
    assert found is not None and not (found == 77).any()


@check
def the_low_precision_buffer_is_filled_from_what_has_arrived() -> None:
    run = Run(engine := build(Case()), None)
    run.micro_step(True)
    expected = engine.optimizer.grad_partitions_flat_buffer.clone()
    run = Run(engine := build(Case()), direct(engine.optimizer))
    run.micro_step(True)
    zero = engine.optimizer
    zero.reduce_and_partition_stream = LateStream([master.grad for master in zero.fp32_partitioned_groups_flat])
    zero.get_fp32_grad_partitions()
    assert torch.equal(zero.grad_partitions_flat_buffer, expected)
    zero.reduce_and_partition_stream = None


@check
def an_error_in_stock_leaves_the_buffers_in_place() -> None:
    engine = build(Case())
    zero = engine.optimizer
    before = dict(getattr(zero, BUFFERS))
    gradients = direct(zero)
    zero._constant_buffered_norm2 = lambda _: 1 / 0
    with pytest.raises(ZeroDivisionError):
        Run(engine, gradients).micro_step(True)
    assert all(before[number] is buffer for number, buffer in getattr(zero, BUFFERS).items())


@check
def an_override_that_came_later_stays() -> None:
    engine = build(Case())
    gradients, zero, calls = direct(engine.optimizer), engine.optimizer, []
    ours = zero._pre_step
    zero._pre_step = lambda: (calls.append(1), ours())
    gradients.remove()
    Run(engine, None).micro_step(True)
    engine.step()
    assert calls == [1] and "partition_grads" not in vars(zero)


@check
def obstacles_are_named() -> None:
    zero = build(Case()).optimizer
    assert obstacle(zero) is None
    zero.partition_grads = zero.partition_grads
    with pytest.raises(IncompatibleError, match=r"partition_grads of .* set \"direct_gradients\" to false"):
        direct(zero)
    del zero.partition_grads
    for name, value, said in [
        ("dtype", torch.float16, "fp16"),
        ("swap_optimizer", True, "offload_optimizer"),
        ("offload_optimizer", False, "offload_optimizer"),
        ("master_weights_and_grads_dtype", torch.bfloat16, "bfloat16"),
    ]:
        before = getattr(zero, name)
        setattr(zero, name, value)
        assert said in str(obstacle(zero))
        setattr(zero, name, before)
    buffers = getattr(zero, BUFFERS)
    delattr(zero, BUFFERS)
    with pytest.raises(IncompatibleError, match=f"no {BUFFERS}"):
        direct(zero)
    setattr(zero, BUFFERS, buffers)


def main(rank: int, ranks: int, port: str, path: Path) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, LOCAL_WORLD_SIZE=str(ranks))
    torch.set_num_threads(1)
    import cpuinfo  # type: ignore[import-untyped]

    cpuinfo.get_cpu_info = cache(cpuinfo.get_cpu_info)  # DeepSpeed asks a new process for it at every engine
    problems = {}
    for name in names(ranks):
        problems[name] = ""
        try:
            CHECKS[name]()
        except (Exception, pytest.fail.Exception):  # noqa: BLE001 - told by the test of this name
            problems[name] = traceback.format_exc()
            if ranks > 1:
                break  # the other rank may wait in a collective
    path.write_text(json.dumps(problems))
    import deepspeed

    if not any(problems.values()):
        deepspeed.comm.destroy_process_group()
    os._exit(0)


def names(ranks: int) -> list[str]:
    return [name for name in CHECKS if ("two ranks" in name) == (ranks == 2)]


# ---- as tests -------------------------------------------------------------------------------------------------------


@cache
def problems(ranks: int, directory: Path) -> dict[str, str]:
    """What each check said, of all ranks."""
    port, said = runs.free_port(), dict[str, str]()
    paths = [directory / f"{ranks}.{rank}.json" for rank in range(ranks)]
    outputs = [directory / f"{ranks}.{rank}.out" for rank in range(ranks)]
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, str(rank), str(ranks), str(port), str(paths[rank])],
            env=runs.environment(),
            stdout=outputs[rank].open("w"),
            stderr=subprocess.STDOUT,
        )
        for rank in range(ranks)
    ]
    try:
        for process in processes:
            process.wait(timeout=TIMEOUT_S)
    finally:
        for process in processes:
            process.kill()
            process.wait()
        runs.remove_shared_memory(port)
    for path, output in zip(paths, outputs, strict=True):
        assert path.exists(), output.read_text()
        for name, problem in json.loads(path.read_text()).items():
            said[name] = said.get(name, "") + problem
    return said


@pytest.fixture(scope="session")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield tmp_path_factory.mktemp("gradients")


@pytest.mark.engine
@pytest.mark.parametrize("name", CHECKS)
def test_check(name: str, directory: Path) -> None:
    said = problems(2 if "two ranks" in name else 1, directory)
    assert said.get(name, "was not run") == "", said.get(name, "an earlier check of these ranks failed")


def test_another_optimizer_is_refused() -> None:
    with pytest.raises(IncompatibleError, match=r"ZeRO-3 optimizer has no .*partition_grads"):
        direct(SimpleNamespace())


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4]))
