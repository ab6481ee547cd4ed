"""``ds_tba estimate``: predicts peak memory, step time and SSD wear for a model, without the memory of training it."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds_tba.cli.format import count, in_units_of, show, table
from ds_tba.telemetry.stats import readable

if TYPE_CHECKING:
    from ds_tba.cli.estimate.estimate import Estimate
    from ds_tba.cli.estimate.summary import Summary

_DESCRIPTION = """\
Runs one forward and backward of the model on PyTorch's meta device (shapes without values), through the cache and the
recorder of a real run, and plans for the recorded trace. Prints the saved bytes of each block, the predicted peak and
step time of keep, rematerialize, recompute, offload and the plan, what is made again by which op, the cost of smaller
budgets, the bandwidth needed, and SSD life.
"""
_EPILOG = """\
--model FILE.py:function
    a function that is called with the keyword arguments batch and sequence, and returns (model, inputs): inputs are a
    tuple or a dict of arguments of the model. The model returns the loss, an object or dict with "loss", or tensors of
    which the first is summed. Tensors made in the function are on the meta device.
--model config.json
    an HF config with "architectures" (needs transformers); tokens and labels are made up.

example:
    ds_tba estimate --config ds_config.json --model train.py:make_model --batch 8 --seq 4096 --tflops 400
