"""Checksums, of staging in host memory and on a device, which it plays; and codecs: every bit comes back."""

from __future__ import annotations

import sys
from itertools import product
from pathlib import Path
from typing import get_args

import pytest
import torch
from conftest import StoreFactory
from support.doubles import DeviceBackend, part_of, raising
from support.stores import CPU, MIB, noise, nothing_is_held, put, stored

from ds_tba.config import AioConfig, Compression, OffloadConfig
from ds_tba.device.accelerator import Accelerator, huge_page_memory
from ds_tba.errors import ActivationCorruptionError, BackendUnavailableError, TransferError
from ds_tba.storage import tiers as tiers_module
from ds_tba.storage.backends import IoBackend, PosixBackend
from ds_tba.storage.integrity import Codec, Integrity
from ds_tba.storage.nvme import NvmeStore
from ds_tba.storage.staging import BUFFER_BYTES, lane_buffer_bytes, slots_bytes_of
from ds_tba.storage.tiers import Selection, Tiers

PAGE = 4096
BLOCK = 5 * PAGE


def words(pages: int) -> torch.Tensor:
    return torch.randint(-(1 << 63), (1 << 63) - 1, (pages * 512,), generator=torch.Generator().manual_seed(pages))


def test_what_is_not_sampled_does_not_count_and_what_is_does() -> None:
    data = words(12)
    integrity = Integrity("sampled", BLOCK)
    sampled = {0: 0, 4: 1, 5: 2, 9: 3, 10: 4, 11: 4}  # pages: the last block has two, which are one sample
    before = integrity.digest(data.view(torch.uint8))
    for page in range(12):
        changed = data.clone()
        changed[page * 512 + 7] += 1
        after = integrity.digest(changed.view(torch.uint8))
        differs = [number for number in range(5) if after[number] != before[number]]
        assert differs == ([sampled[page]] if page in sampled else [])


@pytest.mark.parametrize("mode", ["sampled", "full"])
@pytest.mark.parametrize("pages", [1, 2, 3, 12, 2500])
def test_every_changed_sample_is_found(mode: str, pages: int) -> None:
    integrity = Integrity(mode, BLOCK)
    data = words(pages).view(torch.uint8)
    expected = integrity.digest(data)
    assert all(0 <= one < 1 << 64 for one in expected) and len(set(expected)) == len(expected)
    for start, end in integrity._samples(pages * PAGE)[:: 1 + pages // 60]:
        for at in (start, end - 1):
            data[at] ^= 1
            found = integrity.difference(data, expected, 8 * PAGE)
            assert found.startswith(f"{end - start} bytes at file offset {8 * PAGE + start} have checksum")
            data[at] ^= 1
    assert integrity.difference(data, expected, 0) == ""


@pytest.mark.parametrize("mode", ["off", "sampled", "full"])
@pytest.mark.parametrize("nbytes", [PAGE, 2 * PAGE, 3 * PAGE, 12 * PAGE, 2500 * PAGE, 2500 * PAGE - 1000])
def test_the_checksums_of_the_device_are_those_of_the_host(mode: str, nbytes: int) -> None:
    data = words(2500).view(torch.uint8)[:nbytes]
    host, device = (Integrity(mode, BLOCK, on_device=on_device).digest(data) for on_device in (False, True))
    assert host == device


def test_the_default_device_does_not_matter() -> None:
    data, integrity = words(12).view(torch.uint8), Integrity("full", BLOCK, on_device=True)
    with torch.device("meta"):
        found = integrity.digest(data)
    assert found == integrity.digest(data)


# ---- codecs ---------------------------------------------------------------------------------------------------------


NAMES = get_args(Compression)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8).flatten()


def activations(count: int) -> torch.Tensor:
    """The bytes of so many bfloat16."""
    return bytes_of(torch.nn.functional.gelu(torch.randn(count)).bfloat16())


