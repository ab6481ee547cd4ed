"""The record of a saved storage: its states."""

from __future__ import annotations

import pytest
import torch

from ds_tba.core.accounts import CountedMemory
from ds_tba.core.prefetch import MicroStep
from ds_tba.core.saved import RecordState, SavedStorage, StorageKey
from ds_tba.device.accelerator import AT_ONCE
from ds_tba.errors import StateError


def test_illegal_moves_raise() -> None:
    record = SavedStorage(StorageKey(0, 1, 0, 1), MicroStep(), torch.UntypedStorage(1), CountedMemory(), AT_ONCE, 0)
    with pytest.raises(StateError, match="from 'kept in device memory' to 'in device memory again'"):
        record.move(RecordState.LOADED)
    assert MicroStep().add(record) == 0
