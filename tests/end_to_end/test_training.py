"""Unmodified scripts, as a launcher runs them: losses and parameters are bit for bit those without the block."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

import forked
import programs_deepspeed
import pytest
from compare import agrees, config_of
from support import runs

pytestmark = pytest.mark.engine


def report_of(directory: Path, rank: int = 0) -> dict[str, Any]:
    path = directory / ("report.json" if rank == 0 else f"report.json.rank{rank}")
    return json.loads(path.read_text())


@pytest.mark.aio
@pytest.mark.usefixtures("needs_aio")
@pytest.mark.parametrize("backend", ["aio", pytest.param("posix", marks=pytest.mark.thorough)])
def test_two_ranks_with_parameters_and_activations_on_nvme(tmp_path: Path, backend: str) -> None:
    """The acceptance run: ZeRO-3, parameters on NVMe, one script.

    The runs that are killed, below, and those of ``test_example.py`` are under the stock launcher. With posix
    ``test_blocks_under_deepspeed.py`` has parameters on NVMe, and ``test_two_ranks.py`` two ranks.
    """
    config = runs.nvme_parameters(tmp_path)
    without = runs.run(config, tmp_path, ranks=2)
    assert without.returncode == 0, without.output
    assert len(without.outcome[0]) == 6 and len(without.outcome[1]) == 2
    # An overhead at which the plan moves what it can: at the usual one a loaded machine may keep everything.
    block = runs.with_block(config, tmp_path, io={"backend": backend}, max_step_overhead=1000.0)
    result = runs.run(block, tmp_path, ranks=2)
    assert result.returncode == 0, result.output
    assert result.outcome == without.outcome
    for rank in range(2):
        report = report_of(tmp_path, rank)
        assert (report["backend"], report["rank"], report["state"]) == (backend, rank, "finished")
        assert report["steps"] == 3 and report["fallbacks"] == 0
        assert report["written_bytes"] > 0 and report["read_bytes"] > 0
        assert report["peak_saved_bytes"] < report["peak_saved_bytes_without"] / 2
    leftovers = [path for path in tmp_path.iterdir() if path.suffix not in (".json", ".rank1", ".txt")]
    assert [path.name for path in leftovers] == ["zero_stage_3"]  # ZeRO's own


def test_every_stage_in_fp32_and_bf16_with_gradient_accumulation(tmp_path: Path) -> None:
    each = []
    for stage, is_bf16 in itertools.product(range(4), (False, True)):
        more = {"gradient_accumulation_steps": 4, "gradient_clipping": 1.0, "bf16": {"enabled": is_bf16}}
        plain = config_of(stage, **more)
        ours = runs.with_block(plain, tmp_path, placement="nvme", min_tensor_bytes=4096, io={"staging_bytes": 1 << 20})
        each += [(one, {"steps": 2}) for one in (plain, ours)]
    found = forked.run_each(programs_deepspeed.trained, each, tmp_path, ranks=2, timeout_s=500)
    for without, with_us in zip(found[::2], found[1::2], strict=True):
        assert all(report["written_bytes"] for report in agrees(without, with_us).reports)


def test_a_bad_config_ends_every_rank_before_training(tmp_path: Path) -> None:
    config = runs.with_block(runs.plain_config(), tmp_path, placment="nvme")
    result = runs.run(config, tmp_path, ranks=2)
    assert result.returncode != 0 and "did you mean `placement`?" in result.output
    assert not result.lines("LOSS")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=lambda number: number.name)
def test_a_killed_run_leaves_a_report_and_nothing_else(tmp_path: Path, number: signal.Signals) -> None:
    nvme, port = tmp_path / "nvme", runs.free_port()
    nvme.mkdir()
    config = runs.with_block(runs.plain_config(), nvme, report={"path": str(tmp_path / "report.json")})
    argv = runs.command(runs.SCRIPTS / "train.py", config, tmp_path, "--steps", "10000", "--pause_s", "0.2", port=port)
    with subprocess.Popen(
        argv,
        env=runs.environment(),
        stdout=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        # Tests started in the background of a shell inherit an ignored SIGINT, and so would the ranks.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    ) as launcher:
        for line in launcher.stdout or ():
            if line.startswith("LOSS") and (tmp_path / "report.json").exists() and report_of(tmp_path)["steps"] > 1:
                break
        assert ranks_in(tmp_path)
        for _ in range(3):  # Python drops an interrupt that comes while a finalizer runs
            for pid in ranks_in(tmp_path):
                os.kill(pid, number)
            with suppress(subprocess.TimeoutExpired):
                launcher.communicate(timeout=30)
        assert not ranks_in(tmp_path)
    runs.remove_shared_memory(port)
    assert list(nvme.iterdir()) == []
    report = report_of(tmp_path)
    assert report["written_bytes"] > 0
    assert report["state"] == ("finished" if number == signal.SIGINT else "running")


def ranks_in(directory: Path) -> list[int]:
    """Processes of the ranks themselves, which work in that directory: not the launcher."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            argv = (process / "cmdline").read_text().split("\0")
            if argv[1:2] == ["-u"] and argv[2].endswith("train.py") and (process / "cwd").resolve() == directory:
                found.append(int(process.name))
    return found
