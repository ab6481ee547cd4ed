"""The results file: what each piece found, and where and when. Written after every piece, so that a run can go on."""

from __future__ import annotations

import argparse
import functools
import json
import os
import platform
import subprocess
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarking import parser_of, write_json

ROOT = Path(__file__).resolve().parents[2]
DONE, CUT, FAILED, BEGUN = "done", "cut", "failed", "begun"


class Results:
    """A results file, which holds what earlier runs found.

    Args:
        path: read if it exists.
        rehearsal: the run is one; a file of the other kind is refused.
    """

    def __init__(self, path: Path, *, rehearsal: bool) -> None:
        self.path = path
        self.found: dict[str, Any] = {"rehearsal": rehearsal, "pieces": {}}
        if path.exists():
            self.found = json.loads(path.read_text(encoding="utf-8"))
            if self.found["rehearsal"] != rehearsal:
                its, ours = ("a rehearsal", "a measurement")[:: -1 if rehearsal else 1]
                raise SystemExit(f"{path} is of {its}, this run is {ours}: name another file")
            self._adopt()

    @property
    def running(self) -> Path:
        """The file of the piece that runs."""
        return self.path.with_suffix(".running.json")

    @property
    def log(self) -> Path:
        """All output."""
        return self.path.with_suffix(".log")

    @property
    def pieces(self) -> dict[str, Any]:
        """``state``, ``reason``, ``found``, ``took_s``, ``at``, ``commit`` and ``machine`` of each piece."""
        pieces: dict[str, Any] = self.found["pieces"]
        return pieces

    def is_done(self, name: str) -> bool:
        return self.pieces.get(name, {}).get("state") == DONE

    def begin(self, name: str, part: str) -> None:
        """Note that a piece begins; it writes what it finds to :attr:`running`."""
        self.put(name, part=part, state=BEGUN, reason="", status=None, found=None, took_s=0.0)

    def put(self, name: str, **found: Any) -> None:
        """Keep what a piece found, and where and when, on disk before this returns."""
        at = datetime.now(timezone.utc).isoformat(timespec="seconds")
        self.pieces[name] = {**found, "at": at, "commit": commit(), "machine": machine()}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_json(self.path, self.found)
        self.running.unlink(missing_ok=True)

    def _adopt(self) -> None:
        """Take over what the piece had found in which an earlier run ended."""
        for name, piece in self.pieces.items():
            if piece["state"] != BEGUN:
                continue
            try:
                found = json.loads(self.running.read_text(encoding="utf-8"))
            except (OSError, ValueError):
                found = None
            self.put(name, **{**piece, "state": CUT, "reason": "the run ended in it", "found": found})


def piece_parser(doc: str | None, **more: object) -> argparse.ArgumentParser:
    """Return a parser of the options that pieces have in common, and of more."""
    parser = parser_of(doc, device=("cuda", "cpu or cuda"), nvme_path=Path(), tiny=False, **more)
    parser.add_argument("--result", type=Path, required=True)
    return parser


@functools.cache
def commit() -> str:
    """Return the tree's commit, with a mark if the tree was changed; "unknown" without git."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    except OSError:
        return "unknown"
    return done.stdout.strip() or "unknown"


@functools.cache
def machine() -> dict[str, str]:
    """Return the machine in words."""
    import torch

    versions = {name: version(name) for name in ("deepspeed", "transformers", "trl")}
    device, driver = f"CPU, {os.cpu_count()} cores", ""
    if torch.cuda.is_available():
        total = torch.cuda.get_device_properties(0).total_memory / 2**30
        device, driver = f"{torch.cuda.get_device_name()}, {total:.0f} GiB", f"CUDA {torch.version.cuda}"
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "device": device,
        "host": f"{os.cpu_count()} cores, {host:.0f} GiB, Linux {platform.release()}",
        "torch": torch.__version__ + (f", {driver}" if driver else ""),
        "python": platform.python_version(),
        **versions,
    }


def version(package: str) -> str:
    """Return a package's version, or that it is not there."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
