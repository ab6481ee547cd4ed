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
    SAME_STEP,
    TIGHT,
    UNIT,
    Row,
    Setup,
    fixed_rows,
    holders,
    longest_of,
    recommended,
)
from ds_tba.cli.plan.training import CONTEXT_BYTES, gpu_of, read_training
from ds_tba.device.accelerator import available_bytes
from ds_tba.errors import ConfigError
from ds_tba.holders import REMEDIES
from ds_tba.stats import ASSUMED_TBW, aligned, drive_of, expanded, readable
from ds_tba.storage.staging import with_staging

WRITE_GBPS, READ_GBPS = 4.2, 7.1  # of the data sheet of one PCIe 4.0 drive of a data center
# The fields of a dry run that the JSON has, and the options that the title has.
_TOLD = ("parameters", "parameter_bytes", "trained", "saved_bytes", "temporary_bytes")
_TITLED = ("lora", "lora_targets", "bits", *AIDS, "sequence_parallel")


def planned(options: argparse.Namespace) -> Result:
    """Return what each setting needs and costs, and the one to take; with ``--longest`` its longest sequence."""
    if (options.gpu if options.longest else options.seq) is None:
        raise ConfigError("give the tokens of a sequence, such as --seq 32k, or --longest and --gpu 24GB.")
    setup_of, kind, notes = setups(options)
    if options.longest:
        found = longest_of(setup_of, options.seq or 4096)
        sequence, longest = max(found, key=itemgetter(0))
        setup, chosen = setup_of(sequence or UNIT), longest if sequence else None
        why, tokens = f"{sequence:,} tokens are the longest sequence", ""
    else:
        setup, tokens = setup_of(options.seq), f" x {options.seq} tokens"
        found = [(options.seq, row) for row in [*fixed_rows(setup), setup.planned_row()]]
        chosen = recommended([row for _, row in found])
        why = f"no setting that fits, and spares the drives if any does, is more than {SAME_STEP - 1:.0%} faster"
    given = {name.replace("_", "-"): getattr(options, name) for name in _TITLED}
    said = [name if value is True else f"{name} {value}" for name, value in given.items() if value]
    title = ", ".join([options.model, f"batch {options.batch}{tokens}", kind, *said])
    notes += setup.run.notes
    lines = _text(setup, found, chosen, why)
    told = {"title": title, "batch": options.batch, "gpu_bytes": setup.device.memory_bytes, "notes": notes}
    told |= {key: getattr(setup.run, key) for key in _TOLD}
    told["held"] = asdict(setup.account.held)
    told["rows"] = [{"sequence": sequence, **asdict(row)} for sequence, row in found]
    told["recommended"] = None if chosen is None else chosen.name
    shown = [f"model       {title}", *lines, "", "assumed", *(f"  {note}" for note in notes)]
    return Result(0 if chosen is not None or setup.device.memory_bytes is None else 3, shown, told)


def setups(options: argparse.Namespace) -> tuple[Callable[[int], Setup], str, list[str]]:
    """Return the setups by the length of the sequence, the dtype, and what figures rest on.

    Options and config are looked at first: what is wrong with them is told before transformers is imported.
    """
    sharers = options.gpus_per_node
    training = replace(read_training(options.config), ranks=options.ranks or sharers)
    options.batch = options.batch or training.number("train_micro_batch_size_per_gpu", 1)
    parts = options.sequence_parallel or training.number("sequence_parallel_size", 1)
    offload = with_staging(training.offload, math.inf, is_host=False)
    if options.nvme_path:
        offload = offload.model_copy(update={"nvme_path": options.nvme_path})
    training = replace(training, offload=offload)
    device = gpu_of(options.gpu, training.dtype or torch.float32)
    write, read = options.write_gbps or WRITE_GBPS, options.read_gbps or READ_GBPS
    rates = 1e9 * write / sharers, 1e9 * read / sharers
    drives = {drive_of(expanded(path)) for path in offload.nvme_paths if expanded(path).exists()}
    each_tbw = offload.ssd.rated_endurance_tbw or ASSUMED_TBW
    tbw = options.drive_tbw or each_tbw * (len(drives) or max(1, len(offload.nvme_paths)))
    host_memory_bytes = options.host_memory or available_bytes()
    targets = [one.strip() for one in options.lora_targets.split(",")] if options.lora_targets else ()
    aids = [name for name in AIDS if getattr(options, name)]
    recipe = recipe_of(options.model, bits=options.bits, lora_rank=options.lora, lora_targets=targets, aids=aids)

    @cache
    def setup_of(sequence: int) -> Setup:
        run = dry_run(recipe, options.batch, -(-sequence // parts), training, device, rates)
        return Setup(run, training, device, tbw / sharers, sharers, host_memory_bytes)

    notes = [
        *training.notes,
        f"GPU peak: {FRAGMENTATION:.0%} of saved and temporary tensors are lost to fragmentation, "
        f"{readable(CONTEXT_BYTES)} to the CUDA context; a peak above {TIGHT:.0%} of the GPU is tight",
        f"rates of one {device.name}: {device.flops / 1e12:.3g} TFLOP/s, memory "
        f"{device.memory_bytes_per_s / 1e9:.4g} GB/s, copies {device.copy_bytes_per_s / 1e9:.3g} GB/s; communication "
        "between GPUs is left out",
        f"the drives of a node write {write:.3g} and read {read:.3g} GB/s (--write-gbps, --read-gbps; ds_nvme_tune and "
        f"fio measure them), and are rated {tbw:.4g} TBW "
        f"together (--drive-tbw, else the config's, else {ASSUMED_TBW:g} each); its {sharers} GPUs share them",
        f"TB a day, host memory and swap space are one GPU's; nothing is taken as rematerialized; a node has "
        f"{readable(host_memory_bytes)} of host memory free (--host-memory, else this machine's)",
    ]
    return setup_of, "dtypes of the model" if training.dtype is None else str(training.dtype), notes


def _text(setup: Setup, found: Sequence[tuple[int, Row]], chosen: Row | None, why: str) -> Iterator[str]:
    run, device, held = setup.run, setup.device, setup.account.held
    yield f"parameters  {run.parameters / 1e6:,.1f} M, of which {run.trained / 1e6:,.1f} M are trained"
    named = [f"{name} {readable(nbytes)}" for name, nbytes in {**held.always, **held.passing}.items() if nbytes]
    yield f"held        {', '.join(named)}"
    if device.memory_bytes is not None:
        yield f"GPU         {readable(device.memory_bytes)} for PyTorch, rates of one {device.name}"
    yield ""
    costs = ("activations", "GPU peak", "verdict", "s a step", "TB a day", "drives last", "host", "swap")
    cells: list[tuple[str, ...]] = [("setting", "tokens", *costs)]
    for sequence, row in found:
        tokens = f"{sequence:,}" if sequence else f"not {UNIT}"
        sizes = readable(row.cost.peak_saved_bytes), readable(row.need_bytes), row.verdict or "?"
        per_day, life = row.written_bytes_per_day / 1e12, row.life_days
        days = "-" if life is None else f"{life:,.0f} days"
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
        yield f"            IT WEARS the drives out in {row.life_days:.0f} days: ssd.min_life_days has plans write less"
