"""Two ranks on each of two hosts: network namespaces of one machine, with a wire between them."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import pytest
from compare import MIB, PLANNED, common_plan
from support.ranks import launched
from support.runs import SCRIPTS, plain_config, run, with_block

pytestmark = pytest.mark.engine

STEPS = 10
WIRE = "wire0"
CLONE_NEWNET = 0x40000000  # linux/sched.h


@contextmanager
def two_hosts() -> Iterator[tuple[str, str]]:
    """Names of two namespaces, 10.0.0.1 and 10.0.0.2; skips where they are not permitted."""
    names = (f"ds_tba_{os.getpid()}_0", f"ds_tba_{os.getpid()}_1")
    made = []
    try:
        for name in names:
            _ip("netns", "add", name)
            made.append(name)
        _ip("-n", names[0], "link", "add", WIRE, "type", "veth", "peer", "name", WIRE, "netns", names[1])
        for index, name in enumerate(names):
            _ip("-n", name, "address", "add", f"10.0.0.{1 + index}/24", "dev", WIRE)
            _ip("-n", name, "link", "set", WIRE, "up")
            _ip("-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in made:
            _ip("netns", "delete", name)


def _ip(*arguments: str) -> str:
    try:
        done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("iproute2 is not installed: no network namespaces")
    if done.returncode:
        pytest.skip(f"no network namespaces here: ip {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout


def kill(host: str) -> None:
    """All processes of a host at once, as when its power fails."""
    for process in _ip("netns", "pids", host).split():
        with suppress(ProcessLookupError):
            os.kill(int(process), signal.SIGKILL)


def on_hosts(hosts: tuple[str, str], script: str, *arguments: str) -> None:
    """Run a script as a launcher on the ``HOST`` of this rank does, for ``runs.run``: half of the ranks are on each."""
    host, local_rank = divmod(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]) // 2)
    os.environ |= {"LOCAL_RANK": str(local_rank), "LOCAL_WORLD_SIZE": str(int(os.environ["WORLD_SIZE"]) // 2)}
    os.environ |= {"MASTER_ADDR": "10.0.0.1", "GLOO_SOCKET_IFNAME": WIRE, "HOST": str(host)}
    with Path("/run/netns", hosts[host]).open() as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot move to {hosts[host]}")
    launched(script, *arguments)


@pytest.mark.compatible(
    "Ranks", "2 hosts of 2 ranks, drives of 1000 and 100 MB/s in other directories, ZeRO-3", decides=True
)
def test_two_hosts(tmp_path: Path, row_says: Callable[[str], None]) -> None:
    config = plain_config(3)
    script, arguments = SCRIPTS / "unequal.py", ("--steps", str(STEPS))
    together = run(config, tmp_path, *arguments, ranks=4)
    assert together.returncode == 0, together.output
    block = {"min_tensor_bytes": 65536, **PLANNED, "nvme_path": f"{tmp_path}/drive$HOST"}
    drives = [tmp_path / "drive0", tmp_path / "drive1"]
    for drive in drives:
        drive.mkdir()
    ours, rates = with_block(config, tmp_path, **block), "1000e6,1000e6,100e6,100e6"
    with two_hosts() as pair:
        start = partial(on_hosts, pair)
        found = run(ours, tmp_path, *arguments, ranks=4, script=script, start=start, DRIVES_BYTES_PER_S=rates)
        assert found.returncode == 0, found.output
    assert found.outcome == together.outcome, "not as on one host, without the block"
    assert [len(lines) for lines in found.outcome] == [4 * STEPS, 4]
    reports = [json.loads((tmp_path / f"report.json{rank}").read_text()) for rank in ("", ".rank1", ".rank2", ".rank3")]
    paths = [report["bandwidth"][0] for report in reports]
    assert [path["path"] for path in paths] == [str(drives[0])] * 2 + [str(drives[1])] * 2
    alone = [path["write_bytes_per_s"] for path in paths]
    assert max(alone[2:]) < 2 * 100e6 and min(alone[:2]) > max(alone[2:]), "the drives are as fast as each other"
    common_plan(reports)
    moved_bytes = sum(report["offloaded_bytes"] for report in reports)
    assert moved_bytes > 0
    row_says(f"bit-equal with 4 ranks on one host, one plan, {moved_bytes / MIB:.0f} MiB moved in {STEPS} steps")


@pytest.mark.thorough
@pytest.mark.fault(
    "a host is lost",
    by="SIGKILL of all processes of one of two hosts of two ranks, under ZeRO-3",
    outcome="the ranks of the other end with an error of the collective and write their reports; no file is left",
)
def test_a_host_is_lost(tmp_path: Path, user_sees: Callable[[str], None]) -> None:
    drive = tmp_path / "drive"
    drive.mkdir()
    block = {"placement": "nvme", "min_tensor_bytes": 65536, "nvme_path": str(drive)}
    config = with_block(plain_config(3), tmp_path, **block)
    arguments = ("--steps", "1000", "--pause_s", "0.2")
    outputs = [tmp_path / f"output{rank}.txt" for rank in range(4)]
    with two_hosts() as pair, ThreadPoolExecutor(1) as beside:
        start = partial(on_hosts, pair)
        training = beside.submit(run, config, tmp_path, *arguments, ranks=4, start=start)
        while not training.done() and not all(one.exists() and "LOSS " in one.read_text() for one in outputs):
            time.sleep(0.05)
        kill(pair[1])
        assert training.result().returncode == signal.SIGKILL
    for output in outputs[:2]:
        assert "Connection closed by peer" in output.read_text() or "Connection reset by peer" in output.read_text()
    assert list(drive.iterdir()) == []
    for name in ("report.json", "report.json.rank1"):
        report = json.loads((tmp_path / name).read_text())
        assert report["steps"] > 0 and report["written_bytes"] > 0
    user_sees("(gloo's own) Connection closed by peer")
