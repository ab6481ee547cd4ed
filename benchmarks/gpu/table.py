"""The results as Markdown. Every way and piece has a row; one without figures says why."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import update_time
from benchmarking import GIB, markdown_table
from curves.table import lines

MOVED = ("host_bytes", "written_bytes", "rematerialized_bytes", "recomputed_bytes")
PARTS = {
    "headline": "Four layers of Llama-3-8B, 16k tokens",
    "smoke": "Losses and gradients, bit for bit",
    "probe": "The machine",
    "hooks": "Hook cost, and the recompute-offload-keep curve",
    "update": "The optimizer update",
    "tests": "Tests on the device",
    "peers": "Others' ways, and ours",
    "lengths": "Layers of Llama-3-8B, 4k to 128k tokens",
}
Found = Mapping[str, Any]


def markdown(results: Found) -> str:
    """Return the whole page."""
    return "\n".join(_lines(results)) + "\n"


def _lines(results: Found) -> Iterator[str]:
    pieces: dict[str, Found] = results["pieces"]
    title = "Rehearsal on the CPU, tiny: its figures mean nothing" if results["rehearsal"] else "Measured on a GPU"
    yield f"# {title}"
    yield ""
    yield "Made by `make gpu`; `benchmarks/gpu` says how each figure is measured."
    yield ""
    for where in dict.fromkeys(tuple({**one["machine"], "commit": one["commit"]}.items()) for one in pieces.values()):
        yield "- " + ", ".join(f"{key}: {value}" for key, value in where)
    for part, words in PARTS.items():
        own = {name: one for name, one in pieces.items() if one["part"] == part}
        if not own:
            continue
        states = {name: ": ".join(filter(None, (one["state"], one.get("reason")))) for name, one in own.items()}
        rows = [(name, _cell(states[name]), f"{one['took_s']:.0f} s", one["at"]) for name, one in own.items()]
        yield from ("", f"## {words}", "", *markdown_table(("piece", "state", "took", "at"), rows), "")
        yield from _PARTS[part]({name: one["found"] for name, one in own.items() if one["found"]})
    left = [part for part in PARTS if not any(one["part"] == part for one in pieces.values())]
    if left:
        yield from ("", "Not run: " + "; ".join(PARTS[part] for part in left) + ".")


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _facts(found: Mapping[str, Found]) -> Iterator[str]:
    rows = [row for facts in found.values() for name, fact in facts.items() for row in _flat(name, fact)]
    yield from markdown_table(("fact", "found"), rows)


def _flat(name: str, fact: Any) -> Iterator[tuple[str, str]]:
    if not isinstance(fact, dict):
        yield _cell(name), f"{fact:.4g}" if isinstance(fact, float) else _cell(str(fact))
        return
    for key, value in fact.items():
        yield from _flat(f"{name} {key}", value)


def _tests(found: Mapping[str, Found]) -> Iterator[str]:
    rows = []
    for name, one in found.items():
        told = [*one["failed"], *(f"{count} x {why}" for why, count in one["skipped"].items())]
        passed, skipped = (one["counts"].get(kind, 0) for kind in ("passed", "skipped"))
        rows.append((name.removeprefix("tests "), passed, len(one["failed"]), skipped, _cell("; ".join(told))))
    yield from markdown_table(("file", "passed", "failed", "skipped", "failed, and why skipped"), rows)


def _smoke(found: Mapping[str, Found]) -> Iterator[str]:
    yield "Each step against a run without us, kernels strictly deterministic; *keep again* is a second such run."
    yield from ("Moved and made again: GiB in all steps.", "")
    rows = []
    for row in (row for one in found.values() for row in one["rows"]):
        verdict = f"**{_cell(row['failed'])}**" if row["failed"] else "equal"
        report = row.get("report") or {}
        moved = (f"{report[key] / GIB:.3f}" if report.get(key) else "" for key in MOVED)
        rows.append((f"{row['dtype']}, {row['streams']}", row["way"], verdict, *moved, report.get("plans") or ""))
    columns = ("dtype, streams", "way", "losses and gradients", "to the host", "written", "made again", "recomputed")
    yield from markdown_table((*columns, "plans"), rows)
    for one in found.values():
        if one["untried"]:
            yield from ("", "No time was left for: " + "; ".join(one["untried"]) + ".")


def _waits(rows: list[Found]) -> Iterator[str]:
    """Yield the calls of the device's runtime in one step of each way, those that wait for the device among them."""
    profiled = {row["title"]: row["profiled"] for row in rows if row.get("profiled")}
    names = sorted({name for events in profiled.values() for name in events})
    if not names:
        return
    yield from ("", "Calls of one step, and the milliseconds of the host in them:", "")
    rows = []
    for name in names:
        cells = (f"{events[name][0]}, {events[name][1]:.2f}" if name in events else "" for events in profiled.values())
        rows.append((f"`{name}`", *cells))
    yield from markdown_table(("call", *profiled), rows)


def _peers(found: Mapping[str, Found]) -> Iterator[str]:
    for one in found.values():
        yield from one["table"]


