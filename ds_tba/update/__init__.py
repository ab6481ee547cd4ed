"""The optimizer update, on host and device at once; knows nothing of activations.

Here is only what is asked before each forward and save, whether or not the update itself is loaded.
"""

from __future__ import annotations

from ds_tba.errors import UpdateInterruptedError

HALF_UPDATED = "ds_tba_half_updated"  # the mark of an optimizer; see [Note: Interrupted updates] in zero3.py


def refuse_half_updated(zero: object) -> None:
    """Refuse to go on with a model of which only a part has taken a step.

    Raises:
        UpdateInterruptedError: an update was interrupted, on any rank, and no checkpoint was loaded since.
    """
    if getattr(zero, HALF_UPDATED, False):
        raise UpdateInterruptedError(
            "an optimizer update was interrupted, on this rank or another, so that some parameters have taken that "
            "step and others have not: load a checkpoint with its optimizer states before going on, and save none of "
            "this model."
        )
