"""The results as Markdown. Every way and piece has a row; one without figures says why."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from typing import Any

from curves.table import lines

GIB = 1 << 30
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
        yield from ("", f"## {words}", "", "| piece | state | took | at |", "|---|---|---|---|")
        for name, one in own.items():
            state = one["state"] + (f": {one['reason']}" if one.get("reason") else "")
            yield f"| {name} | {_cell(state)} | {one['took_s']:.0f} s | {one['at']} |"
        yield ""
        yield from _PARTS[part]({name: one["found"] for name, one in own.items() if one["found"]})
    left = [part for part in PARTS if not any(one["part"] == part for one in pieces.values())]
    if left:
        yield from ("", "Not run: " + "; ".join(PARTS[part] for part in left) + ".")


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _facts(found: Mapping[str, Found]) -> Iterator[str]:
    yield from ("| fact | found |", "|---|---|")
    for facts in found.values():
        for name, fact in facts.items():
            for key, value in _flat(fact) if isinstance(fact, dict) else [("", fact)]:
                told = value if isinstance(value, str) else f"{value:.4g}"
                yield f"| {_cell(f'{name} {key}'.strip())} | {_cell(told)} |"


def _flat(fact: Found, above: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in fact.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{above}{key}, ")
        else:
            yield above + key, str(value) if isinstance(value, bool) else value


def _tests(found: Mapping[str, Found]) -> Iterator[str]:
    yield from ("| file | passed | failed | skipped | failed, and why skipped |", "|---|---|---|---|---|")
    for name, one in found.items():
        counts, told = one["counts"], [*one["failed"], *(f"{count} x {why}" for why, count in one["skipped"].items())]
        passed, skipped = counts.get("passed", 0), counts.get("skipped", 0)
        name = name.removeprefix("tests ")
        yield f"| {name} | {passed} | {len(one['failed'])} | {skipped} | {_cell('; '.join(told))} |"


def _smoke(found: Mapping[str, Found]) -> Iterator[str]:
    yield (
        "Each step against a run without us, kernels strictly deterministic; *keep again* is a second such run. "
        "Moved and made again: GiB in all steps."
    )
    yield ""
    yield "| dtype, streams | way | losses and gradients | to the host | written | made again | recomputed | plans |"
    yield "|---" * 8 + "|"
    for row in (row for one in found.values() for row in one["rows"]):
        verdict = f"**{_cell(row['failed'])}**" if row["failed"] else "equal"
        report = row.get("report") or {}
        moved = (f"{report[key] / GIB:.3f}" if report.get(key) else "" for key in MOVED)
        figures = " | ".join((*moved, str(report.get("plans") or "")))
        yield f"| {row['dtype']}, {row['streams']} | {row['way']} | {verdict} | {figures} |"
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
    yield "| call | " + " | ".join(profiled) + " |"
    yield "|---" * (1 + len(profiled)) + "|"
    for name in names:
        cells = (f"{events[name][0]}, {events[name][1]:.2f}" if name in events else "" for events in profiled.values())
        yield f"| `{name}` | " + " | ".join(cells) + " |"


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
        yield from ("", "| " + " | ".join(columns) + " |", "|---" * len(columns) + "|")
        rows = {row["name"]: row for row in one["rows"]}
        for row in one["rows"]:
            yield _row(row, rows.get(base, {}))
        yield from _waits(one["rows"])


def _row(row: Found, base: Found) -> str:
    equal = {True: "equal", False: "**DIFFERENT**", None: _cell(row["unproven"])}[row["equal"]]
    if "step_s" not in row or row["state"] != "runs":
        return f"| {row['title']} | {_cell(row['state'] + ': ' + row['reason'])} | | | | | | | | | {equal} |"
    ratio = row["to_base"]
    step = f"{ratio['median']:.3f} [{ratio['low']:.2f}-{ratio['high']:.2f}]"
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
    figures = (f"{row['step_s']:.3f}", step, host, peak, whole, part, allocated, numbers, moved, equal)
    return " | ".join((f"| {row['title']}", *figures)) + " |"


def longest(found: list[Found]) -> Iterator[str]:
    """Yield each way's longest sequence, and what ended it. Lengths measured with other layers do not mix."""
    for layers in dict.fromkeys(one["shape"]["layers"] for one in found):
        lengths = [one for one in found if one["shape"]["layers"] == layers]
        tried = ", ".join(f"{one['tokens']:,}" for one in lengths)
        yield from (
            "",
            f"{layers} layers, tried: {tried} tokens",
            "",
            "| way | longest sequence | at the next |",
            "|---|---|---|",
        )
        for name, title in dict.fromkeys((row["name"], row["title"]) for one in lengths for row in one["rows"]):
            rows = [(one["tokens"], row) for one in lengths for row in one["rows"] if row["name"] == name]
            ran = max((tokens for tokens, row in rows if row["state"] == "runs"), default=0)
            after = next((f"{tokens:,}: {row['state']}, {row['reason']}" for tokens, row in rows if tokens > ran), "")
            yield f"| {title} | {f'{ran:,}' if ran else 'none'} | {_cell(after)} |"


def _hooks(found: Mapping[str, Found]) -> Iterator[str]:
    for one in found.values():
        if "rows" in one:
            yield from ("| saved tensors | how many | pack us | unpack us | to kept |", "|---|---|---|---|---|")
            for row in one["rows"]:
                figures = " | ".join(f"{row[key]:.2f}" for key in ("pack_us", "unpack_us", "to_kept"))
                yield f"| {row['kind']} | {row['tensors']} | {figures} |"
            yield ""
        for shape in one.get("shapes", ()):
            yield from (shape["verdict"], "", *lines(shape["points"]), "")


def _update(found: Mapping[str, Found]) -> Iterator[str]:
    yield from (
        "| parameters | variant | update s | update / stock | step s | step / stock | losses |",
        "|---|---|---|---|---|---|---|",
    )
    for one in found.values():
        rounds, losses = one["rounds"], list(one["losses"].values())
        most = max(losses, key=len, default=[])
        equal = all(most[: len(other)] == other for other in losses)
        for name in dict.fromkeys(name for turns in rounds for name in turns):
            times = [statistics.median(turns[name][key] for turns in rounds) for key in ("update_s", "step_s")]
            ratios = [
                statistics.median(turns[name][key] / turns["stock"][key] for turns in rounds)
                for key in ("update_s", "step_s")
            ]
            figures = " | ".join(f"{time:.4f} | {ratio:.3f}" for time, ratio in zip(times, ratios, strict=True))
            yield f"| {one['parameters'] / 1e6:,.1f} M | {name} | {figures} | {'equal' if equal else '**DIFFERENT**'} |"


_PARTS = {
    "probe": _facts, "smoke": _smoke, "headline": _headline, "hooks": _hooks, "update": _update,
    "tests": _tests, "peers": _peers, "lengths": _lengths,
}  # fmt: skip
