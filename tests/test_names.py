"""Names for files that have none: given in time, taken away in time, and left behind by nobody for long."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from support import runs

from ds_tba.errors import BackendUnavailableError
from ds_tba.storage.backends.kvikio import named
from ds_tba.storage.swap_file import SwapFile

PROGRAM = f"""
import os, signal, sys
sys.path.insert(0, {str(runs.ROOT)!r})
from pathlib import Path
from ds_tba.storage.backends.kvikio import named
from ds_tba.storage.swap_file import SwapFile
directory = Path(sys.argv[1])
file = SwapFile(directory, 1 << 20)
name = named(file.fd, "gds")
name.__enter__()
"""


def python(directory: Path, ending: str) -> int:
    return subprocess.run([sys.executable, "-c", PROGRAM + ending, str(directory)], timeout=120).returncode


@pytest.fixture
def file(tmp_path: Path) -> SwapFile:
    return SwapFile(tmp_path, 1 << 20)


def test_a_file_has_its_name_within_the_context(file: SwapFile, tmp_path: Path) -> None:
    file.grow(4096)
    with named(file.fd, "kvikio") as path:
        assert list(tmp_path.iterdir()) == [path]
        assert os.path.samestat(path.stat(), os.fstat(file.fd)) and path.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == []
    file.close()


def test_a_file_that_cannot_be_named_is_told_with_the_way_out(tmp_path: Path) -> None:
    """As the swap file where the file system has no O_TMPFILE: unlinked, and linked by no one again."""
    fd, name = tempfile.mkstemp(dir=tmp_path)
    Path(name).unlink()
    with pytest.raises(BackendUnavailableError, match=r'gds: cuFile opens .*without O_TMPFILE.*"backend": "aio"'):
        named(fd, "gds").__enter__()
    os.close(fd)
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_run_left_goes_with_the_next_and_what_a_live_one_has_stays(
    file: SwapFile, tmp_path: Path
) -> None:
    with named(file.fd, "gds") as alive:
        assert python(tmp_path, "os.kill(os.getpid(), signal.SIGKILL)") == -signal.SIGKILL
        assert len(list(tmp_path.iterdir())) == 2
        another = SwapFile(tmp_path, 1 << 20)
        with named(another.fd, "kvikio") as path:
            assert set(tmp_path.iterdir()) == {alive, path}
    assert list(tmp_path.iterdir()) == []
    file.close()
    another.close()
