"""Is more saved outside of the engine's forward than in it? Asked of the loss's graph as ``engine.backward`` begins.

A loss that the program computes itself on the logits saves its tensors without our hooks: they stay in memory, and no
budget and no peak counts them. The nodes that are younger than the end of forward are looked at, without unpacking
anything. Cannot see a backward that begins without the engine (``loss.backward()``), nor what other hooks hold.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.utils._pytree import tree_leaves

from ds_tba.config import BLOCK
from ds_tba.core.tensors import has_plain_storage, held_bytes, is_owned, is_parameter, next_sequence_number
from ds_tba.remat.rules import is_supported
from ds_tba.stats import CacheStats, readable

LEAST_BYTES = 1 << 20  # less than that is no reason to change a config
_SAVED = "_raw_saved_"


class OutsideForward:
    """Compares what the graph of a loss saves outside of forward with what was saved in it, until that is said once.

    Args:
        stats: counters of the cache.
    """

    def __init__(self, stats: CacheStats) -> None:
        self._stats = stats
        self._forward_end = 0  # the first sequence number of nodes that forward did not make; 0 before a forward
        self._is_done = not is_supported()

    def end_forward(self) -> None:
        """Remember that nodes from here on are not of forward."""
        self._forward_end = next_sequence_number()

    def judge(self, losses: object) -> str:
        """Return a line for the log if the graph of ``losses`` holds more than forward saved; else an empty string.

        Args:
            losses: the arguments of the engine's backward, in any nesting.
        """
        if self._is_done or not self._forward_end:
            return ""
        inside_bytes = self._stats.saved.now
        outside_bytes = sum(_outside(losses, self._forward_end).values())
        if outside_bytes < max(LEAST_BYTES, inside_bytes):
            return ""
        self._is_done = True
        return (
            f"the loss is computed outside of the engine's forward: what it saves, {readable(outside_bytes)}, stays in "
            f"memory and is not counted, beside {readable(inside_bytes)} of forward. Set "
            f'"until_backward": true in "{BLOCK}", have the model return the loss, or use a fused or chunked loss'
        )


def _outside(losses: object, forward_end: int) -> dict[int, int]:
    """Return the bytes of each storage, by address, that nodes of the losses hold which forward did not make."""
    roots = [one for one in tree_leaves(losses) if isinstance(one, torch.Tensor)]
    nodes, seen = [one.grad_fn for one in roots if one.grad_fn is not None], set[torch.autograd.graph.Node]()
    found: dict[int, int] = {}
    while nodes:
        node = nodes.pop()
        if node in seen or node._sequence_nr() < forward_end:
            continue
        seen.add(node)
        nodes += [other for other, _ in node.next_functions if other is not None]
        for tensor in _saved_without_hooks(node):
            if not (is_parameter(tensor) or is_owned(tensor)):
                found[tensor.untyped_storage().data_ptr()] = held_bytes(tensor, roots[0].device)
    return found


def _saved_without_hooks(node: torch.autograd.graph.Node) -> Iterator[torch.Tensor]:
    for name in dir(node):
        if not name.startswith(_SAVED):
            continue
        try:
            saved = getattr(node, name)
        except RuntimeError:  # an earlier backward has freed it
            return
        for one in saved if isinstance(saved, (list, tuple)) else (saved,):
            if one.unpack_hook is None and one.data is not None and has_plain_storage(one.data):
                yield one.data
