"""``only`` and ``except``: what they name stays or leaves, and gradients are the same, bit for bit.

That two modules, and two lines of one, are two sites is shown in ``test_sites.py``.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Closing
from planners import PLANNERS
from support.models import Mlp, Stack
from support.offloaders import make as make_offloader
from support.planned_training import controller_of
from support.stepping import assert_same_steps, offloader_of, train
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from ds_tba.errors import ConfigError
from ds_tba.offloader import ActivationOffloader
from ds_tba.plan.agreement import Alone
from ds_tba.remat.where import ChosenModules, RunningModule

WIDTH, ROWS, DEPTH = 64, 64, 3
LEAST_BYTES = 4 * ROWS * WIDTH
EXCEPT_MLPS: dict[str, Any] = {"except": ["*.mlp"]}
BY_EXCEPT, BY_ONLY = 'excluded by name: "except" has *.mlp', 'excluded by name: "only" has *.mlp'


class Layer(nn.Module):
    """Saves in itself (``mul``), in its parts, and in theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.mlp = Mlp(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        return self.mlp(x * x.sigmoid())


class Model(Stack):
    def __init__(self, checkpoints: bool | None = None) -> None:
        super().__init__(Layer, DEPTH)
        self.checkpoints = checkpoints  # reentrant ones, or others; None for none

    def call(self, layer: nn.Module, x: Tensor) -> Tensor:
        if self.checkpoints is None:
            return super().call(layer, x)
        return checkpoint(layer, x, use_reentrant=self.checkpoints)  # type: ignore[no-any-return]


@pytest.fixture
def make(tmp_path: Path, closing: Closing) -> Any:
    return closing(partial(offloader_of, tmp_path, min_tensor_bytes=LEAST_BYTES))


def steps(model: nn.Module, offloader: ActivationOffloader | None, count: int) -> list[list[Tensor]]:
    torch.manual_seed(7)
    return train(model, offloader, (torch.randn(ROWS, WIDTH, requires_grad=True) for _ in range(count)))


def trained(make: Any, count: int, kind: Callable[[], nn.Module] = Model, **block: Any) -> ActivationOffloader:
    """Train so many steps with this block; gradients are those without us."""
    ours, plain = kind(), kind()
    plain.load_state_dict(ours.state_dict())
    offloader = make(ours, **block)
    assert_same_steps(steps(ours, offloader, count), steps(plain, None, count))
    return offloader  # type: ignore[no-any-return]


def saved_bytes() -> tuple[int, int]:
    """Bytes that one forward saves in its MLPs, and elsewhere; of a storage once, where it is first."""
    model, running = Model(), RunningModule()
    running.watch(model)
    own = {one.data_ptr() for one in model.parameters()}
    found: dict[int, tuple[bool, int]] = {}
    held = []

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        is_activation = tensor.grad_fn is not None and storage.data_ptr() not in own  # the batch has no graph: it stays
        if is_activation and storage.nbytes() >= LEAST_BYTES:
            held.append(tensor)
            found.setdefault(storage.data_ptr(), ("mlp" in running.path().split("."), storage.nbytes()))
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(torch.randn(ROWS, WIDTH, requires_grad=True))
    del loss
    return tuple(sum(nbytes for is_in, nbytes in found.values() if is_in == wanted) for wanted in (True, False))  # type: ignore[return-value]


@pytest.mark.parametrize("placement", ["nvme", "host", "keep", "adaptive"])
@pytest.mark.parametrize("patterns", [{"only": ["*.mlp"]}, {"except": ["*.mlp", "layers.1"]}], ids=["only", "except"])
@pytest.mark.parametrize("rematerialize", [True, False])
def test_gradients_are_those_without_us(make: Any, placement: str, patterns: Any, rematerialize: bool) -> None:
    block = {"placement": placement, "rematerialize": rematerialize, "host_budget_bytes": 1 << 30}
    kept = trained(make, 6, max_step_overhead=0.9, **block, **patterns).report().kept_bytes_by_reason
    assert any(reason.startswith("excluded by name") for reason in kept), kept


def test_bytes_of_the_named_modules_stay_and_all_others_leave(make: Any) -> None:
    in_mlps, elsewhere = saved_bytes()
    assert in_mlps and elsewhere
    for patterns, reason, kept_bytes, moved_bytes in (
        (EXCEPT_MLPS, BY_EXCEPT, in_mlps, elsewhere),
        ({"only": ["*.mlp"]}, BY_ONLY, elsewhere + LEAST_BYTES, in_mlps),  # and the batch, which would stay anyway
        ({}, "", 0, in_mlps + elsewhere),
    ):
        report = trained(make, 2, placement="nvme", rematerialize=False, **patterns).report()
        assert report.kept_bytes_by_reason.get(reason, 0) == 2 * kept_bytes
        assert report.offloaded_bytes == 2 * moved_bytes


@pytest.mark.parametrize("budget_bytes", [0, LEAST_BYTES])
def test_no_budget_moves_what_is_excluded(make: Any, budget_bytes: int, caplog: pytest.LogCaptureFixture) -> None:
    in_mlps, _ = saved_bytes()
    report = trained(make, 6, activation_budget_bytes=budget_bytes, **EXCEPT_MLPS).report()
    assert report.kept_bytes_by_reason[BY_EXCEPT] == 6 * in_mlps
    assert report.peak_saved_bytes >= in_mlps
    assert "excluded by name, or there is no room" in caplog.text


class Sharing(nn.Module):
    """One storage is saved by two modules."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x.exp()
        return (self.one(x) + self.other(x)).sum()


@pytest.mark.parametrize("excluded", ["one", "other"])
def test_what_another_module_saves_too_stays_under_a_plan(make: Any, excluded: str) -> None:
    patterns: dict[str, Any] = {"only": ["*"], "except": [excluded]}
    in_force = controller_of(trained(make, 5, Sharing, max_step_overhead=0.9, **patterns)).in_force
    assert in_force is not None and in_force.trace.movable_bytes == 0


def test_blocks_of_which_a_part_is_excluded_are_not_recomputed(make: Any) -> None:
    block: dict[str, Any] = {"recompute": True, "except": ["layers.1.mlp"]}
    report = trained(make, 6, planner=PLANNERS["recompute"], **block).report()
    assert report.plan is not None and report.plan["blocks"] == DEPTH - 1 and report.recomputed_bytes > 0


# ---- checkpoints and compiled code ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("patterns", "are_kept"), [({"except": ["layers.*"]}, False), ({"only": ["layers.*"]}, True)])
@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_s_inputs_belong_to_who_calls_it(
    make: Any, reentrant: bool, patterns: Any, are_kept: bool
) -> None:
    report = trained(make, 2, partial(Model, reentrant), placement="nvme", **patterns).report()
    inputs_bytes = 2 * DEPTH * LEAST_BYTES
    assert (report.kept_bytes >= inputs_bytes) == are_kept and (report.offloaded_bytes >= inputs_bytes) != are_kept


@pytest.mark.parametrize(("pattern", "is_kept"), [("layers.0.mlp", False), ("layers.0", True)])
def test_what_compiled_code_saves_belongs_to_the_module_that_was_compiled(
    make: Any, pattern: str, is_kept: bool
) -> None:
    def compiled() -> Model:
        model = Model()
        model.layers[0].compile(backend="aot_eager")
        return model

    torch._dynamo.reset()
    patterns: dict[str, Any] = {"except": [pattern]}
    kept = trained(make, 2, compiled, placement="nvme", **patterns).report().kept_bytes_by_reason
    assert (kept.get(f'excluded by name: "except" has {pattern}', 0) > 0) == is_kept


# ---- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("patterns", "told"),
    [
        (
            {"only": ["*.mpl"]},
            r"only has '\*.mpl', which matches no module of the model: the nearest are layers.2.mlp, layers.1.mlp",
        ),
        ({"except": ["layer.0.*"]}, r"except has 'layer.0.\*'.*: the nearest are layers.0, layers.0.mlp"),
        ({"only": ["*.mlp", "transformer"]}, r"only has 'transformer'.*: the nearest are layers.2.mlp.norm"),
    ],
)
def test_a_pattern_that_matches_nothing_is_refused_with_the_nearest_paths(make: Any, patterns: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        make(Model(), placement="nvme", **patterns)


class OtherStage(Alone):
    """One of two ranks; the other one has answered already."""

    def __init__(self, answer: dict[str, str]) -> None:
        self._answer = answer

    def all_gather(self, value: Any) -> list[Any]:
        return [value, self._answer]


def test_a_stage_of_a_pipeline_need_not_have_what_another_has(tmp_path: Path, closing: Closing) -> None:
    offloader = closing(make_offloader)(tmp_path, placement="nvme", only=["*.embedding"])
    offloader.watch(Model(), everyone=OtherStage({}))
    with pytest.raises(ConfigError, match="embedding"):
        offloader.watch(Model(), everyone=OtherStage({"*.embedding": "no module of that stage either"}))


# ---- patterns -------------------------------------------------------------------------------------------------------


def parts(**children: nn.Module) -> nn.Module:
    return nn.Sequential(OrderedDict(children))


def left_by(**patterns: Any) -> list[str]:
    """The paths of the modules whose tensors may leave; ``outside`` what is saved outside of all."""
    may_leave: dict[str, bool] = {}

    def note(path: str, *_: object) -> None:
        is_free = not chosen.reason()
        assert may_leave.setdefault(path, is_free) == is_free

    tied, running = nn.Identity(), RunningModule()
    first = parts(mlp=parts(down=nn.Identity()), tied=tied)
    model = parts(first=first, second=parts(mlp=nn.Identity(), other=tied))
    running.watch(model)
    chosen = ChosenModules(running, patterns)
    assert chosen.watch(model) == {}
    for path, module in model.named_modules():
        module.register_forward_pre_hook(partial(note, path))  # before its children, and after them
        module.register_forward_hook(partial(note, path))
    model(torch.ones(1))
    note("outside")
    return [path for path, is_free in may_leave.items() if is_free]


ALL = ["", "first", "first.mlp", "first.mlp.down", "first.tied", "second", "second.mlp", "outside"]


@pytest.mark.parametrize(
    ("patterns", "may_leave"),
    [
        ({"only": ["*"]}, ALL),
        ({"except": ["*"]}, []),
        ({"only": ["*.mlp"]}, ["first.mlp", "first.mlp.down", "second.mlp"]),
        ({"only": ["first.*"]}, ["first.mlp", "first.mlp.down", "first.tied"]),
        ({"only": ["second"]}, ["first.tied", "second", "second.mlp"]),  # which stands in both
        ({"only": ["first", "*.mlp"], "except": ["*.down"]}, ["first", "first.mlp", "first.tied", "second.mlp"]),
        ({"except": ["first"]}, ["", "second", "second.mlp", "outside"]),
        ({"except": ["s*d.mlp", "?????.mlp.down"]}, ["", "first", "first.mlp", "first.tied", "second", "outside"]),
    ],
)
def test_patterns_name_modules_with_all_that_is_inside_of_them(patterns: Any, may_leave: list[str]) -> None:
    assert left_by(**patterns) == may_leave
