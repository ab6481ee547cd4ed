"""Recipes and rules: what is found is the same bits; what cannot be known is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import Parameter, functional

from ds_tba.core.cache import TensorCache
from ds_tba.core.tensors import mark_inputs, mark_owned
from ds_tba.device.accelerator import Accelerator
from ds_tba.errors import StateError
from ds_tba.remat.recipe import MAX_STEPS, UNSAVED, AsInForward, Recipe
from ds_tba.remat.rules import RULES, NoRecipeError
from ds_tba.remat.sites import MAX_BETWEEN_FACTOR, Sites
from ds_tba.remat.store import RematStore

SIZE = (12, 34)
SPECIAL = [0.0, -0.0, float("inf"), float("-inf"), float("nan"), 1e-40, -1e-40, 3e38, -3e38, 65504.0, 88.8, -104.0]
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])

Make = Callable[[Tensor, Tensor], Tensor]


MAKES: dict[str, Make] = {
    "MulBackward0": lambda a, b: a * b,
    "DivBackward0": lambda a, b: a / b,
    "AddBackward0": lambda a, b: torch.add(a, b, alpha=0.3),
    "SubBackward0": lambda a, b: torch.sub(a, b, alpha=-2),
    "SiluBackward0": lambda a, b: functional.silu(a),
    "GeluBackward0": lambda a, b: functional.gelu(a, approximate="tanh"),
    "ReluBackward0": lambda a, b: functional.relu(a),
    "SoftplusBackward0": lambda a, b: functional.softplus(a, 2, 10),
    "GluBackward0": lambda a, b: functional.glu(a, 1),
    "SigmoidBackward0": lambda a, b: torch.sigmoid(a),
    "TanhBackward0": lambda a, b: torch.tanh(a),
    "ExpBackward0": lambda a, b: torch.exp(a),
    "RsqrtBackward0": lambda a, b: torch.rsqrt(a),
    "SinBackward0": lambda a, b: torch.sin(a),
    "NegBackward0": lambda a, b: -a,
    "PowBackward0": lambda a, b: a**3,
    "ClampMinBackward0": lambda a, b: a.clamp_min(-0.5),
    "ClampBackward1": lambda a, b: a.clamp(-1, 2),
    "NativeLayerNormBackward0": lambda a, b: functional.layer_norm(a, SIZE[1:], a[0].detach(), None, 0.1),
    "SoftmaxBackward0": lambda a, b: torch.softmax(a, -1),
    "NativeDropoutBackward0": lambda a, b: torch.native_dropout(a, 0.3, True)[0],
    "IndexBackward0": lambda a, b: a[torch.tensor([1, 1, 0]), :],
    "ToCopyBackward0": lambda a, b: a.to(torch.float16),
    "CloneBackward0": lambda a, b: a.clone(),
    "UnsafeViewBackward0": lambda a, b: a.t().reshape(SIZE),
    # Between two ops.
    "ViewBackward0": lambda a, b: a.view(-1).exp(),
    "UnsqueezeBackward0": lambda a, b: a[None].exp(),
    "SqueezeBackward0": lambda a, b: a[None].squeeze().exp(),
    "SqueezeBackward1": lambda a, b: a[None].squeeze(0).exp(),
    "TBackward0": lambda a, b: a.t().exp(),
    "TransposeBackward0": lambda a, b: a.transpose(0, -1).exp(),
    "PermuteBackward0": lambda a, b: a.permute(1, 0).exp(),
}
OTHER_FORMS: list[Make] = [
    lambda a, b: functional.gelu(a),
    lambda a, b: a * 0.3,
    lambda a, b: a / 3,
    lambda a, b: a * torch.tensor(0.3),
    lambda a, b: a**0.5,
    lambda a, b: a**2,
    lambda a, b: a.clamp(max=1),
    lambda a, b: functional.softplus(a),
    lambda a, b: functional.layer_norm(a, SIZE, a, b, 1e-3),
    lambda a, b: torch.softmax(a, 0),
    *(lambda a, b, p=p: torch.native_dropout(a, p, True)[0] for p in (0.0, 0.1, 0.9, 1.0)),
    lambda a, b: a[:, torch.tensor([2, 2])],
    lambda a, b: a[torch.arange(SIZE[0]) > 3],
    lambda a, b: torch.exp(torch.exp(a.t()) + functional.silu(b).t()),
    lambda a, b: (a + b).t().clone(),
]


def values(seed: int, dtype: torch.dtype = torch.float32, rows: int = SIZE[0]) -> Parameter:
    """Random numbers, and special ones among them."""
    drawn = torch.randn(rows, SIZE[1], generator=torch.Generator().manual_seed(seed)) * 3
    drawn[1::3, : len(SPECIAL)] = torch.tensor(SPECIAL)
    drawn[2::3, -len(SPECIAL) :] = torch.tensor(SPECIAL[::-1])
    return Parameter(drawn.to(dtype))


def bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(torch.uint8)


class Run:
    """A cache that keeps, with what is found in it."""

    def __init__(self, exclude: frozenset[str] = frozenset()) -> None:
        self.cache = TensorCache([], "cpu", 1)
        self.sites = Sites(self.cache, Accelerator(), exclude)
        self.cache.rematerialize(RematStore(self.cache, self.sites))

    def find(self, make: Make, *of_values: Any) -> tuple[Tensor, Recipe | None]:
        """Of what is made of two activations with values, which are saved elsewhere."""
        with self.cache.saving():
            a, b = (values(seed, *of_values).clone() for seed in (0, 1))
            self.saved = [one.sin() for one in (a, b)]
            made = make(a, b)
            return made, self.sites.find(made)

    def refusal(self, make: Make) -> str:
        with pytest.raises(NoRecipeError) as refused:
            self.find(make)
        return str(refused.value)


def made_by(recipe: Recipe) -> Tensor:
    with AsInForward():
        return recipe.make({id(one): one.restore() for one in recipe.held})


# ---- rules ----------------------------------------------------------------------------------------------------------


def test_every_rule_has_a_case() -> None:
    of_other_ops = {"FusedRmsNormBackward0"}  # on a CPU; see below
    assert set(MAKES) | of_other_ops == {name for name, rule in RULES.items() if rule.operands}


def test_what_a_node_no_longer_holds_costs_the_recipe_and_no_more() -> None:
    run, name = Run(), "PowBackward0"
    gone = replace(RULES[name], constants=("exponent_of_old",))
    run.sites.rules = {**run.sites.rules, name: gone}
    assert "has no _saved_exponent_of_old" in run.refusal(MAKES[name])
    a = values(0).requires_grad_()
    with run.cache.saving():
        loss = a.sin().pow(2.5).exp().sum()
    loss.backward()
    assert a.grad is not None and any("exponent_of_old" in one for one in run.sites.summary()["refused_sites"])


@dtypes
@pytest.mark.parametrize(("name", "make"), [*MAKES.items(), *((None, make) for make in OTHER_FORMS)])
def test_a_rule_makes_the_same_bits(name: str | None, make: Make, dtype: torch.dtype) -> None:
    made, recipe = Run().find(make, dtype)
    assert recipe is not None and (name is None or any(one.rule is RULES[name] for one in recipe.steps))
    again = made_by(recipe)
    assert again.dtype == made.dtype and again.shape == made.shape
    assert torch.equal(bits(again), bits(made))


@dtypes
@pytest.mark.parametrize("eps", [None, 1e-3])
def test_a_fused_rms_norm_is_made_by_the_op_that_made_it(eps: float | None, dtype: torch.dtype) -> None:
    """Its epsilon is known on a GPU only: on a CPU, PyTorch's function is made of other ops."""
    a, weight = values(0, dtype), values(1, dtype)[0].detach()
    made = torch.ops.aten._fused_rms_norm(a, SIZE[1:], weight, eps)[0]
    rule = RULES["FusedRmsNormBackward0"]
    assert torch.equal(bits(rule.make(a, weight, SIZE[1:], eps)), bits(made))


