"""The examples, small; the demo as the README runs it."""

from __future__ import annotations

import ctypes
import json
import re
from pathlib import Path
from typing import Any

import demo
import pytest
import torch
from demo import Outcome, summary
from support import ranks, runs

from ds_tba.storage.backends import aio

DEMO = runs.ROOT / "examples" / "demo.py"
SMALL = ("--steps", "2", "--width", "128", "--depth", "2", "--sequence", "256", "--batch", "8", "--rows", "the block")
pytestmark = pytest.mark.engine


CONFIGS = sorted(path.name for path in (runs.ROOT / "ds_configs").glob("*.json"))
# The next test has another one.
IN_BRIEF = {"zero3_nvme_params_activations.json"}


@pytest.mark.parametrize(
    "config",
    [pytest.param(one, marks=() if one in IN_BRIEF else pytest.mark.thorough, id=one) for one in CONFIGS],
)
def test_every_shipped_config_trains(tmp_path: Path, config: str) -> None:
    if "nvme_params" in config and not aio.is_built():
        pytest.skip("DeepSpeed's aio op is not built: make aio")
    where = ("--deepspeed_config", str(runs.ROOT / "ds_configs" / config), "--nvme_path", str(tmp_path))
    arguments = (*where, *SMALL, "--memory", "0", "--report", str(tmp_path / "report.json"))
    # glibc is to give freed memory back, as under ``make demo``.
    done = runs.python(DEMO, *arguments, cwd=tmp_path, timeout_s=900, MALLOC_MMAP_THRESHOLD_=str(64 << 10))
    output = done.stdout + done.stderr
    assert done.returncode == 0 and output.count("equal bit for bit") == 2, output
    if config == "zero3_nvme_params.json":
        assert not (tmp_path / "report.json").exists()
        return
    report = json.loads((tmp_path / "report.json").read_text())
    if config in ("rematerialize.json", "zero3_interleaved_update.json"):  # without a drive
        assert report["rematerialized_bytes"] > 0 and report["written_bytes"] == 0
    else:
        assert report["written_bytes"] > 0
    assert "full block is" in output and str(tmp_path / "report.html") in output
    assert (tmp_path / "report.html").exists()


M_MMAP_THRESHOLD = -3  # of glibc's mallopt


def launched_giving_memory_back(path: str, *arguments: str) -> None:
    """Run a script as the launcher does, under the threshold that ``make demo`` sets in the environment."""
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 64 << 10)
    ranks.launched(path, *arguments)


