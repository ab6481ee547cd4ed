"""The last report of a run, whatever fails; a run that has not trained says nothing; and the log."""

from __future__ import annotations

import json
import logging
import logging.config
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import Mock

import pytest
from support.offloaders import make, step

from ds_tba.offloader import ENGINES
from ds_tba.reporting import show_log


def test_a_run_that_has_not_trained_has_no_last_word(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "report.json"
    with caplog.at_level(logging.INFO, logger="ds_tba"):
        make(tmp_path, placement="keep", report={"path": str(path)}).close()
    assert not path.exists() and not caplog.messages


def test_whatever_fails_as_it_closes_the_last_report_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a device that has failed every question to an event raises."""
    path = tmp_path / "report.json"
    offloader = make(tmp_path, placement="nvme", report={"path": str(path)})
    step(offloader)
    close_tiers, told = offloader._tiers.close, list[threading.ExceptHookArgs]()
    fails = Mock(side_effect=RuntimeError("CUDA error: device-side assert triggered"))

    def fails_after() -> None:
        close_tiers()
        fails()

    offloader.on_close(fails)
    monkeypatch.setattr(offloader.cache, "settle", fails)
    monkeypatch.setattr(offloader._tiers, "close", fails_after)
    monkeypatch.setattr(threading, "excepthook", told.append)
    offloader.close()
    assert json.loads(path.read_text())["state"] == "finished"
    assert offloader.is_closed and offloader not in ENGINES.open
    assert [one.exc_type for one in told] == [RuntimeError]


def test_one_for_which_there_is_no_thread_is_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(ENGINES.open)
    monkeypatch.setattr("ds_tba.offloader.new_thread", Mock(side_effect=RuntimeError("can't start new thread")))
    with pytest.raises(RuntimeError, match="new thread"):
        make(tmp_path)
    assert before == set(ENGINES.open)


# ---- the log --------------------------------------------------------------------------------------------------------

OURS, PART, ROOT = logging.getLogger("ds_tba"), logging.getLogger("ds_tba.storage.path"), logging.getLogger()
BY_NAME = {"version": 1, "handlers": {"all": {"class": "logging.StreamHandler"}}, "root": {"handlers": ["all"]}}


@contextmanager
def logging_of_a_script() -> Iterator[None]:
    """Logging as at the start of a process: pytest has handlers of its own on the root logger."""
    before = [(one, one.handlers[:], one.level, one.disabled) for one in (OURS, PART, ROOT)]
    for one, *_ in before:
        one.handlers[:] = []
        one.setLevel("WARNING" if one is ROOT else "NOTSET")
    try:
        yield
    finally:
        for one, handlers, level, disabled in before:
            one.handlers[:], one.disabled = handlers, disabled
            one.setLevel(level)


def strict_root() -> None:
    handler = logging.StreamHandler()
    handler.setLevel("ERROR")
    ROOT.addHandler(handler)


CONFIGURED: dict[str, Callable[[], object]] = {
    "none": lambda: None,
    "basic": logging.basicConfig,
    "basic-info": lambda: logging.basicConfig(level="INFO"),
    "errors-only": strict_root,
    "null": lambda: ROOT.addHandler(logging.NullHandler()),
    "handler-of-ours": lambda: OURS.addHandler(logging.StreamHandler()),
    "dict": lambda: logging.config.dictConfig(BY_NAME),
}
LATE_DICT = ("dict", "after")


# A late dictConfig disables all loggers that it does not name, those that have spoken before, too.
@pytest.mark.parametrize(
    ("name", "when"), [(name, when) for name in CONFIGURED for when in ("before", "after") if (name, when) != LATE_DICT]
)
def test_a_line_is_seen_once_whatever_logging_a_script_configures(
    name: str, when: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with logging_of_a_script():
        if when == "before":
            CONFIGURED[name]()
        show_log()
        show_log()  # of a second engine
        if when == "after":
            CONFIGURED[name]()
        OURS.info("activations go")
        PART.error("a drive failed")
    said = capsys.readouterr().err
    assert (said.count("activations go"), said.count("a drive failed")) == (1, 1)


def test_the_level_of_a_script_and_of_the_environment_counts(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, level in (("program", "ERROR"), ("environment", "error"), ("mistake", "loud")):
        with logging_of_a_script():
            monkeypatch.setenv("DS_TBA_LOG_LEVEL", "INFO" if name == "program" else level)
            OURS.setLevel(level if name == "program" else "NOTSET")
            show_log()
            OURS.warning("of %s", name)
    assert capsys.readouterr().err.count("of ") == 1  # a level that is none counts as INFO