# ---- what cannot be known -------------------------------------------------------------------------------------------


def test_ops_are_left_out_also_between_others() -> None:
    run = Run(frozenset({"neg"}))
    assert run.find(lambda a, b: -a)[1] is None
    assert run.find(lambda a, b: 1 - a)[1] is None  # for which there is no rule
    assert run.refusal(lambda a, b: torch.relu((-a).t() + b.t())) == UNSAVED


def repeated(op: Callable[[Tensor], Tensor], count: int) -> Make:
    def make(a: Tensor, _: Tensor) -> Tensor:
        for _ in range(count):
            a = op(a)
        return a.exp()

    return make


def test_a_recipe_has_no_more_than_so_many_steps_and_bytes_between_and_an_op_that_is_wanted_twice_once() -> None:
    for op, count in ((Tensor.t, MAX_STEPS - 1), (lambda a: a + a, MAX_BETWEEN_FACTOR)):
        recipe = Run().find(repeated(op, count))[1]
        assert recipe is not None and len(recipe.steps) == count + 1
        assert Run().refusal(repeated(op, count + 1)) == "too many steps"


def test_a_norm_is_made_with_its_own_epsilon() -> None:
    run = Run()
    for eps in (1e-5, 0.5):
        made, recipe = run.find(lambda x, _, eps=eps: functional.layer_norm(x, SIZE[1:], eps=eps))
        assert recipe is not None and torch.equal(bits(made_by(recipe)), bits(made))
    refusal = run.refusal(lambda x, _: torch.native_layer_norm(x, SIZE[1:], None, None, 1e-5)[0])
    assert refusal == "a norm whose eps is not known"


