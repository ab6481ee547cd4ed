"""Faults before training, in a training under way, and of the process: a refusal with the repair, gradients bit for bit
those without us, or an error of ours. Never a hang, and nothing is left behind.

A victim trains with and without the offloader and compares; see ``victims.py``, which also ends what hangs.
"""

from __future__ import annotations

import errno
import json
import os
import random
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.disks import MIB, Disk, limited, run, until
from support.victims import Fault, Job, Outcome, Victim, Victims

from ds_tba.config import BLOCK, OffloadConfig, parse_block
from ds_tba.errors import ConfigError, PathError
from ds_tba.report import checked_path
from ds_tba.storage.backends import aio
from ds_tba.storage.path import SwapFile, check_directories

Sees = Callable[[str], None]
BEGINNING = 4 * MIB  # of a device: room for the file system's own records, none for the swap file
STORAGES = 24  # saved by a victim in all
STORAGE_BYTES = 4 * MIB
NOTHING = "(nothing: the run goes on)"
STALL_S = 10
KILLS = 25
LATEST_KILL_S = 0.3


def refused(outcome: Outcome, error: str, *words: str) -> str:
    """The message with which a victim was refused."""
    assert outcome.error == error and not outcome.log, outcome
    assert all(word in outcome.message for word in words), outcome.message
    return outcome.message


def equal(outcome: Outcome) -> Outcome:
    """An outcome with the gradients of the run without us, and nothing left."""
    assert outcome.error is None, (outcome.error, outcome.message, outcome.log)
    assert outcome.live_records == 0
    return outcome


def raised(outcome: Outcome, error: str, *words: str) -> str:
    """The message of an outcome that is an error of ours, with nothing left."""
    assert outcome.error == error, outcome
    assert all(word in outcome.message for word in (*words, "resume from the last checkpoint")), outcome.message
    assert outcome.live_records == 0
    return outcome.message


def told(outcome: Outcome, user_sees: Sees, *words: str) -> Outcome:
    """An outcome as without us, of which the user was told in these words."""
    equal(outcome)
    assert all(word in outcome.said for word in words), outcome.said
    user_sees(outcome.said)
    return outcome


def at(victim: Victim, pause: str, strike: Callable[[], object]) -> None:
    """Strike while the victim waits at a pause."""
    victim.wait_until(pause)
    strike()
    victim.go_on()


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


def refusal(*paths: object) -> str:
    with pytest.raises(PathError) as caught:
        check_directories(tuple(map(str, paths)), 1, 1)
    return str(caught.value)


def test_what_is_no_directory_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SCRATCH_OF_JOB", raising=False)
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path)
    assert f"nvme_path {tmp_path}/none does not exist: create it (mkdir -p" in refusal("none")
    assert "Several directories are a list" in refusal(f"{tmp_path}, /b")
    assert "is a file" in refusal(tmp_path / "file")
    assert "list it once" in refusal(tmp_path, tmp_path / "link")
    assert "a variable stays as it is where this rank's environment lacks it" in refusal("$SCRATCH_OF_JOB/swap")


def test_not_writable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if os.geteuid() == 0:  # root may write anywhere, so the kernel's answer is put in its place
        monkeypatch.setattr(os, "access", lambda *_: False)
    tmp_path.chmod(0o500)
    assert "not writable by user" in refusal(tmp_path)


def test_a_read_only_mount(disk: Disk) -> None:
    run("mount", "-o", "remount,ro", str(disk.path))
    try:
        message = refusal(disk.path)
    finally:
        run("mount", "-o", "remount,rw", str(disk.path))
    assert "not writable" in message and "mount its ext4 for writing" in message and "chown" not in message


def test_environment_variables_and_the_home_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("swap", "$weird"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SCRATCH_OF_JOB", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("$SCRATCH_OF_JOB/swap", "${SCRATCH_OF_JOB}/swap", "~/swap", "$HOME/swap", "swap"):
        (directory,) = check_directories((name,), 1, 1)
        assert directory.path == tmp_path / "swap"
        assert directory.free_bytes > 0 and directory.file_system != "unknown"
    assert check_directories(("$weird",), 1, 1)[0].path == tmp_path / "$weird"
    assert checked_path("report.path", "$SCRATCH_OF_JOB/report.json", 1) == tmp_path / "report.json.rank1"


# ---- limits of the process at the start -----------------------------------------------------------------------------


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


# ---- room -----------------------------------------------------------------------------------------------------------


@pytest.mark.fault(
    "the drive fills in mid-run",
    by="an ext4 of 64 MiB on a loop device, filled by a file of somebody else between two steps",
    outcome="what does not fit stays in memory, said once; gradients equal; the space comes back",
)
def test_the_drive_fills(small_disk: Disk, victims: Victims, backend_name: str, user_sees: Sees) -> None:
    victim = victims.start(Job(str(small_disk.path), backend_name, grow_step_bytes=4 * MIB, pauses=("forward 0",)))
    filler = small_disk.path / "filler"

    def fill() -> None:
        with filler.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, small_disk.free_bytes - 5 * MIB)

    at(victim, "forward 0", fill)
    outcome = told(victim.outcome(), user_sees, "No space left on device")
    assert 0 < outcome.report["fallbacks_by_reason"]["no space in the swap file"] < STORAGES
    assert outcome.report["written_bytes"] > 0
    filler.unlink()


