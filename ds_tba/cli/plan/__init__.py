"""``ds_tba plan``: what fits the GPU, at what cost, with which block, and how long may a sequence be?"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import cache
from operator import attrgetter, itemgetter

import torch

from ds_tba.cli.format import Result
from ds_tba.cli.plan.dry_run import dry_run
from ds_tba.cli.plan.model import recipe_of
from ds_tba.cli.plan.rows import (
    FRAGMENTATION,
    MOST,
    SAME_STEP,
    SHORT_LIFE_DAYS,
    TIGHT,
    UNIT,
    Row,
    Setup,
    holders,
    longest_of,
    recommended,
    rows_of,
)
from ds_tba.cli.plan.training import CONTEXT_BYTES, Training, gpu_of, read_training
from ds_tba.config import ASSUMED_RATIO, BLOCK, with_staging
from ds_tba.errors import ConfigError
from ds_tba.explain.out_of_memory import remedy
from ds_tba.plan.trace import PathRates
from ds_tba.stats import aligned, expanded, readable
from ds_tba.wear import ASSUMED_TBW, drive_of, rated

WRITE_BYTES_PER_S, READ_BYTES_PER_S = 4.2e9, 7.1e9  # of the data sheet of one PCIe 4.0 drive of a data center
# A drive's rate of writes, and of reads, while both run: this part of its rate alone.
CONCURRENT_FRACTION = 0.6
FIRST_LENGTH = 4096  # of --longest without --seq
_AIDS = ("--fused-loss", "--tiled-mlp")
_COSTS = ("TB a day", "drives last", "host", "swap")  # columns: of the drives and of host memory
# Of a dry run, in JSON.
_TOLD = ("parameters", "parameter_bytes", "trained", "saved_bytes", "peak_saved_bytes", "temporary_bytes", "attention")


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
    notes += [*setup.run.notes, f"attention: {', '.join(setup.run.attention) or 'none of PyTorch'}"]
    told: dict[str, object]
    if longest:
        title = f"{options.model}, batch {options.batch}, {title}"
        head, lines, is_good = longest[0][1], _of_longest(setup, longest), any(sequence for sequence, _ in longest)
        found = [{"sequence": sequence, "is_most": sequence == MOST, **asdict(row)} for sequence, row in longest]
        told = {"longest": found}
    else:
        title = f"{options.model}, batch {options.batch} x {options.seq} tokens, {title}"
        rows = rows_of(setup)
        chosen = recommended(rows)
        head, lines = rows[0], _of_rows(setup, rows, chosen)
        is_good = chosen is not None or setup.device.memory_bytes is None
        told = {key: getattr(setup.run, key) for key in _TOLD}
        told |= {"rows": [asdict(row) for row in rows], "recommended": None if chosen is None else chosen.name}
    shown = [f"model       {title}", *_head(setup, head), *lines, "", "assumed", *(f"  {note}" for note in notes)]
    told |= {"title": title, "batch": options.batch, "gpu_bytes": setup.device.memory_bytes, "notes": notes}
    return Result(0 if is_good else 3, shown, told)


def _setup(options: argparse.Namespace) -> tuple[Callable[[int], Setup], str, list[str]]:
    """Return the setups by the length of the sequence, a title, and what the figures rest on.

    Options and config are looked at first: what is wrong with them is told before transformers is imported.
    """
    training = read_training(options.config)
    options.batch = options.batch or training.number("train_micro_batch_size_per_gpu") or 1
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
    aids = frozenset(name for name in _AIDS if getattr(options, name[2:].replace("-", "_")))
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
    each = f"; each GPU has 1/{sharers} of them" if sharers > 1 else ""
    packed = f"; compression leaves {ASSUMED_RATIO} of what is written" if stored_share != 1.0 else ""
    notes = [
        *training.notes,
        f"GPU peak: {FRAGMENTATION:.0%} of saved and temporary tensors are lost to fragmentation, "
        f"{readable(CONTEXT_BYTES)} to the CUDA context; a peak above {TIGHT:.0%} of the GPU is tight",
        f"rates of one {device.name}: {device.flops / 1e12:.3g} TFLOP/s, memory "
        f"{device.memory_bytes_per_s / 1e9:.4g} GB/s, copies {device.copy_bytes_per_s / 1e9:.3g} GB/s; communication "
        "between GPUs is left out",
        f"the drives of a node write {write / 1e9:.3g} and read {read / 1e9:.3g} GB/s, {CONCURRENT_FRACTION} of each "
        f"while both run (--write-gbps, --read-gbps; ds_nvme_tune and fio measure them){each}",
        f"the drives of a node are rated {rating} (--drive-tbw has yours, together){packed}",
        "TB a day, host memory and swap space are one GPU's; nothing is taken as rematerialized",
    ]
    return setup_of, f"{kind}{adapted}{''.join(f', {name[2:]}' for name in sorted(aids))}", notes


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
            yield f"  {readable(nbytes):>10}  {name}: {remedy(name, setup.way)}"
    else:
        how = "it fits" if chosen.verdict == "fits" else "nothing fits with a margin, it is tight"
        such = "fits and lets the drives last for a year" if chosen.spares_drives else "fits"
        yield f"recommended {chosen.name!r}: {how}; no setting that {such} is more than {SAME_STEP - 1:.0%} faster"
        yield from _instructions(setup, chosen)


def _of_longest(setup: Setup, found: Sequence[tuple[int, Row]]) -> Iterator[str]:
    cells: list[tuple[str, ...]] = [("setting", "longest sequence", "GPU peak", "s a step", *_COSTS)]
    for sequence, row in found:
        length = f"{'more than ' if sequence == MOST else ''}{sequence:,}" if sequence else f"not {UNIT}"
        times = (f"{row.cost.step_s:.3g}", *_costs(row)) if sequence else ("-",) * (1 + len(_COSTS))
        cells.append((row.name, length, readable(row.need_bytes), *times))
    yield from aligned(cells)
    sequence, row = max(found, key=itemgetter(0))
    if sequence:
        yield f"longest     {sequence:,} tokens: {row.name!r}"
        yield from _instructions(setup, row)


def _costs(row: Row) -> tuple[str, ...]:
    life, per_day = row.life_days, row.written_bytes_per_day / 1e12
    days = "-" if life is None else f"{life:.0f} days" if life < 2 * 365 else f"{life / 365:.0f} years"
    sizes = (readable(nbytes) if nbytes else "-" for nbytes in (row.host_bytes, row.swap_bytes))
    return (f"{per_day:.2f}" if per_day else "-", days, *sizes)


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
        yield f"            IT WEARS the drives out in {row.life_days:.0f} days{less}"
