"""Simulate ranks that share drives: bytes per second of each, and seconds that a slow drive or a dead node costs all.

    python benchmarks/at_scale.py [--json FILE] [--nodes 64] [--drives 2 4 8]

Nodes of 8 GPUs share so many drives each. Every rank offers its share of its node's drives. The code of real ranks
makes the plan (``ds_tba.plan.agreement``) over a simulated exchange, and judges it (``Feedback``) by simulated clocks:
a step of the job is as long as that of its slowest rank, by the replay of the plan on that rank's drives. In step 41 of
400 one drive of one node falls to a tenth of its rates. Then the node dies, and the job begins anew on the others. Each
is run with the defaults, and with a budget of half of the peak with all kept, without and with ``recompute``.

Assumptions: Llama-3-8B in bf16, batch 1 x sequence 8192 on each GPU, its trace and other assumptions those of
``planner_scale.py``; a drive writes 6 GB/s and reads 12, is rated for 7,000 TBW, and gives a rank an eighth of both;
stripes follow each drive's rate; nothing is rematerialized; communication takes no time.
"""

from __future__ import annotations

import pickle
import time
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from benchmarking import GIB, JSON, markdown_table, parser_of, provenance, write_json
from planner_scale import REGIMES, SHAPES, model_trace
from planners import PLANNERS

from ds_tba.plan.agreement import Alone, Offer, Planning, Value
from ds_tba.plan.controller import REVIEW_STEPS
from ds_tba.plan.feedback import Action, Feedback, OptimizerStep
from ds_tba.plan.plan import Limits, Plan
from ds_tba.plan.replay import Assignment, Replay, Timeline
from ds_tba.plan.trace import Resources, Trace
from ds_tba.stats import DAY_S, TERABYTE

GPUS = 8  # of a node
WRITE_BYTES_PER_S, READ_BYTES_PER_S, DRIVE_TBW = 6e9, 12e9, 7000
SLOW = 0.1  # of its rates
STEPS, SLOW_AT = 400, 41
BUDGET_FRACTION = 0.5  # of the peak with all kept


@dataclass
class Exchange(Alone):
    """Stands in for the ranks' collectives, where the leader has all offers.

    Attributes:
        sent_bytes: of the plan, as it is pickled for the other ranks.
    """

    offers: list[Offer] = field(default_factory=list)
    sent_bytes: int = 0

    def all_gather(self, value: Any) -> list[Any]:
        """Return the offers of all ranks."""
        return self.offers

    def broadcast(self, value: Value, leader: int) -> Value:
        """Return the leader's value, and count its bytes."""
        self.sent_bytes = len(pickle.dumps(value))
        return value


@dataclass
class Job:
    """Ranks on nodes with drives, one of which may be slow."""

    nodes: int
    drives: int
    trace: Trace
    has_slow: bool = False
    exchange: Exchange = field(default_factory=Exchange)

    def resources(self, *, slow: bool) -> Resources:
        """Return what a rank of a node has: its share of the drives' rates."""
        share = (self.drives - (1 - SLOW if slow else 0)) / GPUS
        write, read = share * WRITE_BYTES_PER_S, share * READ_BYTES_PER_S
        return replace(self.trace.resources, write_bytes_per_s=write, read_bytes_per_s=read)

    def plan(self, feedback: Feedback, limits: Limits) -> Plan:
        """Return the plan on which all ranks agree, made by the leader."""
        trace = replace(feedback.corrected(self.trace), resources=self.resources(slow=False))
        offer = Offer(trace.saved_bytes, trace.resources, limits)
        self.exchange.offers = [offer] * (self.nodes * GPUS)
        if self.has_slow:
            self.exchange.offers[-GPUS:] = [replace(offer, resources=self.resources(slow=True))] * GPUS
        found = Planning(PLANNERS["adaptive"], self.exchange).make(trace, limits)
        if found is None:
            raise RuntimeError("no plan")
        return found

    def step_s(self, plan: Plan) -> float:
        """Return the length of a step of the job: that of its slowest rank."""
        return max(self._rank_step_s(plan, slow) for slow in {False, self.has_slow})

    def _rank_step_s(self, plan: Plan, slow: bool) -> float:
        trace = replace(self.trace, resources=self.resources(slow=slow))
        placements = np.array([int(place) for place in plan.placements], np.int8)
        assignment = Assignment(placements, np.array(plan.recomputed_blocks, bool))
        return Replay(Timeline(trace), assignment, plan.prefetch_distance).cost.step_s

    def rates(self, *, slow: bool) -> tuple[float, float]:
        """Return the rates of a rank's drives, as its feedback compares them."""
        machine = self.resources(slow=slow)
        return machine.write_bytes_per_s, machine.read_bytes_per_s