def _lengths(found: Mapping[str, Found]) -> Iterator[str]:
    yield from longest(sorted(found.values(), key=lambda one: one["tokens"]))
    yield from _headline(found)


def _headline(found: Mapping[str, Found]) -> Iterator[str]:
    for one in sorted(found.values(), key=lambda one: one["tokens"]):
        base = one["base"] or "nothing ran"
        yield ""
        yield (
            f"{one['tokens']:,} tokens, {one['shape']['layers']} layers of width {one['shape']['hidden']}, "
            f"{one['rounds']} rounds; ratios are to {base}; one strict step is compared with that of "
            f"{one['equal_to'] or '-'}; kept: {one['room']['kept'] / GIB:.2f} GiB are saved"
        )
        columns = ("way", "step s", "step / base [middle half]", "host: forward, backward s", "physical peak GiB",
                   "/ base", "activations / base", "peak GiB: allocated, reserved", "retries, mallocs, frees",
                   "per step: written, to the host, made again GiB", "loss, gradients, parameters")  # fmt: skip
        rows = {row["name"]: row for row in one["rows"]}
        yield from ("", *markdown_table(columns, [_row(row, rows.get(base, {})) for row in one["rows"]]))
        yield from _waits(one["rows"])


def _row(row: Found, base: Found) -> tuple[str, ...]:
    equal = {True: "equal", False: "**DIFFERENT**", None: _cell(row["unproven"])}[row["equal"]]
    if "step_s" not in row or row["state"] != "runs":
        return (row["title"], _cell(row["state"] + ": " + row["reason"]), *[""] * 8, equal)
    step = "{median:.3f} [{low:.2f}-{high:.2f}]".format(**row["to_base"])
    peak = f"{row['peak_bytes'] / GIB:.3f}" if "peak_bytes" in row else ""
    whole, part = (
        f"{row[key] / base[key]:.3f}" if row.get(key) and base.get(key) else ""
        for key in ("peak_bytes", "activation_peak_bytes")
    )
    keys = ("allocated_peak_bytes", "reserved_peak_bytes")
    allocated = ", ".join(f"{row[key] / GIB:.2f}" for key in keys if key in row)
    numbers = ", ".join(str(row[key]) for key in ("alloc_retries", "mallocs", "frees") if key in row)
    host = ", ".join(f"{row[key]:.3f}" for key in ("host_forward_s", "host_backward_s") if key in row)
    report = row.get("report")
    moved = ""
    if report and report["steps"]:
        keys = ("written_bytes", "host_bytes", "rematerialized_bytes")
        moved = ", ".join(f"{report[key] / report['steps'] / GIB:.2f}" for key in keys)
        moved += f"; {report['fallbacks']} fallbacks" if report["fallbacks"] else ""
    return row["title"], f"{row['step_s']:.3f}", step, host, peak, whole, part, allocated, numbers, moved, equal


def longest(found: list[Found]) -> Iterator[str]:
    """Yield each way's longest sequence, and what ended it. Lengths measured with other layers do not mix."""
    for layers in dict.fromkeys(one["shape"]["layers"] for one in found):
        lengths = [one for one in found if one["shape"]["layers"] == layers]
        tried = ", ".join(f"{one['tokens']:,}" for one in lengths)
        yield from ("", f"{layers} layers, tried: {tried} tokens", "")
        ends = []
        for name, title in dict.fromkeys((row["name"], row["title"]) for one in lengths for row in one["rows"]):
            rows = [(one["tokens"], row) for one in lengths for row in one["rows"] if row["name"] == name]
            ran = max((tokens for tokens, row in rows if row["state"] == "runs"), default=0)
            after = next((f"{tokens:,}: {row['state']}, {row['reason']}" for tokens, row in rows if tokens > ran), "")
            ends.append((title, f"{ran:,}" if ran else "none", _cell(after)))
        yield from markdown_table(("way", "longest sequence", "at the next"), ends)


def _hooks(found: Mapping[str, Found]) -> Iterator[str]:
    for one in found.values():
        if "rows" in one:
            figures = [(f"{row[key]:.2f}" for key in ("pack_us", "unpack_us", "to_kept")) for row in one["rows"]]
            rows = [(row["kind"], row["tensors"], *more) for row, more in zip(one["rows"], figures, strict=True)]
            yield from (*markdown_table(("saved tensors", "how many", "pack us", "unpack us", "to kept"), rows), "")
        for shape in one.get("shapes", ()):
            yield from (shape["verdict"], "", *lines(shape["points"]), "")


def _update(found: Mapping[str, Found]) -> Iterator[str]:
    for one in found.values():
        names = [name for name in one["rounds"][0] if name != update_time.STOCK]
        yield from update_time.table(one, [update_time.STOCK, *sorted(names)])
        yield from ("", *(f"- {line}" for line in update_time.verdicts(one)), "")


_PARTS = {
    "probe": _facts, "smoke": _smoke, "headline": _headline, "hooks": _hooks, "update": _update,
    "tests": _tests, "peers": _peers, "lengths": _lengths,
}  # fmt: skip
