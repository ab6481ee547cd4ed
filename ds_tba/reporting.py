"""What did this run do? Makes its report, keeps the file up to date, and says in the log what its user should know.

Reads the counters of the core; every other part of the package gives its own fields of the report. Decides nothing.
"""

from __future__ import annotations

import logging
import math
import os
import sys
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from typing import Any, Protocol, TextIO

from ds_tba.config import OffloadConfig
from ds_tba.core.tensors import Eligibility
from ds_tba.device.accelerator import Accelerator
from ds_tba.report import NOTHING_OFFLOADED, OffloadReport, ReportFile
from ds_tba.stats import CacheStats, PathWear, readable

logger = logging.getLogger("ds_tba")

_NO_FORWARD = (
    "no forward that saves activations ran in the engine. Call engine(x), not engine.module(x) or a copy or wrapper of "
    'it, and not under torch.no_grad(); have the model return the loss, or set "until_backward": true. A loop of your '
    "own runs forward and loss inside of ds_tba.Offloader.saving()"
)
# Fields of the report that the cache counts under the same name.
_COUNTED = (
    "micro_steps", "packed_tensors", "passed_through_tensors", "deduplicated_bytes", "recomputed_bytes",
    "rematerialized_bytes",
)  # fmt: skip


class Summarized(Protocol):
    """A part of the package with fields of its own in the report."""

    def summary(self) -> Mapping[str, Any]:
        """Return these fields, by name."""
        ...


class Places(Summarized, Protocol):
    """The places of moved bytes, as a report tells of them: ``Tiers`` documents these."""

    def wear(self, elapsed_s: float) -> list[PathWear]: ...
    def describe(self) -> list[str]: ...


class Reporter:
    """Makes the report of an offloader."""

    def __init__(
        self, config: OffloadConfig, tiers: Places, cache: CacheStats, accelerator: Accelerator, file: ReportFile
    ) -> None:
        # The file is at ``report.path``.
        self._config, self._tiers, self._cache, self._file = config, tiers, cache, file
        self.rank, self.steps = file.rank, 0  # of this process; of the optimizer so far
        self._memory = None if accelerator.is_synchronous else accelerator
        self._parts: list[Summarized] = [tiers]
        self._started_at, self._ended_at = time.monotonic(), math.inf
        self._has_begun = False  # to train
        self._step_peak_bytes = 0
        self._bandwidth_at_start: object = []  # as the first plan was made

    def add(self, part: Summarized) -> None:
        """Have the fields of a part of the package in the report from now on."""
        self._parts.append(part)

    def begin_forward(self) -> None:
        """Write the JSON at ``report.path`` where it is old: also a run that ends in its first step leaves one."""
        self._has_begun = True  # first: a signal handler may raise while the first one is written
        self.refresh()

    def end_step(self, plans: int) -> None:
        """Note that an optimizer step is over, and say what there is to say.

        Args:
            plans: number of plans so far.
        """
        self.steps = steps = self.steps + 1
        self._step_peak_bytes = self._cache.resident.lap()
        if plans and not self._bandwidth_at_start:
            self._bandwidth_at_start = self._tiers.summary()["bandwidth"]
        if steps == 1 and self.rank == 0 and (why := self._why_nothing()):
            logger.warning("nothing was offloaded in step 1: %s", why)
        every = self._config.report.every_steps
        is_due = every > 0 and steps % every == 0
        if is_due:
            logger.info("rank %d: %s", self.rank, self.report().summary())
        self.refresh(now=is_due)

    def end(self) -> None:
        """Say the last word: the run is over. One that never trained says nothing, and leaves the path to another."""
        self._ended_at = time.monotonic()
        if self._has_begun or self.steps:
            logger.info("rank %d: %s", self.rank, self.report().summary())
            self.refresh(now=True)

    def refresh(self, *, now: bool = False) -> None:
        """Write the JSON at ``report.path`` again where it is old, or ``now``."""
        # An engine without a step, such as a reference, leaves the path to one that trains beside it.
        self._file.refresh(lambda: self.report().to_dict(), now=now, yields=not self.steps)

    def report(self) -> OffloadReport:
        """Return the counters of all parts as they are now."""
        cache, config = self._cache, self._config
        kept = dict(cache.kept_bytes)  # at once: forward may count meanwhile
        budget_bytes = config.activation_budget_bytes if config.placement == "adaptive" else None
        state = "running" if self._ended_at == math.inf else "finished"
        elapsed_s = min(self._ended_at, time.monotonic()) - self._started_at
        fields: dict[str, Any] = {name: getattr(cache, name) for name in _COUNTED}
        fields |= {
            "state": f"{state}: {NOTHING_OFFLOADED}" if self.steps and self._why_nothing() else state,
            "rank": self.rank,
            "placement": config.placement,
            "integrity": config.io.integrity,
            "steps": self.steps,
            "kept_bytes": sum(kept.values()),
            "kept_bytes_by_reason": kept,
            "peak_saved_bytes": cache.resident.peak,
            "peak_saved_bytes_without": cache.saved.peak,
            "step_peak_saved_bytes": self._step_peak_bytes,
            "budget_excess_bytes": 0 if budget_bytes is None else max(0, cache.resident.peak - budget_bytes),
            "bandwidth_at_start": self._bandwidth_at_start,
            "wear": [asdict(one) for one in self._tiers.wear(elapsed_s)],
            "device_memory": {} if self._memory is None else self._memory.levels()._asdict(),
        }
        for part in self._parts:
            fields |= part.summary()
        # The stores count failed writes; the cache counts storages that no store took.
        fallbacks = Counter(cache.fallbacks) + Counter(fields.get("fallbacks_by_reason", {}))
        fields |= {"fallbacks": fallbacks.total(), "fallbacks_by_reason": dict(fallbacks)}
        return OffloadReport(**fields)

    def _why_nothing(self) -> str:
        """Return why nothing was offloaded, rematerialized or recomputed, with the repair; empty where it is right."""
        stats, config = self._cache, self._config
        done_bytes = self._tiers.summary()["offloaded_bytes"] + stats.recomputed_bytes + stats.rematerialized_bytes
        kept = Counter(stats.kept_bytes).most_common(1)
        if done_bytes or (kept and config.placement == "keep"):
            return ""
        if not kept:
            return _NO_FORWARD
        if kept[0][0] == Eligibility.SMALL.value:
            outside = "" if config.until_backward else '; "until_backward": true also offloads those of a loss outside'
            return f"all saved tensors are smaller than min_tensor_bytes {config.min_tensor_bytes}: lower it{outside}"
        return f"what forward saves is kept, because of: {kept[0][0]}"


