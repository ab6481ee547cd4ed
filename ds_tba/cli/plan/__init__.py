"""``ds_tba plan``: what fits the GPU, at what cost, with which block, and how long may a sequence be?"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from functools import cache
from operator import attrgetter

import torch

from ds_tba.cli.format import Result
from ds_tba.cli.plan.dry_run import dry_run
from ds_tba.cli.plan.model import recipe_of
from ds_tba.cli.plan.rows import (
    FRAGMENTATION,
    SAME_STEP,
    SHORT_LIFE_DAYS,
    TIGHT,
    UNIT,
    Longest,
    Row,
    Setup,
    Setups,
    holders,
    longest_of,
    recommended,
    remedy,
    rows_of,
)
from ds_tba.cli.plan.training import CONTEXT_BYTES, HOST_BYTES_PER_S, Training, gpu_of, read_training
from ds_tba.config import ASSUMED_RATIO, BLOCK, with_staging
from ds_tba.errors import ConfigError
from ds_tba.plan.trace import PathRates
from ds_tba.stats import aligned, expanded, readable
from ds_tba.wear import ASSUMED_TBW, drive_of, rated

WRITE_BYTES_PER_S, READ_BYTES_PER_S = 4.2e9, 7.1e9  # of the data sheet of one PCIe 4.0 drive of a data center
# A drive's rate of writes, and of reads, while both run: this part of its rate alone.
CONCURRENT_FRACTION = 0.6
FIRST_LENGTH = 4096  # of --longest without --seq


def planned(options: argparse.Namespace) -> Result:
    """Return what each setting needs and costs, and the one to take; with ``--longest`` its longest sequence."""
    if options.longest and options.gpu is None:
        raise ConfigError("--longest needs --gpu: its memory or name, such as --gpu 24GB.")
    if options.seq is None and not options.longest:
        raise ConfigError("--seq is missing: give the tokens of a sequence, such as --seq 32k, or --longest.")
    setup_of, title, notes = _setup(options)
    length = options.seq or FIRST_LENGTH
    longest = longest_of(setup_of, length) if options.longest else []
    setup = setup_of(length)
    rows = [one.row for one in longest] or rows_of(setup)
    chosen = recommended(rows)
    is_good = any(one.sequence for one in longest) or chosen is not None or setup.device.memory_bytes is None
    notes += [*setup.run.notes, f"attention: {', '.join(setup.run.attention) or 'none of PyTorch'}"]
    if longest:
        title = f"{options.model}, batch {options.batch}, {title}"
        lines = _of_longest(setup, longest)
        found = [{"sequence": one.sequence, "is_most": one.is_most, **asdict(one.row)} for one in longest]
        told: dict[str, object] = {"longest": found}
    else:
        title = f"{options.model}, batch {options.batch} x {options.seq} tokens, {title}"
        lines = _of_rows(setup, rows, chosen)
        keys = ("parameters", "parameter_bytes", "trained", "saved_bytes", "peak_saved_bytes", "temporary_bytes")
        told = {key: getattr(setup.run, key) for key in (*keys, "attention")}
        told |= {"rows": [asdict(row) for row in rows], "recommended": None if chosen is None else chosen.name}
    shown = [f"model       {title}", *_head(setup, rows[0]), *lines, "", "assumed", *(f"  {note}" for note in notes)]
    told |= {"title": title, "batch": options.batch, "gpu_bytes": setup.device.memory_bytes, "notes": notes}
    return Result(0 if is_good else 3, shown, told)


def _setup(options: argparse.Namespace) -> tuple[Setups, str, list[str]]:
    """Return the setups by the length of the sequence, a title, and what the figures rest on.

    Options and config are looked at first: what is wrong with them is told before transformers is imported.
    """
    training = read_training(options.config)
    options.batch = options.batch or training.micro_batch or 1
    offload = with_staging(training.offload, math.inf, is_host=False)
    if options.nvme_path:
        offload = offload.model_copy(update={"nvme_path": options.nvme_path})
    training = replace(training, offload=offload)
    device = gpu_of(options.gpu, training.dtype or torch.float32)
    sharers = options.gpus_per_node
    write, read = options.write_gbps or WRITE_BYTES_PER_S, options.read_gbps or READ_BYTES_PER_S
    rates = write / sharers, read / sharers
    paths = (PathRates(*rates, *(CONCURRENT_FRACTION * rate for rate in rates)),)
    tbw, drives, rating = _endurance(options.drive_tbw, training)
    aids = frozenset(name for name in _AID_NOTES if getattr(options, name[2:].replace("-", "_")))
    stored_share = 1.0 if offload.io.compression is None else ASSUMED_RATIO
    recipe = recipe_of(options.model)

    @cache
    def setup_of(sequence: int) -> Setup:
        run = dry_run(recipe, options.batch, sequence, training, device, paths, options.lora, aids)
        where = offload.nvme_path or "/local_nvme"
        return Setup(
            run, training, device, options.ranks or sharers, tbw / sharers, where, sharers, drives, options.batch,
            aids, stored_share,
        )  # fmt: skip

    kind = "dtypes of the model" if training.dtype is None else str(training.dtype).removeprefix("torch.")
    adapted = f", LoRA of rank {options.lora}" if options.lora else ""
    packed = [f"compression leaves {ASSUMED_RATIO} of what is written (the report has yours)"]
    notes = [
        *training.notes,
        *(_AID_NOTES[name] for name in sorted(aids)),
        f"GPU peak: {FRAGMENTATION:.0%} of saved and temporary tensors are lost to fragmentation, "
        f"{readable(CONTEXT_BYTES)} to the CUDA context; a peak above {TIGHT:.0%} of the GPU is tight",
        f"rates of one {device.name}: {device.flops / 1e12:.3g} TFLOP/s, memory "
        f"{device.memory_bytes_per_s / 1e9:.4g} GB/s, copies {device.copy_bytes_per_s / 1e9:.3g} GB/s",
        f"the drives of a node write {write / 1e9:.3g} and read {read / 1e9:.3g} GB/s, {CONCURRENT_FRACTION} of each "
        "while both run (--write-gbps, --read-gbps; ds_nvme_tune and fio measure them)"
        f"{f'; each GPU has 1/{sharers} of them' if sharers > 1 else ''}",
        f"drives of a node rated {rating} (--drive-tbw has yours, together); TB a day, host memory and swap "
        "space in the table are one GPU's",
        *(packed if stored_share != 1.0 else []),
        "an operation takes the time of its FLOPs, of its bytes or of its launch, whichever is longest; communication "
        f"is left out; states in host memory are updated at {HOST_BYTES_PER_S / 1e9:g} GB/s; what ZeRO offloads "
        "goes over PCIe, and a step takes that long at least",
        "nothing is taken as rematerialized; the model is in training mode",
    ]
    return setup_of, f"{kind}{adapted}{''.join(f', {name[2:]}' for name in sorted(aids))}", notes


_AID_NOTES = {
    "--fused-loss": "the loss is fused, as Liger's: as many logits at a time as hidden states; gradients in forward",
    "--tiled-mlp": "MLPs run in tiles as long as hidden states are wide, as DeepSpeed's; again in backward",
}


def _endurance(given: float | None, training: Training) -> tuple[float, int, str]:
    """Return the terabytes that all drives of a node are rated for, how many there are, and the first in words."""
    paths = training.offload.nvme_paths
    drives = len({drive_of(expanded(path)) for path in paths if expanded(path).exists()}) or max(1, len(paths))
    if given:
        return given, drives, f"{given:.4g} TBW as given"
    tbw = training.offload.ssd.rated_endurance_tbw
    return drives * (tbw or ASSUMED_TBW), drives, f"{rated(tbw)}{f' each, {drives} of them' if drives > 1 else ''}"


# ---- the text -------------------------------------------------------------------------------------------------------


def _head(setup: Setup, row: Row) -> Iterator[str]:
    run, held, device = setup.run, row.held, setup.device
    yield f"parameters  {run.parameters / 1e6:,.1f} M, of which {run.trained / 1e6:,.1f} M are trained"
    named = [f"{name} {readable(nbytes)}" for name, nbytes in {**held.always, **held.passing}.items() if nbytes]
    yield f"held        {', '.join(named)}"
    if device.memory_bytes is not None:
        yield f"GPU         {readable(device.memory_bytes)} for PyTorch, rates of one {device.name}"
    yield ""


def _of_rows(setup: Setup, rows: Sequence[Row], chosen: Row | None) -> Iterator[str]:
    first = next((row for row in rows if row.verdict in ("fits", "tight")), rows[0])
    cells: list[tuple[str, ...]] = [("setting", "activations", "GPU peak", "verdict", "step", *_COSTS)]
    for row in rows:
        step = row.cost.step_s / first.cost.step_s if first.cost.step_s else 1.0
        sizes = readable(row.cost.peak_saved_bytes), readable(row.need_bytes)
        cells.append((row.name, *sizes, row.verdict or "?", f"x {step:.2f}", *_costs(row)))
    yield from aligned(cells)
    yield f"            {first.name!r} takes {first.cost.step_s:.3g} s a step"
    yield ""
    if setup.device.memory_bytes is None:
        yield "--gpu (24GB, or a name) says what fits, and recommends a setting"
    elif chosen is None:
        least = min(rows, key=attrgetter("need_bytes"))
        yield f"NOTHING FITS: {least.name!r} needs least, {readable(least.need_bytes)}; what holds most of it:"
        for name, nbytes in holders(least, setup.run)[:3]:
            yield f"  {readable(nbytes):>10}  {name}: {remedy(name, setup)}"
    else:
        how = "it fits" if chosen.verdict == "fits" else "nothing fits with a margin, it is tight"
        such = "fits and lets the drives last for a year" if chosen.spares_drives else "fits"
        yield f"recommended {chosen.name!r}: {how}; no setting that {such} is more than {SAME_STEP - 1:.0%} faster"
        yield from _instructions(setup, chosen)


def _of_longest(setup: Setup, found: Sequence[Longest]) -> Iterator[str]:
    cells: list[tuple[str, ...]] = [("setting", "longest sequence", "GPU peak", "s a step", "tokens a s", *_COSTS)]
    for one in found:
        sequence, row = one
        length = f"{'more than ' if one.is_most else ''}{sequence:,}" if sequence else f"not {UNIT}"
        speed = setup.batch * sequence / row.cost.step_s * setup.training.micro_steps if row.cost.step_s else 0.0
        times = (f"{row.cost.step_s:.3g}", f"{speed:,.0f}", *_costs(row)) if sequence else ("-",) * (2 + len(_COSTS))
        cells.append((row.name, length, readable(row.need_bytes), *times))
    yield from aligned(cells)
    longest = max(found, key=attrgetter("sequence"))
    if longest.sequence:
        yield f"longest     {longest.sequence:,} tokens: {longest.row.name!r}"
        yield from _instructions(setup, longest.row)
        sparing = max((one for one in found if one.row.spares_drives), key=attrgetter("sequence"))
        if sparing.sequence < longest.sequence:
            yield f"            with drives that last for a year: {sparing.sequence:,} tokens, {sparing.row.name!r}"


# Columns: of the drives and of host memory.
_COSTS = ("TB a day", "drives last", "host", "swap")


def _costs(row: Row) -> tuple[str, ...]:
    per_day = row.written_bytes_per_day / 1e12
    wear = (f"{per_day:.2f}", _life(row.life_days)) if per_day else ("-", "-")
    return (*wear, *(readable(nbytes) if nbytes else "-" for nbytes in (row.host_bytes, row.swap_bytes)))


def _life(days: float | None) -> str:
    if days is None:
        return "-"
    return f"{days:.0f} days" if days < 2 * 365 else f"{days / 365:.0f} years"


def _instructions(setup: Setup, row: Row) -> Iterator[str]:
    """Say what to change for a row, what its node needs, and whether it wears drives out."""
    if row.advice:
        yield f"            {row.advice}"
    if row.merged:
        yield "            into ds_config.json:"
        yield from (f"  {line}" for line in json.dumps(row.merged, indent=2).splitlines())
    elif not row.advice:
        yield "            nothing has to be changed"
    taken = {"host memory": row.host_bytes, "swap space": row.swap_bytes}
    found = [f"{readable(setup.sharers * nbytes)} of {what}" for what, nbytes in taken.items() if nbytes]
    if found and setup.sharers > 1:
        yield f"            the {setup.sharers} GPUs of a node take {' and '.join(found)}"
    elif found and setup.ranks > 1:
        yield f"            each GPU of a node takes {' and '.join(found)}: --gpus-per-node adds them up"
    if not row.spares_drives:
        each_tbw = setup.tbw * setup.sharers / setup.drives
        keys = f'"ssd": {{"rated_endurance_tbw": {each_tbw:.4g}, "min_life_days": {SHORT_LIFE_DAYS:g}}}'
        less = f": with {keys} plans write less" if row.merged.get(BLOCK, {}).get("placement") == "adaptive" else ""
        yield f"            IT WEARS the drives out in {_life(row.life_days)}{less}"
