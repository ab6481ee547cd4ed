"""``ds_tba doctor`` and ``ds_tba env``: what is said of the machine, and where it ends."""

from __future__ import annotations

import json
import os
import platform
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import Cli
from support.cuda_doubles import FakeKvikio
from support.offloaders import finished
from support.planned import LLAMA
from support.ranks import environment
from torch.utils import cpp_extension

from ds_tba.cli import main
from ds_tba.cli.doctor import build_aio
from ds_tba.storage.backends import aio


def test_the_doctor_names_what_is_wrong(cli: Cli, tmp_path: Path) -> None:
    assert main(["doctor", "--nvme-path", str(tmp_path)]) == 0
    assert "FAIL  nvme_path /nowhere does not exist" in cli("doctor", "--nvme-path", "/nowhere", status=1).out
    error = cli("doctor", "--staging-bytes", "-5", status=2, exits=True).err
    assert "'-5' must be a whole number of 1 or more" in error
    text = cli("doctor", "--nvme-path", "/tmp/" + "long" * 100, status=1).out
    assert "cannot be examined (File name too long)" in text
    found = json.loads(cli("doctor", "--json", "--nvme-path", "/nowhere", status=1).out)
    assert not found["ok"] and {one["ok"] for one in found["checks"]} >= {True, False}
    assert any(one["what"].startswith("nvme_path /nowhere does not exist") for one in found["checks"])


def test_the_doctor_makes_the_file_that_a_run_would_make(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["doctor", "--nvme-path", str(tmp_path), "--staging-bytes", "16M"]
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8 << 20, before[1]))
    try:
        text = cli(*command, status=1).out
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "cannot reserve 16777216 bytes there (File too large). Raise the limit of file" in text
    assert "GiB free" in cli(*command).out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("torch_version", "line"),
    [
        ("2.9.0a0+145a3a7bda", "ok    torch 2.9.0a0"),  # as NVIDIA's containers name theirs
        ("2.14.1+cu130", "ok    torch 2.14.1"),
        ("2.4.1", "FAIL  torch 2.4.1 is not >=2.8"),
    ],
)
def test_the_doctor_takes_each_build_of_a_supported_torch(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, torch_version: str, line: str
) -> None:
    versions = {"torch": torch_version, "deepspeed": "0.19.5", "ds_tba": "1"}
    monkeypatch.setattr("ds_tba.cli.doctor.version", versions.__getitem__)
    assert line in cli("doctor", status=1 if line.startswith("FAIL") else 0).out


def test_the_doctor_tells_of_each_backend_and_who_measures_drives(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(aio, "is_built", lambda: False)
    monkeypatch.setattr(aio, "kernel_obstacle", lambda *_: "the kernel refuses io_setup")
    monkeypatch.setattr("ds_tba.storage.backends.kvikio.driver_obstacle", lambda: "there is no NVIDIA driver here")
    out = cli("doctor", "--nvme-path", str(tmp_path)).out
    assert "--    DeepSpeed's aio op is not built, so io.backend null means posix (build it: ds_tba doctor --b" in out
    assert "takes, too, would fail; null means posix: the kernel refuses io_setup" in out
    assert "--    io.backend kvikio and gds: there is no NVIDIA driver here: install the driver" in out
    assert "DeepSpeed's ds_nvme_tune and fio tell" in out
    FakeKvikio().install(monkeypatch)
    assert "io.backend kvikio and gds: can be tried by a run" in cli("doctor").out


def test_the_doctor_looks_for_the_entry_point(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "ok    torch loads ds_tba" in cli("doctor").out
    monkeypatch.setattr("ds_tba.cli.doctor.entry_points", lambda **_: [])
    assert "FAIL  torch does not load ds_tba: install it again in" in cli("doctor", status=1).out
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    text = cli("doctor", status=1).out
    assert "FAIL  torch does not load ds_tba: unset TORCH_DEVICE_BACKEND_AUTOLOAD, or import it first" in text


@pytest.mark.parametrize(("op", "is_named"), [(aio.OP, True), ("deepspeed_shm_comm", False)])
def test_a_lock_of_any_op_is_told_at_once_with_the_repair(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, op: str, is_named: bool
) -> None:
    """Whether the build was killed nobody can tell."""
    monkeypatch.setattr(cpp_extension, "FileBaton", object, raising=False)  # as before PyTorch 2.14
    root = tmp_path if is_named else tmp_path / f"py{sys.version_info.major}{sys.version_info.minor}_cpu"
    (root / op).mkdir(parents=True)
    monkeypatch.setattr(cpp_extension, "get_default_build_root", lambda: str(tmp_path))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path) if is_named else "")
    lock = root / op / "lock"
    assert str(lock) not in cli("doctor").out
    lock.touch()
    told = cli("doctor").out
    assert f"--    {lock} exists: what loads this op waits" in told and f"rm {lock}\n" in told


def test_a_lock_that_stays_ends_the_building_before_it_waits(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aio, "lock_that_stays", lambda: Path("/ops/async_io/lock"))
    out = cli("doctor", "--build", status=1).out
    assert "FAIL  /ops/async_io/lock exists: what loads this op waits for its build" in out


@pytest.mark.parametrize("status", [0, 7])
def test_a_build_that_fails_is_told_with_what_the_compiler_says(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    monkeypatch.setattr("ds_tba.cli.doctor._BUILD", f"import sys; print('over'); sys.exit({status})")
    monkeypatch.setattr(aio, "lock_that_stays", lambda: None)
    is_good, told = build_aio()
    assert is_good == (status == 0) and ("did not build" in told) == (status != 0)
    said = capfd.readouterr().err
    assert said == "building DeepSpeed's aio op, unless it is built (once; minutes on few cores)\nover\n"


def test_a_pipe_that_closes_ends_a_command_quietly(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    finished(tmp_path, report={"path": str(tmp_path / "run.json")})
    reader, writer = os.pipe()
    os.close(reader)
    commands = ["env"], ["doctor"], ["report", "run.json"], ["plan", "config.json", "--seq", "8"]
    ours = [sys.executable, "-m", "ds_tba"]
    started = [
        subprocess.Popen(
            [*ours, *one], stdout=writer, stderr=subprocess.PIPE, text=True, cwd=tmp_path, env=environment()
        )
        for one in commands
    ]
    os.close(writer)
    ends = [(one.communicate(timeout=300)[1], one.returncode) for one in started]
    assert ends == [("", 141)] * len(ends)


def test_what_deepspeed_logs_is_not_in_the_output_of_a_command() -> None:
    told = {name: value for name, value in os.environ.items() if name != "DS_ACCELERATOR"}  # else it has less to say
    done = subprocess.run(
        [sys.executable, "-m", "ds_tba", "env", "--json"], env=told, capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout)["Python"] == platform.python_version()


def test_env_tells_versions_and_no_secrets(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "a|b")
    out = cli("env").out
    assert "| deepspeed | 0." in out and "| PYTORCH_CUDA_ALLOC_CONF | a\\|b |" in out and "secret" not in out
    assert json.loads(cli("env", "--json").out)["torch"].startswith("2.")


@pytest.mark.parametrize("arguments", [("doctor",), ("env",), ("plan", "config.json")])
def test_without_deepspeed_a_line_has_the_repair(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    monkeypatch.delitem(sys.modules, "deepspeed", raising=False)
    monkeypatch.setattr(aio, "import_deepspeed", lambda _: None)
    assert 'ds_tba: DeepSpeed cannot be imported: pip install "deepspeed' in cli(*arguments, status=2).err
