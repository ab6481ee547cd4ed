"""A swap file that must have a name for kvikio, where the file system gives it none."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from ds_tba.errors import BackendUnavailableError
from ds_tba.storage.backends.kvikio import named


def test_a_file_that_cannot_be_named_is_told_with_the_way_out(tmp_path: Path) -> None:
    """As the swap file where the file system has no O_TMPFILE: unlinked, and linked by no one again."""
    fd, name = tempfile.mkstemp(dir=tmp_path)
    Path(name).unlink()
    with pytest.raises(BackendUnavailableError, match=r'gds: cuFile opens .*without O_TMPFILE.*"backend": "aio"'):
        named(fd, "gds").__enter__()
    os.close(fd)
    assert list(tmp_path.iterdir()) == []
