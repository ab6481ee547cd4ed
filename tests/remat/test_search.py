"""No graph of an earlier forward is entered."""

from __future__ import annotations

import torch

from ds_tba.core.cache import TensorCache
from ds_tba.core.tensors import next_sequence_number
from ds_tba.remat.rules import RULES
from ds_tba.remat.search import Search, made_by


def test_nodes_are_told_from_those_of_earlier_forwards() -> None:
    x = torch.ones(4, requires_grad=True)
    earlier = x * 2
    search = Search(TensorCache([], "cpu", 1), RULES, next_sequence_number())
    later = x * 3
    assert search.has(made_by(later)[0]) and not search.has(made_by(earlier)[0])
