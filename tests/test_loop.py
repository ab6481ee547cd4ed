"""Training loops without DeepSpeed: the same gradients, no room that no key asks for, clear refusals."""

from __future__ import annotations

import json
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from support import runs
from support.disks import until
from support.ranks import fork, free_port, script
from torch import nn

from ds_tba.errors import BackendUnavailableError, ConfigError, IncompatibleError, StateError
from ds_tba.loop import Offloader

SMALL = {"min_tensor_bytes": 4096, "io": {"staging_bytes": 8 << 20, "swap_file_bytes": 64 << 20}}
SCRIPT = runs.SCRIPTS / "loop.py"


def lines(what: str, directory: Path) -> dict[str, list[str]]:
    """What ``tests/scripts/loop.py`` prints: by the name of each loop its outcome, and the rooms imported by then."""
    done = runs.python(SCRIPT, what, directory)
    assert done.returncode == 0, done.stdout + done.stderr
    return {name: rest for name, *rest in map(str.split, done.stdout.splitlines())}


def test_loops_without_deepspeed_have_the_same_gradients_and_load_the_rooms_that_their_keys_ask_for(
    tmp_path: Path,
) -> None:
    """Who reads the core must not have to know plans, recipes, recomputation or explanations."""
    found = lines("rooms", tmp_path)
    assert found == {
        "nvme": ["EQUAL"],
        "host": ["EQUAL"],
        "keep": ["EQUAL"],
        "rematerialize": ["EQUAL", "remat"],
        "timeline": ["EQUAL", "explain", "remat"],
        "adaptive": ["EQUAL", "explain", "plan", "recompute", "remat"],
    }
    last = json.loads((tmp_path / "report.json").read_text())
    assert (last["state"], last["steps"], last["micro_steps"]) == ("finished", 10, 20) and last["plans"] > 0
    assert last["offloaded_bytes"] > 0 and last["peak_saved_bytes"] < last["peak_saved_bytes_without"]
    assert any("layers" in one["module"] for one in last["holders"])


def in_two_ranks(what: str, directory: Path) -> list[str]:
    """Run the script in two ranks; return what each has printed."""
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    with ThreadPoolExecutor(2) as both:
        done = list(both.map(lambda rank: runs.python(SCRIPT, what, directory, RANK=rank, **shared), "01"))
    outputs = [one.stdout + one.stderr for one in done]
    assert [one.returncode for one in done] == [0, 0], "\n".join(outputs)
    return outputs


@pytest.mark.engine
def test_ranks_of_a_loop_agree_on_a_plan(tmp_path: Path) -> None:
    outputs = in_two_ranks("ranks", tmp_path)
    assert all("ranks EQUAL" in output for output in outputs), "\n".join(outputs)
    reports = [json.loads((tmp_path / name).read_text()) for name in ("report.json", "report.json.rank1")]
    assert [one["rank"] for one in reports] == [0, 1] and all(one["plans"] for one in reports)


@pytest.mark.engine
def test_what_one_rank_of_a_loop_is_refused_ends_the_others_at_once(tmp_path: Path) -> None:
    """They would wait for half an hour for a rank that has raised before it answered."""
    first, second = in_two_ranks("refused", tmp_path)
    assert "refused ConfigError rank 1 cannot do" in first and "the device is meta" in first
    assert "refused IncompatibleError the device is meta" in second


GUIDE = (runs.ROOT / "docs/guides/plain_pytorch.md").read_text()
# A reader of the guide has this code already; the guide shows what is added to it.
GIVEN = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(512, 512), nn.Tanh()) for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x.square().mean()

