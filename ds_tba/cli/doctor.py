"""``ds_tba doctor``: checks this machine before a run, and names the repair for each problem.

``--build`` also builds DeepSpeed's aio op, once, with every core and a progress line.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distributions, entry_points, version
from pathlib import Path
from typing import Any

from packaging.specifiers import SpecifierSet

_BUILD = "from deepspeed.ops.op_builder import AsyncIOBuilder; AsyncIOBuilder().load(verbose=True)"
_LOCKED = "another build is running, or was killed. If none is running, remove the lock, or a build waits for ever"
_MARKS = {True: "ok  ", None: "--  ", False: "FAIL"}
_NINJA_STEP = re.compile(r"^\[(\d+)/(\d+)\]")


def add_parser(commands: Any) -> None:
    """Add the subcommand."""
    parser = commands.add_parser("doctor", help="check this machine, and build DeepSpeed's aio op")
    parser.add_argument("--nvme-path", action="append", default=[], help="a directory to check (may be repeated)")
    parser.add_argument("--staging-bytes", type=int, default=256 << 20, help="io.staging_bytes of the config")
    parser.add_argument("--build", action="store_true", help="build DeepSpeed's aio op if it is not built yet")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print one line per check; 1 if any failed."""
    if options.build and (status := build_aio()):
        return status
    failed = False
    for good, line in checks(options):
        failed = failed or good is False
        sys.stdout.write(f"{_MARKS[good]}  {line}\n")
    return 1 if failed else 0


def checks(options: argparse.Namespace) -> Iterator[tuple[bool | None, str]]:
    """A verdict and a line for each check; None where something is missing that a run can do without."""
    from ds_tba.config import SUPPORTED_DEEPSPEED
    from ds_tba.device.memory import can_lock
    from ds_tba.errors import PathError
    from ds_tba.storage.backends import aio, kvikio
    from ds_tba.storage.swap_file import check_directories

    yield _version("deepspeed", SUPPORTED_DEEPSPEED)
    yield _version("torch", SpecifierSet(">=2.5", prereleases=True))  # as in NVIDIA's containers: 2.9.0a0+145a3a7
    yield _entry_point()
    built = aio.is_built()
    unbuilt = "is not built, so io.backend null means posix (build it: ds_tba doctor --build)"
    yield built or None, f"DeepSpeed's aio op {'is built' if built else unbuilt}"
    abandoned = aio.abandoned_build()
    if abandoned is not None:
        yield False, abandoned
    else:
        yield from ((None, f"{lock} exists: {_LOCKED}") for lock in aio.build_locks())
    if can_lock(options.staging_bytes):
        yield True, f"{options.staging_bytes} bytes can be locked, as aio needs without a GPU"
    else:
        need = "aio needs a GPU or ulimit -l unlimited, posix needs neither"
        yield None, f"{options.staging_bytes} bytes cannot be locked: {need}"
    yield True, "io.backend posix can run here"
    yield built or None, "io.backend aio can run here" + ("" if built else " once DeepSpeed's op is built")
    problem = kvikio.obstacle()
    for name, can in (("kvikio", "can run here; the start-up line shows its mode"), ("gds", "is tried by a run")):
        yield None if problem else True, f"io.backend {name} {f'cannot run here: {problem}' if problem else can}"
    for path in options.nvme_path:
        try:
            (directory,) = check_directories((path,), options.staging_bytes, 1)
        except PathError as error:
            yield False, str(error)
        else:
            yield True, f"{path}: {directory.file_system}, {directory.free_bytes / 2**30:.1f} GiB free"


def _entry_point() -> tuple[bool, str]:
    """Whether ``import torch`` will load this very package."""
    if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") != "1":
        return (
            False,
            'TORCH_DEVICE_BACKEND_AUTOLOAD=0 is set: unset it, or put "import ds_tba" into the training script',
        )
    repair = f"{sys.executable} -m pip uninstall ds_tba, until none is left, then pip install it again"
    if not entry_points(group="torch.backends", name="ds_tba"):
        return False, f"torch does not load ds_tba: there is no entry point of it in {sys.prefix}: {repair}"
    homes = {one.version: str(one.locate_file("")) for one in distributions(name="ds_tba")}
    if len(homes) > 1:
        found = ", ".join(f"{number} in {home}" for number, home in homes.items())
        return False, f"ds_tba is installed in several versions ({found}): {repair}"
    return True, f"torch loads ds_tba {version('ds_tba')} from {Path(__file__).parents[1]} by its entry point"


def build_aio() -> int:
    """Build the op in a child process, showing ninja's steps as one line; returns the child's exit status."""
    from ds_tba.storage.backends import aio

    what = "building DeepSpeed's aio op (once; minutes on few cores)"
    if aio.is_built():
        what = "checking DeepSpeed's aio op"
    environment = {"MAX_JOBS": str(os.cpu_count() or 1), **os.environ}
    for lock in aio.build_locks():
        sys.stdout.write(f"{lock} exists: {_LOCKED}\n")
    started, output = time.monotonic(), []
    with subprocess.Popen(
        [sys.executable, "-c", _BUILD], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    ) as build:
        _progress(what, "", started)
        for line in build.stdout or ():
            output.append(line)
            step = _NINJA_STEP.match(line)
            if step:
                _progress(what, f": file {step[1]} of {step[2]}", started)
    sys.stdout.write("\n")
    if build.returncode:
        sys.stdout.writelines(output[-40:])
        sys.stdout.write(
            "DeepSpeed's aio op did not build. It needs g++, ninja, python3-dev and libaio-dev (Debian, Ubuntu) or "
            'libaio-devel (Fedora); without them, train with "io": {"backend": "posix"}.\n'
        )
    return build.returncode


def _progress(what: str, detail: str, started: float) -> None:
    end = "\r" if sys.stdout.isatty() else "\n"
    sys.stdout.write(f"{what}{detail}, {time.monotonic() - started:.0f} s{end}")
    sys.stdout.flush()


def _version(package: str, wanted: SpecifierSet) -> tuple[bool, str]:
    try:
        found = version(package).partition("+")[0]
    except PackageNotFoundError:
        return False, f'{package} is not installed: pip install "{package}{wanted}"'
    if found in wanted:
        return True, f"{package} {found}"
    return False, f'{package} {found} is outside {wanted}: pip install "{package}{wanted}"'
