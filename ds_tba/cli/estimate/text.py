"""``ds_tba estimate``: what activation offload would do for a model, without the memory that training it takes."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds_tba.cli.format import above_0, count, table
from ds_tba.errors import DsTbaError
from ds_tba.telemetry.stats import readable

if TYPE_CHECKING:
    from ds_tba.cli.estimate.outlook import Outlook
    from ds_tba.cli.estimate.summary import Estimate

_DESCRIPTION = """\
Runs one forward and backward of the model on PyTorch's meta device (shapes without values), through the cache and the
recorder of a real run, and plans for what it saw: saved bytes for each block, the predicted peak and step time of
keep, recompute, offload and the plan, what smaller budgets would cost, the bandwidth needed, SSD life.
"""
_EPILOG = """\
--model FILE.py:function
    is called with the keyword arguments batch and sequence, and returns (model, inputs): inputs are a tuple or a dict
    of arguments of the model. The model returns the loss, an object or dict with "loss", or tensors of which the first
    is summed. Tensors made inside are on the meta device.
--model config.json
    is an HF config with "architectures" (needs transformers); tokens and labels are made up.

example:
    ds_tba estimate --config ds_config.json --model train.py:make_model --batch 8 --seq 4096 --tflops 400
"""
_SHOWN_OUTSIDE = 4
_WORDS = {"keep": "keep all", "recompute": "recompute all", "offload": "offload all", "plan": "the plan"}


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
    parser.add_argument("--batch", type=count, help="sequences of a micro-step and rank (default: the config's)")
    parser.add_argument("--seq", type=count, required=True, help="tokens of a sequence")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="that will train (default: cuda)")
    parser.add_argument("--dtype", choices=("fp32", "bf16", "fp16"), help="of the parameters (default: the config's)")
    parser.add_argument("--tflops", type=above_0, help="that products reach (default: 400, in fp32 50; CPU: measured)")
    parser.add_argument("--memory-gbps", type=above_0, help="GB/s of device memory (default: 3350; CPU: measured)")
    parser.add_argument("--copy-gbps", type=above_0, help="GB/s between device and host (default: 50; CPU: measured)")
    parser.add_argument("--write-gbps", type=above_0, help="GB/s that all drives write (default: measured, else 4.2)")
    parser.add_argument("--read-gbps", type=above_0, help="GB/s that all drives read (default: measured, else 7.1)")
    parser.add_argument("--gpu-memory", type=above_0, metavar="GIB", help="of the device, to hear what fits it")
    parser.add_argument("--ranks", type=count, default=1, help="that ZeRO divides among (default: 1)")
    parser.add_argument("--json", type=Path, help="write everything to this file, too")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the estimate; 2 if something that was given is wrong."""
    import torch

    from ds_tba.cli.estimate.summary import Request, estimate

    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, None: None}
    request = Request(
        options.config,
        options.model,
        options.batch,
        options.seq,
        options.device,
        dtypes[options.dtype],
        _scaled(options.tflops, 1e12),
        _scaled(options.memory_gbps, 1e9),
        _scaled(options.copy_gbps, 1e9),
        _scaled(options.write_gbps, 1e9),
        _scaled(options.read_gbps, 1e9),
        _scaled(options.gpu_memory, 2**30),
        options.ranks,
    )
    try:
        found = estimate(request)
        if options.json is not None:
            options.json.write_text(json.dumps(found.to_dict(), indent=2))
    except DsTbaError as error:
        sys.stderr.write(f"ds_tba estimate: {error}\n")
        return 2
    except OSError as error:
        sys.stderr.write(f"ds_tba estimate: --json {options.json} cannot be written: {error.strerror}\n")
        return 2
    sys.stdout.writelines(f"{line}\n" for line in lines(found))
    return 0


def lines(found: Estimate) -> Iterator[str]:
    """What is printed."""
    yield from _subject(found)
    yield ""
    yield from _footprint(found.outlook)
    yield ""
    yield from _predictions(found.outlook)
    yield ""
    yield from _budgets(found.outlook)
    yield ""
    yield from _verdicts(found)
    yield ""
    yield "assumed"
    yield from (f"  {line}" for line in assumptions(found))


