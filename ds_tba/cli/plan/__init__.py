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
from ds_tba.cli.plan.model import AIDS, recipe_of
from ds_tba.cli.plan.rows import (
    FRAGMENTATION,
    MOST,
    SAME_STEP,
    SHORT_LIFE_DAYS,
    TIGHT,
    UNIT,
    Row,
    Setup,
    fixed_rows,
    holders,
    longest_of,
    recommended,
)
from ds_tba.cli.plan.training import CONTEXT_BYTES, Training, gpu_of, read_training
from ds_tba.config import ASSUMED_RATIO, BLOCK
from ds_tba.device.accelerator import available_bytes
from ds_tba.errors import ConfigError
from ds_tba.explain.account import REMEDIES
from ds_tba.plan.trace import PathRates
from ds_tba.stats import aligned, expanded, readable
from ds_tba.storage.staging import with_staging
from ds_tba.wear import ASSUMED_TBW, drive_of, rated

WRITE_BYTES_PER_S, READ_BYTES_PER_S = 4.2e9, 7.1e9  # of the data sheet of one PCIe 4.0 drive of a data center
# A drive's rate of writes, and of reads, while both run: this part of its rate alone.
CONCURRENT_FRACTION = 0.6
FIRST_LENGTH = 4096  # of --longest without --seq
# The fields of a dry run that the JSON has.
_TOLD = ("parameters", "parameter_bytes", "trained", "saved_bytes", "temporary_bytes", "attention")


def planned(options: argparse.Namespace) -> Result:
    """Return what each setting needs and costs, and the one to take; with ``--longest`` its longest sequence."""
    if options.longest and options.gpu is None:
        raise ConfigError("--longest needs --gpu: its memory or name, such as --gpu 24GB.")
    if options.seq is None and not options.longest:
        raise ConfigError("--seq is missing: give the tokens of a sequence, such as --seq 32k, or --longest.")
    setup_of, title, notes = setups(options)
    if options.longest:
        found = longest_of(setup_of, options.seq or FIRST_LENGTH)
        sequence, longest = max(found, key=itemgetter(0))
        setup, chosen = setup_of(sequence or UNIT), longest if sequence else None
        why, tokens = f"{sequence:,} tokens are the longest sequence", ""
    else:
        setup, tokens = setup_of(options.seq), f" x {options.seq} tokens"
        found = [(options.seq, row) for row in [*fixed_rows(setup), setup.planned_row()]]
        chosen = recommended([row for _, row in found])
        such = "fits and lets the drives last for a year" if chosen and chosen.spares_drives else "fits"
        why = f"no setting that {such} is more than {SAME_STEP - 1:.0%} faster"
    title = f"{options.model}, batch {options.batch}{tokens}, {title}"
    notes += [*setup.run.notes, f"attention: {', '.join(setup.run.attention) or 'none of PyTorch'}"]
    lines = _text(setup, found, chosen, why)
    told = {"title": title, "batch": options.batch, "gpu_bytes": setup.device.memory_bytes, "notes": notes}
    told |= {key: getattr(setup.run, key) for key in _TOLD}
    told["held"] = asdict(setup.held)
    told["rows"] = [{"sequence": sequence, **asdict(row)} for sequence, row in found]
    told["recommended"] = None if chosen is None else chosen.name
    shown = [f"model       {title}", *lines, "", "assumed", *(f"  {note}" for note in notes)]
    return Result(0 if chosen is not None or setup.device.memory_bytes is None else 3, shown, told)


