"""A real file system without room: refused at the start with the numbers, survived in mid-run. Root only (a mount)."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import hazards
import pytest
import torch

from ds_tba.errors import PathError
from ds_tba.store import swap_file
from ds_tba.store.nvme import NvmeStore
from ds_tba.store.paths import check_directories
from ds_tba.store.swap_file import SwapFile

MIB = 1 << 20


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """An ext4 of 64 MiB on a loop device."""
    image, mount_point = tmp_path / "image", tmp_path / "disk"
    mount_point.mkdir()
    image.touch()
    os.truncate(image, 64 * MIB)
    try:
        subprocess.run(["mkfs.ext4", "-q", "-m", "0", str(image)], check=True, capture_output=True)
        subprocess.run(["mount", "-o", "loop", str(image), str(mount_point)], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no loop mount here: {error}")
    yield mount_point
    subprocess.run(["umount", str(mount_point)], check=True)


def free_bytes(directory: Path) -> int:
    usage = os.statvfs(directory)
    return usage.f_bavail * usage.f_frsize


@pytest.mark.fault(
    "the drive is full at the start",
    by="an ext4 of 64 MiB on a loop device",
    outcome="refused before training, with the numbers; no space is lost",
)
def test_at_the_start_it_is_refused_with_the_numbers(small_disk: Path, user_sees: Callable[[str], None]) -> None:
    with pytest.raises(PathError, match=r"has 0\.0\d GiB \(\d+ bytes\) free, but 2 rank") as caught:
        check_directories((str(small_disk),), 48 * MIB, 2)
    user_sees(str(caught.value))
    file = SwapFile(small_disk, 1 << 30)
    before = free_bytes(small_disk)
    with pytest.raises(PathError, match=r"cannot reserve 268435456 bytes there .No space left on device"):
        file.reserve_first(256 * MIB)
    assert free_bytes(small_disk) == before
    file.close()


@pytest.mark.fault(
    "the drive fills in mid-run",
    by="an ext4 of 64 MiB on a loop device, less than one forward needs",
    outcome="what does not fit stays in memory, said once; gradients equal; the space comes back",
)
def test_in_mid_run_what_does_not_fit_stays_in_memory(
    monkeypatch: pytest.MonkeyPatch,
    small_disk: Path,
    caplog: pytest.LogCaptureFixture,
    user_sees: Callable[[str], None],
) -> None:
    monkeypatch.setattr(swap_file, "GROW_STEP_BYTES", 8 * MIB)
    before = free_bytes(small_disk)
    with hazards.nvme_cache(small_disk, staging_bytes=16 * MIB) as cache:
        (store,) = cache._stores

        def deep(saving: hazards.Saving) -> list[torch.Tensor]:
            x = torch.randn(1024, 1024, requires_grad=True)  # 4 MiB
            for _ in range(2):
                with saving():
                    y = x
                    for _ in range(30):
                        y = y.sin()
                    loss = y.sum()
                loss.backward()
            return hazards.grads(x)

        hazards.check(deep, cache)
        assert isinstance(store, NvmeStore)
        assert 0 < store.stats.fallbacks["no space in the swap file"] < 60
        assert store.stats.writes.nbytes > 32 * MIB
        (said,) = [message for message in caplog.messages if "No space left on device" in message]
        user_sees(said)
    assert free_bytes(small_disk) == before
