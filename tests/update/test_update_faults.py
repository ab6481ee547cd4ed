"""Updates that are interrupted, and optimizers that are not what they seem."""

from __future__ import annotations

from pathlib import Path

import forked
import pytest
import update_fault_programs as programs
from update_programs import CHUNKS, ds_config

BF16 = {"bf16": {"enabled": True}}
BLOCK = {**CHUNKS, "device_share": 0.5}


@pytest.mark.parametrize("place", ["counting steps", "host", "device"])
def test_after_an_interrupted_update_only_a_checkpoint_helps(place: str, tmp_path: Path) -> None:
    (found,) = forked.run(programs.interrupted, ds_config(**BF16), tmp_path, block=BLOCK, place=place)
    assert found["interrupted"] == "KeyboardInterrupt"
    for then in ("at once", "without optimizer states"):
        assert "load a checkpoint with its optimizer states" in found[then], then
    assert found["after a load"] == found["uninterrupted"]


def test_the_device_is_verified_in_the_first_update_in_which_it_computes(tmp_path: Path) -> None:
    (found,) = forked.run(programs.late_memory, ds_config(**BF16), tmp_path, block={**CHUNKS, "device_share": 1})
    assert found["verified"] == [0, 0, 4, 4] and found["elements"][1] == 0 < found["elements"][2]


def test_default_types_and_hooks_of_all_optimizers_change_nothing(tmp_path: Path) -> None:
    config = ds_config(**BF16, gradient_clipping=0.01)
    (found,) = forked.run(programs.surroundings, config, tmp_path, block=BLOCK)
    assert found["ours"] == found["stock"]
    assert found["fallbacks"] == {"step hooks": 1}
