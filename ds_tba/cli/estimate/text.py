"""``ds_tba estimate``: what activation offload would do for a model, without the memory that training it takes."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds_tba.cli.format import above_0, count
from ds_tba.cli.table import table
from ds_tba.errors import DsTbaError

if TYPE_CHECKING:
    from ds_tba.cli.estimate.outlook import Outlook
    from ds_tba.cli.estimate.summary import Estimate

_DESCRIPTION = """\
Runs one forward and backward of the model on PyTorch's meta device (shapes without values), through the cache and the
recorder of a real run, and plans for what it saw: saved bytes for each block, the predicted peak and step time of
keep, recompute, offload and the plan, the bandwidth needed, the sequence length from which offload pays, SSD life.
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
    parser.add_argument("--longest-seq", type=count, default=1 << 20, help="end of the search (default: 1048576)")
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
        options.longest_seq,
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
    line = f"parameters  {run.parameters / 1e6:,.1f} M, {gib(run.parameter_bytes)}; gradients come on top"
    states = found.training.states(run.parameters)
    yield f"{line}, {states}" if states else line


def _footprint(outlook: Outlook) -> Iterator[str]:
    rows = [("saved for backward", "passes", "each", "all", "may be moved")]
    blocks = [group for group in outlook.groups if group.count]
    outside = [group for group in outlook.groups if not group.count]
    for group in blocks:
        movable = group.movable_bytes * group.count
        rows.append((group.name, str(group.count), gib(group.nbytes), gib(group.total_bytes), gib(movable)))
    for group in outside[:_SHOWN_OUTSIDE]:
        rows.append((f"outside: {group.name}", "", "", gib(group.nbytes), gib(group.movable_bytes)))
    if rest := outside[_SHOWN_OUTSIDE:]:
        total, movable = sum(group.nbytes for group in rest), sum(group.movable_bytes for group in rest)
        rows.append((f"outside: {len(rest)} others", "", "", gib(total), gib(movable)))
    total = sum(group.total_bytes for group in outlook.groups)
    movable = sum(group.movable_bytes * max(1, group.count) for group in outlook.groups)
    rows.append(("all", "", "", gib(total), gib(movable)))
    yield from table(rows)


def _predictions(outlook: Outlook) -> Iterator[str]:
    rows = [("predicted", "peak saved", "of keep", "step", "longer by", "written in a step")]
    keep = outlook.costs["keep"]
    for name, cost in outlook.costs.items():
        part = cost.peak_saved_bytes / keep.peak_saved_bytes if keep.peak_saved_bytes else 1.0
        longer = cost.step_s / keep.step_s - 1 if keep.step_s else 0.0
        peak = gib(cost.peak_saved_bytes)
        rows.append(
            (_WORDS[name], peak, f"{part:.2f}", duration(cost.step_s), _longer(longer), gib(cost.written_bytes))
        )
    yield from table(rows)
    shares = [f"{name} {gib(nbytes)}" for name, nbytes in sorted(outlook.plan_bytes.items())]
    blocks = outlook.plan.recomputed_blocks
    again = f"; {sum(blocks)} of {len(blocks)} passes are recomputed" if any(blocks) else ""
    yield f"the plan    {', '.join(shares) or 'nothing is saved'}{again}"
    if not outlook.is_within:
        yield f"            no placement was found within {_asked(outlook)}: this is the nearest"


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
            f"            {gib(outlook.too_large_bytes)} are in storages above io.staging_bytes "
            f"({found.training.offload.io.staging_bytes}), and stay: raise it"
        )
    yield (
        f"bandwidth   so that moving all {gib(need.moved_bytes)} takes no time of its own: "
        f"{need.write_bytes_per_s / 1e9:.1f} GB/s written during forward, {need.read_bytes_per_s / 1e9:.1f} GB/s read "
        f"during backward; the drives have {machine.write_bytes_per_s / 1e9:.3g} and "
        f"{machine.read_bytes_per_s / 1e9:.3g}"
    )
    yield f"sequence    {_about_length(found)}"
    yield from _about_wear(found)


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
        f"offload moves it by {gain} only: {name} holds it (without what that saves it would be {gib(nbytes)} lower); "
        f"the plan lowers it by {outlook.plan_gain:.0%}"
    )


def _about_length(found: Estimate) -> str:
    lengths, note = found.all_lengths, f" ({found.length_note})" if found.length_note else ""
    pays = found.pays_from
    what = "the plan moves bytes and lowers the peak by a tenth or more within the limits"
    if pays is None:
        first, last = lengths[0][0], lengths[-1][0]
        looked = f"not at {first}" if first == last else f"at no doubling from {first} to {last}"
        return f"{looked}: {what}{_about_size(found)}{note}"
    shorter = [length for length, _ in lengths if length < pays]
    return f"from {pays} on {what}{f', at {max(shorter)} not' if shorter else ''}{note}"


def _about_size(found: Estimate) -> str:
    staging_bytes = found.training.offload.io.staging_bytes
    too_long = [length for length, one in found.all_lengths if one.too_large_bytes > one.need.moved_bytes / 2]
    if not too_long:
        return ""
    return f"; from {min(too_long)} on most storages are larger than io.staging_bytes ({staging_bytes}), and stay"


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
            f"SSD life    {_WORDS[name]}: {gib(wear.written_bytes_per_step)} a step, {wear.steps_per_day:,.0f} steps "
            f"and {wear.written_bytes_per_day / 1e12:.1f} TB a day; {life}"
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
    if found.run.runs_on == "cpu" and request.device == "cuda":
        yield "attention and norms are those of the CPU, which may save more than those of CUDA"
    if request.device == "cuda":
        yield "dropout saves a mask of one byte for each element, and RMS norm a factor for each row, as on CUDA"
    yield "inputs of floats have the dtype of the parameters; the model is in training mode"
    yield "peak saved: of what autograd saves; weights, gradients, states and temporary memory come on top"
    if found.training.offload.placement != "adaptive":
        yield f'the config has "placement": "{found.training.offload.placement}"; the plan is that of "adaptive"'


# ---- formats --------------------------------------------------------------------------------------------------------


def gib(nbytes: float) -> str:
    """Bytes to read."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= size:
            return f"{nbytes / size:.2f} {unit}"
    return f"{nbytes:.0f} B"


def duration(seconds: float) -> str:
    """Seconds to read."""
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def _longer(part: float) -> str:
    return f"{part:.1%}" if part < 10 else f"{part:,.0f} times"


def _scaled(value: float | None, unit: float) -> float | None:
    return None if value is None else value * unit
