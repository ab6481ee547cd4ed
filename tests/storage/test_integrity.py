"""What checksums must find, for staging in host memory and in device memory, which host memory plays here."""

from __future__ import annotations

import pytest
import torch

from ds_tba.storage.integrity import Integrity

PAGE = 4096
BLOCK = 5 * PAGE
both = pytest.mark.parametrize("on_device", [False, True], ids=["host", "device"])


def words(pages: int) -> torch.Tensor:
    return torch.randint(-(1 << 63), (1 << 63) - 1, (pages * 512,), generator=torch.Generator().manual_seed(pages))


@both
def test_what_is_not_sampled_does_not_count_and_what_is_does(on_device: bool) -> None:
    data = words(12)
    integrity = Integrity("sampled", BLOCK, on_device=on_device)
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
    integrity = Integrity(mode, BLOCK, on_device=on_device)
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


@pytest.mark.parametrize("mode", ["sampled", "full"])
@pytest.mark.parametrize("nbytes", [PAGE, 12 * PAGE, 2500 * PAGE, 2500 * PAGE - 1000])
def test_the_checksums_of_the_device_are_those_of_the_host(mode: str, nbytes: int) -> None:
    data = words(2500).view(torch.uint8)[:nbytes]
    host, device = (Integrity(mode, BLOCK, on_device=on_device).digest(data) for on_device in (False, True))
    assert host == device


def test_samples_come_to_the_host_in_one_copy_and_blocks_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[int] = []
    cpu = torch.Tensor.cpu
    monkeypatch.setattr(torch.Tensor, "cpu", lambda tensor: copied.append(tensor.numel()) or cpu(tensor))
    data = words(2500).view(torch.uint8)
    Integrity("sampled", BLOCK, on_device=True).digest(data)
    assert copied == [2 * PAGE * 500]
    copied.clear()
    Integrity("full", BLOCK, on_device=True).digest(data)
    assert copied == [BLOCK] * 500


@both
def test_off_computes_nothing(on_device: bool) -> None:
    integrity = Integrity("off", BLOCK, on_device=on_device)
    data = words(4).view(torch.uint8)
    assert integrity.digest(data) == () and integrity.difference(data, (), 0) == ""


def test_the_default_device_does_not_matter() -> None:
    data, integrity = words(12).view(torch.uint8), Integrity("full", BLOCK, on_device=True)
    with torch.device("meta"):
        found = integrity.digest(data)
    assert found == integrity.digest(data)