@pytest.mark.parametrize(("name", "nbytes"), [*product(NAMES, (1, 4095, 4096, 4097, 3 * MIB + 17, 9 * MIB + 1))])
def test_every_bit_comes_back(make_store: StoreFactory, backend: IoBackend, name: str, nbytes: int) -> None:
    """Random bits are numbers, NaNs with payloads, infinities and denormals of each dtype; beside them usual values."""
    store = make_store(backend, codec=Codec(name))
    usual = bytes_of(torch.randn(nbytes // 4 + 1).mul(4))[:nbytes]
    few_values = torch.randint(0, 16, (nbytes,), dtype=torch.uint8)
    for data in (noise(nbytes), usual, few_values, torch.zeros(nbytes, dtype=torch.uint8)):
        for item_bytes in (1, 2, 4, 8, 16):
            ticket = stored(store, data.clone(), item_bytes)
            assert torch.equal(store.get(ticket, CPU).data, data)
            store.release(ticket)
    nothing_is_held(store)


@pytest.mark.parametrize("name", NAMES)
def test_fewer_bytes_reach_the_drive_and_are_counted(make_store: StoreFactory, name: str) -> None:
    store, data = make_store(codec=Codec(name)), activations(4 * MIB)
    ticket = stored(store, data, 2)
    assert torch.equal(store.get(ticket, CPU).data, data)
    (path,) = store.paths
    counts = {path.meter.writes.drive_bytes, path.meter.reads.drive_bytes}
    stored_bytes = sum(part.stored_bytes for part in ticket.parts)
    assert counts == {stored_bytes} and stored_bytes < 0.85 * data.numel()
    assert path.meter.writes.moved_bytes == path.meter.reads.moved_bytes == data.numel()  # rates are of tensors
    assert all(piece.stored_bytes % 4096 == 0 for part in ticket.parts for piece in part.pieces)
    of_other_length = stored(store, data, 1)  # the shuffle needs to know how long an element is
    assert stored_bytes < 0.95 * sum(part.stored_bytes for part in of_other_length.parts)


@pytest.mark.parametrize("name", NAMES)
def test_a_piece_that_does_not_become_smaller_is_stored_as_it_is(make_store: StoreFactory, name: str) -> None:
    store = make_store(codec=Codec(name), staging_bytes=64 * MIB)
    data = torch.cat([noise(BUFFER_BYTES), torch.zeros(BUFFER_BYTES, dtype=torch.uint8)])
    ticket = stored(store, data.clone())
    first, second = part_of(ticket).pieces
    assert (first.packed_bytes, first.stored_bytes) == (0, BUFFER_BYTES)
    assert 0 < second.packed_bytes <= second.stored_bytes < BUFFER_BYTES / 100
    assert second.offset == first.offset + first.stored_bytes
    assert torch.equal(store.get(ticket, CPU).data, data)


def lose(store: NvmeStore, offset: int, nbytes: int) -> None:
    """Have other bytes there, as where a write was lost."""
    others = huge_page_memory(nbytes).random_(0, 256)
    PosixBackend().open_handle(store.paths[0].file.fd).write(others, offset)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("where", ["first page", "last page", "all of it"])
def test_torn_and_stale_pieces_are_found(make_store: StoreFactory, name: str, where: str) -> None:
    store = make_store(codec=Codec(name))
    ticket = stored(store, activations(MIB), 2)
    (piece,) = part_of(ticket).pieces
    length = piece.stored_bytes if where == "all of it" else 4096
    lose(store, piece.offset + (piece.stored_bytes - 4096 if where == "last page" else 0), length)
    with pytest.raises(ActivationCorruptionError, match="bytes read back are not the bytes written"):
        store.get(ticket, CPU)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seed", range(20))
def test_what_checksums_do_not_see_never_leaves_its_memory(make_store: StoreFactory, name: str, seed: int) -> None:
    """With integrity off any bytes reach the codec: it refuses, or fills the memory that it has, and no other."""
    store = make_store(codec=Codec(name), integrity="off")
    beside = noise(MIB)
    neighbour = put(store, beside.clone())
    ticket = stored(store, activations(MIB), 2)
    (piece,) = part_of(ticket).pieces
    torch.manual_seed(seed)
    page = 4096 * int(torch.randint(0, piece.stored_bytes // 4096, (1,))) if seed else 0
    lose(store, piece.offset + page, 4096)
    try:
        assert store.get(ticket, CPU).data.numel() == 2 * MIB and page, "without its head it was taken"
    except ActivationCorruptionError as error:
        assert f"{name} cannot decompress" in str(error)
    assert torch.equal(store.get(neighbour, CPU).data, beside)


@pytest.mark.parametrize("verb", ["compress", "decompress"])
@pytest.mark.parametrize(
    ("raised", "told"),
    [(RuntimeError("Could not create the context"), MemoryError), (ValueError("damaged"), TransferError)],
    ids=["without memory", "failed"],
)
def test_a_codec_without_memory_is_told_from_one_that_failed(
    monkeypatch: pytest.MonkeyPatch, verb: str, raised: Exception, told: type[Exception]
) -> None:
    codec, data, packed = Codec("lz4"), torch.zeros(MIB, dtype=torch.uint8), torch.empty(MIB, dtype=torch.uint8)
    length = codec.compress(data, packed, 1)
    monkeypatch.setattr(codec._blosc2, f"{verb}2", raising(raised))
    with pytest.raises(told, match=f"lz4 cannot {verb} .*{raised}"):
        codec.compress(data, packed, 1) if verb == "compress" else codec.decompress(packed[:length], data)


# ---- who may have one ----


def config_of(tmp_path: Path, **io: object) -> OffloadConfig:
    block = {"nvme_path": str(tmp_path), "io": {"compression": "lz4", "backend": "posix", **io}}
    return OffloadConfig.model_validate(block)


def opened(config: OffloadConfig) -> Tiers:
    return Tiers(config, AioConfig(), Accelerator(), zero_paths=(), ranks_on_node=1)


def test_without_its_package_a_codec_names_the_repair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "blosc2", None)
    said = r'io.compression "lz4" needs.*pip install "ds_tba\[compression\]"'
    with pytest.raises(BackendUnavailableError, match=said):
        opened(config_of(tmp_path))
    opened(config_of(tmp_path, compression=None)).close()  # imports nothing


@pytest.mark.parametrize("staging_bytes", [MIB, 64 * MIB])
def test_buffers_of_lanes_are_a_part_of_staging_that_plans_leave_out(tmp_path: Path, staging_bytes: int) -> None:
    config = config_of(tmp_path, staging_bytes=staging_bytes, write_lanes=3)
    tiers = opened(config)
    assert tiers.nvme is not None
    ring, held = tiers.nvme.ring, sum(buffer.nbytes for buffer in tiers.nvme.ring.buffers)
    assert len(ring.buffers) == 5 and held + ring.slots.capacity_bytes == staging_bytes >= 4 * held
    assert slots_bytes_of(config) == ring.slots.capacity_bytes
    assert lane_buffer_bytes(1 << 30, 4) == BUFFER_BYTES and lane_buffer_bytes(MIB, 128) == 4096
    tiers.close()


def test_a_backend_that_stages_on_the_device_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiers_module, "select_backend", lambda *_, **__: Selection(DeviceBackend(), "a test"))
    with pytest.raises(BackendUnavailableError, match=r'io.compression "lz4".*host memory.*"backend": "posix"'):
        opened(config_of(tmp_path))
