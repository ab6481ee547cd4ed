"""A half updated model is refused by its mark alone."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from ds_tba.errors import UpdateInterruptedError
from ds_tba.update import HALF_UPDATED, refuse_half_updated


def test_the_mark_is_refused_with_the_way_out() -> None:
    refuse_half_updated(None)
    refuse_half_updated(SimpleNamespace())
    with pytest.raises(UpdateInterruptedError, match="load a checkpoint with its optimizer states"):
        refuse_half_updated(SimpleNamespace(**{HALF_UPDATED: True}))