@pytest.mark.long
def test_the_block_lives_where_checkpointing_dies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each run is a forked process; the test above starts them under the launcher, whose imports take longer."""

    def run(name: str, count: int, arguments: list[str], _console: Any) -> Outcome:
        directory = tmp_path / name.replace(" ", "_")
        directory.mkdir()
        files = [directory / one for one in ("result.json", "lengths.json")]
        told = ["--deterministic", "--result", str(files[0]), "--lengths", str(files[1])]
        script = str(runs.ROOT / "examples" / "train_gpt.py")
        codes, outputs = ranks.fork(
            launched_giving_memory_back, script, *arguments, *told, directory=directory, ranks=count, timeout_s=600
        )
        found, shorter = (json.loads(one.read_text()) if one.exists() else None for one in files)
        return Outcome(name, codes[0], found or {}, shorter or [], outputs[0])

    size = ("--width", "64", "--depth", "32", "--lora_rank", "4", "--batch", "8", "--steps", "1", "--sequence", "512")
    size += ("--also_lengths", "128", "256")
    limits = ("--placement", "nvme", "--staging_bytes", str(8 << 20), "--min_tensor_bytes", str(64 << 10))
    config = json.loads((runs.ROOT / "ds_configs" / "zero2_activations.json").read_text())
    config["bf16"]["enabled"] = False  # in which many processors are ten times as slow
    (tmp_path / "ds_config.json").write_text(json.dumps(config))
    where = ("--deepspeed_config", str(tmp_path / "ds_config.json"), "--nvme_path", str(tmp_path), "--backend", "posix")
    monkeypatch.setattr("demo.run", run)
    status = demo.main([*where, *size, *limits, "--memory", "0.1"])
    output = capsys.readouterr().out
    assert status == 0 and output.count("equal bit for bit") == 3, output  # two rows, the last line
    died = [line for line in output.splitlines() if "no: memory ran out" in line]
    assert ["as it is" in line for line in died] == [True, False] and len(died) == 2, output
    assert re.search(r"In [\d,]+ MiB this model trains sequences of [\d,]+ tokens with the block", output), output


def outcome(name: str, peaks: dict[int, int], result: dict[str, object]) -> Outcome:
    lengths = [{"sequence": length, "peak_memory_bytes": nbytes, "step_s": 2.0} for length, nbytes in peaks.items()]
    return Outcome(name, 0 if result else 137, result, lengths, "")


def test_the_longest_sequence_is_where_the_line_of_peaks_reaches_the_limit() -> None:
    mib = 1 << 20
    steep = outcome("as it is", {100: 200 * mib, 200: 300 * mib}, {})
    assert steep.longest(400 * mib) == pytest.approx(300)
    assert outcome("as it is", {100: 200 * mib}, {}).longest(400 * mib) is None
    assert outcome("as it is", {100: 200 * mib, 200: 200 * mib}, {}).longest(400 * mib) is None
    halved = outcome("torch checkpointing", {100: 150 * mib, 200: 200 * mib}, {})
    flat = outcome("the block", {100: 125 * mib, 200: 150 * mib}, {"sequence": 300, "peak_memory_bytes": 175 * mib})
    said = summary([steep, halved, flat], 400 * mib)
    assert "In 400 MiB" in said and "1,200 tokens with the block" in said and "2.0 x and 4 x" in said
    assert summary([steep, halved], 400 * mib) == "" == summary([steep, halved, flat], 0)


# ---- long sequences: the same training whatever is done with its activations ----------------------------------------

LONG_CONTEXT = runs.ROOT / "examples" / "long_context.py"
BRIEF = ("--sequence", "4096", "--width", "128", "--layers", "2", "--steps", "1", "--staging_mib", "16")


def long_context(directory: Path, *arguments: str) -> tuple[dict[str, Any], str]:
    config, found = runs.ROOT / "ds_configs" / "long_context.json", directory / "result.json"
    where = ("--nvme_path", str(directory), "--output_dir", str(directory), "--backend", "posix")
    told = ("--deepspeed_config", str(config), *where, "--result", str(found), *BRIEF, *arguments)
    result = runs.run(None, directory, *told, script=LONG_CONTEXT, timeout_s=600)
    assert result.returncode == 0, result.output
    return json.loads(found.read_text()), result.output


def test_checkpoints_go_to_nvme(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    plain, output = long_context(tmp_path, "--without_block", "--no-checkpointing")
    assert plain["report"] is None and "no checkpointing" in output and len(plain["losses"]) == 1
    checkpointed, output = long_context(tmp_path)
    assert all(checkpointed[one] == plain[one] for one in ("losses", "parameters_sha256"))
    # the inputs of the second layer, at least, in bf16
    assert checkpointed["report"]["fallbacks"] == 0 and checkpointed["report"]["offloaded_bytes"] >= 4096 * 128 * 2
    assert "activations: at most" in output


@pytest.mark.parametrize("counted", [None, 5000], ids=["by itself", "by the Trainer"])
def test_the_loss_in_chunks_is_the_models_own(counted: int | None) -> None:
    pytest.importorskip("transformers")
    from long_context import LOSS_TOKENS, llama, tile_loss

    torch.manual_seed(0)
    tokens = torch.randint(256, (1, 2 * LOSS_TOKENS + 300))
    more = {} if counted is None else {"num_items_in_batch": torch.tensor(counted)}
    found = []
    for tiled in (False, True):
        torch.manual_seed(0)
        model = llama(64, 1, tokens.shape[1])
        if tiled:
            tile_loss(model)
        loss = model(input_ids=tokens, labels=tokens, **more).loss
        loss.backward()
        found.append([loss.detach(), *(parameter.grad for parameter in model.parameters())])
    for own, in_chunks in zip(*found, strict=True):
        torch.testing.assert_close(in_chunks, own, rtol=1e-4, atol=1e-6)


def test_transformers_is_missing(tmp_path: Path) -> None:
    without = (
        f"import runpy, sys; sys.modules['transformers'] = None; runpy.run_path({str(LONG_CONTEXT)!r}, run_name='x')"
    )
    done = runs.python("-c", f"import sys; sys.path.insert(0, {str(LONG_CONTEXT.parent)!r}); {without}")
    assert done.returncode == 1
    assert "needs transformers and accelerate" in done.stderr and "pip install 'ds_tba[examples]'" in done.stderr
    assert "Traceback" not in done.stderr
