"""Memory runs out between two lines of a lane, each in turn: bytes come back or are lost by name, and nobody hangs.

    memory_in_lanes.py DIRECTORY LANES FIRST STRIDE LIMIT_S [CODEC]

LANES: ``write`` or ``read``. From its line FIRST on every STRIDE-th is struck, each in a store of its own, for LIMIT_S
seconds or until every line was. Prints ``LINES struck of all lines in lanes``, ``EXACT`` and ``LOST`` with how many
storages were, and where a line was struck that ended in neither, ``WRONG``.
"""

from __future__ import annotations

import faulthandler
import linecache
import logging
import os
import random
import sys
import threading
import time
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from support.doubles import CpuAccelerator, DeviceBackend
from support.late_device import LateDevice

import ds_tba
from ds_tba.errors import StorageError
from ds_tba.storage.backends.base import IoBackend, IoHandle
from ds_tba.storage.backends.posix import PosixBackend
from ds_tba.storage.base import Refusal
from ds_tba.storage.codec import Codec
from ds_tba.storage.nvme import Lanes, NvmeStore
from ds_tba.storage.path import LaneGroup
from ds_tba.storage.staging import StagingRing
from ds_tba.storage.swap_file import SwapFile

KIB = 1 << 10
SIZES = (4 * KIB, 60_000, 300_000, 128 * KIB)
HANG_S = 20.0
PACKAGE = str(Path(ds_tba.__file__).parent)
# Taking a lock asks for no memory, and the line of its `with` is run at both ends: the tracer would raise between the
# end of the block and the release. The line of a `try` does nothing.
LOCKS = (".lock:", ".changed:")
CPU = torch.device("cpu")


@cache
def is_spared(file: str, line: int) -> bool:
    code = linecache.getline(file, line).partition("#")[0].strip()
    return code == "try:" or (code.startswith("with ") and code.endswith(LOCKS))


class Strike:
    """Counts the lines of ours that lanes of a kind run, and raises at one.

    Attributes:
        lines: so far.
        at: the line, from 1; 0 for none.
        where: the error came.
    """

    def __init__(self, lanes: str) -> None:
        self._name = f"ds_tba-{lanes}"
        self.lines = self.at = 0
        self.where = ""

    def begin(self, at: int) -> None:
        self.lines, self.at, self.where = 0, at, ""

    def trace(self, frame: FrameType, event: str, _: Any) -> Any:
        name = frame.f_code.co_filename
        if not threading.current_thread().name.startswith(self._name):
            return None
        if not name.startswith(PACKAGE) or frame.f_code is LaneGroup._run.__code__:
            return None
        if event == "line" and not is_spared(name, frame.f_lineno):
            self.lines += 1
            if self.lines == self.at and not self.where:
                self.where = f"{Path(name).name}:{frame.f_lineno}"
                raise MemoryError("the test's")
        return self.trace


def strike_lanes(strike: Strike) -> None:
    """Have each lane traced, and again at each task: Python takes a tracer off that has raised."""
    serve = LaneGroup._serve

    def traced_serve(self: LaneGroup, handle: IoHandle) -> bool:
        sys.settrace(strike.trace)
        return serve(self, handle)

    LaneGroup._serve = traced_serve  # type: ignore[method-assign]


class Trial:
    """One store: storages go out and come back, some read ahead, some given up."""

    def __init__(self, directory: Path, seed: int, codec: str) -> None:
        chance = random.Random(seed)
        self.device = LateDevice(late_compute=True, longest_pause_s=0.0) if seed % 2 else CpuAccelerator()
        backend: IoBackend = DeviceBackend() if seed % 4 == 3 and not codec else PosixBackend()
        lanes, paths = Lanes(2, 2), 1 + seed % 3 // 2
        ring = StagingRing(self.device, backend, 512 * KIB, lanes.of(paths) if codec else 0)
        files = [SwapFile(directory, 4 << 20) for _ in range(paths)]
        for file in files:
            file.reserve_first(4 << 20)
        self.store = NvmeStore(files, backend, ring, lanes, "sampled", Codec(codec) if codec else None)
        self.chance = chance
        self.values = 16 if codec else 256  # of a byte: of all, no codec has anything to take
        self.exact = self.lost = self.wrong = 0

    def round(self) -> None:
        """Put, read ahead in part, get, compare, give up."""
        store, chance = self.store, self.chance
        saved = []
        for size in SIZES:
            wanted = torch.randint(0, self.values, (size,), dtype=torch.uint8)
            data = self.device.allocate(size, CPU)
            if isinstance(self.device, LateDevice):
                self.device.launch(lambda to, wanted=wanted: to.copy_(wanted), data)
            else:
                data.copy_(wanted)
            ticket = store.put(data, wait=True)
            if not isinstance(ticket, Refusal):
                saved.append((ticket, wanted))
        if chance.random() < 0.7:
            deadline = time.monotonic() + 0.05
            while store.writes and time.monotonic() < deadline:
                time.sleep(0.001)
        if len(saved) > 3:
            store.release(saved.pop(0)[0])  # perhaps under its write
        for ticket, _ in saved[::2]:
            store.prefetch(ticket)
        for ticket, wanted in reversed(saved):
            try:
                self._compare(store.get(ticket, CPU).data, wanted)
            except StorageError:
                self.lost += 1
            store.release(ticket)

    def _compare(self, found: torch.Tensor, wanted: torch.Tensor) -> None:
        def compare(found: torch.Tensor) -> None:
            is_exact = torch.equal(found, wanted)
            self.exact += is_exact
            self.wrong += not is_exact

        if isinstance(self.device, LateDevice):
            self.device.launch(compare, found)
        else:
            compare(found)

    def end(self) -> None:
        """Close; no lane is left."""
        if isinstance(self.device, LateDevice):
            self.device.synchronize()
        groups = [group for path in self.store.paths for group in (path.writes, path.reads)]
        threads = [thread for group in groups for thread in group._threads]
        self.store.close()
        if isinstance(self.device, LateDevice):
            self.device.end()
        if not threads or any(thread.is_alive() for thread in threads):
            self.wrong += 1
        if any(path.file.fd >= 0 for path in self.store.paths):
            self.wrong += 1


def hangs(strike: Strike) -> None:
    print(f"HANG {strike.at} at {strike.where}", flush=True)
    faulthandler.dump_traceback()
    os._exit(1)


def main(directory: str, lanes: str, first: str, stride: str, limit_s: str, codec: str = "") -> None:
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    strike = Strike(lanes)
    strike_lanes(strike)
    until_s = time.monotonic() + float(limit_s)
    at, struck, exact, lost = int(first), 0, 0, 0
    most = at
    while time.monotonic() < until_s and at <= most:
        strike.begin(at)
        watch = threading.Timer(HANG_S, hangs, (strike,))
        watch.start()
        trial = Trial(Path(directory), at, codec)
        trial.round()
        struck += bool(strike.where)
        strike.at = 0
        trial.round()  # memory is there again, in the same store
        trial.end()
        watch.cancel()
        most = max(most, strike.lines // 2)
        exact, lost = exact + trial.exact, lost + trial.lost
        if trial.wrong:
            print(f"WRONG {at} at {strike.where}", flush=True)
        if trial.lost:
            print(f"LOST-AT {at} at {strike.where}", flush=True)
        at += int(stride)
    print(f"LINES {struck} of {most}\nEXACT {exact}\nLOST {lost}")


if __name__ == "__main__":
    main(*sys.argv[1:])
