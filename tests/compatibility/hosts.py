"""Two hosts on one machine: network namespaces with a wire between them, each with a node's launcher of DeepSpeed."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.runs import Result, environment

WIRE, PORT = "wire0", 29500  # nobody else is in these namespaces
TIMEOUT_S = 240.0


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


def _ip(*arguments: str) -> None:
    try:
        done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("iproute2 is not installed: no network namespaces")
    if done.returncode:
        pytest.skip(f"no network namespaces here: ip {' '.join(arguments)}: {done.stderr.strip()}")


def launch(
    hosts: tuple[str, str], config: dict[str, Any], directory: Path, script: Path, *arguments: str, **variables: str
) -> Result:
    """What ``deepspeed --hostfile`` starts on each of the hosts, with one rank there; the output of both."""
    path = directory / "ds_config.json"
    path.write_text(json.dumps(config))
    world = base64.urlsafe_b64encode(json.dumps({host: [0] for host in hosts}).encode()).decode()
    nodes = []
    try:
        for index, host in enumerate(hosts):
            command = [
                "ip", "netns", "exec", host, sys.executable, "-m", "deepspeed.launcher.launch",
                f"--world_info={world}", f"--node_rank={index}", "--master_addr=10.0.0.1", f"--master_port={PORT}",
                str(script), "--deepspeed_config", str(path), *arguments,
            ]  # fmt: skip
            output = (directory / f"host{index}.txt").open("w+")
            variables_here = environment(GLOO_SOCKET_IFNAME=WIRE, **variables)
            nodes.append((
                subprocess.Popen(command, env=variables_here, stdout=output, stderr=output, cwd=directory), output
            ))  # fmt: skip
        for node, _ in nodes:
            node.wait(TIMEOUT_S)
    finally:
        for node, _ in nodes:
            node.terminate()  # the launcher ends its ranks
            node.wait()
    text = "\n".join((directory / f"host{index}.txt").read_text() for index in range(len(nodes)))
    for _, output in nodes:
        output.close()
    return Result(max(abs(node.returncode) for node, _ in nodes), text)
