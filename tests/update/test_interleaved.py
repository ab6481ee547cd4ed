"""Updates under the block, against unmodified DeepSpeed: every bit that a step leaves."""

from __future__ import annotations

import json
from pathlib import Path

import forked
import pytest
import update_programs as programs
from update_programs import BF16, CASES, CHUNKS, ds_config

pytestmark = pytest.mark.engine

SHARES = (0, 0.5, 1, None)


# "bf16" alone is a part of each of the others.
@pytest.mark.parametrize(
    "case", [pytest.param(one, marks=pytest.mark.thorough) if one == "bf16" else one for one in CASES]
)
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


def test_checkpoints_with_the_block_and_without_it_go_on_alike(tmp_path: Path) -> None:
    config = ds_config(**BF16, gradient_clipping=0.05)
    block = {**CHUNKS, "device_share": 0.5}
    (found,) = forked.run(programs.resume, config, tmp_path, saved_in=str(tmp_path), block=block)
    found.pop("output")
    expected = found["stock goes on"]
    assert len({str(step) for step in expected}) == 3
    assert {name for name, steps in found.items() if steps != expected} == set()


def test_states_of_single_parameters_are_read_and_set_alike(tmp_path: Path) -> None:
    config = ds_config(**BF16, gradient_clipping=0.05)
    stock, ours = (
        forked.run(programs.states, config, tmp_path / str(number), block=block)[0]["found"]
        for number, block in enumerate((None, {**CHUNKS, "device_share": 0.7}))
    )
    assert ours == stock


@pytest.mark.parametrize("share", [0.5, pytest.param(None, marks=pytest.mark.thorough)])
def test_two_ranks_train_alike(share: float | None, tmp_path: Path) -> None:
    variants = [{"groups": "decay"}, {"groups": "decay", "block": {**CHUNKS, "device_share": share}}]
    config = ds_config(**BF16, gradient_clipping=0.05)
    for rank in forked.run(programs.compare, config, tmp_path, ranks=2, variants=variants):
        stock, ours = rank["variants"]
        assert ours["steps"] == stock["steps"] and ours["report"]["device_elements"]


def test_both_blocks_train_together(tmp_path: Path) -> None:
    activations = {
        "placement": "nvme",
        "nvme_path": str(tmp_path),
        "min_tensor_bytes": 1024,
        "io": {"backend": "posix"},
    }
    both = {"block": {**CHUNKS, "device_share": 0.5}, "config": {"activation_nvme_offload": activations}}
    (result,) = forked.run(programs.compare, ds_config(**BF16), tmp_path / "run", variants=[{}, both])
    stock, ours = result["variants"]
    assert ours["steps"] == stock["steps"] and ours["report"]["device_elements"]


def test_the_report_is_there_while_training_runs(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    block = {**CHUNKS, "report": {"path": str(path), "every_steps": 2}}
    (result,) = forked.run(programs.compare, ds_config(**BF16), tmp_path / "run", variants=[{"block": block}])
    report = json.loads(path.read_text())
    (found,) = result["variants"]
    assert report["state"] == "finished" and report["steps"] == found["report"]["steps"] == 4
    assert report["elements"] == found["report"]["elements"] > 0
    assert result["output"].count("optimizer updates of") >= 2 and "on host and device" in result["output"]


def test_universal_checkpoints_with_the_block_and_without_it_go_on_alike(tmp_path: Path) -> None:
    block = {**CHUNKS, "device_share": 0.5}
    (found,) = forked.run(programs.universal, ds_config(**BF16), tmp_path, saved_in=str(tmp_path), block=block)
    found.pop("output")
    expected = found["stock loads stock"]
    assert [step["step 0"] for step in expected] == [4, 5]
    assert len(found) == 4 and {name for name, steps in found.items() if steps != expected} == set()
