"""Machines as users have them, in a process of their own: system calls that are forbidden, and mounts of any name."""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import subprocess

import pytest

from support import runs

NUMBERS = {
    "x86_64": {"io_setup": 206, "io_getevents": 208, "io_submit": 209, "fallocate": 285, "io_pgetevents": 333},
    "aarch64": {"io_setup": 0, "io_submit": 2, "io_getevents": 4, "fallocate": 47, "io_pgetevents": 292},
}
_NO_NEW_PRIVILEGES, _SET_SECCOMP, _FILTER = 38, 22, 2  # linux/prctl.h, linux/seccomp.h
_LOAD_NUMBER, _IS_EQUAL, _RETURN = 0x20, 0x15, 0x06  # linux/bpf_common.h: of the first word, a jump, an answer
_ALLOWED, _ERRNO, KILLED = 0x7FFF0000, 0x00050000, 0x80000000


def forbid(*calls: str, code: int) -> None:
    """Have the kernel refuse these calls of this process and its children with an errno, or end it (``KILLED``)."""
    answer = KILLED if code == KILLED else _ERRNO | code
    numbers = [NUMBERS[platform.machine()][call] for call in calls]
    lines = [(_LOAD_NUMBER, 0, 0, 0)]
    for index, number in enumerate(numbers):
        lines.append((_IS_EQUAL, len(numbers) - index, 0, number))
    lines += [(_RETURN, 0, 0, _ALLOWED), (_RETURN, 0, 0, answer)]
    program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in lines))
    header = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(lines), ctypes.addressof(program)))
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    prctl.argtypes = (ctypes.c_int, *[ctypes.c_ulong] * 4)
    if prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0) or prctl(_SET_SECCOMP, _FILTER, ctypes.addressof(header), 0, 0):
        raise OSError(ctypes.get_errno(), "no filter of system calls can be had here")


def run_python(
    code: str, *, own_mounts: bool = False, setup: str = "", timeout_s: float = 120.0
) -> subprocess.CompletedProcess[str]:
    """Run a program that can import the tests' support; with mounts that no other process sees, where asked for."""
    if platform.machine() not in NUMBERS:
        pytest.skip("the numbers of its system calls are not known")
    if own_mounts and os.geteuid() != 0:
        pytest.skip("mounts are root's")
    unshare = ("unshare", "--mount", "--propagation", "private", "bash", "-ec", f'{setup}\nexec "$0" "$@"')
    done = runs.python("-c", code, timeout_s=timeout_s, within=unshare if own_mounts else ())
    if own_mounts and done.returncode == 32:
        pytest.skip(f"no such mount here: {done.stderr}")
    return done