def double_in_place(tensor: Tensor) -> None:
    with torch.no_grad():
        tensor.mul_(2)


def with_a_changed_operand(a: Tensor, b: Tensor) -> Tensor:
    held = a.neg()
    made = held * b
    double_in_place(held)
    return made


def changed_itself(a: Tensor, b: Tensor) -> Tensor:
    made = a * b
    double_in_place(made[:1])
    return made


def with_a_weight_that_zero3_let_go_of(a: Tensor, _: Tensor) -> Tensor:
    weight = Parameter(torch.ones(SIZE[1]))
    made = a * weight
    weight.data = torch.empty(0)
    return made


def behind(order: Callable[[Tensor], Tensor]) -> Make:
    """What is made of a copy: it may have another order of elements, and other loops round other last bits."""
    return lambda a, _: torch.sigmoid(order(functional.silu(a).view(2, 6, 17, 2)))


GIVEN = torch.randn(SIZE)
mark_inputs([GIVEN])
LEAF, OWNED = torch.randn(SIZE).requires_grad_(), Parameter(torch.randn(SIZE))


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda a, _: a + 1, UNSAVED),
        (lambda a, b: a + b.detach(), UNSAVED),
        (lambda a, _: torch.exp(a.cumsum(0)), UNSAVED),
        (lambda a, b: torch.exp(a.masked_fill(b > 0, 0.5)), UNSAVED),
        (lambda a, _: a * GIVEN, "an input of the model"),
        (lambda a, _: LEAF.exp(), "an input of the model"),
        # DeepSpeed changes them without a version, between two backwards of one forward, say.
        (lambda a, _: (a * OWNED).neg(), "a parameter or buffer of a module"),
        (lambda a, _: a + OWNED, "a parameter"),
        (lambda a, _: OWNED.bfloat16(), "a parameter"),
        (with_a_weight_that_zero3_let_go_of, "a parameter or buffer of a module"),
        (with_a_changed_operand, "an operand was changed in place"),
        (changed_itself, "changed in place, or a part of its storage"),
        (behind(lambda h: h.contiguous(memory_format=torch.channels_last)), "behind a copy"),
        (behind(lambda h: h.to(memory_format=torch.channels_last)), "behind a copy"),
        (behind(lambda h: h.permute(0, 2, 3, 1).clone()), "behind a copy"),
        (behind(lambda h: h.to(torch.float64)), "behind a copy"),
    ],
)
def test_what_is_not_known_or_may_be_another_by_backward_is_refused(make: Make, why: str) -> None:
    assert Run().refusal(make) == why


