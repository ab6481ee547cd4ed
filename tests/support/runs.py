"""Running training scripts: under the stock ``deepspeed`` launcher, and in ranks that are forked."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support import ranks as of_ranks
from support.ranks import environment, free_port, remove_shared_memory

SHARED = "DS_TBA_TESTS_SHARED"  # a directory of all processes of a run of the tests
SCRIPTS = Path(__file__).parents[1] / "scripts"
ROOT = Path(__file__).parents[2]
EXIT_ABORT = "terminate called without an active exception"
OPTIMIZER = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}


def import_path() -> str:
    """``PYTHONPATH`` of a process that can import this repository and its tests."""
    return os.pathsep.join([str(ROOT), str(ROOT / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])])


def python(
    *arguments: object, timeout_s: float = 300, cwd: Path | None = None, within: tuple[str, ...] = (), **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run Python on the CPU, in one thread, with this repository and its tests on the path; within another command."""
    command = [*within, sys.executable, *map(str, arguments)]
    own = environment(**{"PYTHONPATH": import_path(), **variables})
    return subprocess.run(command, env=own, cwd=cwd, capture_output=True, text=True, timeout=timeout_s)


def benchmark(name: str, *arguments: object) -> str:
    """Run a program of ``benchmarks/``, and return its output."""
    done = python(ROOT / "benchmarks" / name, *arguments, timeout_s=1800)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def plain_config(stage: int = 0, **more: Any) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": stage}
    return {"train_micro_batch_size_per_gpu": 4, "optimizer": OPTIMIZER, "zero_optimization": zero, **more}


def nvme_parameters(directory: Path) -> dict[str, Any]:
    """ZeRO-3 with parameters on NVMe."""
    config = plain_config(3, bf16={"enabled": True})
    offload = {"device": "nvme", "nvme_path": str(directory), "buffer_count": 24, "buffer_size": 1 << 20}
    config["zero_optimization"] |= {
        "offload_param": offload,
        "stage3_prefetch_bucket_size": 0,
        "stage3_param_persistence_threshold": 1000,
    }
    return config


def with_block(config: dict[str, Any], directory: Path, **block: Any) -> dict[str, Any]:
    io = {"backend": "posix", "staging_bytes": 32 << 20, **block.pop("io", {})}
    ours = {"enabled": True, "nvme_path": str(directory), "io": io, "report": {"path": str(directory / "report.json")}}
    return {**config, "activation_nvme_offload": {**ours, **block}}


@dataclass(frozen=True)
class Result:
    returncode: int
    output: str

    def lines(self, tag: str) -> list[str]:
        return sorted(line for line in self.output.splitlines() if line.startswith(tag + " "))

    @property
    def outcome(self) -> tuple[list[str], list[str]]:
        """Losses in order per rank, and parameters."""
        losses = [line for line in self.output.splitlines() if line.startswith("LOSS ")]
        return sorted(losses, key=lambda line: line.split()[1]), self.lines("PARAMETERS")


def command(
    script: Path,
    config: dict[str, Any] | None,
    directory: Path,
    *arguments: str,
    ranks: int = 1,
    port: int | None = None,
) -> list[str]:
    arguments = _arguments(config, directory, arguments)
    launcher, port = launcher_script(), port or free_port()
    return [
        sys.executable, str(launcher), "--num_gpus", str(ranks), "--master_port", str(port), str(script), *arguments,
    ]  # fmt: skip


def _arguments(config: dict[str, Any] | None, directory: Path, arguments: tuple[str, ...]) -> tuple[str, ...]:
    if config is None:
        return arguments
    path = directory / f"ds_config_{len(list(directory.glob('ds_config_*')))}.json"
    path.write_text(json.dumps(config))
    return ("--deepspeed_config", str(path), *arguments)


def launcher_script() -> Path:
    """The stock launcher, of this interpreter's environment or of a directory that packages were put into."""
    beside = Path(sys.executable).with_name("deepspeed")
    return beside if beside.exists() else Path(shutil.which("deepspeed") or beside)


def once(key: Any, make: Callable[[], Any]) -> Any:
    """Return what a function returns, which the first process of a run of the tests that asks for it calls.

    Args:
        key: what the answer depends on.
    """
    name = hashlib.sha256(json.dumps(key, sort_keys=True, default=str).encode()).hexdigest()
    path = Path(os.environ[SHARED]) / f"{name}.json"
    path.parent.mkdir(exist_ok=True)
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            made = json.dumps(make())
            path.with_suffix(".part").write_text(made)
            path.with_suffix(".part").rename(path)
        return json.loads(path.read_text())


def run(
    config: dict[str, Any] | None,
    directory: Path,
    *arguments: str,
    ranks: int = 1,
    script: Path = SCRIPTS / "train.py",
    timeout_s: float = 240,
    start: Callable[..., None] = of_ranks.launched,
    **variables: str | None,
) -> Result:
    """Run a script without the launcher: the ranks are forked, and do not end as interpreters do.

    Args:
        start: what runs the script in each rank, as the launcher does or otherwise.
    """
    codes, outputs = of_ranks.fork(
        start, str(script), *_arguments(config, directory, arguments), directory=directory, ranks=ranks,
        timeout_s=timeout_s, **variables,
    )  # fmt: skip
    return Result(max(map(abs, codes)), "\n".join(outputs))


def launch(
    config: dict[str, Any] | None,
    directory: Path,
    *arguments: str,
    ranks: int = 1,
    script: Path = SCRIPTS / "train.py",
    timeout_s: float = 240,
    **variables: str,
) -> Result:
    """Run a script to its end; standard output and error together.

    A rank that is done may abort at interpreter exit in DeepSpeed's or gloo's own threads, seen once in a run without
    the block: such a run is repeated once. That our part exits cleanly is checked in ``test_engine.py``, without this.
    """
    for last in (False, True):
        port = free_port()
        done = subprocess.run(
            command(script, config, directory, *arguments, ranks=ranks, port=port),
            env=environment(**variables),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout_s,
            cwd=directory,
        )
        for used in (port, port + 1):  # the example's --compare meets at the second one too
            remove_shared_memory(used)
        if last or done.returncode == 0 or EXIT_ABORT not in done.stdout:
            break
    return Result(done.returncode, done.stdout)