def run(job: Job, limits: Limits) -> dict[str, Any]:
    """Train on simulated clocks; return when plans changed, and how long steps were."""
    feedback = Feedback()
    feedback.learn(job.trace.step_s, 0.0)
    began = time.perf_counter()
    plan = first = job.plan(feedback, limits)
    planning_s = time.perf_counter() - began
    feedback.follow(plan, job.rates(slow=False))
    step_s = first_s = job.step_s(plan)
    changes: list[dict[str, Any]] = []
    wanted, lost_s, slow_s = Action.GO_ON, 0.0, 0.0
    for step in range(1, STEPS + 1):
        if step == SLOW_AT:
            job.has_slow = True
            step_s = slow_s = job.step_s(plan)
        lost_s += step_s - first_s
        rates = job.rates(slow=job.has_slow)
        wanted = max(wanted, feedback.decide(step, step_s, rates, OptimizerStep(None, micro_steps=1)))
        if step % REVIEW_STEPS or wanted is Action.GO_ON:
            continue
        action, wanted = wanted, Action.GO_ON
        feedback.change(action, step)
        plan = job.plan(feedback, replace(limits, movable_share=feedback.share))
        feedback.follow(plan, rates)
        step_s = job.step_s(plan)
        written, peak = plan.prediction.written_bytes, plan.prediction.peak_saved_bytes
        change = {"step": step, "action": action.name, "reason": feedback.reason, "step_s": step_s}
        changes.append({**change, "written_bytes": written, "peak_saved_bytes": peak})
    kept = PLANNERS["keep"](job.trace, limits).prediction
    return {
        "ranks": job.nodes * GPUS, "drives": job.drives, "write_bytes_per_s": job.rates(slow=False)[0],
        "kept_step_s": kept.step_s, "kept_peak_bytes": kept.peak_saved_bytes, "step_s": first_s,
        "peak_bytes": first.prediction.peak_saved_bytes, "written_bytes": first.prediction.written_bytes,
        "planning_s": planning_s, "offer_bytes": len(pickle.dumps(job.exchange.offers[0])),
        "plan_bytes": job.exchange.sent_bytes, "slow_step_s": slow_s, "lost_s": lost_s, "changes": changes,
        "last_step_s": step_s, "last_peak_bytes": plan.prediction.peak_saved_bytes,
    }  # fmt: skip


def shown(found: dict[str, Any]) -> dict[str, str]:
    """Return the cells of a run, by what they tell."""
    written = found["written_bytes"] * GPUS / found["drives"] / found["step_s"] * DAY_S  # by a drive in a day
    after = [change["step"] - SLOW_AT for change in found["changes"]]
    return {
        "GPUs": str(found["ranks"]),
        "drives of a node": str(found["drives"]),
        "writes of a GPU": f"{found['write_bytes_per_s'] / 1e9:.2f} GB/s",
        "peak, all kept": f"{found['kept_peak_bytes'] / GIB:.1f} GiB",
        "peak": f"{found['peak_bytes'] / GIB:.1f} GiB",
        "step, all kept": f"{found['kept_step_s']:.3f} s",
        "step": f"{found['step_s']:.3f} s",
        "written by a GPU in a step": f"{found['written_bytes'] / GIB:.1f} GiB",
        "drives last, by their rating": f"{DRIVE_TBW * TERABYTE / written:.0f} days" if written else "unworn",
        "planning takes": f"{found['planning_s']:.1f} s",
        "a rank's offer, the plan": f"{found['offer_bytes']} bytes, {found['plan_bytes'] / 1024:.0f} KiB",
        "step, one drive slow": f"{found['slow_step_s']:.3f} s",
        "plans after it, in steps": ", ".join(map(str, after)) or "none",
        "step, peak at the end": f"{found['last_step_s']:.3f} s, {found['last_peak_bytes'] / GIB:.1f} GiB",
        f"the slow drive cost all, in {STEPS - SLOW_AT + 1} steps": f"{found['lost_s']:.1f} s",
    }


PLANNED = ("step_s", "peak_bytes", "written_bytes")  # what a plan decides


def main(argv: list[str] | None = None) -> int:
    parser = parser_of(__doc__, json=JSON, nodes=64)
    parser.add_argument("--drives", type=int, nargs="+", default=[2, 4, 8])
    options = parser.parse_args(argv)
    trace = model_trace(SHAPES["Llama-3-8B"], REGIMES[0], WRITE_BYTES_PER_S)
    half = int(PLANNERS["keep"](trace, Limits()).prediction.peak_saved_bytes * BUDGET_FRACTION)
    asked = {
        "max_step_overhead 0.02": Limits(recompute=False),
        f"activation_budget_bytes {half}": Limits(activation_budget_bytes=half, recompute=False),
        f"activation_budget_bytes {half}, recompute": Limits(activation_budget_bytes=half, recompute=True),
    }
    found, is_same = [], True
    for title, limits in asked.items():
        rows = [run(Job(nodes, one, trace), limits) for nodes in (1, options.nodes) for one in options.drives]
        # A node's death: the job begins anew on the others.
        rest = [run(Job(options.nodes - 1, one, trace), limits) for one in options.drives]
        for before, after in zip(rows[len(options.drives) :], rest, strict=True):
            is_same &= all(before[name] == after[name] for name in PLANNED)
        cells = [shown(row) for row in rows]
        columns, *lines = [(name, *(cell[name] for cell in cells)) for name in cells[0]]
        print("\n".join([f"{title}\n", *markdown_table(columns, lines), ""]))
        found.append({"limits": title, "rows": rows, "without_a_node": rest})
    print(f"{options.nodes - 1} nodes begin with the plan of {options.nodes}: {'yes' if is_same else 'no'}")
    write_json(options.json, {**provenance(__file__, argv), "found": found})
    return 0 if is_same else 1


if __name__ == "__main__":
    raise SystemExit(main())