def setups(options: argparse.Namespace) -> tuple[Callable[[int], Setup], str, list[str]]:
    """Return the setups by the length of the sequence, a title, and what figures rest on.

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
    tbw, rating = _endurance(options.drive_tbw, training)
    host_memory_bytes = options.host_memory or available_bytes()
    sequence_ranks = options.sequence_parallel or training.number("sequence_parallel_size") or 1
    targets = options.lora_targets.split(",") if options.lora_targets else ()
    aids = frozenset(name for name in AIDS if getattr(options, name[2:].replace("-", "_")))
    recipe = recipe_of(options.model, bits=options.bits, lora_rank=options.lora, lora_targets=targets, aids=aids)

    @cache
    def setup_of(sequence: int) -> Setup:
        run = dry_run(recipe, options.batch, -(-sequence // sequence_ranks), training, device, paths)
        return Setup(run, training, device, options.ranks or sharers, tbw / sharers, sharers, host_memory_bytes)

    kind = "dtypes of the model" if training.dtype is None else str(training.dtype).removeprefix("torch.")
    adapted = f", LoRA of rank {options.lora}{f' on {options.lora_targets}' if targets else ''}" if options.lora else ""
    adapted += f", tokens divided by {sequence_ranks}" if sequence_ranks > 1 else ""
    each = f"; each GPU has 1/{sharers} of them" if sharers > 1 else ""
    packed = f"; compression leaves {ASSUMED_RATIO} of what is written" if offload.io.compression else ""
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
        f"TB a day, host memory and swap space are one GPU's; nothing is taken as rematerialized; a node has "
        f"{readable(host_memory_bytes)} of host memory free{'' if options.host_memory else ', as this machine'} "
        "(--host-memory)",
    ]
    title = f"{kind}{adapted}{''.join(f', {name[2:]}' for name in sorted(aids))}"
    return setup_of, title, notes


def _endurance(given: float | None, training: Training) -> tuple[float, str]:
    """Return the terabytes that all drives of a node are rated for, as a number and in words."""
    paths, tbw = training.offload.nvme_paths, training.offload.ssd.rated_endurance_tbw
    if given:
        return given, f"{given:.4g} TBW as given"
    drives = len({drive_of(expanded(path)) for path in paths if expanded(path).exists()}) or max(1, len(paths))
    return drives * (tbw or ASSUMED_TBW), f"{rated(tbw)}{f' each, {drives} of them' if drives > 1 else ''}"


def _text(setup: Setup, found: Sequence[tuple[int, Row]], chosen: Row | None, why: str) -> Iterator[str]:
    run, device, held = setup.run, setup.device, setup.held
    yield f"parameters  {run.parameters / 1e6:,.1f} M, of which {run.trained / 1e6:,.1f} M are trained"
    named = [f"{name} {readable(nbytes)}" for name, nbytes in {**held.always, **held.passing}.items() if nbytes]
    yield f"held        {', '.join(named)}"
    if device.memory_bytes is not None:
        yield f"GPU         {readable(device.memory_bytes)} for PyTorch, rates of one {device.name}"
    yield ""
    costs = ("activations", "GPU peak", "verdict", "s a step", "TB a day", "drives last", "host", "swap")
    cells: list[tuple[str, ...]] = [("setting", "tokens", *costs)]
    for sequence, row in found:
        tokens = f"{'more than ' if sequence == MOST else ''}{sequence:,}" if sequence else f"not {UNIT}"
        sizes = readable(row.cost.peak_saved_bytes), readable(row.need_bytes), row.verdict or "?"
        per_day, life = row.written_bytes_per_day / 1e12, row.life_days
        days = "-" if life is None else f"{life:.0f} days" if life < 2 * 365 else f"{life / 365:.0f} years"
        wear = f"{row.cost.step_s:.3g}", f"{per_day:.2f}" if per_day else "-", days
        beside = (readable(nbytes) if nbytes else "-" for nbytes in (row.host_bytes, row.swap_bytes))
        cells.append((row.name, tokens, *sizes, *wear, *beside))
    yield from aligned(cells)
    yield ""
    if device.memory_bytes is None:
        yield "--gpu (24GB, or a name) says what fits, and recommends a setting"
    elif chosen is None:
        least = min((row for _, row in found), key=attrgetter("need_bytes"))
        yield f"NOTHING FITS: {least.name!r} needs least, {readable(least.need_bytes)}; what holds most of it:"
        for name, nbytes in holders(least, setup)[:3]:
            yield f"  {readable(nbytes):>10}  {name}: {REMEDIES[name]}"
    else:
        yield f"recommended {chosen.name!r}: {why}"
        holding = [f"{name} {readable(nbytes)}" for name, nbytes in holders(chosen, setup) if nbytes]
        yield f"            the GPU holds {', '.join(holding[:4])}"
        yield from _instructions(chosen)


def _instructions(row: Row) -> Iterator[str]:
    """Say what to change for a row, and whether it wears drives out."""
    if row.advice:
        yield f"            {row.advice}"
    if row.merged:
        yield "            into ds_config.json:"
        yield from (f"  {line}" for line in json.dumps(row.merged, indent=2).splitlines())
    elif not row.advice:
        yield "            nothing has to be changed"
    if not row.spares_drives:
        keys = f'"ssd": {{"rated_endurance_tbw": ..., "min_life_days": {SHORT_LIFE_DAYS:g}}}'
        less = f": with {keys} plans write less" if row.merged.get(BLOCK, {}).get("placement") == "adaptive" else ""
        yield f"            IT WEARS the drives out in {row.life_days:.0f} days{less}"
