"""Write ``docs/evidence/published.md``: GiB that others have measured, beside those of ``ds_tba plan`` for the same.

    python benchmarks/published.py [--only TEXT]

``published.json`` has the rows: who measured what, with which settings, and the options of ``ds_tba plan`` that say the
same. What the plan says is kept in ``results/published.json``; ``--only`` asks again for the rows whose options have a
text. All rows take four minutes, and the one in tiles as long again: nothing is trained, models have shapes alone.
"""

from __future__ import annotations

import json
import shlex
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarking import GIB, markdown_table, parser_of, write_json

HERE = Path(__file__).parent
TABLE, RESULTS = HERE / "published.json", HERE / "results/published.json"
PAGE = HERE.parent / "docs/evidence/published.md"
FAR = 0.15
LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "num_hidden_layers": 32}
HEADS = {"num_attention_heads": 32, "num_key_value_heads": 32, "max_position_embeddings": 32768}
LLAMA_3 = {**LLAMA, **HEADS, "vocab_size": 128256, "intermediate_size": 14336, "num_key_value_heads": 8}
MODELS: dict[str, dict[str, Any]] = {
    "Llama-2-7B": {**LLAMA, **HEADS, "vocab_size": 32000, "intermediate_size": 11008},
    "Llama-3-8B": LLAMA_3,
    "Llama-3.1-8B": {**LLAMA_3, "max_position_embeddings": 131072},
    "Qwen-7B": {**LLAMA, **HEADS, "vocab_size": 151936, "intermediate_size": 11008, "attention_bias": True},
}
HOST = {"device": "cpu"}
CONFIGS = {
    "no ZeRO": {"bf16": {"enabled": True}},
    "both offloads": {
        "bf16": {"enabled": True}, "optimizer": {"type": "AdamW"},
        "zero_optimization": {"stage": 3, "offload_optimizer": HOST, "offload_param": HOST},
    },
}  # fmt: skip


class Published(NamedTuple):
    """A measured figure: of which model, how and by whom, and the options and the row of the plan that say the same."""

    model: str
    setting: str
    source: str
    measured_gib: float
    config: str
    options: str
    row: str

    @property
    def name(self) -> str:
        return f"{self.model} {self.options}"


def published() -> tuple[dict[str, Any], list[Published]]:
    """Return what the table says of sources, and its rows."""
    told = json.loads(TABLE.read_text())
    rows = [
        Published(group["model"], group["setting"], group["source"], gib, group["config"],
                  group["options"].format(varied), group["row"])
        for group in told["groups"] for varied, gib in group["measured_gib"].items()
    ]  # fmt: skip
    return told, rows


def planned_gib(one: Published) -> float:
    """Return what ``ds_tba plan`` says that a row needs."""
    from ds_tba.cli import command_parser
    from ds_tba.cli.plan import setups
    from ds_tba.cli.plan.rows import fixed_rows

    with tempfile.TemporaryDirectory() as directory:
        model, config = Path(directory, "config.json"), Path(directory, "ds_config.json")
        model.write_text(json.dumps(MODELS[one.model]))
        config.write_text(json.dumps(CONFIGS[one.config]))
        options = command_parser().parse_args(["plan", str(model), "--config", str(config), *shlex.split(one.options)])
        setup_of, *_ = setups(options)
        (found,) = [row for row in fixed_rows(setup_of(options.seq)) if row.name == one.row]
    return round(found.need_bytes / GIB, 1)


def is_far(measured_gib: float, plan_gib: float) -> bool:
    return abs(plan_gib / measured_gib - 1) > FAR


def page(found: Mapping[str, float]) -> str:
    """Return the page for what the plan says by a row's name."""
    told, rows = published()
    lines = [told["head"]]
    for source, words in told["sources"].items():
        cells = [
            (one.model, f"`{one.options}`", f"{one.measured_gib:g}", f"{found[one.name]:.1f}",
             f"{found[one.name] / one.measured_gib:.2f}")
            for one in rows if one.source == source
        ]  # fmt: skip
        settings = {one.setting: None for one in rows if one.source == source}
        lines += [f"## {source}", "", words, "", *(f"- {one}" for one in settings), ""]
        heads = ["model", "options of `ds_tba plan`", "measured, GiB", "plan, GiB", "plan / measured"]
        lines += [*markdown_table(heads, cells), ""]
    return "\n".join(lines).rstrip() + "\n"


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__, only=("", "of the rows those whose options have this"))
    options = parser.parse_args(argv)
    found = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for one in published()[1]:
        if options.only in one.options or one.name not in found:
            found[one.name] = planned_gib(one)
            print(f"{one.name}: {found[one.name]} GiB, {found[one.name] / one.measured_gib:.2f} of it", flush=True)
            write_json(RESULTS, found)
    PAGE.write_text(page(found))


if __name__ == "__main__":
    main()
