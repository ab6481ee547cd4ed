"""Faults that are there before training: refused with the repair, and nothing is left behind."""

from __future__ import annotations

import errno
import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.disks import MIB, Disk, limited, run
from support.victims import Fault, Job, Outcome, Victims

from ds_tba.config import BLOCK, OffloadConfig, parse_block
from ds_tba.errors import ConfigError, PathError
from ds_tba.storage.path import SwapFile, check_directories

Sees = Callable[[str], None]


def refused(outcome: Outcome, error: str, *words: str) -> str:
    """The message with which a victim was refused."""
    assert outcome.error == error and not outcome.log, outcome
    assert all(word in outcome.message for word in words), outcome.message
    return outcome.message


# ---- the block ------------------------------------------------------------------------------------------------------

VALID = OffloadConfig(
    nvme_path="/local_nvme", placement="nvme", host_budget_bytes=1 << 30, recompute=True, blocks=["model.layers"],
    io={"staging_bytes": 256 << 20}, ssd={"rated_endurance_tbw": 600, "min_life_days": 365.5},
).model_dump(mode="json", by_alias=True)  # fmt: skip
SUB_BLOCKS = [key for key, value in VALID.items() if isinstance(value, dict)]
PLACES = [(key,) for key in VALID] + [(block, key) for block in SUB_BLOCKS for key in VALID[block]]


MISSPELT: list[Callable[[str], str]] = [
    lambda key: key[:-1],
    lambda key: key[0] + key,
    str.capitalize,
    lambda key: key.replace("_", "-"),
]
wrong_values = (
    st.none()
    | st.booleans()
    | st.integers(max_value=-1)
    | st.integers(min_value=1 << 62)
    | st.just(10**400)
    | st.floats()
    | st.sampled_from(["auto", "", "64MB", "true", "posix", "nvme", "sampled", 0, 1, 4096, 1.5, [], {}, [[]], [3]])
    | st.text(max_size=5)
    | st.dictionaries(st.text("abc", min_size=1, max_size=3), st.just("auto"), max_size=1)
)
unknown_keys = st.tuples(st.sampled_from(PLACES), st.sampled_from(MISSPELT)).map(
    lambda drawn: (*drawn[0][:-1], drawn[1](drawn[0][-1]))
)
mutations = st.lists(
    st.tuples(st.sampled_from(PLACES) | st.sampled_from(PLACES) | unknown_keys, wrong_values), min_size=1, max_size=3
)


def mutated(changes: list[tuple[tuple[str, ...], Any]]) -> dict[str, Any]:
    block: dict[str, Any] = json.loads(json.dumps(VALID))
    for place, value in changes:
        holder = block
        for key in place[:-1]:
            holder = holder[key] if isinstance(holder.get(key), dict) else {}
        holder[place[-1]] = value
    return block


def same(given: Any, taken: Any) -> bool:
    """Check that what was taken is what was given, less the keys that were left out."""
    if isinstance(given, dict):
        return all(same(value, taken[key]) for key, value in given.items())
    return bool(given == taken) and isinstance(given, bool) == isinstance(taken, bool)


@pytest.mark.fault(
    "a value or a key of the block is wrong",
    by="200 blocks made from a valid one: misspelt and unknown keys, wrong types, negative, huge, null, `auto`",
    outcome="taken as written, or refused before training with the name of the key; no key is ever ignored",
)
def test_a_wrong_block_is_refused_by_name_or_means_what_it_says(user_sees: Sees) -> None:
    counts = {"taken": 0, "refused": 0}

    @settings(max_examples=200, deadline=None, derandomize=True)
    @given(mutations)
    def check(changes: list[tuple[tuple[str, ...], Any]]) -> None:
        block = mutated(changes)
        try:
            parsed = parse_block({BLOCK: block})
        except ConfigError as error:
            names = [re.escape(place[-1]) for place, _ in changes]
            assert re.search(rf"(?<!\w)({'|'.join(names)})(?!\w)", str(error)), (changes, str(error))
            counts["refused"] += 1
            return
        counts["taken"] += 1
        config = parsed[0] if parsed else OffloadConfig.model_validate(block)
        assert same(block, config.model_dump(by_alias=True))
        assert OffloadConfig.model_validate_json(config.model_dump_json(by_alias=True)) == config

    check()
    assert all(counts.values()), counts
    with pytest.raises(ConfigError) as caught:
        parse_block({BLOCK: {**VALID, "placment": "nvme", "io": {"read_lanes": 0}}})
    user_sees(str(caught.value))