@pytest.mark.parametrize("factor", [torch.randn(SIZE), torch.tensor(0.5)], ids=["a tensor", "one without dimensions"])
def test_hooks_of_the_user_are_not_called(factor: Tensor) -> None:
    calls = []

    def make(a: Tensor, b: Tensor) -> Tensor:
        with saved_tensors_hooks(lambda tensor: (calls.append("pack"), tensor)[1], lambda held: calls.append("unpack")):
            outside = a * factor
        calls.append("made")
        return torch.exp(outside.t() + b.t())

    assert Run().refusal(make) == "saved by hooks of the user"
    assert calls == ["pack", "made"]


def test_of_what_a_norm_saves_of_its_module_a_copy_is_the_operand() -> None:
    module = torch.nn.BatchNorm1d(SIZE[1])
    mark_owned(module)
    owned = module.running_var
    assert owned is not None
    run = Run()
    made, recipe = run.find(lambda a, _: a * owned, torch.float32, 64)
    assert recipe is not None
    stats = run.cache.stats
    expected, before = made.detach().clone(), (stats.resident.now, stats.saved.now)
    recipe = recipe.owned(run.cache)
    owned.data.mul_(3)  # as DeepSpeed does, without a version
    assert torch.equal(bits(made_by(recipe)), bits(expected))
    assert (stats.resident.now, stats.saved.now) == (before[0] + owned.nbytes, before[1])
    # Not small beside what need not be saved.
    assert "a parameter" in run.refusal(lambda a, _: a * owned)


def test_graphs_of_earlier_forwards_are_not_entered() -> None:
    run = Run()
    with run.cache.saving():
        carried = functional.silu(values(0) * 2)
    run.sites.begin_forward()
    for make in (lambda *_: torch.relu(carried.t()), lambda *_: carried):
        assert run.refusal(make) == "made in an earlier forward"


def test_an_op_in_place_that_would_promote_is_not_made() -> None:
    scale = torch.ones(SIZE[1])

    def make(a: Tensor, b: Tensor) -> Tensor:
        h = functional.silu(a) * b
        h.mul_(scale)
        return torch.relu(-h)

    made, recipe = Run().find(make, torch.bfloat16)
    assert recipe is not None and made.dtype == torch.bfloat16
    with pytest.raises(NoRecipeError, match="another shape or dtype"):
        made_by(recipe)


def test_an_operand_changed_between_two_uses_is_not_taken_for_the_first() -> None:
    a, b = (Parameter(torch.randn(SIZE)) for _ in range(2))

    def forward(changes: bool) -> tuple[Tensor, ...]:
        held, other = functional.silu(a * 2), b * 2
        kept, made = [other.sin()], held + other
        if changes:
            double_in_place(held)
        kept.append(held.sin())  # saves it, as it is now
        return made.sin(), *kept

    run = Run()
    for changes in (False, False, True):
        plain = torch.autograd.grad(forward(changes)[0].sum(), [a, b])
        with run.cache.saving():
            loss, *kept = forward(changes)
        assert all(map(torch.equal, torch.autograd.grad(loss.sum(), [a, b]), plain))
        del kept
    assert run.cache.stats.rematerialized_bytes


@contextmanager
def while_set(change: Callable[[Any], object], to: object, before: object) -> Iterator[None]:
    change(to)
    yield
    change(before)


@pytest.mark.parametrize(
    "other_kernels",
    [
        lambda: torch.backends.mkldnn.flags(enabled=False, allow_tf32=False),
        lambda: while_set(torch.set_flush_denormal, True, False),
        lambda: while_set(torch.set_num_threads, torch.get_num_threads() + 1, torch.get_num_threads()),
    ],
    ids=["oneDNN", "flushing", "threads"],
)
def test_kernels_that_round_differently_than_in_forward_are_refused(
    other_kernels: Callable[[], AbstractContextManager[Any]],
) -> None:
    run, a = Run(), Parameter(torch.randn(SIZE))
    with run.cache.saving():
        loss = functional.silu(a * 2).sin().sum()
    with other_kernels(), pytest.raises(StateError, match=r'output of silu.* was changed.*"exclude": \["silu"\]'):
        loss.backward(retain_graph=True)
    loss.backward()
    assert run.cache.stats.rematerialized_bytes