QUOTA_IN_MID_RUN = pytest.mark.fault(
    "the quota is used up in mid-run",
    by="a quota of 40 MiB on a btrfs; `fallocate` or `pwritev` answering EDQUOT",
    outcome="what does not fit stays in memory, said once; gradients equal; the space comes back",
)


@QUOTA_IN_MID_RUN
def test_a_quota_of_btrfs_is_used_up(quota_disk: Disk, victims: Victims, backend_name: str) -> None:
    """Also under aio, which would not tell of a rewrite that fails: the swap file is not copied on write."""
    with limited(quota_disk, "40M") as directory:
        outcome = equal(victims.run(Job(str(directory), backend_name, steps=4)))
    (said,) = [message for message in outcome.log if "cannot grow" in message]  # a write may have failed of it as well
    assert "Disk quota exceeded" in said
    assert outcome.report["written_bytes"] > 40 * MIB and outcome.report["kept_bytes"] > 0


@QUOTA_IN_MID_RUN
@pytest.mark.parametrize("call", ["write", "allocate"])
def test_a_quota_is_used_up(disk: Disk, victims: Victims, call: str, user_sees: Sees) -> None:
    fault = Fault(call, "fail", errno.EDQUOT, first=2)
    job = Job(str(disk.path), "posix", grow_step_bytes=4 * MIB, faults=[fault])
    outcome = told(victims.run(job), user_sees, "Disk quota exceeded")
    assert outcome.said.endswith("in memory instead" if call == "write" else "or raise the quota")
    assert 0 < outcome.report["fallbacks"] < STORAGES


# ---- errors that the kernel tells -----------------------------------------------------------------------------------


