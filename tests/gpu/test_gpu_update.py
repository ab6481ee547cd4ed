"""The optimizer update on a real device: every bit that a step leaves is that of unmodified DeepSpeed.

    python -m pytest -m gpu tests/gpu/test_gpu_update.py

What ``test_zero3.py`` runs with the CPU as the device, here on CUDA. Some cases run on the CPU, too, so that
the tests themselves are known to work.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from alternating import ALONE
from support import runs
from update_programs import BF16, CASES, CHUNKS, ds_config

TESTS = runs.ROOT / "tests"
# A program of update_programs.py as the only rank; the file has the config and the arguments, and gets what was found.
PROGRAM = """
import json, pathlib, sys, torch, update_programs
torch.use_deterministic_algorithms(True)
program, file = sys.argv[1], pathlib.Path(sys.argv[2])
asked = json.loads(file.read_text())
file.write_text(json.dumps(getattr(update_programs, program)(asked["config"], **asked["arguments"])))
"""
CUDA = pytest.param(
    "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
)
# On the CPU tests/update/test_pinning.py has forked children beside pinned memory.
CPU = pytest.param("cpu", marks=[pytest.mark.engine, pytest.mark.thorough])
on_cuda, on_both = (pytest.mark.parametrize("kind", kinds) for kinds in ([CUDA], [CPU, CUDA]))
BLOCKS = [{**CHUNKS, "device_share": share} for share in (0.5, 1, None)]


def run(kind: str, program: str, config: dict[str, Any], directory: Path, **arguments: Any) -> dict[str, Any]:
    file, port = directory / "asked.json", runs.free_port()
    file.write_text(json.dumps({"config": config, "arguments": arguments}))
    folders = [TESTS / "update", TESTS, runs.ROOT / "benchmarks", runs.ROOT]
    paths = os.pathsep.join([*map(str, folders), os.environ.get("PYTHONPATH", "")])
    variables = {"PYTHONPATH": paths, "DS_ACCELERATOR": kind, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    done = runs.python("-c", PROGRAM, program, file, cwd=directory, **ALONE, MASTER_PORT=str(port), **variables)
    runs.remove_shared_memory(port)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(file.read_text())


def check(found: dict[str, Any]) -> None:
    """Stock first, then ours."""
    stock, *ours = found["variants"]
    assert len({str(step) for step in stock["steps"]}) == len(stock["steps"])
    for one in ours:
        assert one["steps"] == stock["steps"]
        report = one["report"]
        assert report["steps"] == len(stock["steps"]) and not report["stock_steps"] and not report["fallbacks"]
        assert report["device_elements"]


@on_cuda
@pytest.mark.parametrize("case", CASES)
def test_every_bit_is_that_of_unmodified_deepspeed(kind: str, case: str, tmp_path: Path) -> None:
    more, groups = CASES[case]
    variants = [{"groups": groups}, *({"groups": groups, "block": block} for block in BLOCKS)]
    check(run(kind, "compare", ds_config(**more), tmp_path, variants=variants))


@on_both
def test_workers_that_are_forked_between_steps_change_nothing(kind: str, tmp_path: Path) -> None:
    variants = [{}, {"workers": True}, *({"workers": True, "block": block} for block in BLOCKS[:1])]
    found = run(kind, "compare", ds_config(**BF16, gradient_clipping=0.01), tmp_path, variants=variants)
    plain, *forked = found["variants"]
    expected = [float(one) for one in range(2, 16)]  # the first batch was taken before the step
    for step in (step for one in forked for step in one["steps"]):
        assert [number for batch in step["batches"] for number in batch] == expected
        step["batches"] = []
    assert forked[0]["steps"] == plain["steps"]
    check({"variants": forked})


@on_cuda
def test_checkpoints_with_the_block_and_without_it_go_on_alike(kind: str, tmp_path: Path) -> None:
    config = ds_config(**BF16, gradient_clipping=0.05)
    found = run(kind, "resume", config, tmp_path, saved_in=str(tmp_path), block=BLOCKS[0])
    expected = found["stock goes on"]
    assert len({str(step) for step in expected}) == 3
    assert {name for name, steps in found.items() if steps != expected} == set()
