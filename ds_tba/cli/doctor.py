"""``ds_tba doctor`` and ``ds_tba env``: can this machine run, and what should an issue say of it?

The doctor names the repair for each problem; ``--build`` also builds DeepSpeed's aio op, once, with every core.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from functools import partial
from importlib.metadata import Distribution, PackageNotFoundError, distributions, entry_points, version
from pathlib import Path
from typing import TypeAlias
from urllib.parse import unquote, urlsplit

from packaging.specifiers import SpecifierSet

from ds_tba.cli.format import Commands, Result, add_json, show, size

_BUILD = "from deepspeed.ops.op_builder import AsyncIOBuilder; AsyncIOBuilder().load(verbose=True)"
_LOCKED = "another build is running, or was killed. If none is running, remove the lock, or a build waits for ever"
_MARKS = {True: "ok  ", None: "--  ", False: "FAIL"}
PACKAGES = (
    "ds_tba", "torch", "deepspeed", "transformers", "accelerate", "peft", "trl", "pydantic",
    "kvikio-cu12", "kvikio-cu13",
)  # fmt: skip
# Of the environment: what changes which code runs. Values of others may be secrets.
VARIABLES = ("CUDA_", "CUFILE_", "DS_ACCELERATOR", "DS_TBA_", "KVIKIO_", "OMP_NUM_THREADS", "PYTORCH_", "TORCH_")


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


# ---- the doctor -----------------------------------------------------------------------------------------------------


# A verdict, None where something is missing that a run can do without, and what to say.
Check: TypeAlias = tuple[bool | None, str]


def _examine(options: argparse.Namespace) -> Result:
    """Return one line per check, and status 1 if any failed."""
    if options.build and (status := build_aio()):
        return Result(status, [], {"ok": False, "checks": [{"ok": False, "what": "DeepSpeed's aio op did not build"}]})
    found = list(checks(options))
    is_good = all(good is not False for good, _ in found)
    told = [{"ok": good, "what": what} for good, what in found]
    verdict = "ready" if is_good else "not ready: repair what is marked FAIL"
    lines = [*(f"{_MARKS[good]}  {what}" for good, what in found), verdict]
    return Result(1 - is_good, lines, {"ok": is_good, "checks": told})


def checks(options: argparse.Namespace) -> Iterator[Check]:
    """Check versions, the entry point, backends and directories."""
    from ds_tba.config import SUPPORTED_DEEPSPEED
    from ds_tba.device.accelerator import available_bytes
    from ds_tba.device.memory import can_lock
    from ds_tba.errors import PathError
    from ds_tba.storage.backends import aio, kvikio
    from ds_tba.storage.swap_file import SwapFile, check_directories

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
    free_bytes = available_bytes()
    if options.staging_bytes > free_bytes:  # locking takes the memory: the kernel would kill this process, or another
        yield None, f"{options.staging_bytes >> 20} MiB cannot be locked: {free_bytes >> 20} MiB are available"
    elif can_lock(options.staging_bytes):
        yield True, f"{options.staging_bytes >> 20} MiB can be locked, as aio needs without a GPU"
    else:
        need = "aio needs a GPU or ulimit -l unlimited, posix needs neither"
        yield None, f"{options.staging_bytes >> 20} MiB cannot be locked: {need}"
    yield True, "io.backend posix can run here"
    yield _aio(options.nvme_path, built=built)
    problem = kvikio.obstacle()
    for name, can in (("kvikio", "can run here; the start-up line shows its mode"), ("gds", "is tried by a run")):
        yield None if problem else True, f"io.backend {name} {f'cannot run here: {problem}' if problem else can}"
    for path in options.nvme_path:
        try:
            (directory,) = check_directories((path,), options.staging_bytes, 1)
            # Space is reserved as in a run: otherwise quotas and limits of file sizes would not show.
            with closing(SwapFile(directory.path, options.staging_bytes)) as file:
                file.reserve_first(options.staging_bytes)
        except PathError as error:
            yield False, str(error)
        else:
            slow = "" if file.preallocates else ", without fallocate: the swap file is written once as it grows"
            yield True, f"{path}: {directory.file_system}, {directory.free_bytes / 2**30:.1f} GiB free{slow}"


def _aio(paths: Sequence[str], *, built: bool) -> Check:
    """Check that the kernel and the directories let DeepSpeed's op work, and that it loads."""
    from ds_tba.config import AioConfig, IoConfig
    from ds_tba.errors import BackendUnavailableError
    from ds_tba.stats import expanded
    from ds_tba.storage.backends import aio

    handles = (IoConfig().write_lanes + IoConfig().read_lanes) * max(1, len(paths)) + 1
    obstacle = aio.kernel_obstacle(AioConfig(), handles)
    if obstacle is None and built and not aio.build_locks():  # else loading waits for it
        try:
            aio.AioBackend(AioConfig(), handles)
        except BackendUnavailableError as error:
            obstacle = str(error).rstrip(".")
    if obstacle is not None:
        return False, f"io.backend aio cannot run here, nor ZeRO's NVMe offload; null means posix: {obstacle}"
    present = [one for one in map(expanded, paths) if os.path.isdir(one)]  # Path's raises for long names
    of_paths = aio.kernel_obstacle(AioConfig(), handles, present)
    if of_paths is not None:
        return None, f"io.backend aio cannot run there; null means posix: {of_paths}"
    return built or None, "io.backend aio can run here" + ("" if built else " once DeepSpeed's op is built")


