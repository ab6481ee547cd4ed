"""``ds_tba plan`` and ``ds_tba estimate``, its details: what fits the GPU, at what cost, with which block?"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds_tba.cli.format import in_units_of, show, size, table
from ds_tba.config import Placement, parse_block, with_staging
from ds_tba.errors import ConfigError
from ds_tba.telemetry.report import write_file
from ds_tba.telemetry.stats import readable

if TYPE_CHECKING:
    from ds_tba.cli.plan.machine import Device, Drives
    from ds_tba.cli.plan.rows import Row, Setup
    from ds_tba.planner.plan import Plan

_DESCRIPTION = """\
Runs one forward and backward of the model on PyTorch's meta device (shapes without values), through the cache and the
recorder of a real run. Prints for each setting whether it fits the GPU, the time of a step and the wear of the drives;
recommends one, and prints what to paste into ds_config.json. If nothing fits: what fills the GPU, and exit status 3.
"""
_EPILOG = """\
MODEL is the config.json, folder or name of a Hugging Face model on this machine (inputs are made up), or
FILE.py:function: called with the keyword arguments batch and sequence, it returns (model, inputs); inputs are a tuple
or a dict of arguments of the model. The model returns the loss, an object or dict with "loss", or tensors of which the
first is summed. Tensors made in the function are on the meta device.

example:
    ds_tba plan Llama-3.1-8B/config.json --gpu 24GB --seq 32k --lora 16 --write ds_config.json
