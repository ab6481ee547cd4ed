"""Fixtures: a store in a temporary directory for each backend that this machine has, and the table of faults."""

from __future__ import annotations

import gc
import itertools
import logging
import os
import platform
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from operator_page import OperatorPage
from support.disks import EXT4, MIB, Disk, mounted, run, until
from support.doubles import Accelerator
from support.runs import SHARED
from support.tables import CompatibilityTable, FaultTable, covering
from support.victims import NoVictims, Victims, serving

from ds_tba.cli import main
from ds_tba.config import AioConfig
from ds_tba.storage.backends import IoBackend, PosixBackend, aio
from ds_tba.storage.integrity import Codec
from ds_tba.storage.nvme import Lanes, NvmeStore
from ds_tba.storage.path import SwapFile
from ds_tba.storage.staging import StagingRing

pytest.register_assert_rewrite("contracts")


Factory = Callable[..., Any]
StoreFactory = Callable[..., NvmeStore]
Closing = Callable[..., Factory]
Cli = Callable[..., Any]
# Variables of a rank that is alone; it needs a MASTER_PORT, too.
ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}


@pytest.fixture
def closing() -> Iterator[Closing]:
    """Turn what makes something into a factory whose products are closed after the test, the last one first."""
    with ExitStack() as last:

        def factory(make: Factory, close: Callable[[Any], None] = lambda made: made.close()) -> Factory:
            def made(*arguments: Any, **options: Any) -> Any:
                product = make(*arguments, **options)
                last.callback(close, product)
                return product

            return made

        yield factory


def make_backend(name: str) -> IoBackend:
    if name == "posix":
        return PosixBackend()
    if not aio.is_built():
        pytest.skip("DeepSpeed's aio op is not built: make aio")
    return aio.AioBackend(AioConfig())


@pytest.fixture(params=["posix", pytest.param("aio", marks=pytest.mark.aio)])
def backend_name(request: pytest.FixtureRequest) -> str:
    make_backend(request.param)
    return str(request.param)


@pytest.fixture
def backend(backend_name: str) -> IoBackend:
    return make_backend(backend_name)


@pytest.fixture(autouse=True)
def frozen_imports() -> None:
    """Many tests collect garbage, and DeepSpeed does: not among all that was imported, a tenth of a second each."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def shared_directory(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Name a directory of all workers of a run: what one has found the others need not find again."""
    own = tmp_path_factory.getbasetemp()
    root = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own
    os.environ[SHARED] = str(root / "shared")


@pytest.fixture(autouse=True)
def level_of_the_log() -> Iterator[None]:
    """Restore the logger's level, which a training in the tests' own process sets for the tests that follow."""
    yield
    logging.getLogger("ds_tba").setLevel(logging.NOTSET)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Compute in one thread: for small tensors several mostly wait for one another."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def steady_drives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drives whose rates never ask for another plan: on a busy machine those of a real one do at any time."""
    monkeypatch.setattr("ds_tba.plan.feedback.RATE_CHANGE", 1e300)


class AlarmError(Exception):
    """Raised by a signal handler, wherever that has come."""


class Alarm:
    """Has a handler raise an ``AlarmError`` in so many seconds."""

    def __init__(self) -> None:
        # Also where Python ignored it, as in a finalizer: whoever waits for it is to wait for this as well.
        self.has_come = False

    def __call__(self, seconds: float) -> None:
        self.has_come = False
        signal.setitimer(signal.ITIMER_REAL, seconds)

    def handler(self, *_: object) -> None:
        self.has_come = True
        raise AlarmError


@pytest.fixture
def alarm() -> Iterator[Alarm]:
    """One at a time; none comes after the test."""
    alarm = Alarm()
    before = signal.signal(signal.SIGALRM, alarm.handler)
    try:
        yield alarm
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    """Run a command of ``ds_tba``, which must end with this status; return what it has told, and nothing before it."""

    def run(*arguments: object, status: int = 0, exits: bool = False) -> Any:
        capsys.readouterr()
        if exits:
            with pytest.raises(SystemExit, match=str(status)):
                main([*map(str, arguments)])
        else:
            assert main([*map(str, arguments)]) == status
        return capsys.readouterr()

    return run


@pytest.fixture
def make_store(tmp_path: Path, closing: Closing) -> StoreFactory:
    directories = itertools.count()

    def make(
        backend: IoBackend | None = None,
        *,
        staging_bytes: int = 32 << 20,
        swap_file_bytes: int = 256 << 20,
        lanes: Lanes = Lanes(2, 2),  # noqa: B008 - frozen
        integrity: str = "sampled",
        paths: int = 1,
        accelerator: Accelerator | None = None,
        codec: Codec | None = None,
    ) -> NvmeStore:
        backend = backend or PosixBackend()
        files, number = [], next(directories)
        for index in range(paths):
            directory = tmp_path / f"nvme{number}.{index}"
            directory.mkdir()
            files.append(SwapFile(directory, swap_file_bytes))
        buffers = 0 if codec is None else paths * (lanes.write + lanes.read)
        ring = StagingRing(accelerator or Accelerator(), backend, staging_bytes, buffers)
        try:
            return NvmeStore(files, backend, ring, lanes, integrity, codec)
        except BaseException:
            ring.close()
            raise

    return closing(make)


