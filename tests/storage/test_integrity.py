"""The checksums of the device, computed here on host tensors, and what both kinds must find."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ds_tba.storage import integrity as device_checksum
from ds_tba.storage.integrity import DeviceChecksum, Integrity

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


def digest(data: torch.Tensor, nbytes: int | None = None) -> tuple[int, ...]:
    return DeviceChecksum().digest(data.view(torch.uint8), [(0, nbytes or data.numel() * 8)])


@given(st.lists(st.integers(0, (1 << 64) - 1), min_size=1, max_size=20))
def test_words_are_mixed_as_murmurhash3_does(numbers: list[int]) -> None:
    """Its finalizer is one-to-one; torch's integers are signed and shift with their sign."""

    def reference(word: int) -> int:
        for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
            word = (word ^ word >> 33) * factor & (1 << 64) - 1
        return word ^ word >> 33

    mixed = device_checksum._mix(torch.tensor([_signed(word) for word in numbers]))
    assert [word & (1 << 64) - 1 for word in mixed.tolist()] == [reference(word) for word in numbers]


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


def test_what_is_not_sampled_does_not_count_and_what_is_does() -> None:
    data = words(12)
    samples = [(0, PAGE), (4 * PAGE, 6 * PAGE), (11 * PAGE, 12 * PAGE)]
    checksum = DeviceChecksum()
    before = checksum.digest(data.view(torch.uint8), samples)
    for page in range(12):
        changed = data.clone()
        changed[page * 512 + 7] += 1
        after = checksum.digest(changed.view(torch.uint8), samples)
        differs = [number for number in range(3) if after[number] != before[number]]
        assert differs == [n for n, (start, end) in enumerate(samples) if start <= page * PAGE < end]


def test_zeros_of_different_length_differ() -> None:
    assert len({digest(torch.zeros(pages * 512, dtype=torch.int64)) for pages in range(1, 9)}) == 8


def test_the_checksum_does_not_depend_on_the_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    data = words(11)
    whole = digest(data)
    monkeypatch.setattr(device_checksum, "PAGES_PER_CHUNK", 3)
    assert digest(data) == whole


def test_the_data_is_left_alone_and_a_slice_of_it_will_do() -> None:
    data = words(6)
    before = data.clone()
    part = data[512:1536].view(torch.uint8)
    assert DeviceChecksum().digest(part, [(0, 2 * PAGE)]) == digest(before[512:1536].clone())
    assert torch.equal(data, before)


def test_plans_are_kept_for_the_sizes_used_last() -> None:
    checksum = DeviceChecksum()
    for pages in [1, *range(1, 2 * device_checksum.PLANS_KEPT), 1]:
        checksum.digest(words(pages).view(torch.uint8), [(0, pages * PAGE)])
    assert len(checksum._plans) == device_checksum.PLANS_KEPT
    assert next(reversed(checksum._plans))[1] == ((0, PAGE),)


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
