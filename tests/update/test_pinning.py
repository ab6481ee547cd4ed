"""What is pinned in place: kept out of forked children, and let go when it is replaced. CUDA is a double here."""

from __future__ import annotations

import json
import mmap
import os
import sys
from pathlib import Path

import forked
import pinning_programs as programs
import pytest
import torch
from pinning_programs import Pins
from support import runs
from update_programs import CHUNKS, ds_config

from ds_tba.device.accelerator import PAGE_BYTES
from ds_tba.update.pinning import Registry
from ds_tba.update.updater import chunks_of

MEBIBYTE = 1 << 20
PINNED_MEBIBYTE = MEBIBYTE - PAGE_BYTES  # of memory that begins and ends within a page


def in_page(nbytes: int, offset: int = 64) -> torch.Tensor:
    """Memory that begins ``offset`` behind the start of a page, whatever the allocator does."""
    region = mmap.mmap(-1, nbytes + offset, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(region, dtype=torch.uint8, offset=offset)


# ---- the registry


def test_memory_is_pinned_once_up_to_the_limit_and_unpinned_when_it_is_replaced() -> None:
    pins = Pins()
    registry = Registry(pins, 3 * PINNED_MEBIBYTE + PAGE_BYTES)
    first, second, third = (in_page(MEBIBYTE) for _ in range(3))
    assert registry.pin(first) and registry.pin(first[5:]) and registry.pin(second)
    assert registry.is_pinned(first) and registry.is_pinned(second[1:]) and len(pins.pinned) == 2
    fourth = in_page(2 * MEBIBYTE)
    assert not registry.pin(fourth) and not registry.is_pinned(fourth)
    registry.keep([second])
    assert pins.pinned == {second.data_ptr() - 64 + PAGE_BYTES: PINNED_MEBIBYTE}
    assert registry.pinned_bytes == PINNED_MEBIBYTE
    assert registry.pin(fourth) and registry.pinned_bytes == 3 * PINNED_MEBIBYTE + PAGE_BYTES
    assert not registry.pin(third)
    registry.close()
    assert pins.pinned == {} and registry.pinned_bytes == 0 and registry.refused_bytes == 0


@pytest.mark.parametrize("offset", [0, 64, 4032])
def test_only_whole_pages_are_pinned_and_chunks_of_the_device_lie_in_them(offset: int) -> None:
    pins = Pins()
    registry = Registry(pins, None)
    memory = in_page(123_457 * 4, offset)
    assert registry.pin(memory)
    ((address, nbytes),) = pins.pinned.items()
    assert address % PAGE_BYTES == nbytes % PAGE_BYTES == 0
    assert memory.data_ptr() <= address < memory.data_ptr() + PAGE_BYTES
    assert address + nbytes <= memory.data_ptr() + memory.nbytes < address + nbytes + PAGE_BYTES
    for chunk in chunks_of([123_457], 1000):
        assert address <= memory.data_ptr() + 4 * chunk.start
        assert memory.data_ptr() + 4 * chunk.stop <= address + nbytes
    registry.close()


def test_memory_that_is_pinned_cannot_be_freed_before_it_is_unpinned() -> None:
    registry = Registry(Pins(), None)
    tensor = torch.ones(1 << 18)
    address = tensor.untyped_storage().data_ptr()
    registry.pin(tensor)
    del tensor
    others = [torch.zeros(1 << 18) for _ in range(8)]
    assert address not in {other.untyped_storage().data_ptr() for other in others}
    registry.close()


def test_a_small_array_is_left_out_without_a_word() -> None:
    registry = Registry(Pins(), None)
    small = in_page(PAGE_BYTES, 100)
    assert not registry.pin(small) and registry.refused_bytes == 0 and not registry.is_pinned(small)


def test_what_cannot_be_pinned_is_tried_once_and_stays_visible_to_children() -> None:
    pins = Pins(refuses=True)
    registry = Registry(pins, None)
    tensor = in_page(MEBIBYTE)
    assert not registry.pin(tensor) and not registry.pin(tensor)
    assert registry.refused_bytes == PINNED_MEBIBYTE and registry.pinned_bytes == 0
    assert pins.tried == 1 and not programs.hidden_bytes(tensor)
    registry.keep([])
    assert registry.refused_bytes == 0


# ---- forks


def test_children_have_all_but_the_pinned_pages_until_they_are_unpinned() -> None:
    program = "import json, pinning_programs; print(json.dumps(pinning_programs.forks()))"
    done = runs.python("-c", program, PYTHONPATH=os.pathsep.join(sys.path))
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["hidden"] == {"before": 0, "pinned": programs.PINNED_BYTES, "replaced": 0, "closed": 0}
    assert (found["ends"], found["pinned pages"], found["unpinned pages"]) == (programs.ENDS, "SIGSEGV", "0")
    assert found["child's end"] == "0"  # it goes through the interpreter's exit, and frees nothing that it has not
    # Each write to a page that a child shares is a fault, after which the parent's page may be another one.
    pages = programs.PINNED_BYTES // PAGE_BYTES
    assert found["faults"]["shared"] >= 2 * pages // 3 and found["faults"]["pinned"] <= pages // 8


# ---- when a run starts


@pytest.mark.engine
@pytest.mark.parametrize("limit_bytes", [None, 10**9])
def test_what_is_there_at_the_start_is_pinned_then_and_counted(limit_bytes: int | None, tmp_path: Path) -> None:
    """With a limit whole sub-groups come first, which are whole in the first step only."""
    block = {**CHUNKS, "exact": False, "device_share": 0.5, "pinned_bytes": limit_bytes}
    (found,) = forked.run(programs.starts, ds_config(bf16={"enabled": True}), tmp_path, block=block)
    at_start, first, second = found["pinned"]
    assert first == second > 0 and at_start == (0 if limit_bytes else first // 2)
    assert found["pinned_bytes"] > 0


# ---- loads


@pytest.mark.engine
def test_moments_that_a_load_replaces_are_unpinned_and_freed_at_once(tmp_path: Path) -> None:
    (found,) = forked.run(programs.loads, ds_config(bf16={"enabled": True}), tmp_path, block=CHUNKS)
    assert found["pinned"] > 0 and found["moments"] == found["freed"] > 0
    assert found["masters and gradients stay"]
    assert found["goes on"] == found["goes on again"]