# ---- faults ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def victims(victim_server: Victims) -> Iterator[Victims]:
    """Starts processes that train while a fault strikes. Name it after the disk: they end before it is unmounted."""
    yield victim_server
    victim_server.end()


@pytest.fixture(scope="session")
def victim_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Victims]:
    try:
        with serving(tmp_path_factory.mktemp("victims")) as victims:
            yield victims
    except NoVictims as error:
        pytest.skip(str(error))


@pytest.fixture
def needs_aio() -> None:
    make_backend("aio")


def left_as_found(disk: Disk) -> Iterator[Disk]:
    before = disk.free_bytes
    yield disk
    if os.path.ismount(disk.path):
        until(lambda: disk.is_empty(before), f"no file on the disk, and {before} bytes of room")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    """An ext4 of 256 MiB; the test must leave it as it found it."""
    with mounted(tmp_path / "loop", 256 * MIB) as disk:
        yield from left_as_found(disk)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Disk]:
    """An ext4 of 64 MiB; otherwise as ``disk``."""
    with mounted(tmp_path / "loop", 64 * MIB) as disk:
        yield from left_as_found(disk)


@pytest.fixture
def fragile_disk(tmp_path: Path) -> Iterator[Disk]:
    """An ext4 to be broken: without a journal, whose loss would shut down the file system for good.

    In what state a broken drive is left is not checked.
    """
    with mounted(tmp_path / "loop", 256 * MIB, *EXT4, "-O", "^has_journal") as disk:
        yield disk


@pytest.fixture
def quota_disk(tmp_path: Path) -> Iterator[Disk]:
    """A btrfs of 256 MiB with quotas on."""
    with mounted(tmp_path / "loop", 256 * MIB, "mkfs.btrfs", "-q") as disk:
        run("btrfs", "quota", "enable", str(disk.path))
        yield from left_as_found(disk)


# ---- the tables of faults and of combinations -----------------------------------------------------------------------

TABLE = pytest.StashKey[FaultTable]()
COMPATIBILITY = pytest.StashKey[CompatibilityTable]()
REMATERIALIZED = pytest.StashKey[CompatibilityTable]()
TABLES: dict[str, pytest.StashKey[Any]] = {
    "reliability": TABLE, "compatibility": COMPATIBILITY, "rematerialized": REMATERIALIZED,
}  # fmt: skip
# Whose versions a table names beside PyTorch's.
PACKAGES = {
    "compatibility": ("deepspeed", "transformers", "accelerate", "peft", "trl", "diffusers", "torch_remat"),
    "rematerialized": ("transformers",),
}
SAVED = "model | saved MiB | with it | less | ops"


def pytest_addoption(parser: pytest.Parser) -> None:
    for name in (*TABLES, "operators"):
        parser.addoption(f"--{name}", type=Path, help="write the table of this run to a file")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[TABLE] = FaultTable()
    config.stash[COMPATIBILITY] = CompatibilityTable()
    config.stash[REMATERIALIZED] = CompatibilityTable("rematerialized", SAVED, is_part=True)
    path = config.getoption("--operators")
    if path is not None and "PYTEST_XDIST_WORKER" not in os.environ:
        config.pluginmanager.register(OperatorPage(path, versions()))


@pytest.hookimpl(tryfirst=True)  # before -k and -m deselect
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for table in TABLES.values():
        config.stash[table].collect(items)
    for item in items:
        marker = item.get_closest_marker("compatible")
        if marker is not None and item.get_closest_marker("engine") and not marker.kwargs.get("decides"):
            item.add_marker("thorough")
    trained = [item for item in items if item.get_closest_marker("rematerialized")]
    for item in set(trained) - covering(trained):
        item.add_marker("thorough")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Any:
    report = yield
    if report.when == "call" or report.outcome != "passed":
        for table in TABLES.values():
            item.config.stash[table].note(item, report.outcome)
    return report


def pytest_sessionfinish(session: pytest.Session) -> None:
    for name, table in TABLES.items():
        path = session.config.getoption(f"--{name}")
        if path is not None:
            session.config.stash[table].write(path, versions(*PACKAGES.get(name, ())))


def versions(*more: str) -> str:
    packages = ", ".join(f"{name} {metadata.version(name)}" for name in ("torch", *more))
    return f"Python {platform.python_version()}, {packages}"


@pytest.fixture
def all_tests(request: pytest.FixtureRequest) -> None:
    """Skip a test of a table's rows where not all tests were collected."""
    if any(Path(argument).resolve() != Path(__file__).parent for argument in request.config.args):
        pytest.skip("only a part of the tests was collected")


@pytest.fixture
def user_sees(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Tell what the user reads when the fault of this test strikes."""
    return lambda message: request.config.stash[TABLE].see(request.node, message)


@pytest.fixture
def row_says(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Tell the outcome of the combination that this test trains, in the table of its marker."""

    def say(outcome: str) -> None:
        for table in (COMPATIBILITY, REMATERIALIZED):
            request.config.stash[table].say(request.node, outcome)

    return say
