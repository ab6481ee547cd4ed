"""Where the tests of ``test_gpu.py`` run: a CUDA device, or the late double on the CPU.

As a program it runs every scenario and mutation of ``hazards.py``:  python tests/gpu_rig.py cuda|late
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
from curves.device import Device
from support import hazards
from support.late_device import LateDevice

from ds_tba.device.accelerator import Accelerator
from ds_tba.device.copies import Copies
from ds_tba.remat.sites import Sites

# Read when CUDA's matrix library starts: without it equal products on several streams may differ in their last bits.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@pytest.fixture(autouse=True)
def shows_something(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A test in which no byte was moved and nothing was made again has shown nothing, and fails.

    But for those that say so (``moves_nothing``). For a module, which has to import it.
    """
    shown: Counter[str] = Counter()
    out, make = Copies.out, Sites.make

    def counted_out(copies: Copies, data: torch.Tensor, target: torch.Tensor) -> Any:
        shown["moved"] += data.numel()
        return out(copies, data, target)

    def counted_make(sites: Sites, recipe: Any) -> torch.Tensor:
        made = make(sites, recipe)
        shown["made again"] += made.numel()
        return made

    monkeypatch.setattr(Copies, "out", counted_out)
    monkeypatch.setattr(Sites, "make", counted_make)
    yield
    if request.node.get_closest_marker("moves_nothing") is None and not shown.total():
        pytest.fail("no byte was moved and nothing was made again: this test has shown nothing")


class Rig:
    """A device, its accelerator, and streams of the user's own."""

    def __init__(self, kind: str) -> None:
        self.is_cuda = kind == "cuda"
        self.device = "cuda" if self.is_cuda else "cpu"  # for ``torch.device``; the double's memory is the host's
        self._late = None if self.is_cuda else LateDevice(longest_pause_s=0.001)
        self.accelerator: Accelerator = self._late or Device("cuda").accelerator
        # Kernels of the double are the CPU's own, done when their call returns, and need no streams.
        self._streams: list[Any] = [torch.cuda.Stream() for _ in range(3)] if self.is_cuda else [None] * 3

    def streams(self) -> list[AbstractContextManager[Any]]:
        """Contexts, each in a stream that has waited for what the current one was given so far."""
        for stream in self._streams:
            if stream is not None:
                stream.wait_stream(torch.cuda.current_stream())
        return [nullcontext() if stream is None else torch.cuda.stream(stream) for stream in self._streams]

    def join(self) -> None:
        """Let the current stream wait for the others."""
        for stream in self._streams:
            if stream is not None:
                torch.cuda.current_stream().wait_stream(stream)

    def synchronize(self) -> None:
        if self._late is not None:
            self._late.synchronize()
        else:
            torch.cuda.synchronize()

    @contextmanager
    def exact(self) -> Iterator[None]:
        """Kernels that give the same bits each time, so that runs can be compared."""
        if not self.is_cuda:
            yield
            return
        from torch.nn.attention import SDPBackend, sdpa_kernel

        with sdpa_kernel(SDPBackend.MATH), torch.backends.cudnn.flags(enabled=True, deterministic=True):
            yield

    def end(self) -> None:
        if self._late is not None:
            self._late.end()


def main(kind: str) -> int:
    rig = Rig(kind)
    with rig.exact():
        status = hazards.main(rig.accelerator, rig.device)
    rig.end()
    return status


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1]))