class _OwnHandler(logging.StreamHandler[TextIO]):
    """Shows on stderr what no handler of the script does, also one that the script adds later."""

    def filter(self, record: logging.LogRecord) -> bool:
        others = (*logger.handlers, *(logging.getLogger().handlers if logger.propagate else ()))
        return not any(
            one.level <= record.levelno for one in others if not isinstance(one, (_OwnHandler, logging.NullHandler))
        )


def show_log() -> None:
    """Make our lines visible, each once: by the script's handlers, or by one of ours where it has none.

    "I set the JSON and nothing changed" is what users complain about, and a root logger shows only warnings unless it
    is told otherwise. Who wants fewer lines sets the level of the logger "ds_tba".
    """
    for name, one in (*logging.Logger.manager.loggerDict.items(),):
        if isinstance(one, logging.Logger) and name.partition(".")[0] == logger.name:
            one.disabled = False  # logging.config.dictConfig disables all that it does not name
    if not any(isinstance(one, _OwnHandler) for one in logger.handlers):
        handler = _OwnHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("[%(asctime)s] [%(levelname)s] [ds_tba] %(message)s"))
        logger.addHandler(handler)
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)
        with suppress(ValueError):
            logger.setLevel(os.environ.get("DS_TBA_LOG_LEVEL", "INFO").upper())


def start_line(config: OffloadConfig, tiers: Places) -> str:
    """Return the start-up line of the log: where activations go, and by which rule."""
    parts = tiers.describe()
    of_plans = ("activation_budget_bytes", "recompute", "blocks")
    unread = " and ".join(key for key in of_plans if getattr(config, key) is not type(config).model_fields[key].default)
    unplanned = f", without a plan, so that nobody reads {unread}" if unread else ""
    if not parts:
        again = ", and recomputed where that is cheap" if config.rematerialize is not False else ""
        return f'placement "keep": activations are measured, not moved{again}{unplanned}'
    if config.placement != "adaptive":
        rule = f'placement "{config.placement}" is a rule, not a plan{unplanned}'
    elif config.activation_budget_bytes is not None:
        rule = f"least time within {readable(config.activation_budget_bytes)}"
    else:
        rule = f"steps +{config.max_step_overhead:.1%} at most"
    return "; ".join([*parts, rule])
