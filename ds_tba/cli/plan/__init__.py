"""``ds_tba plan``: what fits the GPU, at what cost, with which block, and how long may a sequence be?

``ds_tba estimate`` is the name that ``ds_tba plan --details`` had.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeAlias

import torch

from ds_tba.cli.format import Result
from ds_tba.cli.plan.dry_run import dry_run
from ds_tba.cli.plan.model import recipe_of
from ds_tba.cli.plan.rows import (
    ADAPTIVE,
    FRAGMENTATION,
    SAME_STEP,
    SHORT_LIFE_DAYS,
    TIGHT,
    UNIT,
    Longest,
    Row,
    Setup,
    Setups,
    groups_of,
    holders,
    longest_of,
    made_again,
    recommended,
    remedy,
    rows_of,
    scale,
)
from ds_tba.cli.plan.training import (
    CONTEXT_BYTES,
    HOST_BYTES_PER_S,
    Training,
    device_of,
    read_config,
    read_training,
)
from ds_tba.config import ASSUMED_RATIO, BLOCK, DsConfig, parse_block, with_staging
from ds_tba.errors import BackendUnavailableError, ConfigError
from ds_tba.plan.plan import Plan
from ds_tba.plan.trace import PathRates
from ds_tba.report import write_file
from ds_tba.stats import aligned, expanded, readable
from ds_tba.storage.tiers import probe
from ds_tba.wear import ASSUMED_TBW, drive_of, rated

WRITE_BYTES_PER_S, READ_BYTES_PER_S = 4.2e9, 7.1e9  # of the data sheet of one PCIe 4.0 drive of a data center
# A drive's rate of writes, and of reads, while both run: this part of its rate alone.
CONCURRENT_FRACTION = 0.6
FIRST_LENGTH = 4096  # of --longest without --seq
_SHOWN_GROUPS, _SHOWN_OPS = 20, 6

Found: TypeAlias = dict[str, Any]  # what ``--json`` prints


def planned(options: argparse.Namespace) -> Result:
    """Return what each setting needs and costs, and the one to take; with ``--longest`` its longest sequence."""
    if options.longest:
        return _plan_longest(options)
    if options.seq is None:
        raise ConfigError("--seq is missing: give the tokens of a sequence, such as --seq 32k, or --longest.")
    setup_of, title, notes = _setup(options)
    setup = setup_of(options.seq)
    notes += _notes_of_run(setup)
    rows, plan = rows_of(setup)
    is_known = setup.device.memory_bytes is not None
    chosen = recommended(rows) if is_known else None
    found = _to_dict(setup, rows, plan, chosen)
    title = f"{options.model}, batch {options.batch} x {options.seq} tokens, {title}"
    lines = [*_table(setup, rows), "", *_verdict(setup, rows, chosen)]
    if options.nodes * options.gpus_per_node > 1:
        row = chosen or next(one for one in rows if one.name == ADAPTIVE)
        found["scale"] = scale(setup, row, options.nodes, options.network_gbps)
        lines += ["", *_at_scale(setup, row, found["scale"])]
    if options.details:
        lines += ["", *_details(setup, plan, found)]
    if options.write is not None:
        new = {**setup.training.config, "train_micro_batch_size_per_gpu": options.batch}
        found["write"] = write_merged(options.write, new, None if chosen is None else chosen.merged)
        lines.append(found["write"])
    return _result(3 if is_known and chosen is None else 0, title, options.batch, lines, found, notes)


def _result(status: int, title: str, batch: int, lines: Sequence[str], found: Found, notes: Sequence[str]) -> Result:
    shown = [f"model       {title}", *lines, "", "assumed", *(f"  {note}" for note in notes)]
    return Result(status, shown, {"title": title, "batch": batch, **found, "notes": notes})


def _plan_longest(options: argparse.Namespace) -> Result:
    if options.gpu is None:
        raise ConfigError("--longest needs --gpu: its memory or name, such as --gpu 24GB.")
    if options.write is not None:
        raise ConfigError("--longest writes no config: plan again with --seq, the length that you want, and --write.")
    setup_of, title, notes = _setup(options)
    first = options.seq or FIRST_LENGTH
    found = longest_of(setup_of, first)
    setup = setup_of(first)
    notes += _notes_of_run(setup)
    title = f"{options.model}, batch {options.batch}, {title}"
    lines = [*_head(setup, found[0].row), "", *_table_of_longest(setup, found)]
    rows = [{"sequence": one.sequence, "is_most": one.is_most, **asdict(one.row)} for one in found]
    told = {"gpu_bytes": setup.device.memory_bytes, "longest": rows}
    return _result(0 if any(one.sequence for one in found) else 3, title, options.batch, lines, told, notes)


def _setup(options: argparse.Namespace) -> tuple[Setups, str, list[str]]:
    """Return the setups by the length of the sequence, a title, and what the figures rest on.

    Options and config are looked at first: what is wrong with them is told before transformers is imported.
    """
    training = read_training(options.config)
    options.batch = options.batch or training.micro_batch or 1
    offload = with_staging(training.offload, math.inf, is_host=options.device == "cpu")
    if options.nvme_path:
        offload = offload.model_copy(update={"nvme_path": options.nvme_path})
    training = replace(training, offload=offload)
    given = options.tflops, options.memory_gbps, options.copy_gbps
    device = device_of(options.device, options.gpu, training.autocast or training.dtype or torch.float32, given)
    paths, drives = _drives(training, options.write_gbps, options.read_gbps, options.gpus_per_node)
    tbw, drive_count, rating = _endurance(options.drive_tbw, training)
    stored_share, compression_notes = _compression(options.compression_ratio, offload.io.compression)
    ranks, sharers = options.ranks or options.nodes * options.gpus_per_node, options.gpus_per_node
    where = offload.nvme_path or "/local_nvme"
    chosen = {"--fused-loss": options.fused_loss, "--tiled-mlp": options.tiled_mlp}
    aids = frozenset(name for name, is_chosen in chosen.items() if is_chosen)
    recipe = recipe_of(options.model)

    @cache
    def setup_of(sequence: int) -> Setup:
        run = dry_run(recipe, options.batch, sequence, training, device, paths, options.lora, aids)
        return Setup(
            run, training, device, ranks, tbw / sharers, where, sharers, drive_count, batch=options.batch, aids=aids,
            stored_share=stored_share,
        )  # fmt: skip

    kind = "dtypes of the model" if training.dtype is None else str(training.dtype).removeprefix("torch.")
    adapted = f", LoRA of rank {options.lora}" if options.lora else ""
    notes = [
        *training.notes,
        *(_AID_NOTES[name] for name in sorted(aids)),
        f"GPU peak: {FRAGMENTATION:.0%} of saved and temporary tensors are lost to fragmentation, "
        f"{readable(CONTEXT_BYTES)} to the CUDA context; a peak above {TIGHT:.0%} of the GPU is tight",
        f"rates of one {device.name}{', but those that were given' if any(given) else ''}: {device.flops / 1e12:.3g} "
        f"TFLOP/s, memory {device.memory_bytes_per_s / 1e9:.4g} GB/s, copies {device.copy_bytes_per_s / 1e9:.3g} GB/s",
        f"rates of the drives {drives}{f'; each GPU has 1/{sharers} of them' if sharers > 1 else ''}",
        f"drives of a node rated {rating} (--drive-tbw has yours, together); TB a day, host memory and swap "
        "space in the table are one GPU's",
        *compression_notes,
        "an operation takes the time of its FLOPs, of its bytes or of its launch, whichever is longest; communication "
        f"is left out; states in host memory are updated at {HOST_BYTES_PER_S / 1e9:g} GB/s; what ZeRO offloads "
        "goes over PCIe, and a step takes that long at least",
        "what rematerialization has a rule for is taken to come out equal; the model is in training mode",
    ]
    return setup_of, f"{kind}{adapted}{''.join(f', {name[2:]}' for name in sorted(aids))}", notes


_AID_NOTES = {
    "--fused-loss": "the loss is fused, as Liger's: as many logits at a time as hidden states; gradients in forward",
    "--tiled-mlp": "MLPs run in tiles as long as hidden states are wide, as DeepSpeed's; again in backward",
}


def _notes_of_run(setup: Setup) -> list[str]:
    attention = ", ".join(setup.run.attention) or "none of PyTorch"
    return [*setup.run.notes, f"attention on {setup.device.kind}: {attention}"]


def _drives(
    training: Training, write: float | None, read: float | None, sharers: int = 1
) -> tuple[tuple[PathRates, ...], str]:
    """Return a rank's part of the drives' rates, and where these are from: given, measured here, or documented.

    An aio op that is not built is not built for this.
    """
    config, source = training.offload, "of the data sheet of one PCIe 4.0 drive"
    if write and read:
        source = "write and read as given"
    elif write or read:
        source = f"{'write' if write else 'read'} as given, else {source}"
    elif config.nvme_paths:
        # Measuring with it would compile the op for minutes.
        if config.io.backend == "aio":
            config = config.model_copy(update={"io": config.io.model_copy(update={"backend": None})})
        try:
            found, written_bytes = probe(config, training.aio)
            told = f"measured here at {', '.join(config.nvme_paths)}, which wrote {written_bytes / 1e6:.0f} MB"
            return tuple(PathRates(*(rate / sharers for rate in one)) for one in found), told
        except (ConfigError, BackendUnavailableError) as error:
            source += f" (nvme_path cannot be measured here: {error})"
    rates = (write or WRITE_BYTES_PER_S) / sharers, (read or READ_BYTES_PER_S) / sharers
    path = PathRates(*rates, *(CONCURRENT_FRACTION * rate for rate in rates))
    return (path,), f"{source}; {CONCURRENT_FRACTION} of each while both run"


def _compression(given: float | None, configured: str | None) -> tuple[float, list[str]]:
    """Return the bytes that compression leaves of one, and what to say of them."""
    if given is None and configured is None:
        return 1.0, []
    assumed = "assumed, as in BF16; FP16 and FP32 shrink less: the report of a run has yours"
    source = assumed if given is None else "as given"
    ratio = ASSUMED_RATIO if given is None else given
    return ratio, [f"compression leaves {ratio:g} of the bytes that are written a day ({source})"]


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


def _table(setup: Setup, rows: Sequence[Row]) -> Iterator[str]:
    first = next((row for row in rows if row.verdict in ("fits", "tight")), rows[0])
    yield from _head(setup, rows[0])
    yield f"temporary   up to {readable(setup.run.temporary_bytes)}, with logits and the gradients of activations"
    yield ""
    cells: list[tuple[str, ...]] = [("setting", "activations", "GPU peak", "verdict", "step", *_COSTS)]
    for row in rows:
        step = row.cost.step_s / first.cost.step_s if first.cost.step_s else 1.0
        sizes = readable(row.cost.peak_saved_bytes), readable(row.need_bytes)
        cells.append((row.name, *sizes, row.verdict or "?", f"x {step:.2f}", *_costs(row)))
    yield from aligned(cells)
    yield f"            {first.name!r} takes {first.cost.step_s:.3g} s a step"


def _table_of_longest(setup: Setup, found: Sequence[Longest]) -> Iterator[str]:
    cells: list[tuple[str, ...]] = [("setting", "longest sequence", "GPU peak", "s a step", "tokens a s", *_COSTS)]
    for one in found:
        sequence, row = one
        length = f"{'more than ' if one.is_most else ''}{sequence:,}" if sequence else f"not {UNIT}"
        speed = setup.batch * sequence / row.cost.step_s * setup.training.micro_steps if row.cost.step_s else 0.0
        times = (f"{row.cost.step_s:.3g}", f"{speed:,.0f}", *_costs(row)) if sequence else ("-",) * (2 + len(_COSTS))
        cells.append((row.name, length, readable(row.need_bytes), *times))
    yield from aligned(cells)
    longest = max(found, key=attrgetter("sequence"))
    if not longest.sequence:
        return
    yield f"longest     {longest.sequence:,} tokens: {longest.row.name!r}"
    yield from _instructions(longest.row)
    yield from _of_node(setup, longest.row)
    yield from _wear(setup, longest.row)
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


def _verdict(setup: Setup, rows: Sequence[Row], chosen: Row | None) -> Iterator[str]:
    if setup.device.memory_bytes is None:
        yield "--gpu (24GB, or a name) says what fits, and recommends a setting"
        return
    if chosen is None:
        least = min(rows, key=attrgetter("need_bytes"))
        yield f"NOTHING FITS: {least.name!r} needs least, {readable(least.need_bytes)}; what holds most of it:"
        yield from (
            f"  {readable(nbytes):>10}  {name}: {remedy(name, setup)}" for name, nbytes in holders(least, setup.run)[:3]
        )
        return
    how = "it fits" if chosen.verdict == "fits" else "nothing fits with a margin, it is tight"
    such = "fits and lets the drives last for a year" if chosen.spares_drives else "fits"
    fastest = f"no setting that {such} is more than {SAME_STEP - 1:.0%} faster"
    yield f"recommended {chosen.name!r}: {how}; {fastest}"
    yield from _instructions(chosen, " (--write FILE merges it)")
    yield from _of_node(setup, chosen)
    yield from _wear(setup, chosen)


def _of_node(setup: Setup, row: Row) -> Iterator[str]:
    """Say what all GPUs of a node take of its memory and drives: the table has what one takes."""
    taken = {"host memory": row.host_bytes, "swap space": row.swap_bytes}
    found = [f"{readable(setup.sharers * nbytes)} of {what}" for what, nbytes in taken.items() if nbytes]
    if found and setup.sharers > 1:
        yield f"            the {setup.sharers} GPUs of a node take {' and '.join(found)}"
    elif found and setup.ranks > 1:
        yield f"            each GPU of a node takes {' and '.join(found)}: --gpus-per-node adds them up"


def _instructions(row: Row, how: str = "") -> Iterator[str]:
    """Say what to change for a row."""
    if row.advice:
        yield f"            {row.advice}"
    if row.merged:
        yield f"            into ds_config.json{how}:"
        yield from (f"  {line}" for line in json.dumps(row.merged, indent=2).splitlines())
    elif not row.advice:
        yield "            nothing has to be changed"


def _wear(setup: Setup, row: Row) -> Iterator[str]:
    if row.spares_drives or row.life_days is None:
        return
    each_tbw = setup.tbw * setup.sharers / setup.drives
    keys = f'"ssd": {{"rated_endurance_tbw": {each_tbw:.4g}, "min_life_days": {SHORT_LIFE_DAYS:g}}}'
    less = f": with {keys} plans write less" if row.merged.get(BLOCK, {}).get("placement") == "adaptive" else ""
    yield f"            IT WEARS the drives out in {_life(row.life_days)}{less}"


def _at_scale(setup: Setup, row: Row, found: Found) -> Iterator[str]:
    moved = "on average over a step" if row.cost.written_bytes else "nothing is written"
    yield f"at scale    {found['nodes']} x {setup.sharers} GPUs, {row.name!r}, {moved}"
    cells = [("", "written a step", "write GB/s", "read GB/s", "TB a day", "drives last")]
    of_node = [found[key] for key in ("written_bytes", "write_bytes_per_s", "read_bytes_per_s")]
    for name, parts in (("GPU", setup.sharers), ("drive", setup.drives), ("node", 1), ("job", 1 / found["nodes"])):
        nbytes, write, read = (value / parts for value in of_node)
        per_day, life = setup.sharers * row.written_bytes_per_day / parts / 1e12, _life(row.life_days)
        cells.append((name, readable(nbytes), f"{write / 1e9:.2f}", f"{read / 1e9:.2f}", f"{per_day:.2f}", life))
    yield from aligned(cells) if row.cost.written_bytes else ()
    if found["nodes"] > 1:
        left = max(0.0, 1 - found["network_s"] / row.cost.step_s)
        yield (
            f"network     into each node, and as much out: {readable(found['network_bytes'])} of ZeRO-"
            f"{found['stage']} a step, {found['network_s']:.3g} s of {row.cost.step_s:.3g}; {left:.0%} is left"
        )


def _details(setup: Setup, plan: Plan, found: Found) -> Iterator[str]:
    run = setup.run
    cells = [("saved for backward", "passes", "saved", "may be moved")]
    for group in found["groups"][:_SHOWN_GROUPS]:
        sizes = readable(group["saved_bytes"]), readable(group["movable_bytes"])
        cells.append((group["name"], str(group["count"] or ""), *sizes))
    yield from aligned(cells)
    yield ""
    shares = [f"{word} {readable(nbytes)}" for word, nbytes in found["plan_bytes"].items()]
    again = f"{sum(plan.recomputed_blocks)} of {len(plan.recomputed_blocks)} passes are recomputed"
    yield f"adaptive    {', '.join(shares) or 'nothing is saved'}; {again}"
    for what, ops in (("can be", found["made_again_bytes"]), ("the plan", made_again(run, plan.placements))):
        named = [f"{op} {readable(nbytes)}" for op, nbytes in list(ops.items())[:_SHOWN_OPS]]
        yield f"made again  {what}: {readable(sum(ops.values()))} ({', '.join(named) or 'no op'})"
    moved = [one for one in run.trace.storages if one.is_movable and one.blocks]
    if moved:
        nbytes, turn_s = sum(one.nbytes for one in moved), min(one.first_backward_use_s for one in moved)
        spans = turn_s - min(one.pack_s for one in moved), run.trace.end_s - turn_s
        write, read = (f"{nbytes / span_s / 1e9:.1f}" if span_s else "?" for span_s in spans)
        yield (
            f"bandwidth   to move all {readable(nbytes)} at no cost in time: {write} GB/s written in forward, {read} "
            "GB/s read in backward"
        )


def _to_dict(setup: Setup, rows: Sequence[Row], plan: Plan, chosen: Row | None) -> Found:
    run, resources, shares = setup.run, setup.run.trace.resources, Counter[str]()
    for storage, placement in zip(run.trace.storages, plan.placements, strict=True):
        shares[placement.word] += storage.nbytes if storage.blocks else 0
    keys = (
        "parameters", "parameter_bytes", "trained", "saved_bytes", "peak_saved_bytes", "packed_tensors",
        "temporary_bytes", "attention",
    )  # fmt: skip
    return {
        **{key: getattr(run, key) for key in keys},
        "ran_on": run.runs_on,
        "gpu_bytes": setup.device.memory_bytes,
        "write_bytes_per_s": resources.write_bytes_per_s,
        "read_bytes_per_s": resources.read_bytes_per_s,
        "rows": [asdict(row) for row in rows],
        "recommended": None if chosen is None else chosen.name,
        "plan_bytes": +shares,
        "groups": groups_of(run.trace),
        "made_again_bytes": made_again(run),
    }


def write_merged(path: Path, new: DsConfig, merged: DsConfig | None) -> str:
    """Merge into a ``ds_config.json``, of which a backup is kept; return a line that says so, or why it was left alone.

    Args:
        new: the config that is merged into where there is no file.
        merged: what is recommended, if anything is.

    Raises:
        ConfigError: the file cannot be read or written, or the result is none that a run would take.
    """
    if merged is None:
        return f"not written {path}: nothing is recommended"
    if not merged and path.exists():
        return f"not written {path}: nothing in it has to be changed"
    old = read_config("--write", path) if path.exists() else new
    result, kept = _merged(old, merged), ""
    # A file that a run would refuse is not written over one that it takes.
    parse_block(result)
    try:
        if path.exists():
            backups = (path.with_name(f"{path.name}.bak{number or ''}") for number in range(1000))
            backup = next(one for one in backups if not one.exists())
            # Before the file itself, which a full disk would else leave without a copy.
            write_file(backup, path.read_text())
            kept = f"; what it was is in {backup}"
        write_file(path, json.dumps(result, indent=2) + "\n")
    except OSError as error:
        raise ConfigError(f"--write {path} cannot be written: {error.strerror}") from error
    return f"written to  {path}{kept}"


def _merged(old: DsConfig, new: DsConfig) -> DsConfig:
    """Merge ``new`` into ``old``, object by object."""
    objects = [key for key, value in new.items() if isinstance(value, dict) and isinstance(old.get(key), dict)]
    return {**old, **new, **{key: _merged(old[key], new[key]) for key in objects}}
