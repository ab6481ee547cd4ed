"""Two hosts on one machine: network namespaces with a wire between them."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from support import ranks as of_ranks

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


def on_hosts(hosts: tuple[str, str], own: Sequence[Mapping[str, str]], script: str, *arguments: str) -> None:
    """Run a script as a launcher on the host of this rank does, for ``runs.run``: half of the ranks are on each."""
    host, local_rank = divmod(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]) // 2)
    os.environ |= {"LOCAL_RANK": str(local_rank), "LOCAL_WORLD_SIZE": str(int(os.environ["WORLD_SIZE"]) // 2)}
    os.environ |= {"MASTER_ADDR": "10.0.0.1", "GLOO_SOCKET_IFNAME": WIRE, **own[host]}
    with Path("/run/netns", hosts[host]).open() as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot move to {hosts[host]}")
    of_ranks.launched(script, *arguments)