# ---- parts ----------------------------------------------------------------------------------------------------------


def _subject(found: Estimate) -> Iterator[str]:
    run, request = found.run, found.request
    dtype = found.training.dtype
    kind = "the numbers that the model has" if dtype is None else str(dtype).removeprefix("torch.")
    steps = found.training.micro_steps
    yield f"model       {request.model}, batch {found.batch} x {request.sequence} tokens, {kind}"
    if steps > 1:
        yield f"step        {steps} micro-steps; saved bytes are of one"
    line = f"parameters  {run.parameters / 1e6:,.1f} M, {readable(run.parameter_bytes)}; gradients come on top"
    states = found.training.states(run.parameters)
    yield f"{line}, {states}" if states else line


def _footprint(outlook: Outlook) -> Iterator[str]:
    rows = [("saved for backward", "passes", "each", "all", "may be moved")]
    blocks = [group for group in outlook.groups if group.count]
    outside = [group for group in outlook.groups if not group.count]
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
    total = sum(group.total_bytes for group in outlook.groups)
    movable = sum(group.movable_bytes * max(1, group.count) for group in outlook.groups)
    rows.append(("all", "", "", readable(total), readable(movable)))
    yield from table(rows)


def _predictions(outlook: Outlook) -> Iterator[str]:
    rows = [("predicted", "peak saved", "of keep", "step", "longer by", "written in a step")]
    keep = outlook.costs["keep"]
    for name, cost in outlook.costs.items():
        part = cost.peak_saved_bytes / keep.peak_saved_bytes if keep.peak_saved_bytes else 1.0
        longer = _longer(cost.step_s, keep.step_s)
        peak = readable(cost.peak_saved_bytes)
        rows.append((_WORDS[name], peak, f"{part:.2f}", duration(cost.step_s), longer, readable(cost.written_bytes)))
    yield from table(rows)
    shares = [f"{name} {readable(nbytes)}" for name, nbytes in sorted(outlook.plan_bytes.items())]
    blocks = outlook.plan.recomputed_blocks
    again = f"; {sum(blocks)} of {len(blocks)} passes are recomputed" if any(blocks) else ""
    if blocks and not outlook.limits.recompute:
        again = '; nothing is recomputed, because "recompute" is false'
    yield f"the plan    {', '.join(shares) or 'nothing is saved'}{again}"
    if not outlook.is_within:
        yield f"            no placement was found within {_asked(outlook)}: this is the nearest"


def _budgets(outlook: Outlook) -> Iterator[str]:
    """What each budget would cost."""
    rows = [("activation_budget_bytes", "of keep", "step", "longer by", "written in a step")]
    keep_s = outlook.costs["keep"].step_s
    for one in outlook.budgets:
        longer = _longer(one.cost.step_s, keep_s)
        times = (duration(one.cost.step_s), longer) if one.is_within else ("cannot be held", "")
        rows.append((str(one.budget_bytes), f"{one.fraction:.2f}", *times, readable(one.cost.written_bytes)))
    yield from table(rows)


def _asked(outlook: Outlook) -> str:
    limits = outlook.limits
    if limits.activation_budget_bytes is not None:
        return f"activation_budget_bytes {limits.activation_budget_bytes}"
    return f"max_step_overhead {limits.max_step_overhead:g}"


def _verdicts(found: Estimate) -> Iterator[str]:
    outlook = found.outlook
    need, machine = outlook.need, found.run.trace.resources
    yield f"the peak    {_about_peak(outlook, machine.staging_bytes)}"
    if outlook.too_large_bytes:
        yield (
            f"            {readable(outlook.too_large_bytes)} are in storages above io.staging_bytes "
            f"({found.training.offload.io.ring_bytes}), and stay: raise it"
        )
    yield (
        f"bandwidth   so that moving all {readable(need.moved_bytes)} takes no time of its own: "
        f"{need.write_bytes_per_s / 1e9:.1f} GB/s written during forward, {need.read_bytes_per_s / 1e9:.1f} GB/s read "
        f"during backward; the drives have {machine.write_bytes_per_s / 1e9:.3g} and "
        f"{machine.read_bytes_per_s / 1e9:.3g}"
    )
    yield from _about_device(found)
    yield from _about_wear(found)


