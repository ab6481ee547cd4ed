"""Updates that are interrupted, and optimizers that are not what they seem."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import forked
import pytest
import torch
import update_fault_programs as programs
from update_programs import CHUNKS, ds_config

from ds_tba.update import pinning

BF16 = {"bf16": {"enabled": True}}
BLOCK = {**CHUNKS, "device_share": 0.5}


SAVES = ds_config(**BF16, zero_optimization={"stage3_gather_16bit_weights_on_model_save": True})


def check_refusals(found: dict[str, Any]) -> None:
    for then in ("at once", "without optimizer states", "closed"):
        assert found[then].pop("files") == "", then
        for way, said in found[then].items():
            assert "load a checkpoint with its optimizer states" in said, f"{way}, {then}: {said}"
    assert found["after a load"] == found["closed, after a load"] == found["uninterrupted"]
    assert found["left behind"] == []


@pytest.mark.engine
@pytest.mark.parametrize("place", ["counting steps", "host", "device", "draining", "DeepSpeed's"])
def test_after_an_interrupted_update_only_a_checkpoint_helps(place: str, tmp_path: Path) -> None:
    (found,) = forked.run(programs.interrupted, SAVES, tmp_path / "run", block=BLOCK, place=place)
    assert found["interrupted"] == "KeyboardInterrupt"
    check_refusals(found)


@pytest.mark.engine
def test_where_one_rank_is_interrupted_all_refuse(tmp_path: Path) -> None:
    found = forked.run(programs.interrupted, SAVES, tmp_path / "run", ranks=2, block=BLOCK, place="host")
    assert [rank["interrupted"] for rank in found] == ["UpdateInterruptedError", "KeyboardInterrupt"]
    for rank in found:
        check_refusals(rank)


@pytest.mark.engine
def test_the_saving_methods_of_deepspeed_are_hooked_for_this_block_only(tmp_path: Path) -> None:
    (found,) = forked.run(programs.hooked, ds_config(**BF16), tmp_path, block=BLOCK)
    assert found["none"] == ["__init__"]
    assert found["activations"] == ["__del__", "__init__", "backward", "destroy", "forward", "save_checkpoint", "step"]
    saving = {"_zero3_consolidated_16bit_state_dict", "save_16bit_model"}
    assert set(found["both"]) - set(found["activations"]) == saving


@pytest.mark.engine
def test_the_device_computes_from_the_update_on_in_which_it_has_memory(tmp_path: Path) -> None:
    (found,) = forked.run(programs.late_memory, ds_config(**BF16), tmp_path, block={**CHUNKS, "device_share": 1})
    assert found["elements"][1] == 0 < found["elements"][2]


@pytest.mark.engine
def test_default_types_and_hooks_of_all_optimizers_change_nothing(tmp_path: Path) -> None:
    config = ds_config(**BF16, gradient_clipping=0.01)
    (found,) = forked.run(programs.surroundings, config, tmp_path, block=BLOCK)
    assert found["ours"] == found["stock"]
    assert found["fallbacks"] == {"step hooks": 1}


@pytest.mark.parametrize(
    ("owner", "name"), [("zero", "_optimizer_step"), ("zero", "_prepare_sub_group"), ("zero", "step"), ("adam", "step")]
)
def test_methods_that_somebody_else_has_replaced_are_refused(owner: str, name: str) -> None:
    found = programs.replaced(owner, name)
    assert not any("somebody else" in problem for problem in found["before"])
    assert any(f"somebody else has replaced {name}" in problem for problem in found["replaced"])


def test_a_refused_pin_does_not_stay_for_the_next_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    last_error = [0]

    def refuse(*_: int) -> int:
        last_error[0] = 712
        return 712

    def launch(*_: Any, **__: Any) -> None:
        if last_error.pop():
            raise RuntimeError("CUDA error: resource already mapped")

    runtime = SimpleNamespace(cudaHostRegister=refuse, cudaHostUnregister=refuse)
    memory = torch.zeros(10_000)
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "cudart", lambda: runtime)
        patch.setattr(pinning.torch, "ones", launch)
        patch.setattr(torch.Tensor, "is_pinned", lambda _: False)
        registry = pinning.Registry(pinning.CudaDriver(), None)
        assert not registry.pin(memory) and 0 < registry.refused_bytes <= memory.nbytes
    assert not last_error