# ---- the path -------------------------------------------------------------------------------------------------------


@pytest.mark.fault(
    "nvme_path is not there, or its drive is not mounted",
    by="an ext4 on a loop device, unmounted; nvme_path is a directory in it",
    outcome="refused before training",
)
def test_a_path_on_a_drive_that_is_not_mounted(disk: Disk, victims: Victims, user_sees: Sees) -> None:
    directory = disk.path / "activations"
    directory.mkdir()
    assert victims.run(Job(str(directory))).error is None
    run("umount", str(disk.path))
    user_sees(refused(victims.run(Job(str(directory))), "PathError", f"{directory} does not exist"))
    assert list(disk.path.iterdir()) == []


@pytest.mark.fault(
    "the drive is full at the start",
    by="an ext4 of 64 MiB on a loop device",
    outcome="refused before training, with the numbers; no space is lost",
)
def test_a_full_drive_is_refused_with_the_numbers(small_disk: Disk, user_sees: Sees) -> None:
    with pytest.raises(PathError, match=r"has \d\d\.\d\d MiB \(\d+ bytes\) free, but 2 rank") as caught:
        check_directories((str(small_disk.path),), 48 * MIB, 2)
    user_sees(str(caught.value))
    file = SwapFile(small_disk.path, 1 << 30)
    before = small_disk.free_bytes
    with pytest.raises(PathError, match=r"cannot reserve 268435456 bytes there .No space left on device"):
        file.reserve_first(256 * MIB)
    assert small_disk.free_bytes == before
    file.close()


QUOTA_AT_START = pytest.mark.fault(
    "the quota is too small at the start",
    by="a quota of 10 MiB on a btrfs; `fallocate` answering EDQUOT",
    outcome="refused before training; no space is lost",
)


@QUOTA_AT_START
def test_a_quota_of_btrfs_that_is_too_small(quota_disk: Disk, victims: Victims) -> None:
    with limited(quota_disk, "10M") as directory:
        refused(victims.run(Job(str(directory))), "PathError", "16777216 bytes", "Disk quota exceeded")


@QUOTA_AT_START
def test_a_quota_that_is_too_small(disk: Disk, victims: Victims, user_sees: Sees) -> None:
    outcome = victims.run(Job(str(disk.path), at_start=[Fault("allocate", "fail", errno.EDQUOT)]))
    user_sees(refused(outcome, "PathError", "16777216 bytes", "Disk quota exceeded"))


# ---- limits of the process ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("free", [0, 20])
@pytest.mark.fault(
    "too many open files at the start (ulimit -n)",
    by="a process that may open no file more, or twenty",
    outcome="refused before training, with the numbers; no space is lost",
)
def test_no_descriptor_for_the_swap_file(
    disk: Disk, victims: Victims, backend_name: str, free: int, user_sees: Sees
) -> None:
    outcome = victims.run(Job(str(disk.path), backend_name, free_descriptors_at_start=free))
    user_sees(refused(outcome, "ConfigError", "file descriptors", "raise the limit (ulimit -n"))


@pytest.mark.fault(
    "too little memory may be locked (ulimit -l), io.backend left out",
    by="RLIMIT_MEMLOCK of 1 MiB, without root's privilege over it",
    outcome="trains with backend posix and says why; gradients equal",
)
def test_little_lockable_memory_means_posix(disk: Disk, victims: Victims, user_sees: Sees) -> None:
    outcome = victims.run(Job(str(disk.path), None, lockable_bytes=MIB))
    assert outcome.error is None, outcome
    (reason,) = [part for part in outcome.start_line.split("; ") if part.startswith("backend posix")]
    assert "16781312 bytes" in reason and "ulimit -l" in reason
    user_sees(reason)


@pytest.mark.fault(
    "too little memory may be locked (ulimit -l), io.backend aio",
    by="RLIMIT_MEMLOCK of 1 MiB, without root's privilege over it",
    outcome="refused before training",
)
def test_little_lockable_memory_rules_a_named_aio_out(disk: Disk, victims: Victims, user_sees: Sees) -> None:
    outcome = victims.run(Job(str(disk.path), "aio", lockable_bytes=MIB))
    user_sees(refused(outcome, "BackendUnavailableError", "16781312 bytes", "ulimit -l", '"posix"'))
