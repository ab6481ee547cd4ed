"""What a terminal gets beside the text: colours of verdicts, and the shell's completion."""

from __future__ import annotations

import io
import sys
from argparse import ArgumentParser, Namespace
from types import ModuleType

import pytest

from ds_tba.cli import main
from ds_tba.cli.format import Result, painted, show

GREEN, YELLOW, RED, END = "\x1b[32m", "\x1b[33m", "\x1b[31m", "\x1b[0m"


@pytest.mark.parametrize(
    ("line", "verdict", "colour"),
    [
        ("ok    torch 2.9.1", "ok", GREEN),
        ("--    io.backend gds cannot run here", "--", YELLOW),
        ("FAIL  nvme_path", "FAIL", RED),
        ("not ready: repair it", "not ready", RED),
        ("as it is  9 GiB          fits  x 1.00", "fits", GREEN),
        ("as it is  9 GiB  does not fit  x 1.00", "does not fit", RED),
        ("recommended 'as it is': it fits; no setting that fits is faster", "recommended", GREEN),
        ("the plan fits what it can", "", ""),
    ],
)
def test_verdicts_have_colours_and_sentences_have_none(line: str, verdict: str, colour: str) -> None:
    assert painted(line) == (line.replace(verdict, f"{colour}{verdict}{END}") if verdict else line)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("variables", "has_colours"),
    [({}, True), ({"NO_COLOR": "1"}, False), ({"NO_COLOR": ""}, True), ({"TERM": "dumb"}, False)],
)
def test_a_terminal_has_colours_unless_its_user_wants_none(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], has_colours: bool
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "stdout", Terminal())
    show("doctor", lambda _: Result(0, ["FAIL  it"], {}), Namespace(json=False))
    assert sys.stdout.getvalue() == (f"{RED}FAIL{END}  it\n" if has_colours else "FAIL  it\n")  # type: ignore[attr-defined]


@pytest.mark.parametrize("output", [io.StringIO, Terminal])
def test_files_and_json_have_none(monkeypatch: pytest.MonkeyPatch, output: type[io.StringIO]) -> None:
    monkeypatch.setattr(sys, "stdout", output())
    show("doctor", lambda _: Result(0, ["x"], "FAIL  it"), Namespace(json=output is Terminal))
    assert "\x1b" not in sys.stdout.getvalue()  # type: ignore[attr-defined]


def test_a_shell_that_asks_gets_completions_where_argcomplete_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    class CompletedError(Exception):
        """In the place of ``os._exit``, with which argcomplete ends."""

    def autocomplete(parser: ArgumentParser) -> None:
        raise CompletedError(parser.prog)

    double = ModuleType("argcomplete")
    double.autocomplete = autocomplete  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "argcomplete", double)
    with pytest.raises(SystemExit):
        main([])  # no shell asks
    monkeypatch.setenv("_ARGCOMPLETE", "1")
    with pytest.raises(CompletedError, match="ds_tba"):
        main([])


def test_without_argcomplete_a_shell_gets_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_ARGCOMPLETE", "1")
    monkeypatch.setitem(sys.modules, "argcomplete", None)
    with pytest.raises(SystemExit):
        main([])
