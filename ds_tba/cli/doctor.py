"""``ds_tba doctor`` and ``ds_tba env``: can this machine run, and what should an issue say of it?

The doctor names the repair for each problem; ``--build`` also builds DeepSpeed's aio op, once, with every core. It
measures no drive: DeepSpeed's ``ds_nvme_tune`` and fio do.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from functools import partial
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path
from typing import TypeAlias

from packaging.specifiers import SpecifierSet

from ds_tba.cli.format import Commands, Result, add_json, show, size
from ds_tba.config import SUPPORTED_DEEPSPEED, AioConfig
from ds_tba.errors import PathError

_BUILD = "from deepspeed.ops.op_builder import AsyncIOBuilder; AsyncIOBuilder().load(verbose=False)"
_MARKS = {True: "ok  ", None: "--  ", False: "FAIL"}
PACKAGES = ("ds_tba", "torch", "deepspeed", "transformers", "accelerate", "peft", "trl", "pydantic", "kvikio-cu12",
            "kvikio-cu13")  # fmt: skip
# Of the environment: what changes which code runs. Values of others may be secrets.
VARIABLES = ("CUDA_", "CUFILE_", "DS_ACCELERATOR", "DS_TBA_", "KVIKIO_", "MALLOC_", "OMP_NUM_THREADS", "PYTORCH_",
             "TORCH_")  # fmt: skip
# A verdict, None where something is missing that a run can do without, and what to say.
Check: TypeAlias = tuple[bool | None, str]


def add_parsers(commands: Commands) -> None:
    """Add both subcommands."""
    parser = commands.add_parser("doctor", help="check this machine, and build DeepSpeed's aio op")
    parser.add_argument("--nvme-path", action="append", default=[], help="a directory to check (may be repeated)")
    parser.add_argument("--staging-bytes", type=size, default=256 << 20, help="io.staging_bytes of the config")
    parser.add_argument("--build", action="store_true", help="build DeepSpeed's aio op if it is not built yet")
    add_json(parser)
    parser.set_defaults(run=partial(show, "doctor", _examine))
    parser = commands.add_parser("env", help="print versions and devices, to paste into an issue")
    add_json(parser)
    parser.set_defaults(run=partial(show, "env", _environment))


def _examine(options: argparse.Namespace) -> Result:
    """Return one line per check, and status 1 if any failed."""
    built = [build_aio()] if options.build else []
    found = [*built, *checks(options.nvme_path, options.staging_bytes)]
    is_good = all(good is not False for good, _ in found)
    lines = [f"{_MARKS[good]}  {what}" for good, what in found]
    lines.append("ready" if is_good else "not ready: repair what is marked FAIL")
    return Result(1 - is_good, lines, {"ok": is_good, "checks": [{"ok": good, "what": what} for good, what in found]})


def checks(paths: Sequence[str], staging_bytes: int) -> Iterator[Check]:
    """Check versions, the entry point, backends and directories."""
    from ds_tba.storage.backends import aio, kvikio
    from ds_tba.storage.path import SwapFile, check_directories

    torch_wanted = SpecifierSet(">=2.8", prereleases=True)  # as in NVIDIA's containers: 2.9.0a0+145a3a7
    for package, wanted in (("deepspeed", SUPPORTED_DEEPSPEED), ("torch", torch_wanted)):
        found = _installed(package)
        is_right = bool(found) and found in wanted
        repair = "" if is_right else f' is not {wanted}: pip install "{package}{wanted}"'
        yield is_right, f"{package} {found or 'missing'}{repair}"
    # A broken one torch refuses by name as it is imported.
    is_on = os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") == "1"
    is_loaded = is_on and bool(entry_points(group="torch.backends", name="ds_tba"))
    repair = f"install it again in {sys.prefix}" if is_on else "unset TORCH_DEVICE_BACKEND_AUTOLOAD"
    yield is_loaded, "torch loads ds_tba" if is_loaded else f"torch does not load ds_tba: {repair}, or import it first"
    built, unbuilt = aio.is_built(), "is not built, so io.backend null means posix (build it: ds_tba doctor --build)"
    yield built or None, f"DeepSpeed's aio op {'is built' if built else unbuilt}"
    for lock in aio.build_locks(("*",)):
        yield None, _waiting_for(lock)
    if problem := aio.kernel_obstacle(AioConfig()):
        yield None, f"io.backend aio, which ZeRO's NVMe offload takes, too, would fail; null means posix: {problem}"
    problem = kvikio.obstacle()
    yield None if problem else True, f"io.backend kvikio and gds: {problem or 'can be tried by a run'}"
    for path in paths:
        try:
            (directory,) = check_directories((path,), staging_bytes, 1)
            # Space is reserved as in a run: otherwise quotas and limits of file sizes would not show.
            with closing(SwapFile(directory.path, staging_bytes)) as file:
                file.reserve_first(staging_bytes)
        except PathError as error:
            yield False, str(error)
        else:
            yield True, f"{path}: {directory.file_system}, {directory.free_bytes / 2**30:.1f} GiB free"
    yield None, "how fast a drive is, DeepSpeed's ds_nvme_tune and fio tell"


def _waiting_for(lock: Path) -> str:
    return f"{lock} exists: what loads this op waits for its build. If none is running, rm {lock}"


def build_aio() -> Check:
    """Build the op in a child process, whose words go to the standard error."""
    from ds_tba.storage.backends import aio

    if lock := aio.lock_that_stays():
        return False, _waiting_for(lock)
    sys.stderr.write("building DeepSpeed's aio op, unless it is built (once; minutes on few cores)\n")
    env = {"MAX_JOBS": str(os.cpu_count() or 1), **os.environ}
    if subprocess.run([sys.executable, "-c", _BUILD], stdout=2, env=env, check=False).returncode:
        needed = "g++, ninja, python3-dev and libaio-dev (Debian, Ubuntu) or libaio-devel (Fedora)"
        return False, f"DeepSpeed's aio op did not build, as said above. It needs {needed}; else set io.backend posix"
    return True, "DeepSpeed's aio op was built"


def _environment(_: argparse.Namespace) -> Result:
    """Return the table in Markdown."""
    import torch

    found = {"Python": platform.python_version(), "system": f"{platform.system()} {platform.release()}"}
    found |= {package: _installed(package) or "not installed" for package in PACKAGES}
    found["CUDA of torch"] = torch.version.cuda or "none"
    found["devices"] = ", ".join(map(torch.cuda.get_device_name, range(torch.cuda.device_count()))) or "none"
    found |= {name: value for name, value in sorted(os.environ.items()) if name.startswith(VARIABLES)}
    rows = [f"| {name} | {value.replace('|', chr(92) + '|')} |" for name, value in found.items()]
    return Result(0, ["| | |", "|---|---|", *rows], found)


def _installed(package: str) -> str:
    """Return the version of a package, empty where it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
