"""Offloads to host memory where there is too little of it: each way to train in a control group that the kernel guards.

    python benchmarks/control_group.py [--nvme_path DIR] [--json FILE]

A Llama with random weights under DeepSpeed, every layer checkpointed, so that a step saves ``layers x tokens x width``
elements. The group may have what the process takes at its peak when all of them are on the drive, which is measured
first, and a quarter of their bytes. A way that needs more is killed by the kernel. What the drive behind it costs where
the host has room for all, ``races.py host`` tells.

It needs Linux and root (or a group that is delegated to the user), makes groups within its own, and takes them away. On
a CPU the activations are in host memory before an offload takes them there; what it adds is what a GPU's would add: the
offloads of Hugging Face and DeepSpeed hold them until backward.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from alternating import add_process_options, has_answered, in_a_process
from benchmarking import JSON, MIB, markdown_table, parser_of, write_json
from capacity import MMAP_THRESHOLD_BYTES, VARIANTS, Training, Variant, shape_of
from capacity import parse as parse_capacity

GROUPS, OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
HOST: dict[str, Any] = {"placement": "host", "rematerialize": False}
OTHERS = ("checkpoint", "transformers_offload", "deepspeed_offload")
WAYS = {
    **{name: VARIANTS[name] for name in OTHERS},
    "nvme": Variant('**ours**, `"placement": "nvme"`', True, block={"placement": "nvme", "rematerialize": False}),
    "host": Variant("**ours**, host memory and the drive behind it", True, block=HOST),
}


class Group:
    """A control group of limited memory, within that of this process; of version 2 or 1."""

    def __init__(self, name: str) -> None:
        lines = [line.split(":", 2) for line in OWN.read_text().splitlines()]
        is_second = (GROUPS / "cgroup.controllers").exists()
        kind, root = ("", GROUPS) if is_second else ("memory", GROUPS / "memory")
        own = root / next(path for _, ruled, path in lines if kind in ruled.split(",")).lstrip("/")
        if is_second and "memory" not in (own / "cgroup.subtree_control").read_text().split():
            own = root / name  # a group with processes may have no limited groups within: one beside
        self.path = own / f"{name}_{os.getpid()}"
        names = ("memory.max", "memory.peak") if is_second else ("memory.limit_in_bytes", "memory.max_usage_in_bytes")
        self._limit, self._peak = (self.path / one for one in names)

    @contextmanager
    def limited(self, limit_bytes: int | None) -> Iterator[Group]:
        self.path.mkdir(parents=True)
        try:
            if limit_bytes is not None:
                self._limit.write_text(str(limit_bytes))
                with suppress(OSError):
                    (self.path / "memory.swap.max").write_text("0")
            yield self
        finally:
            self.path.rmdir()

    @property
    def peak_bytes(self) -> int:
        return int(self._peak.read_text())


def available() -> str:
    """Return why there can be no control group here; an empty text if there can."""
    try:
        with Group("ds_tba_probe").limited(1 << 30):
            return ""
    except (OSError, StopIteration) as error:
        return f"no control group of limited memory can be made: {error!r}"


def saved_bytes(options: argparse.Namespace) -> int:
    """Return the bytes of the layers' inputs."""
    shape = shape_of(options.model) if options.model else {}
    layers, width = shape.get("num_hidden_layers", options.layers), shape.get("hidden_size", options.width)
    return int(layers * options.rows * options.sequence * width * 4)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure in one process, which goes into its group before it has taken memory."""
    if options.group:
        (Path(options.group) / "cgroup.procs").write_text(str(os.getpid()))
    HOST["host_budget_bytes"] = saved_bytes(options) // 8  # half of what the group has for them
    VARIANTS.update(WAYS)
    sized = parse_capacity([])
    sized.longest_sequence, sized.min_tensor_kib = options.sequence, 64
    for name in ("variant", "model", "width", "layers", "rows", "loss_tokens", "nvme_path"):
        setattr(sized, name, getattr(options, name))
    training = Training(sized)
    training.step(64)
    found = training.steps(options.sequence, options.steps)
    losses = [loss.hex() for loss in found["losses"]]
    return {**found, "losses": losses, "threads": training.threads, "report": training.report()}


def parse(argv: list[str]) -> argparse.Namespace:
    parser = parser_of(
        __doc__, width=128, layers=64, rows=8, sequence=512, steps=4, loss_tokens=128,
        model=("", "a shape of benchmarks/models, with LoRA, instead of width and layers"), nvme_path=".", json=JSON,
        group=(str, argparse.SUPPRESS),
    )  # fmt: skip
    add_process_options(parser, list(WAYS))
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    options = parse(argv)
    if has_answered(options, measure):
        return 0
    if why_not := available():
        print(why_not)
        return 3

    def turn(way: str, limit_bytes: int | None) -> dict[str, Any]:
        """Run a way in a group, and return its result, or the status with which it ended."""
        with Group("ds_tba").limited(limit_bytes) as group:
            arguments = [*argv, "--group", str(group.path)]
            try:
                found = in_a_process(__file__, way, arguments, MALLOC_MMAP_THRESHOLD_=MMAP_THRESHOLD_BYTES)
            except SystemExit as error:
                found = {"ended": str(error)}
            return {**found, "group_peak_bytes": group.peak_bytes}

    turn("nvme", None)  # whoever reads the libraries' files first has them counted as memory of its group
    nvme = turn("nvme", None)
    if "ended" in nvme:
        raise SystemExit(nvme["ended"])
    limit_bytes = nvme["group_peak_bytes"] + saved_bytes(options) // 4
    inputs, limit, peak = (
        f"{one / MIB:.0f} MiB" for one in (saved_bytes(options), limit_bytes, nvme["group_peak_bytes"])
    )
    print(f"{inputs} of layers' inputs; the group may have {limit}, a quarter of them more than the {peak}", end=" ")
    print("of a process that has them on the drive", flush=True)
    outcomes = {way: turn(way, limit_bytes) for way in (*OTHERS, "host")}
    columns = ("way", "outcome", "peak of the group, MiB", "s per step", "of the moved bytes in host memory")
    rows = [(WAYS[way].title, *figures(found, nvme)) for way, found in outcomes.items()]
    print("\n".join(markdown_table(columns, rows)))
    outcomes["nvme"] = nvme
    write_json(options.json, {"limit_bytes": limit_bytes, "saved_bytes": saved_bytes(options), "outcomes": outcomes})
    finished = [way for way, found in outcomes.items() if "ended" not in found]
    return 0 if finished == ["host", "nvme"] and outcomes["host"]["losses"] == nvme["losses"] else 1


def figures(found: dict[str, Any], nvme: dict[str, Any]) -> tuple[str, ...]:
    peak = f"{found['group_peak_bytes'] / MIB:.0f}"
    if "ended" in found:
        is_killed = found["ended"].partition(":\n")[0].endswith("status -9")
        return ("killed by the kernel" if is_killed else found["ended"][-300:], peak, "", "")
    report = found["report"]
    part = f"{report['host_bytes'] / max(1, report['offloaded_bytes']):.2f}" if report else ""
    equal = "losses equal" if found["losses"] == nvme["losses"] else "LOSSES DIFFER"
    return f"finishes, {equal}", peak, f"{found['step_s']:.2f}", part


if __name__ == "__main__":
    raise SystemExit(main())
