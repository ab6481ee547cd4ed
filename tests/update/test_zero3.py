"""Updates under the block against unmodified DeepSpeed: every bit of a step; what is interrupted, and refused."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any
from unittest import mock

import forked
import programs_deepspeed
import programs_hf
import pytest
import torch
import update_programs as programs
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from torch.optim.optimizer import register_optimizer_step_post_hook
from update_programs import BF16, BLOCK, CASES, CHUNKS, build, digest, ds_config, steps

from ds_tba.errors import UpdateInterruptedError
from ds_tba.update import updater
from ds_tba.update.device import DevicePipeline
from ds_tba.update.host import HostUpdate
from ds_tba.update.zero3 import InterleavedUpdate, _changed_methods

SHARED = {**CHUNKS, "device_share": 0.5}
SAVES = ds_config(**BF16, zero_optimization={"stage3_gather_16bit_weights_on_model_save": True})
SHARES = (0, 0.5, 1, None)


@pytest.mark.engine
@pytest.mark.parametrize("case", CASES)
def test_every_bit_is_that_of_unmodified_deepspeed(case: str, tmp_path: Path) -> None:
    more, groups = CASES[case]
    blocks = [{**CHUNKS, "device_share": share} for share in SHARES]
    variants = [{"groups": groups}]
    variants += [{"groups": groups, "block": block} for block in blocks]
    variants += [{"groups": groups, "block": block, "late": True} for block in blocks[1:]]
    (result,) = forked.run(programs.compare, ds_config(**more), tmp_path, variants=variants)
    stock, *ours = result["variants"]
    assert len({str(step) for step in stock["steps"]}) == len(stock["steps"])
    for variant, found in zip(variants[1:], ours, strict=True):
        assert found["steps"] == stock["steps"], variant
        report, share = found["report"], variant["block"]["device_share"]
        assert report["steps"] == len(stock["steps"]) and not report["stock_steps"] and not report["fallbacks"]
        if share is not None:
            assert abs(report["device_share"] - share) < 0.2
        if share != 0:
            assert report["device_elements"]
        if not variant.get("late"):
            assert report["uploaded_bytes"] == 16 * report["device_elements"]
            # Gradients come back only in steps in which they are clipped.
            assert 12 * report["device_elements"] <= report["written_back_bytes"] <= 16 * report["device_elements"]
        assert report["host_s"] + report["drain_s"] <= report["update_s"]


@pytest.mark.engine
@pytest.mark.parametrize(
    ("program", "stock", "ways"),
    [(programs.resume, "stock goes on", 8), (programs.universal, "stock loads stock", 4)],
    ids=["DeepSpeed's own", "universal"],
)
def test_checkpoints_with_the_block_and_without_it_go_on_alike(
    program: forked.Program, stock: str, ways: int, tmp_path: Path
) -> None:
    config = ds_config(**BF16, gradient_clipping=0.05)
    (found,) = forked.run(program, config, tmp_path, saved_in=str(tmp_path), block=SHARED)
    found.pop("output")
    expected = found[stock]
    assert [step["taken"][0] for step in expected] == [4, 5, 6][: len(expected)] and len(found) == ways
    assert len({str(step) for step in expected}) == len(expected)
    assert {name for name, steps in found.items() if steps != expected} == set()


@pytest.mark.engine
@pytest.mark.parametrize(
    ("share", "ranks"), [(0.5, 2), pytest.param(None, 2, marks=pytest.mark.thorough), (0.5, 1)], ids=str
)
def test_ranks_train_alike_also_with_both_blocks(share: float | None, ranks: int, tmp_path: Path) -> None:
    """On one rank activations go to NVMe beside it."""
    activations = {"placement": "nvme", "nvme_path": str(tmp_path), "min_tensor_bytes": 1024}
    activations["io"] = {"backend": "posix"}
    more = {"config": {"activation_nvme_offload": activations}} if ranks == 1 else {}
    variants = [{"groups": "decay"}, {"groups": "decay", "block": {**CHUNKS, "device_share": share}, **more}]
    config = ds_config(**BF16, gradient_clipping=0.05)
    for rank in forked.run(programs.compare, config, tmp_path / "run", ranks=ranks, variants=variants):
        stock, ours = rank["variants"]
        assert ours["steps"] == stock["steps"] and ours["report"]["device_elements"]


@pytest.mark.engine
def test_the_report_is_there_while_training_runs(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    block = {**CHUNKS, "report": {"path": str(path), "every_steps": 2}}
    (result,) = forked.run(programs.compare, ds_config(**BF16), tmp_path / "run", variants=[{"block": block}])
    report = json.loads(path.read_text())
    (found,) = result["variants"]
    assert report["state"] == "finished" and report["steps"] == found["report"]["steps"] == 4
    assert report["elements"] == found["report"]["elements"] > 0
    assert result["output"].count("optimizer updates of") >= 2 and "on host and device" in result["output"]


@pytest.mark.engine
@pytest.mark.parametrize(
    "first", [0, pytest.param(8, marks=pytest.mark.thorough), pytest.param(16, marks=pytest.mark.thorough)]
)
def test_random_trainings_leave_every_bit_as_stock_does(first: int, tmp_path: Path) -> None:
    (result,) = forked.run(programs.compare_drawn, None, tmp_path, seeds=list(range(first, first + 8)))
    assert result["failed"] == {}
    assert 0 < result["elements"][1] < result["elements"][0]


# ---- trainers that people use ---------------------------------------------------------------------------------------

AUTO = dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")
OF_TRAINERS = {
    **ds_config(),
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "optimizer": {"type": "AdamW", "params": AUTO},
    "scheduler": {"type": "WarmupLR", "params": {f"warmup_{of}": "auto" for of in ("min_lr", "max_lr", "num_steps")}},
}


@pytest.mark.engine
@pytest.mark.parametrize(
    ("program", "config", "ranks", "arguments"),
    [
        (programs_hf.trainer, OF_TRAINERS, 2, {"steps": 4}),
        pytest.param(
            programs_hf.trainer, OF_TRAINERS, 1, {"steps": 4, "lora": True, "gradient_accumulation_steps": 2},
            marks=pytest.mark.thorough,
        ),
        (programs_hf.resumed_trainer, OF_TRAINERS, 1, {"steps": 6}),
        (programs_deepspeed.trained_from_zero_init, ds_config(gradient_accumulation_steps=2), 1, {}),
    ],
    ids=["Trainer, 2 ranks", "Trainer, LoRA", "Trainer, resumed", "zero.Init"],
)  # fmt: skip
def test_a_trainer_trains_alike(
    program: forked.Program, config: dict[str, Any], ranks: int, arguments: dict[str, Any], tmp_path: Path
) -> None:
    stock = forked.run(program, config, tmp_path / "stock", ranks=ranks, **arguments)
    ours = forked.run(program, {**config, BLOCK: SHARED}, tmp_path / "ours", ranks=ranks, **arguments)
    assert "optimizer updates: 50% on the device" in ours[0]["output"]
    assert "optimizer updates" not in stock[0]["output"]
    for one, other in zip(stock, ours, strict=True):
        assert other["losses"] == one["losses"] and other["parameters"] == one["parameters"]


# ---- interrupted and refused ----------------------------------------------------------------------------------------


@contextmanager
def _interrupted(owner: Any, name: str, call: int) -> Iterator[None]:
    """Interrupt a function in one of its calls."""
    original, calls = getattr(owner, name), count(1)

    def interrupting(*args: Any, **more: Any) -> Any:
        if next(calls) == call:
            raise KeyboardInterrupt
        return original(*args, **more)

    with mock.patch.object(owner, name, interrupting):
        yield


def _refusals(engine: Any, folder: Path) -> dict[str, str]:
    """What each way to use or save the model says; nothing may be in the folder afterwards."""

    def evaluate() -> None:
        engine.eval()
        try:
            with torch.no_grad():
                engine(torch.zeros(4, 37, dtype=torch.bfloat16), True)
        finally:
            engine.train()

    ways: dict[str, Callable[[], Any]] = {
        "forward": lambda: steps(engine, 1),
        "evaluation": evaluate,
        "step": engine.step,
        "save_checkpoint": lambda: engine.save_checkpoint(str(folder), tag="half"),
        "save_16bit_model": lambda: engine.save_16bit_model(str(folder)),
        "consolidated": engine._zero3_consolidated_16bit_state_dict,
        "optimizer's state_dict": engine.optimizer.state_dict,
    }
    found = {}
    for way, call in ways.items():
        try:
            call()
            found[way] = "done"
        except UpdateInterruptedError as error:
            found[way] = str(error)
    return found | {"files": ", ".join(path.name for path in folder.glob("*"))}


def interrupted(config: dict[str, Any], *, block: dict[str, Any], place: str) -> dict[str, Any]:
    """An update that is interrupted on the last rank, and attempts to go on."""
    engine = build({**config, BLOCK: block}, "decay")
    last = torch.distributed.get_world_size() - 1
    steps(engine, 1)
    checkpoint, folder = str(Path.cwd().parent / "checkpoint"), Path.cwd().parent / "half"
    engine.save_checkpoint(checkpoint, tag="1")
    found: dict[str, Any] = {"uninterrupted": steps(engine, 2)}
    engine.load_checkpoint(checkpoint, tag="1")
    owner, name, call = {
        "counting steps": (InterleavedUpdate, "_sub_group", 2),
        "host": (HostUpdate, "_update", 7),
        "device": (updater, "update_", 1),
        "draining": (DevicePipeline, "_block_until_done", 2),
        "DeepSpeed's": (type(engine.optimizer.optimizer), "step", 2),
    }[place]
    see = register_optimizer_step_post_hook(lambda *_: None) if place == "DeepSpeed's" else None
    try:
        if torch.distributed.get_rank() == last:
            with _interrupted(owner, name, call):
                steps(engine, 1)
        else:
            steps(engine, 1)
    except (KeyboardInterrupt, UpdateInterruptedError) as error:
        found["interrupted"] = type(error).__name__
    if see is not None:
        see.remove()
    found["at once"] = _refusals(engine, folder)
    engine.load_checkpoint(checkpoint, tag="1", load_optimizer_states=False)
    found["without optimizer states"] = _refusals(engine, folder)
    engine.load_checkpoint(checkpoint, tag="1")
    found["after a load"] = steps(engine, 2)
    try:
        with _interrupted(owner, name, call):
            steps(engine, 1)
    except KeyboardInterrupt:
        engine.interleaved_optimizer_update.close()
    found["closed"] = _refusals(engine, folder)
    engine.load_checkpoint(checkpoint, tag="1")
    found["closed, after a load"] = steps(engine, 2)
    found["left behind"] = sorted({"step", "state_dict", "load_state_dict"} & set(vars(engine.optimizer)))
    engine.destroy()
    return found


def surroundings(config: dict[str, Any], *, block: dict[str, Any]) -> dict[str, Any]:
    """Steps under other default dtypes, and one with a hook of all optimizers, which sees their states."""
    found: dict[str, Any] = {}
    for name, own in {"stock": {}, "ours": {BLOCK: block}}.items():
        engine, seen = build({**config, **own}), found.setdefault(name, [])

        def see(optimizer: Any, *_: object, seen: list[Any] = seen) -> None:
            seen.append([digest(state["exp_avg"]) for state in optimizer.state.values()])

        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            torch.set_default_dtype(dtype)
            seen += steps(engine, 1)
        torch.set_default_dtype(torch.float32)
        hook = register_optimizer_step_post_hook(see)
        seen += steps(engine, 1)
        hook.remove()
        if name == "ours":
            found["fallbacks"] = engine.interleaved_optimizer_update.report().fallbacks
        engine.destroy()
    return found


@pytest.mark.engine
@pytest.mark.parametrize(
    ("place", "ranks"),
    [("counting steps", 1), ("host", 1), ("device", 1), ("draining", 1), ("DeepSpeed's", 1), ("host", 2)],
)
def test_after_an_interrupted_update_only_a_checkpoint_helps(place: str, ranks: int, tmp_path: Path) -> None:
    """Where one rank is interrupted, all refuse."""
    found = forked.run(interrupted, SAVES, tmp_path / "run", ranks=ranks, block=SHARED, place=place)
    assert [rank["interrupted"] for rank in found] == ["UpdateInterruptedError", "KeyboardInterrupt"][-ranks:]
    for rank in found:
        for then in ("at once", "without optimizer states", "closed"):
            assert rank[then].pop("files") == "", then
            for way, said in rank[then].items():
                assert "load a checkpoint with its optimizer states" in said, f"{way}, {then}: {said}"
        assert rank["after a load"] == rank["closed, after a load"] == rank["uninterrupted"]
        assert rank["left behind"] == []


@pytest.mark.engine
def test_default_types_and_hooks_of_all_optimizers_change_nothing(tmp_path: Path) -> None:
    config = ds_config(**BF16, gradient_clipping=0.01)
    (found,) = forked.run(surroundings, config, tmp_path, block=SHARED)
    assert found["ours"] == found["stock"]
    assert found["fallbacks"] == {"step hooks": 1}


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (DeepSpeedZeroOptimizer_Stage3, "_optimizer_step"),
        (DeepSpeedZeroOptimizer_Stage3, "_prepare_sub_group"),
        (DeepSpeedZeroOptimizer_Stage3, "step"),
        (DeepSpeedCPUAdam, "step"),
    ],
)
def test_methods_that_somebody_else_has_replaced_are_refused(
    kind: type, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    zero = DeepSpeedZeroOptimizer_Stage3.__new__(DeepSpeedZeroOptimizer_Stage3)
    vars(zero)["optimizer"] = DeepSpeedCPUAdam.__new__(DeepSpeedCPUAdam)
    assert _changed_methods(zero) == []
    monkeypatch.setattr(kind, name, functools.wraps(getattr(kind, name))(lambda *_: None))
    assert _changed_methods(zero) == [name if kind is DeepSpeedZeroOptimizer_Stage3 else "DeepSpeedCPUAdam.step"]
