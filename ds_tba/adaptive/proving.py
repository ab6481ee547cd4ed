"""Has the blocks of a model proven fit to be recomputed: the same blocks, in the same steps, on every rank.

Knows blocks and ranks; does not know how a block is proven.

[Note: The course] Blocks are watched in the first step, and those that left no trace on any rank are verified in the
next; what a first forward has set up is forgiven, so there may be another such pair of steps. It ends when every block
is proven or left out on all ranks, and begins again before a new plan if passes of another kind have come by then.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from ds_tba.adaptive.agreement import Agreement
from ds_tba.autograd.blocks import Block, Blocks

logger = logging.getLogger(__name__)

MAX_STEPS = 5
_NOT_VERIFIED = f"in {MAX_STEPS} steps backward did not come to it, or ranks gave it arguments of other kinds"


@dataclass(frozen=True, slots=True)
class _Finding:
    """What one rank knows of one block."""

    unverified: frozenset[str]
    obstacle: str | None
    is_settled: bool


class Proving:
    """The steps in which blocks are watched and verified.

    Args:
        agreement: the ranks; all of them call the same methods at the same steps.

    Attributes:
        is_running: whether this step is one of them; the same on all ranks.
    """

    def __init__(self, blocks: Blocks, agreement: Agreement) -> None:
        self._blocks = blocks
        self._agreement = agreement
        self._steps = 0
        self._told: set[str] = set()
        self.is_running = bool(blocks.all)

    def begin(self) -> bool:
        """Whether passes have come since that are to be proven; the next steps do so. A collective."""
        self._steps = 0
        self.is_running = bool(self._blocks.all)
        self.end_step()
        return self.is_running

    def end_step(self) -> None:
        """The optimizer has stepped. A collective while this is running."""
        if self.is_running:
            self._steps += 1
            self._blocks.end_verifications()
            self._agree()
        if self._agreement.rank == 0 or not self.is_running:
            self._tell()

    def unproven(self) -> list[dict[str, str]]:
        """For the report: the blocks that are left out, with the reason."""
        of_blocks = ((block.path, self._reason(block)) for block in self._blocks.all)
        return [{"path": path, "reason": reason} for path, reason in of_blocks if reason is not None]

    def _reason(self, block: Block) -> str | None:
        if self._blocks.is_settled(block):
            return self._blocks.obstacle(block) or ""
        return None if self.is_running else self._blocks.unseen(block)

    def _agree(self) -> None:
        """Have all ranks verify the same blocks next; a block that one leaves out, all do."""
        blocks = self._blocks
        mine = [
            _Finding(blocks.unverified(block), blocks.obstacle(block), blocks.is_settled(block)) for block in blocks.all
        ]
        of_ranks: list[list[_Finding]] = self._agreement.all_gather(mine)
        to_verify, is_waiting = set(), False
        for block, findings in zip(blocks.all, zip(*of_ranks, strict=True), strict=True):
            settled = next((rank for rank, one in enumerate(findings) if one.is_settled), None)
            if settled is not None:
                self._leave_out(block, settled, findings[settled].obstacle or "")
            elif any(one.obstacle is not None or one.unverified != findings[0].unverified for one in findings):
                is_waiting = True
            elif findings[0].unverified:
                to_verify.add(block.path)
        blocks.to_verify = frozenset(to_verify)
        if self._steps >= MAX_STEPS:
            self._give_up()
        self.is_running = self._steps < MAX_STEPS and (bool(to_verify) or is_waiting)

    def _leave_out(self, block: Block, rank: int, obstacle: str) -> None:
        own = self._agreement.size == 1 or obstacle.startswith("on rank")
        where = self._agreement.where
        self._blocks.settle(block, obstacle if own else f"on rank {rank}{where} {obstacle}")

    def _give_up(self) -> None:
        self._blocks.to_verify = frozenset()
        for block in self._blocks.all:
            obstacle = self._blocks.obstacle(block)
            if obstacle is not None or self._blocks.unverified(block):
                self._blocks.settle(block, obstacle or _NOT_VERIFIED)

    def _tell(self) -> None:
        """One line for each new reason."""
        of_reason: dict[str, list[str]] = {}
        for one in self.unproven():
            of_reason.setdefault(one["reason"], []).append(one["path"])
        for reason, paths in of_reason.items():
            if reason not in self._told:
                self._told.add(reason)
                others = f" and {len(paths) - 1} more blocks are" if len(paths) > 1 else " is"
                logger.warning("%s%s not recomputed: %s", paths[0], others, reason)
