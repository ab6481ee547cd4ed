"""``only`` and ``except``: what they name stays or leaves, and gradients are the same, bit for bit."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Closing
from planners import PLANNERS
from support.models import Stack
from support.offloaders import make as make_offloader
from support.planned_training import controller_of
from support.stepping import assert_same_steps, offloader_of, train
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import ds_tba
from ds_tba.config import Placement
from ds_tba.errors import ConfigError
from ds_tba.offloader import ActivationOffloader
from ds_tba.plan.agreement import Alone
from ds_tba.remat.where import RunningModule

WIDTH, ROWS, DEPTH = 64, 64, 3
LEAST_BYTES = 4 * ROWS * WIDTH
BY_EXCEPT, BY_ONLY = 'excluded by name: "except" has *.mlp', 'excluded by name: "only" has *.mlp'


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.mix(x).tanh())


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(x)))


class Layer(nn.Module):
    """Saves in itself (``mul``), in its parts, and in theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.norm, self.mlp = Attention(), nn.LayerNorm(WIDTH), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        x = x * x.sigmoid()
        return x + self.mlp(self.norm(x))


class Model(Stack):
    def __init__(self, checkpoints: bool | None = None) -> None:
        super().__init__(Layer, DEPTH)
        self.checkpoints = checkpoints  # reentrant ones, or others; None for none

    def call(self, layer: nn.Module, x: Tensor) -> Tensor:
        if self.checkpoints is None:
            return super().call(layer, x)
        return checkpoint(layer, x, use_reentrant=self.checkpoints)  # type: ignore[no-any-return]


def model(**options: Any) -> Model:
    torch.manual_seed(0)
    return Model(**options)


@pytest.fixture
def make(tmp_path: Path, closing: Closing) -> Any:
    return closing(partial(offloader_of, tmp_path, min_tensor_bytes=LEAST_BYTES))


def steps(model: nn.Module, offloader: ActivationOffloader | None, count: int) -> list[list[Tensor]]:
    torch.manual_seed(7)
    return train(model, offloader, (torch.randn(ROWS, WIDTH, requires_grad=True) for _ in range(count)))


def saved_bytes(model: Model, inside: str) -> tuple[int, int]:
    """Bytes that one forward saves in modules with this name, and elsewhere; of a storage once, where it is first."""
    running = RunningModule()
    running.watch(model)
    own = {one.data_ptr() for one in model.parameters()}
    found: dict[int, tuple[bool, int]] = {}
    held = []

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        is_activation = tensor.grad_fn is not None and storage.data_ptr() not in own  # the batch has no graph: it stays
        if is_activation and storage.nbytes() >= LEAST_BYTES:
            held.append(tensor)
            found.setdefault(storage.data_ptr(), (inside in running.path().split("."), storage.nbytes()))
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(torch.randn(ROWS, WIDTH, requires_grad=True))
    del loss
    return tuple(sum(nbytes for is_in, nbytes in found.values() if is_in == wanted) for wanted in (True, False))  # type: ignore[return-value]


@pytest.mark.parametrize("placement", ["nvme", "host", "keep", "adaptive"])
@pytest.mark.parametrize("patterns", [{"only": ["*.mlp"]}, {"except": ["*.mlp", "layers.1"]}], ids=["only", "except"])
@pytest.mark.parametrize("rematerialize", [True, False])
def test_gradients_are_those_without_us(make: Any, placement: str, patterns: Any, rematerialize: bool) -> None:
    expected = steps(model(), None, 6)
    ours = model()
    block = {"placement": placement, "rematerialize": rematerialize, "host_budget_bytes": 1 << 30}
    offloader = make(ours, max_step_overhead=0.9, **block, **patterns)
    assert_same_steps(steps(ours, offloader, 6), expected)
    kept = offloader.report().kept_bytes_by_reason
    assert any(reason.startswith("excluded by name") for reason in kept), kept


def test_bytes_of_the_named_modules_stay_and_all_others_leave(make: Any) -> None:
    in_mlps, elsewhere = saved_bytes(model(), "mlp")
    assert in_mlps and elsewhere
    for patterns, reason, kept_bytes, moved_bytes in (
        ({"except": ["*.mlp"]}, BY_EXCEPT, in_mlps, elsewhere),
        ({"only": ["*.mlp"]}, BY_ONLY, elsewhere + LEAST_BYTES, in_mlps),  # and the batch, which would stay anyway
        ({}, "", 0, in_mlps + elsewhere),
    ):
        ours = model()
        offloader = make(ours, placement="nvme", rematerialize=False, **patterns)
        steps(ours, offloader, 2)
        report = offloader.report()
        assert report.kept_bytes_by_reason.get(reason, 0) == 2 * kept_bytes
        assert report.offloaded_bytes == 2 * moved_bytes


@pytest.mark.parametrize("budget_bytes", [0, LEAST_BYTES])
def test_no_budget_moves_what_is_excluded(make: Any, budget_bytes: int, caplog: pytest.LogCaptureFixture) -> None:
    expected = steps(model(), None, 6)
    in_mlps, _ = saved_bytes(model(), "mlp")
    ours = model()
    offloader = make(ours, activation_budget_bytes=budget_bytes, **{"except": ["*.mlp"]})
    assert_same_steps(steps(ours, offloader, 6), expected)
    assert offloader.report().kept_bytes_by_reason[BY_EXCEPT] == 6 * in_mlps
    assert offloader.report().peak_saved_bytes >= in_mlps
    assert "excluded by name, or there is no room" in caplog.text


