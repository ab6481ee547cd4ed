"""The kernels of a recipe are those of forward, and the caller's afterwards."""

from __future__ import annotations

import torch

from ds_tba.remat.recipe import Kernels, as_in_forward


def test_kernels_are_as_in_forward_within_and_as_before_behind() -> None:
    before = Kernels.present()
    other = Kernels(before.threads + 1, not before.with_onednn, before.flushes_denormals)
    with as_in_forward(other):
        assert Kernels.present() == other and not torch.is_grad_enabled()
    assert Kernels.present() == before