def _entry_point() -> Check:
    """Check that ``import torch`` will load this very package."""
    if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") != "1":
        return (
            False,
            'TORCH_DEVICE_BACKEND_AUTOLOAD=0 is set: unset it, or put "import ds_tba" into the training script',
        )
    repair = f"{sys.executable} -m pip uninstall ds_tba, until none is left, then pip install it again"
    points = list(entry_points(group="torch.backends", name="ds_tba"))
    if not points:
        return False, f"torch does not load ds_tba: there is no entry point of it in {sys.prefix}: {repair}"
    try:
        home = Path(inspect.getfile(points[0].load())).parent
    except (ImportError, AttributeError) as error:
        return False, f"torch does not load ds_tba: its entry point {points[0].value} fails ({error}): {repair}"
    copies = dict.fromkeys((one.version, _source(one)) for one in distributions(name="ds_tba"))
    if len(copies) > 1:  # pip takes out one, and imports find another
        found = ", ".join(f"{number} in {where}" for number, where in copies)
        return False, f"ds_tba is installed {len(copies)} times ({found}): {repair}"
    return True, f"torch loads ds_tba {version('ds_tba')} from {home} by its entry point"


def _source(found: Distribution) -> Path:
    """Return where its code is; an editable installation has an ``egg-info`` there, and a ``dist-info`` elsewhere."""
    told = json.loads(found.read_text("direct_url.json") or "{}")
    is_editable = told.get("dir_info", {}).get("editable") is True
    return (Path(unquote(urlsplit(told["url"]).path)) if is_editable else Path(str(found.locate_file("")))).resolve()


def build_aio() -> int:
    """Build the op in a child process; return the child's exit status."""
    from ds_tba.storage.backends import aio

    for lock in aio.build_locks():
        sys.stdout.write(f"{lock} exists: {_LOCKED}\n")
    if (abandoned := aio.abandoned_build()) is not None:
        sys.stdout.write(f"{abandoned}\n")
        return 1
    verb, cost = ("checking", "") if aio.is_built() else ("building", " (once; minutes on few cores)")
    sys.stdout.write(f"{verb} DeepSpeed's aio op{cost}\n")
    sys.stdout.flush()  # a compiler says nothing for minutes
    build = subprocess.run(
        [sys.executable, "-c", _BUILD],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={"MAX_JOBS": str(os.cpu_count() or 1), **os.environ},
        check=False,
    )
    if build.returncode:
        sys.stdout.writelines(f"{line}\n" for line in build.stdout.decode(errors="replace").splitlines()[-40:])
        sys.stdout.write(
            "DeepSpeed's aio op did not build. It needs g++, ninja, python3-dev and libaio-dev (Debian, Ubuntu) or "
            'libaio-devel (Fedora); without them, train with "io": {"backend": "posix"}.\n'
        )
    return build.returncode


def _version(package: str, wanted: SpecifierSet) -> Check:
    try:
        found = version(package).partition("+")[0]
    except PackageNotFoundError:
        return False, f'{package} is not installed: pip install "{package}{wanted}"'
    if found in wanted:
        return True, f"{package} {found}"
    return False, f'{package} {found} is outside {wanted}: pip install "{package}{wanted}"'


# ---- what an issue should say ---------------------------------------------------------------------------------------


def _environment(_: argparse.Namespace) -> Result:
    """Return the table in Markdown."""
    found = environment()
    rows = [f"| {name} | {value.replace('|', chr(92) + '|')} |" for name, value in found.items()]
    return Result(0, ["| | |", "|---|---|", *rows], found)


def environment() -> dict[str, str]:
    """Return name and value of each line."""
    import torch

    from ds_tba.storage.backends import aio

    found = {"Python": platform.python_version(), "system": f"{platform.system()} {platform.release()}"}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    found["CUDA of torch"] = torch.version.cuda or "none"
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    found["devices"] = ", ".join(names) or "none"
    pages, page_bytes = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    found["processors"], found["memory"] = str(os.cpu_count()), f"{pages * page_bytes / 2**30:.0f} GiB"
    found["DeepSpeed's aio op"] = "built" if aio.is_built() else "not built"
    found |= {name: value for name, value in sorted(os.environ.items()) if name.startswith(VARIABLES)}
    return found