"""
_SHOWN_OUTSIDE = 4
_SHOWN_OPS = 6
_WORDS = {
    "keep": "keep all",
    "rematerialize": "rematerialize all",
    "recompute": "recompute all",
    "offload": "offload all",
    "plan": "the plan",
}


def add_parser(commands: Any) -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "estimate",
        help="predict what offload would do for a model, without training it",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config", type=Path, required=True, help="ds_config.json")
    parser.add_argument("--model", required=True, help="FILE.py:function, or an HF config.json")
    parser.add_argument("--batch", type=count, help="sequences per micro-step and rank (default: the config's)")
    parser.add_argument("--seq", type=count, required=True, help="tokens per sequence")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="training device (default: cuda)")
    parser.add_argument(
        "--dtype", choices=("fp32", "bf16", "fp16"), help="dtype of the parameters (default: the config's)"
    )
    parser.add_argument(
        "--tflops", type=in_units_of(1e12), help="TFLOP/s of matrix products (default: 400, in fp32 50; CPU: measured)"
    )
    parser.add_argument(
        "--memory-gbps", type=in_units_of(1e9), help="GB/s of device memory (default: 3350; CPU: measured)"
    )
    parser.add_argument(
        "--copy-gbps", type=in_units_of(1e9), help="GB/s between device and host (default: 50; CPU: measured)"
    )
    parser.add_argument(
        "--write-gbps", type=in_units_of(1e9), help="GB/s written by all drives (default: measured, else 4.2)"
    )
    parser.add_argument(
        "--read-gbps", type=in_units_of(1e9), help="GB/s read by all drives (default: measured, else 7.1)"
    )
    parser.add_argument(
        "--gpu-memory", type=in_units_of(2**30), metavar="GIB", help="memory of the GPU, to see what fits"
    )
    parser.add_argument("--ranks", type=count, default=1, help="ranks that ZeRO divides among (default: 1)")
    parser.add_argument("--json", type=Path, help="also write everything to this file")
    parser.set_defaults(run=partial(show, "estimate", _estimate))


def _estimate(options: argparse.Namespace) -> tuple[list[str], dict[str, Any]]:
    import torch

    from ds_tba.cli.estimate.estimate import Request, estimate
    from ds_tba.cli.estimate.hardware import GivenRates

    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, None: None}
    request = Request(
        options.config,
        options.model,
        options.batch,
        options.seq,
        options.device,
        dtypes[options.dtype],
        GivenRates(
            options.tflops,
            options.memory_gbps,
            options.copy_gbps,
            options.write_gbps,
            options.read_gbps,
        ),
        options.gpu_memory,
        options.ranks,
    )
    found = estimate(request)
    return list(lines(found)), found.to_dict()


def lines(found: Estimate) -> Iterator[str]:
    """The text of an estimate."""
    summary = found.summary
    parts = [_subject(found), _breakdown(summary), _predictions(summary), _budgets(summary), _verdicts(found)]
    for part in parts:
        yield from part
        yield ""
    yield "assumed"
    yield from (f"  {line}" for line in _assumptions(found))


# ---- parts ----------------------------------------------------------------------------------------------------------


def _subject(found: Estimate) -> Iterator[str]:
    run, request, training = found.run, found.request, found.training
    dtype = "dtypes of the model" if training.dtype is None else str(training.dtype).removeprefix("torch.")
    yield f"model       {request.model}, batch {found.batch} x {request.sequence} tokens, {dtype}"
    if training.micro_steps > 1:
        yield f"step        {training.micro_steps} micro-steps; saved bytes are of one micro-step"
    line = f"parameters  {run.parameters / 1e6:,.1f} M, {readable(run.parameter_bytes)}; gradients come on top"
    states = training.states(run.parameters)
    yield f"{line}, {states}" if states else line


def _breakdown(summary: Summary) -> Iterator[str]:
    rows = [("saved for backward", "passes", "each", "all", "may be moved")]
    blocks = [group for group in summary.breakdown if group.count]
    outside = [group for group in summary.breakdown if not group.count]
    for group in blocks:
        movable = group.movable_bytes * group.count
        rows.append(
            (group.name, str(group.count), readable(group.nbytes), readable(group.total_bytes), readable(movable))
        )
    for group in outside[:_SHOWN_OUTSIDE]:
        rows.append((f"outside: {group.name}", "", "", readable(group.nbytes), readable(group.movable_bytes)))
    if rest := outside[_SHOWN_OUTSIDE:]:
        total, movable = sum(group.nbytes for group in rest), sum(group.movable_bytes for group in rest)
        rows.append((f"outside: {len(rest)} others", "", "", readable(total), readable(movable)))
    total = sum(group.total_bytes for group in summary.breakdown)
    movable = sum(group.movable_bytes * max(1, group.count) for group in summary.breakdown)
    rows.append(("all", "", "", readable(total), readable(movable)))
    yield from table(rows)


def _predictions(summary: Summary) -> Iterator[str]:
    rows = [("predicted", "peak saved", "of keep", "step", "longer by", "written per step")]
    keep, chosen = summary.predictions["keep"], summary.chosen
    for name, cost in summary.predictions.items():
        part = cost.peak_saved_bytes / keep.peak_saved_bytes if keep.peak_saved_bytes else 1.0
        longer = _longer(cost.step_s, keep.step_s)
        peak = readable(cost.peak_saved_bytes)
        rows.append((_WORDS[name], peak, f"{part:.2f}", _duration(cost.step_s), longer, readable(cost.written_bytes)))
    yield from table(rows)
    shares = [f"{name} {readable(nbytes)}" for name, nbytes in sorted(chosen.saved_bytes.items())]
    blocks = chosen.plan.recomputed_blocks
    again = f"; {sum(blocks)} of {len(blocks)} passes are recomputed" if any(blocks) else ""
    if blocks and not chosen.limits.recompute:
        again = '; nothing is recomputed, because "recompute" is false'
    yield f"the plan    {', '.join(shares) or 'nothing is saved'}{again}"
    if not chosen.is_within:
        budget_bytes = chosen.limits.activation_budget_bytes
        limit = (
            f"max_step_overhead {chosen.limits.max_step_overhead:g}"
            if budget_bytes is None
            else f"activation_budget_bytes {budget_bytes}"
        )
        yield f"            NO PLAN KEEPS TO {limit}: this one comes closest"
    yield from _about_made_again(summary)


def _about_made_again(summary: Summary) -> Iterator[str]:
    """What rematerialization makes again, and what it does without a drive."""
    if "rematerialize" not in summary.predictions:
        return
    most, plan = (_by_op(summary.made_again_bytes[name]) for name in ("rematerialize", "plan"))
    yield f"made again  {most}"
    if most != plan:
        yield f"            by the plan: {plan}"
    longer = _longer(summary.predictions["rematerialize"].step_s, summary.predictions["keep"].step_s)
    yield (
        f"no drive    rematerialization alone lowers the peak by {summary.rematerialize_gain:.0%}, and the step takes "
        f'{longer} longer ("placement": "keep", which needs no nvme_path)'
    )


def _by_op(made_again_bytes: dict[str, int]) -> str:
    """Bytes by op, the largest first."""
    if not made_again_bytes:
        return "nothing"
    shown = [f"{op} {readable(nbytes)}" for op, nbytes in list(made_again_bytes.items())[:_SHOWN_OPS]]
    rest = list(made_again_bytes.values())[_SHOWN_OPS:]
    others = [f"{len(rest)} other ops {readable(sum(rest))}"] if rest else []
    return f"{readable(sum(made_again_bytes.values()))}: {', '.join(shown + others)}"


def _budgets(summary: Summary) -> Iterator[str]:
    """The cost of each budget."""
    rows = [("activation_budget_bytes", "of keep", "step", "longer by", "written per step")]
    keep_s = summary.predictions["keep"].step_s
    for one in summary.budgets:
        longer = _longer(one.cost.step_s, keep_s)
        times = (_duration(one.cost.step_s), longer) if one.is_within else ("cannot be held", "")
        rows.append((str(one.budget_bytes), f"{one.fraction:.2f}", *times, readable(one.cost.written_bytes)))
    yield from table(rows)


def _verdicts(found: Estimate) -> Iterator[str]:
    summary, bandwidth, machine = found.summary, found.summary.bandwidth, found.run.trace.resources
    yield f"the peak    {_about_peak(summary, machine.staging_bytes)}"
    if summary.too_large_bytes:
        yield (
            f"            {readable(summary.too_large_bytes)} stay in device memory, in storages larger than "
            f"io.staging_bytes ({found.training.offload.io.ring_bytes}): raise io.staging_bytes to move them"
        )
    yield (
        f"bandwidth   to move all {readable(bandwidth.moved_bytes)} at no cost in time, the drives must write "
        f"{bandwidth.write_bytes_per_s / 1e9:.1f} GB/s during forward and read {bandwidth.read_bytes_per_s / 1e9:.1f} "
        f"GB/s during backward; they write {machine.write_bytes_per_s / 1e9:.3g} and read "
        f"{machine.read_bytes_per_s / 1e9:.3g}"
    )
    yield from _about_device(found)
    yield from _about_wear(found)


def _about_device(found: Estimate) -> Iterator[str]:
    """The placements that fit the device."""
    need, memory_bytes = found.need, found.request.gpu_memory_bytes
    states = "states not known" if need.states_bytes is None else f"states {readable(need.states_bytes)}"
    yield (
        f"GPU memory  parameters {readable(need.parameter_bytes)}, gradients {readable(need.gradient_bytes)}, "
        f"{states}, temporary {readable(need.temporary_bytes)} (with logits and gradients of activations), and the "
        "saved tensors"
    )
    if memory_bytes is None:
        yield "            --gpu-memory GIB shows what fits"
        return
    for name, cost in found.summary.predictions.items():
        needed_bytes = need.with_saved(cost.peak_saved_bytes)
        verdict = "fits" if found.fits(name) else "DOES NOT FIT"
        yield f"            {_WORDS[name]}: {readable(needed_bytes)} of {readable(int(memory_bytes))}, {verdict}"


def _about_peak(summary: Summary, staging_bytes: int) -> str:
    gain, plan_gain = f"{summary.offload_gain:.0%}", f"the plan lowers it by {summary.plan_gain:.0%}"
    if summary.peak_holder is None:
        return f"offload all lowers it by {gain}, {plan_gain}"
    if summary.bandwidth.moved_bytes <= staging_bytes:
        return (
            f"offload all lowers it by {gain} only: everything that may be moved fits into io.staging_bytes "
            f"({staging_bytes}), and is read back as soon as backward begins; {plan_gain}"
        )
    name, nbytes = summary.peak_holder
    return (
        f"offload all lowers it by {gain} only: {name} holds the peak, which would be {readable(nbytes)} lower without "
        f"the tensors saved there; {plan_gain}"
    )


def _about_wear(found: Estimate) -> Iterator[str]:
    rated = found.training.offload.ssd.rated_endurance_tbw
    for name, wear in found.summary.wear.items():
        if not wear.written_bytes_per_step:
            yield f"SSD life    {_WORDS[name]}: nothing is written"
            continue
        life = "set ssd.rated_endurance_tbw to see how long the drives last"
        if wear.life_days is not None:
            life = f"drives rated for {rated:g} TBW last {wear.life_days:.1f} days"
        yield (
            f"SSD life    {_WORDS[name]}: {readable(wear.written_bytes_per_step)} per step, "
            f"{wear.steps_per_day:,.0f} steps and {wear.written_bytes_per_day / 1e12:.1f} TB per day; {life}"
        )


def _assumptions(found: Estimate) -> Iterator[str]:
    """Everything that the figures rest on."""
    compute, request = found.compute, found.request
    yield from found.training.notes
    yield from found.run.notes
    yield (
        f"the device computes {compute.flops.value / 1e12:.3g} TFLOP/s ({compute.flops.source}), its memory moves "
        f"{compute.memory.value / 1e9:.4g} GB/s ({compute.memory.source}), copies to and from the host "
        f"{compute.copy.value / 1e9:.3g} GB/s ({compute.copy.source})"
    )
    yield f"the drives: {found.drives.source}"
    if found.drives.written_bytes:
        yield f"measuring the drives wrote {found.drives.written_bytes / 1e6:.0f} MB"
    yield (
        "an operation takes the time of its FLOPs (causal attention counts in full) or of its bytes, whichever is "
        "longer; kernel launches, kernel fusion, communication and the optimizer are left out"
    )
    for one in sorted(found.run.attention):
        yield f"on {request.device}: {one.words}"
    if found.run.runs_on == "cpu" and request.device == "cuda":  # under autocast
        yield "attention and norms are those of the CPU, which may save more than those of CUDA"
    if request.device == "cuda":
        yield "dropout saves a mask of one byte per element, and RMS norm a factor per row, as on CUDA"
    yield "floating-point inputs have the dtype of the parameters; the model is in training mode"
    yield "peak saved counts what autograd saves; weights, gradients, states and temporary memory come on top"
    if "rematerialize" in found.summary.predictions:
        yield (
            "what rematerialization has a rule for is taken as proven, and takes the time of the bytes that its ops "
            "read and write"
        )
    placement = found.training.offload.placement
    if placement != "adaptive":
        yield f'the config has "placement": "{placement}"; the plan shown is that of "adaptive"{_without_plan(found)}'


def _without_plan(found: Estimate) -> str:
    """What a run with another placement than ``adaptive`` does with what can be made again."""
    if "rematerialize" not in found.summary.predictions:
        return ""
    if found.training.offload.placement == "keep":
        return ', and that of the run "rematerialize all"'
    return ", and the run moves only what cannot be made again"


# ---- formats --------------------------------------------------------------------------------------------------------


def _duration(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def _longer(step_s: float, kept_step_s: float) -> str:
    part = step_s / kept_step_s - 1 if kept_step_s else 0.0
    return f"{part:.1%}" if part < 10 else f"{part:,.0f} times"
