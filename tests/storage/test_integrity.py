"""What checksums must find, for staging in host memory and in device memory, which host memory plays here."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ds_tba.storage import integrity as module
from ds_tba.storage.integrity import Integrity

PAGE = 4096
BLOCK = 5 * PAGE
both = pytest.mark.parametrize("on_device", [False, True], ids=["host", "device"])
patterns = st.sampled_from([0, 1, -1, 1 << 62, -(1 << 63), 0x3F803F803F803F80, 0x0000000100000001])


def blocks(nbytes: int) -> list[tuple[int, int]]:
    return [(start, min(start + BLOCK, nbytes)) for start in range(0, nbytes, BLOCK)]


def words(pages: int, fill: int | None = None) -> torch.Tensor:
    if fill is None:
        return torch.randint(-(1 << 63), (1 << 63) - 1, (pages * 512,), generator=torch.Generator().manual_seed(pages))
    return torch.full((pages * 512,), fill)


def one_block(nbytes: int) -> list[tuple[int, int]]:
    return [(0, nbytes)]


def digest(data: torch.Tensor, on_device: bool = True) -> tuple[int, ...]:
    return Integrity("full", one_block, on_device=on_device).digest(data.view(torch.uint8))


@given(st.integers(1, 4), patterns, st.data())
def test_one_changed_word_always_changes_the_checksum(pages: int, fill: int, data: st.DataObject) -> None:
    before = words(pages, fill)
    after = before.clone()
    at = data.draw(st.integers(0, before.numel() - 1))
    after[at] = data.draw(st.integers(-(1 << 63), (1 << 63) - 1).filter(lambda word: word != fill))
    assert digest(before) != digest(after)


@given(st.integers(1, 4), patterns, patterns, st.data())
def test_swapped_words_and_swapped_pages_are_seen(pages: int, fill: int, other: int, data: st.DataObject) -> None:
    before = words(pages, fill)
    one, two = data.draw(st.lists(st.integers(0, before.numel() - 1), min_size=2, max_size=2, unique=True))
    before[one] = other + 1
    after = before.clone()
    after[[one, two]] = before[[two, one]]
    if fill != other + 1:
        assert digest(before) != digest(after)
    turned = torch.cat([before[512:], before[:512]])
    assert (digest(turned) == digest(before)) == torch.equal(turned, before)


@given(patterns, st.sets(st.integers(0, 511), min_size=2))
def test_signs_that_flip_together_do_not_cancel_out(fill: int, places: set[int]) -> None:
    """Stale bytes may differ from the right ones in signs alone, and a weighted sum does not see two of them."""
    before = words(1, fill)
    for flip in (-(1 << 63), _signed(0x8000800080008000)):
        after = before.clone()
        after[list(places)] ^= flip
        assert digest(before) != digest(after)


@both
def test_what_is_not_sampled_does_not_count_and_what_is_does(on_device: bool) -> None:
    data = words(12)
    integrity = Integrity("sampled", blocks, on_device=on_device)
    samples = [0, 4, 5, 9, (10, 11)]  # pages: the last block has two, which are one sample
    before = integrity.digest(data.view(torch.uint8))
    for page in range(12):
        changed = data.clone()
        changed[page * 512 + 7] += 1
        after = integrity.digest(changed.view(torch.uint8))
        differs = [number for number in range(5) if after[number] != before[number]]
        assert differs == [n for n, sample in enumerate(samples) if sample == page or (sample == (10, 11) and page > 9)]


@both
@pytest.mark.parametrize("mode", ["sampled", "full"])
@pytest.mark.parametrize("pages", [1, 2, 3, 12, 2500])
def test_every_changed_sample_is_found(mode: str, on_device: bool, pages: int) -> None:
    integrity = Integrity(mode, blocks, on_device=on_device)
    data = words(pages).view(torch.uint8)
    expected = integrity.digest(data)
    for start, end in integrity._samples(pages * PAGE)[:: 1 + pages // 60]:
        for at in (start, end - 1):
            data[at] ^= 1
            found = integrity.compare(data, expected)
            assert found is not None and (found.offset, found.nbytes) == (start, end - start)
            data[at] ^= 1
    assert integrity.compare(data, expected) is None


@pytest.mark.parametrize("mode", ["sampled", "full"])
@pytest.mark.parametrize("nbytes", [PAGE, 12 * PAGE, 2500 * PAGE, 2500 * PAGE - 1000])
def test_the_checksums_of_the_device_are_those_of_the_host(mode: str, nbytes: int) -> None:
    data = words(2500).view(torch.uint8)[:nbytes]
    host, device = (Integrity(mode, blocks, on_device=on_device).digest(data) for on_device in (False, True))
    assert host == device


def test_samples_come_to_the_host_in_one_copy_and_blocks_within_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[int] = []
    cpu = torch.Tensor.cpu
    monkeypatch.setattr(torch.Tensor, "cpu", lambda tensor: copied.append(tensor.numel()) or cpu(tensor))
    data = words(2500).view(torch.uint8)
    Integrity("sampled", blocks, on_device=True).digest(data)
    assert copied == [2 * PAGE * 500]
    copied.clear()
    Integrity("full", blocks, on_device=True).digest(data)
    assert sum(copied) == data.numel() and len(copied) == 3 and max(copied) <= module.GATHER_BYTES + BLOCK


def test_zeros_of_different_length_differ() -> None:
    assert len({digest(torch.zeros(pages * 512, dtype=torch.int64)) for pages in range(1, 9)}) == 8


@pytest.mark.parametrize("gathered_bytes", [1, PAGE, 3 * PAGE, 8 * PAGE])
def test_the_checksum_does_not_depend_on_the_chunks(monkeypatch: pytest.MonkeyPatch, gathered_bytes: int) -> None:
    data, integrity = words(11).view(torch.uint8), Integrity("sampled", blocks, on_device=True)
    whole = integrity.digest(data)
    monkeypatch.setattr(module, "GATHER_BYTES", gathered_bytes)
    assert integrity.digest(data) == whole


def test_the_data_is_left_alone_and_a_slice_of_it_will_do() -> None:
    data = words(6)
    before = data.clone()
    part = data[512:1536].view(torch.uint8)
    assert digest(part) == digest(before[512:1536].clone())
    assert torch.equal(data, before)


@both
@pytest.mark.parametrize("mode", ["sampled", "full"])
def test_a_mismatch_names_the_place(mode: str, on_device: bool) -> None:
    integrity = Integrity(mode, blocks, on_device=on_device)
    data = words(12).view(torch.uint8)
    expected = integrity.digest(data)
    assert integrity.compare(data, expected) is None
    data[2 * BLOCK + 5] += 1
    found = integrity.compare(data, expected)
    assert found is not None and found.offset == 2 * BLOCK
    assert found.found != found.expected and found.nbytes == 2 * PAGE  # the last block has two pages
    assert all(0 <= one < 1 << 64 for one in expected) and len(set(expected)) == len(expected) >= 3


@both
def test_off_computes_nothing(on_device: bool) -> None:
    integrity = Integrity("off", blocks, on_device=on_device)
    data = words(4).view(torch.uint8)
    assert integrity.digest(data) == () and integrity.compare(data, ()) is None


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word


def test_the_default_device_does_not_matter() -> None:
    data = words(3)
    with torch.device("meta"):
        found = digest(data)
    assert found == digest(data)
