"""Names for files that have none: given in time, and taken away in time."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from ds_tba.errors import BackendUnavailableError
from ds_tba.storage.backends.kvikio import named
from ds_tba.storage.path import SwapFile


def test_a_file_has_its_name_within_the_context(tmp_path: Path) -> None:
    file = SwapFile(tmp_path, 1 << 20)
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
