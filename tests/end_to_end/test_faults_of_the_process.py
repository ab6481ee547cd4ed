"""The drive when the process dies, and two processes that share it."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import pytest
from support.disks import Disk, until
from support.victims import Job, Victims

Sees = Callable[[str], None]
KILLS = 25
LATEST_KILL_S = 0.3
NOTHING = "(nothing)"


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
    user_sees(NOTHING)


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
    user_sees(NOTHING)