def test_plans_obey(make: Any) -> None:
    in_mlps, elsewhere = saved_bytes(model(), "mlp")
    ours = model()
    offloader = make(ours, max_step_overhead=0.9, **{"except": ["*.mlp"]})
    steps(ours, offloader, 5)
    in_force = controller_of(offloader).in_force
    assert in_force is not None
    placed = list(zip(in_force.trace.storages, in_force.placements, strict=True))
    of_mlps = [(one, place) for one, place in placed if ".mlp" in one.module and one.nbytes >= LEAST_BYTES]
    assert sum(one.nbytes for one, _ in of_mlps) == in_mlps
    assert not any(one.is_movable or one.rematerialize_s is not None for one, _ in of_mlps)
    assert {place for _, place in of_mlps} == {Placement.KEEP}
    assert in_force.trace.movable_bytes == elsewhere


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
    torch.manual_seed(0)
    ours, plain = Sharing(), Sharing()
    plain.load_state_dict(ours.state_dict())
    offloader = make(ours, max_step_overhead=0.9, only=["*"], **{"except": [excluded]})
    assert_same_steps(steps(ours, offloader, 5), steps(plain, None, 5))
    in_force = controller_of(offloader).in_force
    assert in_force is not None and in_force.trace.movable_bytes == 0


def test_blocks_of_which_a_part_is_excluded_are_not_recomputed(make: Any) -> None:
    expected = steps(model(), None, 6)
    ours = model()
    offloader = make(ours, recompute=True, planner=PLANNERS["recompute"], **{"except": ["layers.1.mlp"]})
    assert_same_steps(steps(ours, offloader, 6), expected)
    report = offloader.report()
    assert report.plan is not None and report.plan["blocks"] == DEPTH - 1 and report.recomputed_bytes > 0


# ---- checkpoints and compiled code ----------------------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_s_inputs_belong_to_who_calls_it(make: Any, reentrant: bool) -> None:
    expected = steps(model(checkpoints=reentrant), None, 2)
    for patterns, are_kept in (({"except": ["layers.*"]}, False), ({"only": ["layers.*"]}, True)):
        ours = model(checkpoints=reentrant)
        offloader = make(ours, placement="nvme", **patterns)
        assert_same_steps(steps(ours, offloader, 2), expected)
        inputs_bytes = 2 * DEPTH * LEAST_BYTES
        report = offloader.report()
        assert (report.kept_bytes >= inputs_bytes) == are_kept and (report.offloaded_bytes >= inputs_bytes) != are_kept


def test_a_forward_that_runs_again_under_our_hooks_saves_in_its_modules(make: Any) -> None:
    """A reentrant checkpoint in a backward inside of ``saving()``."""
    in_mlps, _ = saved_bytes(model(), "mlp")
    found = []
    for patterns in ({}, {"except": ["*.mlp"]}):
        ours = model(checkpoints=True)
        offloader = make(ours, placement="nvme", rematerialize=False, **patterns)
        with offloader.saving():
            ours(torch.randn(ROWS, WIDTH, requires_grad=True, generator=torch.manual_seed(3))).backward()
        offloader.note_micro_step()
        found.append([[one.grad for one in ours.parameters()]])
    assert offloader.report().kept_bytes_by_reason[BY_EXCEPT] == in_mlps
    assert_same_steps(*found)


def test_what_compiled_code_saves_belongs_to_the_module_that_was_compiled(make: Any) -> None:
    for pattern, is_kept in (("layers.0.mlp", False), ("layers.0", True)):
        torch._dynamo.reset()
        ours, plain = model(), model()
        for one in (ours, plain):
            one.layers[0].compile(backend="aot_eager")
        offloader = make(ours, placement="nvme", **{"except": [pattern]})
        assert_same_steps(steps(ours, offloader, 2), steps(plain, None, 2))
        assert (
            offloader.report().kept_bytes_by_reason.get(f'excluded by name: "except" has {pattern}', 0) > 0
        ) == is_kept


# ---- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("patterns", "told"),
    [
        (
            {"only": ["*.mpl"]},
            r"only has '\*.mpl', which matches no module of the model: the nearest are layers.2.mlp, layers.1.mlp",
        ),
        ({"except": ["layer.0.*"]}, r"except has 'layer.0.\*'.*: the nearest are layers.0, layers.0.mlp"),
        ({"only": ["*.mlp", "transformer"]}, r"only has 'transformer'.*: the nearest are layers.2.norm"),
    ],
)
def test_a_pattern_that_matches_nothing_is_refused_with_the_nearest_paths(make: Any, patterns: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        make(model(), placement="nvme", **patterns)


class OtherStage(Alone):
    """One of two ranks; the other one has answered already."""

    def __init__(self, answer: dict[str, str]) -> None:
        self._answer = answer

    def all_gather(self, value: Any) -> list[Any]:
        return [value, self._answer]


def test_a_stage_of_a_pipeline_need_not_have_what_another_has(tmp_path: Path, closing: Closing) -> None:
    offloader = closing(make_offloader)(tmp_path, placement="nvme", only=["*.embedding"])
    offloader.watch(model(), everyone=OtherStage({}))
    with pytest.raises(ConfigError, match="embedding"):
        offloader.watch(model(), everyone=OtherStage({"*.embedding": "no module of that stage either"}))


def test_a_loop_takes_except_with_an_underscore(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"nvme_path": str(tmp_path), "placement": "nvme", "except_": ["*.mlp"]}
    ours, in_mlps = model(), saved_bytes(model(), "mlp")[0]
    with ds_tba.Offloader(ours, min_tensor_bytes=LEAST_BYTES, io={"staging_bytes": 16 << 20}, **keys) as offloader:
        with offloader.saving():
            loss = ours(torch.randn(ROWS, WIDTH))
        loss.backward()
        offloader.step()
    assert offloader.report().kept_bytes_by_reason[BY_EXCEPT] == in_mlps
