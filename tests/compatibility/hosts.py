"""Two hosts on one machine: network namespaces with a wire between them."""

from __future__ import annotations

import base64
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from support import ranks as of_ranks
from support.runs import Result, environment

WIRE, PORT = "wire0", 29500  # nobody else is in these namespaces
TIMEOUT_S = 240.0
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


class Job:
    """A training on both hosts: a launcher on each, and what it and its ranks print."""

    def __init__(self, hosts: tuple[str, str], nodes: list[subprocess.Popen[str]], outputs: list[Path]) -> None:
        self._hosts, self._nodes, self._outputs = hosts, nodes, outputs

    def output(self, host: int) -> str:
        return self._outputs[host].read_text()

    def wait_for(self, text: str, host: int) -> None:
        """Wait until a host has printed that."""
        ends_s = time.monotonic() + TIMEOUT_S
        while text not in self.output(host):
            assert time.monotonic() < ends_s and self._nodes[host].poll() is None, self.output(host)
            time.sleep(0.05)

    def kill(self, host: int) -> None:
        """All processes of a host at once, as when its power fails."""
        for process in _ip("netns", "pids", self._hosts[host]).split():
            with suppress(ProcessLookupError):
                os.kill(int(process), signal.SIGKILL)

    def status(self, host: int, timeout_s: float = TIMEOUT_S) -> int:
        """At the end of its launcher."""
        return self._nodes[host].wait(timeout_s)


@contextmanager
def started(
    hosts: tuple[str, str],
    config: dict[str, Any],
    directory: Path,
    script: Path,
    *arguments: str,
    ranks: int = 1,
) -> Iterator[Job]:
    """Start what ``deepspeed --hostfile`` starts on each of the hosts, so many ranks on each."""
    path = directory / "ds_config.json"
    path.write_text(json.dumps(config))
    world = base64.urlsafe_b64encode(json.dumps({host: list(range(ranks)) for host in hosts}).encode()).decode()
    outputs = [directory / f"host{index}.txt" for index in range(2)]
    nodes: list[subprocess.Popen[str]] = []
    with ExitStack() as stack:
        for index, host in enumerate(hosts):
            command = [
                "ip", "netns", "exec", host, sys.executable, "-m", "deepspeed.launcher.launch",
                f"--world_info={world}", f"--node_rank={index}", "--master_addr=10.0.0.1", f"--master_port={PORT}",
                str(script), "--deepspeed_config", str(path), *arguments,
            ]  # fmt: skip
            output = stack.enter_context(outputs[index].open("w"))
            variables = environment(GLOO_SOCKET_IFNAME=WIRE)
            node = subprocess.Popen(command, env=variables, stdout=output, stderr=output, cwd=directory, text=True)
            stack.callback(node.wait)
            stack.callback(node.terminate)  # the launcher ends its ranks
            nodes.append(node)
        yield Job(hosts, nodes, outputs)


def run(
    hosts: tuple[str, str],
    config: dict[str, Any],
    directory: Path,
    script: Path,
    *arguments: str,
    ranks: int,
    own: Sequence[Mapping[str, str]],
    **variables: str,
) -> Result:
    """Run a script to its end on both hosts, so many ranks on each, which are forked: no launcher imports DeepSpeed."""
    path = directory / "ds_config.json"
    path.write_text(json.dumps(config))
    codes, outputs = of_ranks.fork(
        _rank, hosts, own, str(script), "--deepspeed_config", str(path), *arguments, directory=directory,
        ranks=2 * ranks, timeout_s=TIMEOUT_S, **variables,
    )  # fmt: skip
    return Result(max(map(abs, codes)), "\n".join(outputs))


def _rank(hosts: tuple[str, str], own: Sequence[Mapping[str, str]], script: str, *arguments: str) -> None:
    """Move to the host of this rank, and train as its launcher would have it."""
    host, local_rank = divmod(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]) // 2)
    os.environ |= {"LOCAL_RANK": str(local_rank), "LOCAL_WORLD_SIZE": str(int(os.environ["WORLD_SIZE"]) // 2)}
    os.environ |= {"MASTER_ADDR": "10.0.0.1", "GLOO_SOCKET_IFNAME": WIRE, **own[host]}
    with Path("/run/netns", hosts[host]).open() as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot move to {hosts[host]}")
    of_ranks.launched(script, *arguments)