@pytest.mark.fault(
    "a write fails (Input/output error), backend posix",
    by="an ext4 on a loop device whose far end goes away between two steps",
    outcome="from there on activations stay in memory, said once; gradients equal",
)
def test_a_write_fails(fragile_disk: Disk, victims: Victims, user_sees: Sees) -> None:
    victim = victims.start(Job(str(fragile_disk.path), "posix", pauses=("forward 1",)))
    at(victim, "forward 1", lambda: fragile_disk.break_beyond(BEGINNING))
    outcome = told(victim.outcome(), user_sees, "Input/output error", "stay in memory")
    assert outcome.report["written_bytes"] == STORAGES // 2 * STORAGE_BYTES
    assert outcome.report["fallbacks_by_reason"] == {"path failed": STORAGES // 2}


@pytest.mark.aio
@pytest.mark.fault(
    "a write fails (Input/output error), backend aio",
    by="an ext4 on a loop device whose far end is away for one forward; DeepSpeed's op tells no error",
    outcome="found by its checksum when backward reads; `ActivationCorruptionError`, no wrong gradient",
)
def test_a_write_fails_unseen(fragile_disk: Disk, victims: Victims, needs_aio: None, user_sees: Sees) -> None:
    victim = victims.start(Job(str(fragile_disk.path), "aio", pauses=("forward 0", "backward 0")))
    at(victim, "forward 0", lambda: fragile_disk.break_beyond(BEGINNING))
    at(victim, "backward 0", fragile_disk.repair)
    user_sees(raised(victim.outcome(), "ActivationCorruptionError", "are not the bytes written"))


@pytest.mark.fault(
    "a read fails once (Input/output error)",
    by="one `preadv` answering EIO",
    outcome="tried once more; gradients equal",
)
def test_a_read_fails_once(disk: Disk, victims: Victims, user_sees: Sees) -> None:
    fault = Fault("read", "fail", errno.EIO, first=7, last=7)
    outcome = victims.run(Job(str(disk.path), "posix", faults=[fault]))
    told(outcome, user_sees, "Input/output error; trying once more")


@pytest.mark.fault(
    "a read fails for good (Input/output error)",
    by="an ext4 on a loop device whose far end goes away between forward and backward",
    outcome="tried once more, then `ActivationLostError` with place and reason; no wrong gradient",
)
def test_a_read_fails_for_good(fragile_disk: Disk, victims: Victims, backend_name: str, user_sees: Sees) -> None:
    victim = victims.start(Job(str(fragile_disk.path), backend_name, pauses=("backward 1",)))
    at(victim, "backward 1", lambda: fragile_disk.break_beyond(BEGINNING))
    outcome = victim.outcome()
    assert any("trying once more" in message for message in outcome.log)
    user_sees(raised(outcome, "ActivationLostError", str(fragile_disk.path), "offset", "Input/output error"))


# ---- bytes that do not come or go -----------------------------------------------------------------------------------


@pytest.mark.fault(
    "writes or reads move a part of the bytes",
    by="`pwritev` and `preadv` that move half of what is asked, each time",
    outcome="the rest is moved too; gradients equal",
)
@pytest.mark.parametrize("call", ["write", "read"])
def test_short_transfers_are_completed(disk: Disk, victims: Victims, call: str, user_sees: Sees) -> None:
    outcome = equal(victims.run(Job(str(disk.path), "posix", faults=[Fault(call, "half")])))
    assert not outcome.log and outcome.report["read_bytes"] == STORAGES * STORAGE_BYTES
    assert outcome.strikes[call] > 5 * STORAGES
    user_sees(NOTHING)


@pytest.mark.fault(
    "a write moves no byte",
    by="one `pwritev` that returns 0",
    outcome="from there on activations stay in memory, said once; gradients equal",
)
def test_a_write_moves_nothing(disk: Disk, victims: Victims, user_sees: Sees) -> None:
    outcome = victims.run(Job(str(disk.path), "posix", faults=[Fault("write", "nothing", first=5, last=5)]))
    told(outcome, user_sees, "short: 0 of 4194304 bytes")


@pytest.mark.fault(
    "reads end too early (end of file)",
    by="`preadv` that returns 0, from the sixth on",
    outcome="tried once more, then `ActivationLostError`; no wrong gradient",
)
def test_reads_move_nothing(disk: Disk, victims: Victims, user_sees: Sees) -> None:
    outcome = victims.run(Job(str(disk.path), "posix", faults=[Fault("read", "nothing", first=5)]))
    user_sees(raised(outcome, "ActivationLostError", "short: 0 of 4194304 bytes"))


@pytest.mark.fault(
    "a write is lost, and the drive says nothing",
    by="`pwritev` that returns without writing; with aio one block of a request, dropped",
    outcome="found by its checksum when backward reads; `ActivationCorruptionError`, no wrong gradient",
)
@pytest.mark.parametrize("number", [0, 11])
def test_a_lost_write(disk: Disk, victims: Victims, backend_name: str, number: int, user_sees: Sees) -> None:
    call = "write" if backend_name == "posix" else "op_write"
    fault = Fault(call, "drop", first=number, last=number)
    outcome = victims.run(Job(str(disk.path), backend_name, faults=[fault]))
    user_sees(raised(outcome, "ActivationCorruptionError", "have checksum", "A write was lost"))


@pytest.mark.fault(
    "a rewrite is lost, so that the drive has the bytes of the step before",
    by="`pwritev` that returns without writing; with aio a loop device whose far end is away for one forward",
    outcome="found by its checksum when backward reads; `ActivationCorruptionError`, no wrong gradient",
)
def test_stale_bytes(fragile_disk: Disk, victims: Victims, backend_name: str, user_sees: Sees) -> None:
    lost = [Fault("write", "drop", first=STORAGES // 2)] if backend_name == "posix" else []
    victim = victims.start(Job(str(fragile_disk.path), backend_name, faults=lost, pauses=("forward 1", "backward 1")))
    at(victim, "forward 1", lambda: None if lost else fragile_disk.break_beyond(BEGINNING))
    at(victim, "backward 1", fragile_disk.repair)
    outcome = victim.outcome()
    assert outcome.report["read_bytes"] == STORAGES // 2 * STORAGE_BYTES  # the first step's
    user_sees(raised(outcome, "ActivationCorruptionError", "have checksum", "stale"))


@pytest.mark.aio
@pytest.mark.fault(
    "a read is lost, backend aio",
    by="every read that DeepSpeed's op makes, dropped",
    outcome="found by its checksum and read again without the op; gradients equal",
)
def test_a_lost_read(disk: Disk, victims: Victims, needs_aio: None, user_sees: Sees) -> None:
    outcome = equal(victims.run(Job(str(disk.path), "aio", faults=[Fault("op_read", "drop")])))
    assert all("not the bytes written; trying once more" in message for message in outcome.log)
    user_sees(outcome.log[0])


# ---- a drive that is slow or gone -----------------------------------------------------------------------------------


@pytest.mark.fault(
    "the drive stalls for 10 s",
    by="an ext4 on a loop device, frozen between two steps; elsewhere the first read, held up",
    outcome="the step waits and goes on; gradients equal",
)
def test_the_drive_stalls(disk: Disk, victims: Victims, tmp_path: Path, user_sees: Sees) -> None:
    """Writes and reads, with every backend of this machine, at the same time, because it takes its time."""
    backends = ["posix", *(["aio"] if aio.is_built() else [])]
    pauses = ("forward 1", "backward 1")
    writing = [victims.start(Job(str(disk.path), name, grow_step_bytes=MIB, pauses=pauses)) for name in backends]
    for victim in writing:
        victim.wait_until("forward 1")
    disk.freeze()
    for victim in writing:
        victim.go_on()
    held_up = [Fault(call, "slow", STALL_S, first=0, last=0) for call in ("read", "op_read")]
    reading = [victims.start(Job(str(tmp_path), name, grow_step_bytes=MIB, faults=held_up)) for name in backends]
    time.sleep(STALL_S)
    assert all(victim.is_silent for victim in writing)  # staging is full, and no write ends
    disk.thaw()
    for victim in writing:
        at(victim, "backward 1", lambda: None)
        assert not equal(victim.outcome()).log
    for victim in reading:
        outcome = equal(victim.outcome())
        assert not outcome.log and outcome.report["stall_s"] > STALL_S - 1
    user_sees(NOTHING)


@pytest.mark.fault(
    "the path is unmounted in mid-run",
    by="`umount -l` of an ext4 on a loop device between forward and backward",
    outcome="goes on in the open swap file; gradients equal; the file system is gone with the run",
)
def test_the_path_is_unmounted(disk: Disk, victims: Victims, backend_name: str, user_sees: Sees) -> None:
    victim = victims.start(Job(str(disk.path), backend_name, steps=3, pauses=("backward 1",)))
    at(victim, "backward 1", disk.unmount_lazily)
    outcome = equal(victim.outcome())
    assert not outcome.log and outcome.report["fallbacks"] == 0
    assert outcome.report["read_bytes"] == 3 * 12 * STORAGE_BYTES
    assert list(disk.path.iterdir()) == []
    until(lambda: not disk.is_attached, "the end of the file system")
    user_sees(NOTHING)


# ---- limits of the process ------------------------------------------------------------------------------------------


@pytest.mark.fault(
    "too many open files in mid-run (ulimit -n)",
    by="a process at its limit of open files",
    outcome="goes on in the open swap file; gradients equal",
)
def test_no_descriptor_is_left(disk: Disk, victims: Victims, backend_name: str, user_sees: Sees) -> None:
    outcome = equal(victims.run(Job(str(disk.path), backend_name, free_descriptors=0)))
    assert not outcome.log and outcome.report["read_bytes"] == STORAGES * STORAGE_BYTES
    assert outcome.report["fallbacks"] == 0
    complaints = [line for line in outcome.stderr.splitlines() if line.startswith("deepspeed_aio")]
    assert bool(complaints) == (backend_name == "aio")
    user_sees(f"{complaints[0]} (DeepSpeed's aio, at each request)" if complaints else NOTHING)


# ---- the process ----------------------------------------------------------------------------------------------------


@pytest.mark.fault(
    "two jobs, or two ranks, with one nvme_path at the same time",
    by="three processes with an ext4 on a loop device, one of them killed between forward and backward",
    outcome="gradients of the others equal; each job's room comes back when it ends",
)
def test_jobs_on_one_path(disk: Disk, victims: Victims, backend_name: str, user_sees: Sees) -> None:
    before = disk.free_bytes
    step = 16 << 20
    job = Job(str(disk.path), backend_name, grow_step_bytes=step, pauses=("backward 0",))
    running = [victims.start(job) for _ in range(3)]
    for victim in running:
        victim.wait_until("backward 0")
    storages = job.layers * (4 << 20)
    assert before - disk.free_bytes >= 3 * storages  # each has a file of its own
    killed, *others = running
    killed.kill()
    until(lambda: before - disk.free_bytes < 3 * storages, "the room of the job that was killed")
    for victim in others:
        victim.go_on()
    for victim in others:
        outcome = victim.outcome()
        assert outcome.error is None and not outcome.log, outcome
        assert outcome.report["read_bytes"] == job.steps * storages
    user_sees("(nothing)")


@pytest.mark.fault(
    "the process is killed (SIGKILL, out of memory)",
    by="SIGKILL at 50 random moments of a training, half of them with DeepSpeed's aio",
    outcome="no file is left, and the room comes back, each time",
)
def test_killed_at_random_moments(disk: Disk, victims: Victims, backend_name: str, user_sees: Sees) -> None:
    before = disk.free_bytes
    chance = random.Random(backend_name)
    held_room = 0
    for _ in range(KILLS):
        victim = victims.start(Job(str(disk.path), backend_name, forever=True))
        time.sleep(chance.uniform(0, LATEST_KILL_S))
        held_room += disk.free_bytes < before
        victim.kill()
        until(lambda: disk.is_empty(before), f"no file on the disk, and {before} bytes of room")
    assert held_room  # or they all died too early to leave anything
    user_sees("(nothing)")
