"""The shell's completion."""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from types import ModuleType

import pytest

from ds_tba.cli import main


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