"""
ASSUMED_TBW = 600.0  # of one drive of 1 TB
FEW_DAYS = 365.0
_SHOWN = 6


def add_parser(commands: Any) -> None:
    """Add both subcommands."""
    for name, what in (("plan", "say what fits the GPU, and what to set"), ("estimate", "plan, with all details")):
        parser = commands.add_parser(
            name,
            help=what,
            description=_DESCRIPTION,
            epilog=_EPILOG,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        add = parser.add_argument
        add("model", nargs="?", metavar="MODEL", default=argparse.SUPPRESS, help="see below")
        add("--model", dest="model", metavar="MODEL", help=argparse.SUPPRESS)
        add("--seq", type=size, required=True, help="tokens of a sequence, such as 32k")
        add("--batch", type=size, help="sequences per micro-step and rank (default: the config's, else 1)")
        add("--gpu", "--gpu-memory", metavar="GPU", help='its memory or name: 24GB, "RTX 4090"')
        add("--ranks", type=size, default=1, help="ranks that ZeRO divides among (default: 1)")
        add("--lora", type=size, metavar="RANK", help="train adapters of this rank on all linear layers, not the model")
        add("--config", type=Path, help="ds_config.json (default: bf16, AdamW, ZeRO stage 2)")
        add("--nvme-path", action="append", help="a directory on a drive (default: the config's; may be repeated)")
        add("--drive-tbw", type=in_units_of(1), help="terabytes that the drives are rated for, together")
        add("--write", type=Path, metavar="FILE", help="merge what is recommended into FILE; a backup is kept")
        add("--details", action="store_true", default=name == "estimate", help="also what is saved where, and more")
        add("--dtype", choices=("fp32", "bf16", "fp16"), help="of the parameters (default: the config's)")
        add("--device", choices=("cuda", "cpu"), default="cuda", help="training device (default: cuda)")
        for option, unit, what in (
            ("tflops", 1e12, "TFLOP/s of matrix products"), ("memory-gbps", 1e9, "GB/s of device memory"),
            ("copy-gbps", 1e9, "GB/s between device and host"), ("write-gbps", 1e9, "GB/s written by all drives"),
            ("read-gbps", 1e9, "GB/s read by all drives"),
        ):  # fmt: skip
            add(f"--{option}", type=in_units_of(unit), help=f"{what} (default: measured, or of the data sheet)")
        add("--json", type=Path, help="also write everything to this file")
        parser.set_defaults(run=partial(show, name, _answer))


@dataclass(frozen=True, slots=True)
class Answer:
    """All that is printed.

    Attributes:
        plan: that of the adaptive row.
        chosen: the recommended row.
        notes: what the figures rest on.
    """

    title: str
    gpu: str
    setup: Setup
    device: Device
    drives: Drives
    rows: list[Row]
    plan: Plan
    chosen: Row | None
    notes: list[str]


def _answer(options: argparse.Namespace) -> tuple[int, list[str], dict[str, Any]]:
    from ds_tba.cli.plan.rows import recommended, rows_of

    if options.model is None:
        raise ConfigError("MODEL is missing: name a config.json, a folder, a model on this machine or FILE.py:function")
    title, gpu, setup, device, drives, notes = _setup(options)
    rows, plan = rows_of(setup)
    chosen = None if setup.memory_bytes is None else recommended(rows)
    answer = Answer(title, gpu, setup, device, drives, rows, plan, chosen, notes)
    lines = [*_lines(answer), *(_details(answer) if options.details else ())]
    if options.write is not None:
        if chosen is None:
            raise ConfigError(f"--write {options.write}: nothing is recommended" + (
                "; --gpu is needed for that" if setup.memory_bytes is None else ", for nothing fits"
            ))  # fmt: skip
        lines.append(write_merged(options.write, {**setup.training.config, **_batch(options, setup)}, chosen.merged))
    lines += ["", "assumed", *(f"  {note}" for note in notes)]
    is_hopeless = setup.memory_bytes is not None and chosen is None
    return 3 if is_hopeless else 0, lines, _to_dict(answer, options)


def _setup(options: argparse.Namespace) -> tuple[str, str, Setup, Device, Drives, list[str]]:
    import torch

    from ds_tba.autograd.sites import excluded_ops
    from ds_tba.cli.plan.dry_run import Settings, dry_run
    from ds_tba.cli.plan.machine import GivenRates, device_of, drives_of, gpu_of
    from ds_tba.cli.plan.model import recipe_of
    from ds_tba.cli.plan.rows import FRAGMENTATION, TIGHT, Setup
    from ds_tba.cli.plan.training import CONTEXT_BYTES, HOST_BYTES_PER_S, read_training
    from ds_tba.planner.trace import Resources

    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, None: None}
    training = read_training(options.config, dtypes[options.dtype])
    batch = options.batch or training.micro_batch or (1 if options.config is None else None)
    if batch is None:
        raise ConfigError(
            f'{options.config} has no number at "train_micro_batch_size_per_gpu": give the sequences of a micro-step '
            "with --batch."
        )
    gpu, memory_bytes = ("H100", None) if options.gpu is None else gpu_of(options.gpu)
    is_host = options.device == "cpu"
    offload = with_staging(training.offload, math.inf, is_host=is_host)
    if options.nvme_path:
        offload = offload.model_copy(update={"nvme_path": options.nvme_path})
    training = replace(training, offload=offload)
    given = GivenRates(
        options.tflops, options.memory_gbps, options.copy_gbps, options.write_gbps, options.read_gbps
    )  # fmt: skip
    device = device_of(options.device, gpu, training.autocast or training.dtype or torch.float32, given)
    drives = drives_of(given, offload, training.aio)
    copy = device.copy_bytes
    settings = Settings(
        options.device, training.dtype, training.autocast, offload.min_tensor_bytes, offload.blocks, device.flops,
        device.memory_bytes, device.launch_s, training.micro_steps, offload.rematerialize_enabled,
        excluded_ops(offload),
    )  # fmt: skip
    resources = Resources(drives.paths, copy, copy, offload.io.ring_bytes, is_synchronous=is_host)
    run = dry_run(recipe_of(options.model, options.lora), batch, options.seq, settings, resources)
    tbw = options.drive_tbw or offload.ssd.rated_endurance_tbw
    paths = list(offload.nvme_paths) or ["/local_nvme"]
    setup = Setup(
        run, training, options.ranks, options.device, memory_bytes, device.memory_bytes, tbw or ASSUMED_TBW,
        paths[0] if len(paths) == 1 else paths,
    )  # fmt: skip
    dtype = "dtypes of the model" if training.dtype is None else str(training.dtype).removeprefix("torch.")
    adapted = f", LoRA of rank {options.lora}" if options.lora else ""
    title = f"{options.model}, batch {batch} x {options.seq} tokens, {dtype}{adapted}"
    flops, memory, copies = device.flops / 1e12, device.memory_bytes / 1e9, device.copy_bytes / 1e9
    notes = [
        *training.notes,
        *run.notes,
        f"GPU peak: {FRAGMENTATION:.0%} of saved and temporary tensors are lost to fragmentation, "
        f"{readable(CONTEXT_BYTES)} to the CUDA context; a peak above {TIGHT:.0%} of the GPU is tight",
        f"rates {device.source}: {flops:.3g} TFLOP/s, device memory {memory:.4g} GB/s, copies {copies:.3g} GB/s",
        f"the drives: {drives.source}; rated for {setup.tbw:g} TBW"
        + ("" if tbw else ", the usual rating of a drive of 1 TB (--drive-tbw has yours)"),
        "an operation takes the time of its FLOPs, of its bytes or of its launch, whichever is longest; communication "
        f"is left out; states in host memory are updated at {HOST_BYTES_PER_S / 1e9:g} GB/s",
        *(f"attention on {options.device}: {one.name.lower()}" for one in sorted(run.attention)),
        "what rematerialization has a rule for is taken to come out equal; the model is in training mode",
    ]
    return title, gpu, setup, device, drives, notes


# ---- the text -------------------------------------------------------------------------------------------------------


def _lines(answer: Answer) -> Iterator[str]:
    setup, run = answer.setup, answer.setup.run
    first = next((row for row in answer.rows if row.verdict in ("fits", "tight")), answer.rows[0])
    held = answer.rows[0].held
    yield f"model       {answer.title}"
    yield f"parameters  {run.parameters / 1e6:,.1f} M, of which {run.trained / 1e6:,.1f} M are trained"
    named = [f"{name} {readable(nbytes)}" for name, nbytes in {**held.always, **held.passing}.items() if nbytes]
    yield f"held        {', '.join(named)}"
    if setup.memory_bytes is not None:
        yield f"GPU         {readable(setup.memory_bytes)}, rates of one {answer.gpu}"
    yield ""
    rows = [("setting", "GPU peak", "verdict", "step", "TB a day", "drives last")]
    for row in answer.rows:
        step = f"x {row.cost.step_s / first.cost.step_s:.2f}" if first.cost.step_s else ""
        per_day = row.written_bytes_per_day / 1e12
        wear = (f"{per_day:.2f}", _life(row.life_days)) if per_day else ("-", "-")
        rows.append((row.name, readable(row.need_bytes), row.verdict or "?", step, *wear))
    yield from table(rows)
    yield f"            the step of {first.name!r} takes {_duration(first.cost.step_s)}"
    yield ""
    if setup.memory_bytes is None:
        yield "--gpu (24GB, or a name) says what fits, and recommends a setting"
    elif answer.chosen is None:
        yield from _remedies(answer)
    else:
        yield from _recommendation(answer, answer.chosen)


def _recommendation(answer: Answer, chosen: Row) -> Iterator[str]:
    how = "it fits" if chosen.verdict == "fits" else "nothing fits with a margin, it is tight"
    yield f"recommended {chosen.name!r}: {how}, and no other setting that does is faster by more than 5 %"
    if chosen.advice:
        yield f"            {chosen.advice}"
    if chosen.merged:
        yield "            into ds_config.json (--write FILE merges it):"
        yield from (f"  {line}" for line in json.dumps(chosen.merged, indent=2).splitlines())
    elif not chosen.advice:
        yield "            nothing has to be changed"
    if chosen.life_days is not None and chosen.life_days < FEW_DAYS:
        yield (
            f'            IT WEARS the drives out in {_life(chosen.life_days)}: "ssd": {{"rated_endurance_tbw": '
            f'{answer.setup.tbw:g}, "min_life_days": {FEW_DAYS:g}}} makes plans write less'
        )


def _remedies(answer: Answer) -> Iterator[str]:
    from ds_tba.cli.plan.rows import REMEDIES, holders

    least = min(answer.rows, key=lambda row: row.need_bytes)
    yield f"NOTHING FITS. {least.name!r} needs least, {readable(least.need_bytes)}; what holds most of it:"
    for name, nbytes in holders(least, answer.setup.run)[:3]:
        yield f"  {readable(nbytes):>10}  {name}: {REMEDIES[name]}"


def _details(answer: Answer) -> Iterator[str]:
    from ds_tba.cli.plan.rows import groups_of, made_again

    run, plan = answer.setup.run, answer.plan
    rows = [("saved for backward", "passes", "each", "all", "may be moved")]
    for group in groups_of(run.trace):
        name, times = (group.name, group.count) if group.count else (f"outside: {group.name}", 1)
        cells = [readable(one) for one in (group.saved_bytes, times * group.saved_bytes, times * group.movable_bytes)]
        rows.append((name, str(group.count or ""), *cells))  # type: ignore[arg-type]
    yield ""
    yield from table(rows[: 4 * _SHOWN])
    yield ""
    keep = answer.rows[0].cost
    costs = [("predicted", "peak saved", "of keep", "step", "longer by", "written per step")]
    for name, cost in {**{row.name: row.cost for row in answer.rows}, **_others(answer)}.items():
        part = cost.peak_saved_bytes / keep.peak_saved_bytes if keep.peak_saved_bytes else 1.0
        longer = cost.step_s / keep.step_s - 1 if keep.step_s else 0.0
        peak, written = readable(cost.peak_saved_bytes), readable(cost.written_bytes)
        costs.append((name, peak, f"{part:.2f}", _duration(cost.step_s), f"{longer:.1%}", written))
    yield from table(costs)
    yield ""
    shares = {word: nbytes for word, nbytes in _shares(answer).items() if nbytes}
    again = sum(plan.recomputed_blocks)
    yield f"adaptive    {', '.join(f'{word} {readable(nbytes)}' for word, nbytes in shares.items()) or 'saves nothing'}"
    yield f"recomputed  {again} of {len(plan.recomputed_blocks)} passes"
    for what, found in (("can be", made_again(run)), ("the plan", made_again(run, plan.placements))):
        ops = [f"{op} {readable(nbytes)}" for op, nbytes in list(found.items())[:_SHOWN]]
        yield f"made again  {what}: {readable(sum(found.values()))} ({', '.join(ops) or 'no op'})"
    moved = [one for one in run.trace.storages if one.is_movable and one.blocks]
    nbytes, ends_s = sum(one.nbytes for one in moved), min((one.first_backward_use_s for one in moved), default=0.0)
    forward_s = ends_s - min((one.pack_s for one in moved), default=0.0)
    if forward_s and run.trace.end_s > ends_s:
        yield (
            f"bandwidth   to move all {readable(nbytes)} at no cost in time: {nbytes / forward_s / 1e9:.1f} GB/s "
            f"written in forward, {nbytes / (run.trace.end_s - ends_s) / 1e9:.1f} GB/s read in backward"
        )
    yield f"temporary   {readable(run.temporary_bytes)}, with logits and the gradients of activations"


def _others(answer: Answer) -> dict[str, Any]:
    """Predictions that are no rows: everything to NVMe, and plans for smaller budgets."""
    from ds_tba.cli.plan.rows import BUDGET_FRACTIONS, fixed
    from ds_tba.planner.search import adaptive

    setup, keep = answer.setup, answer.rows[0].cost
    trace, limits = setup.trace(setup.training), setup.limits(setup.training)
    found = {"offload all": fixed(trace, Placement.NVME)}
    for budget in (int(part * keep.peak_saved_bytes) for part in BUDGET_FRACTIONS):
        cost = adaptive(trace, replace(limits, activation_budget_bytes=budget)).prediction
        found[f"budget {budget}{'' if cost.peak_saved_bytes <= budget else ' (cannot be held)'}"] = cost
    return found


def _shares(answer: Answer) -> dict[str, int]:
    """Bytes of the adaptive plan by placement."""
    found = dict.fromkeys((one.word for one in Placement), 0)
    for storage, placement in zip(answer.setup.run.trace.storages, answer.plan.placements, strict=True):
        found[placement.word] += storage.nbytes if storage.blocks else 0
    return found


def _life(days: float | None) -> str:
    if days is None:
        return "-"
    return f"{days:.0f} days" if days < 2 * 365 else f"{days / 365:.0f} years"


def _duration(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


# ---- JSON -----------------------------------------------------------------------------------------------------------


def _to_dict(answer: Answer, options: argparse.Namespace) -> dict[str, Any]:
    from ds_tba.cli.plan.rows import groups_of, made_again

    setup, run, resources = answer.setup, answer.setup.run, answer.setup.run.trace.resources
    rows = [
        {**{key: value for key, value in asdict(row).items() if key not in ("cost", "held")}, **asdict(row.cost)}
        for row in answer.rows
    ]
    found = {
        "title": answer.title,
        **_batch(options, setup),
        "ran_on": run.runs_on,
        **{key: getattr(run, key) for key in (
            "parameters", "parameter_bytes", "trained", "saved_bytes", "peak_saved_bytes", "temporary_bytes",
        )},
        "attention": sorted(one.name.lower() for one in run.attention),
        "held": asdict(answer.rows[0].held),
        "gpu_bytes": setup.memory_bytes,
        **{f"{key}_per_s": getattr(answer.device, key) for key in ("flops", "memory_bytes", "copy_bytes")},
        "write_bytes_per_s": resources.write_bytes_per_s,
        "read_bytes_per_s": resources.read_bytes_per_s,
        "drives": answer.drives.source,
        "rows": rows,
        "recommended": None if answer.chosen is None else answer.chosen.name,
        "plan_bytes": _shares(answer),
        "groups": [asdict(group) for group in groups_of(run.trace)],
        "made_again_bytes": made_again(run),
        "notes": answer.notes,
    }  # fmt: skip
    if options.details:
        found["others"] = {name: asdict(cost) for name, cost in _others(answer).items()}
    return found


def _batch(options: argparse.Namespace, setup: Setup) -> dict[str, int]:
    return {"train_micro_batch_size_per_gpu": options.batch or setup.training.micro_batch or 1}


def write_merged(path: Path, new: dict[str, Any], merged: dict[str, Any]) -> str:
    """Merge into a ``ds_config.json``, of which a backup is kept; a line that says so.

    Args:
        new: the config that is merged into where there is no file.

    Raises:
        ConfigError: the file cannot be read or written, or the result is none that a run would take.
    """
    try:
        text = path.read_text() if path.exists() else json.dumps(new)
        result = _merged(json.loads(text), merged)
        parse_block(result)
        kept = ""
        if path.exists():
            backups = (path.with_name(f"{path.name}.bak{number or ''}") for number in range(1000))
            backup = next(one for one in backups if not one.exists())
            write_file(backup, text)
            kept = f"; what it was is in {backup}"
        write_file(path, json.dumps(result, indent=2) + "\n")
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"--write {path}: it must be a ds_config.json that can be read and written: {error}"
        ) from error
    return f"written to  {path}{kept}"


def _merged(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    found = dict(old)
    for key, value in new.items():
        below = old.get(key)
        found[key] = _merged(below, value) if isinstance(value, dict) and isinstance(below, dict) else value
    return found
