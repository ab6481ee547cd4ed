"""What the documentation quotes of the log is what runs say, and the messages of a user's trouble are all in it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import runs

DOCS = runs.ROOT / "docs"
# Errors that say where a bug of ours is, or that are turned into one for users.
INTERNAL = {"LinAlgError", "StateError", "TransferError", "TypeError", "RuntimeError", "AttributeError"}
# Of plan/ without the files that only compute: traces and plans come from our own code, or from a developer's.
PURE = {"plan", "replay", "search", "timeline", "trace"}
PARTS = ("storage", "plan", "core/residency.py", "offloader.py", "report.py", "reporting.py", "loop.py")
GAP = "..."


def text_of(node: ast.expr) -> str | None:
    """A string as it stands in the code, with ``...`` for what is filled in."""
    match node:
        case ast.Constant(value=str(text)):
            return re.sub(r"%(\.\d)?[sdf]|\{\w+\}", GAP, text.replace("%%", "%"))
        case ast.JoinedStr(values=parts):
            return "".join(text_of(part) or GAP for part in parts)
    return None


def messages_of(path: Path) -> Iterator[str]:
    """What a file raises for users, or logs as a warning or an error."""
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Call) or not node.args:
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        is_error = name.endswith("Error") and name not in INTERNAL
        text = text_of(node.args[name == "_warn_once"])
        if text and (is_error or name in ("warning", "error", "_warn_once")):
            yield text


def files() -> list[Path]:
    roots = [runs.ROOT / "ds_tba" / part for part in PARTS]
    found = [path for root in roots for path in (sorted(root.rglob("*.py")) if root.is_dir() else [root])]
    return [path for path in found if not (path.parent.name == "plan" and path.stem in PURE)]


CODE = [text for path in files() for text in messages_of(path)]
# A text that is nearly all filled in tells nothing by itself.
TELLING = [text for text in CODE if len(re.sub("[^a-z]", "", text)) >= 12]
TEXTS = [
    text
    for path in (runs.ROOT / "ds_tba").rglob("*.py")
    for node in ast.walk(ast.parse(path.read_text()))
    if isinstance(node, (ast.Constant, ast.JoinedStr)) and (text := text_of(node))
]
TABLE = (DOCS / "trouble" / "messages.md").read_text().partition("## Messages")[2]
QUOTED = [
    one for line in TABLE.splitlines() if line.startswith("| `") for one in re.findall("`(.+?)`", line.split(" | ")[0])
]


def is_in(quoted: str, text: str) -> bool:
    """Whether the quoted pieces come in the text in this order."""
    pieces = [piece.strip() for piece in quoted.split(GAP) if piece.strip()]
    return re.search(".*?".join(map(re.escape, pieces)), text, re.DOTALL) is not None


@pytest.mark.parametrize("quoted", QUOTED)
def test_what_the_table_quotes_is_in_the_code(quoted: str) -> None:
    assert any(is_in(quoted, text) for text in TEXTS)


@pytest.mark.parametrize("text", TELLING)
def test_each_message_is_in_the_table(text: str) -> None:
    assert any(is_in(quoted, text) for quoted in QUOTED)


# ---- lines of the log -----------------------------------------------------------------------------------------------

QUOTES = [
    line.strip()
    for path in [runs.ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
    for line in path.read_text().splitlines()
    if line.startswith("[ds_tba")
]


def general(line: str) -> str:
    """A line without what differs from run to run, and with a wildcard for what the documentation leaves out."""
    line = re.sub(r"/[\w/.-]+ \([^)]*\)", "PATH", line)
    line = re.sub(r"backend \w+(?: \([^)]*\))?", "BACKEND", line)
    line = re.sub(r"(?:(?:keep|host|nvme|recompute|rematerialize) \d+ MiB(?:, )?)+", "PLACES", line)
    line = re.sub(r"[-+]?(?:\d[\d.]*(?:e-?\d+)?|\.\.\.)(?: [KMG]iB| B)?(?![\w.])", "*", line)
    return re.sub(r"\*$", "", line)


@pytest.mark.engine
def test_the_lines_of_the_log_in_the_documentation_are_those_of_a_run(tmp_path: Path) -> None:
    config = runs.with_block(runs.plain_config(), tmp_path, min_tensor_bytes=65536, max_step_overhead=1000.0)
    result = runs.run(config, tmp_path, "--steps", "6")
    assert result.returncode == 0, result.output
    said = [general(line.partition("[INFO] ")[2]) for line in result.output.splitlines() if "[INFO] [ds_tba" in line]
    assert len(QUOTES) == 4
    for quote in QUOTES:
        assert any(line.startswith(general(quote)) for line in said), (general(quote), said)