model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
batches = [torch.randn(512, 512) for _ in range(2)]
"""


def test_the_samples_of_the_guide_run_as_they_stand(tmp_path: Path) -> None:
    """On directories that are there, in place of the drives that they name."""
    samples = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)
    code = "\n".join([GIVEN, *samples])
    for name in set(re.findall(r'"/(\w+)"', code)):
        (tmp_path / name).mkdir()
        code = code.replace(f'"/{name}"', f'"{tmp_path / name}"')
    done = runs.python("-c", code, cwd=tmp_path)
    assert len(samples) == 2 and done.returncode == 0, done.stdout + done.stderr
    assert "2 steps: activations take" in done.stderr and "deepspeed" not in done.stdout.lower()


def test_the_sample_of_the_guide_for_several_ranks_runs_as_it_stands(tmp_path: Path) -> None:
    (sample,) = re.findall(r"```text\n(.*?)```", GUIDE, re.DOTALL)
    (tmp_path / "train.py").write_text(GIVEN + sample.replace("/local_nvme", str(tmp_path)))
    codes, outputs = fork(script, str(tmp_path / "train.py"), directory=tmp_path, ranks=2, timeout_s=300)
    assert codes == [0, 0], "\n".join(outputs)
    for name in ("report.json", "report.json.rank1"):
        report = json.loads((tmp_path / name).read_text())
        assert report["state"] == "finished" and report["steps"] == 2 and report["offloaded_bytes"] > 0


# ---- in this process ------------------------------------------------------------------------------------------------


def loop(offloader: Offloader, model: nn.Module, steps: int = 1) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        with offloader.saving():
            loss = model(torch.randn(64, 64)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        offloader.step()


def model_of() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({}, r'a model is missing, for placement "adaptive": give it, as in ds_tba.Offloader\(model'),
        ({"placement": "keep", "report": {"trace_path": "trace.json"}}, "is missing, for report.trace_path"),
        ({"placement": "keep", "only": ["*.mlp"]}, "is missing, for only or except"),
        ({"placement": "keep", "until_backward": True}, "until_backward is true.*inside of saving"),
        ({"placement": "keep", "enabled": False}, "enabled is false: make no ds_tba.Offloader"),
        ({"placement": "keep", "colour": 1}, r'ds_tba.Offloader\(...\) is refused:\n  "ds_tba.Offloader.colour"'),
        ({"placement": "auto"}, '"ds_tba.Offloader.placement" is "auto"'),
        ({"placement": "cpu"}, "did you mean `host`"),
        ({"placement": "keep", "model": "/local_nvme"}, "the model is '/local_nvme': it must be a torch.nn.Module"),
    ],
)
def test_what_a_loop_cannot_tell_is_refused_by_name(tmp_path: Path, keys: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        Offloader(nvme_path=str(tmp_path), **keys)


def test_values_of_a_program_are_those_of_a_file(tmp_path: Path) -> None:
    """Paths, tuples and NumPy's numbers are what a program has where JSON has strings, lists and numbers."""
    (tmp_path / "second").mkdir()
    keys = {"placement": "nvme", "min_tensor_bytes": numpy.int64(4096), "io": {**SMALL["io"], "write_lanes": 1}}
    report = {"path": tmp_path / "report.json"}
    with Offloader(nvme_path=(tmp_path, tmp_path / "second"), report=report, **keys) as offloader:
        loop(offloader, model_of())
    assert json.loads((tmp_path / "report.json").read_text())["paths"] == [str(tmp_path), str(tmp_path / "second")]
    with pytest.raises(ConfigError, match=r"min_tensor_bytes.* is 0\.5: it must be a valid integer"):
        Offloader(placement="keep", min_tensor_bytes=numpy.float32(0.5))
    with pytest.raises(ConfigError, match=r"min_tensor_bytes.* is True"):
        Offloader(placement="keep", min_tensor_bytes=True)


def test_another_device_is_refused_by_name() -> None:
    for device in ("meta", f"cuda:{torch.cuda.device_count()}"):
        with pytest.raises(IncompatibleError, match=f"the device is {device}, and ds_tba serves the CPU"):
            Offloader(device=device, placement="keep")


def test_aio_without_deepspeed_names_the_way_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed.git_version_info", None)
    with pytest.raises(BackendUnavailableError, match=r'DeepSpeed cannot be imported.*"backend": "posix"'):
        Offloader(nvme_path=str(tmp_path), placement="nvme", io={"backend": "aio"})


def test_a_closed_one_refuses_the_next_forward() -> None:
    with Offloader(placement="keep") as offloader:
        loop(offloader, model_of())
    with pytest.raises(StateError, match=r"^saving\(\) after close"):
        loop(offloader, model_of())
    with pytest.raises(StateError, match=r"^step\(\) after close"):
        offloader.step()
    assert offloader.report().steps == 1


def test_one_that_nobody_refers_to_any_more_closes(tmp_path: Path) -> None:
    """A cell of a notebook that runs again, without the context."""
    model, path = model_of(), tmp_path / "report.json"
    offloader = Offloader(model, nvme_path=str(tmp_path), placement="nvme", report={"path": str(path)}, **SMALL)
    loop(offloader, model)
    inner = offloader._offloader
    del offloader
    until(lambda: inner.is_closed, "the end of the tiers")
    until(lambda: path.exists() and json.loads(path.read_text())["state"] == "finished", "the last report")


def test_steps_and_forwards_that_are_not_told_are_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("WARNING", "ds_tba")
    with Offloader(placement="keep") as offloader:
        loop(offloader, model_of())
    assert not caplog.text
    with Offloader(placement="keep") as offloader, offloader.saving():
        model_of()(torch.randn(8, 64))
    assert "Offloader.step() was never called" in caplog.text
    with Offloader(placement="keep") as offloader:
        with torch.no_grad(), offloader.saving():
            model_of()(torch.randn(8, 64))
        model_of()(torch.randn(8, 64)).sum().backward()
        offloader.step()
    assert "A loop of your own runs forward and loss inside of ds_tba.Offloader.saving()" in caplog.text


def test_memory_that_runs_out_in_the_loop_is_explained(caplog: pytest.LogCaptureFixture) -> None:
    model = model_of()
    options = {"placement": "keep", "min_tensor_bytes": 1}
    with pytest.raises(MemoryError), Offloader(model, **options) as offloader, offloader.saving():
        model(torch.randn(8, 64))
        raise MemoryError
    assert "memory ran out" in caplog.text and "What would help" in caplog.text


def test_an_evaluation_in_the_loop_counts_as_no_micro_step(tmp_path: Path) -> None:
    model = model_of()
    with Offloader(model, nvme_path=str(tmp_path), placement="nvme", **SMALL) as offloader:
        loop(offloader, model)
        with torch.no_grad(), offloader.saving():
            model(torch.randn(8, 64))
        loop(offloader, model)
        report = offloader.report()
    assert (report.steps, report.micro_steps) == (2, 2)
