"""TRL's trainers under ZeRO: packed and varying lengths, two forwards before a backward, and a loss in chunks that
looks for ZeRO-3's attributes of the weight in backward. Every placement trains as without us.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
from support import runs

pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("trl") is None, reason="TRL is not installed"),
]

PLACEMENTS = ("adaptive", "recompute", "nvme", "host", "keep")
CASES = {
    3: ["sft/varying/none", "sft/packed/non_reentrant", "dpo/pairs/none", "dpo/pairs/reentrant"],
    2: ["sft/packed/none"],
}


@pytest.mark.parametrize("stage", CASES)
def test_every_placement_trains_as_without_us(tmp_path: Path, stage: int) -> None:
    cases = CASES[stage]
    arguments = ("--nvme_path", str(tmp_path), "--stage", str(stage), "--cases", *cases)
    result = runs.run(None, tmp_path, *arguments, script=runs.SCRIPTS / "trl_trainers.py", timeout_s=1800)
    assert result.returncode == 0, result.output
    lines = [line.split()[1:] for line in result.lines("TRL")]
    assert [line[:3] for line in lines] == sorted([case, one, "EQUAL"] for case in cases for one in PLACEMENTS)
    # With gradient checkpointing by the user nothing is left to recompute; and "keep" moves nothing.
    for case, placement, _, nbytes in lines:
        moves = placement != "keep" and not (placement == "recompute" and not case.endswith("/none"))
        assert (int(nbytes) > 0) == moves, (case, placement)


@pytest.mark.usefixtures("needs_recompute")
@pytest.mark.parametrize("stage", [2, 3])
def test_a_loss_outside_of_forward_is_served_until_backward(tmp_path: Path, stage: int) -> None:
    """TRL 1.16 has the log-probabilities computed in forward, so that what its losses save is small."""
    cases, placements = ["dpo/pairs/none", "grpo/prompts/none", "rloo/prompts/none"], ["adaptive", "nvme"]
    arguments = ["--nvme_path", str(tmp_path), "--stage", str(stage), "--steps", "4", "--placements", *placements]
    saved = []
    for more in ([], ["--until_backward"]):
        script = runs.SCRIPTS / "trl_trainers.py"
        result = runs.run(None, tmp_path, *arguments, *more, "--cases", *cases, script=script, timeout_s=1800)
        assert result.returncode == 0, result.output
        lines = [line.split()[1:] for line in result.lines("TRL")]
        assert [line[:3] for line in lines] == sorted([case, one, "EQUAL"] for case in cases for one in placements)
        saved.append([int(line.split()[3]) for line in result.lines("SAVED")])
    assert all(with_it > without for without, with_it in zip(*saved, strict=True)), saved