def _about_device(found: Estimate) -> Iterator[str]:
    """What fits the device."""
    need, memory_bytes = found.need, found.request.gpu_memory_bytes
    states = "states not known" if need.states_bytes is None else f"states {readable(need.states_bytes)}"
    parts = f"parameters {readable(need.parameter_bytes)}, gradients {readable(need.gradient_bytes)}, {states}"
    yield (
        f"GPU memory  {parts}, temporary {readable(need.temporary_bytes)} (logits and gradients of activations are in "
        "it), and what is saved"
    )
    if memory_bytes is None:
        yield "            --gpu-memory GIB says what fits"
        return
    for name, cost in found.outlook.costs.items():
        needed_bytes = need.with_saved(cost.peak_saved_bytes)
        verdict = "fits" if found.fits(name) else "DOES NOT FIT"
        yield f"            {_WORDS[name]}: {readable(needed_bytes)} of {readable(int(memory_bytes))}, {verdict}"


def _about_peak(outlook: Outlook, staging_bytes: int) -> str:
    gain = f"{outlook.offload_gain:.0%}"
    if outlook.holder is None:
        return f"offload of all lowers it by {gain}, the plan by {outlook.plan_gain:.0%}"
    if outlook.need.moved_bytes <= staging_bytes:
        return (
            f"offload moves it by {gain} only: all that may be moved fits into io.staging_bytes ({staging_bytes}), and "
            f"is read ahead when backward begins; the plan lowers it by {outlook.plan_gain:.0%}"
        )
    name, nbytes = outlook.holder
    return (
        f"offload moves it by {gain} only: {name} holds it (without what that saves it would be {readable(nbytes)} "
        f"lower); the plan lowers it by {outlook.plan_gain:.0%}"
    )


def _about_wear(found: Estimate) -> Iterator[str]:
    rated = found.training.offload.ssd.rated_endurance_tbw
    for name, wear in found.outlook.wear.items():
        if not wear.written_bytes_per_step:
            yield f"SSD life    {_WORDS[name]}: nothing is written"
            continue
        life = "set ssd.rated_endurance_tbw to see how long the drives last"
        if wear.life_days is not None:
            life = f"drives rated for {rated:g} TBW last {wear.life_days:.1f} days"
        yield (
            f"SSD life    {_WORDS[name]}: {readable(wear.written_bytes_per_step)} a step, "
            f"{wear.steps_per_day:,.0f} steps and {wear.written_bytes_per_day / 1e12:.1f} TB a day; {life}"
        )


def assumptions(found: Estimate) -> Iterator[str]:
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
        yield f"measuring them wrote {found.drives.written_bytes / 1e6:.0f} MB"
    yield (
        "an operation takes as long as its FLOPs (causal attention counts in full) or its bytes, whichever is more; "
        "not in it: launching and fusing kernels, communication, the optimizer"
    )
    for one in sorted(found.run.attention):
        yield f"on {request.device}: {one.words}"
    if found.run.runs_on == "cpu" and request.device == "cuda":  # under autocast
        yield "attention and norms are those of the CPU, which may save more than those of CUDA"
    if request.device == "cuda":
        yield "dropout saves a mask of one byte for each element, and RMS norm a factor for each row, as on CUDA"
    yield "inputs of floats have the dtype of the parameters; the model is in training mode"
    yield "peak saved: of what autograd saves; weights, gradients, states and temporary memory come on top"
    if found.training.offload.placement != "adaptive":
        yield f'the config has "placement": "{found.training.offload.placement}"; the plan is that of "adaptive"'


# ---- formats --------------------------------------------------------------------------------------------------------


def duration(seconds: float) -> str:
    """Seconds to read."""
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def _longer(step_s: float, kept_step_s: float) -> str:
    part = step_s / kept_step_s - 1 if kept_step_s else 0.0
    return f"{part:.1%}" if part < 10 else f"{part:,.0f} times"


def _scaled(value: float | None, unit: float) -> float | None:
    return None if value is None else value * unit
