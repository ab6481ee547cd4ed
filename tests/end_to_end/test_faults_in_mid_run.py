"""Faults that strike a training under way: gradients bit for bit those without us, or an error of ours. Never a hang.

A victim trains with and without the offloader and compares; see ``victims.py``, which also ends what hangs.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support.disks import MIB, Disk, limited, until
from support.victims import Fault, Job, Outcome, Victim, Victims

from ds_tba.storage.backends import aio

Sees = Callable[[str], None]
BEGINNING = 4 * MIB  # of a device: room for the file system's own records, none for the swap file
STORAGES = 24  # saved by a victim in all
STORAGE_BYTES = 4 * MIB
NOTHING = "(nothing: the run goes on)"


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


STALL_S = 10


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
