"""Ranks that are forked, and what one run of the tests finds out once."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest
from support import ranks
from support.runs import SHARED, once


def test_once_is_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SHARED, str(tmp_path))
    made: list[str] = []

    def make(name: str) -> list[str]:
        made.append(name)
        return [name]

    found = [once(["a program", {"of": "this config"}], lambda: make("first")) for _ in range(2)]
    assert found == [["first"], ["first"]] and once(["another", {}], lambda: make("second")) == ["second"]
    assert made == ["first", "second"]


def test_what_fails_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SHARED, str(tmp_path))
    with pytest.raises(ZeroDivisionError):
        once("a program", lambda: 1 // 0)
    assert once("a program", lambda: 1) == 1


def fails_or_waits() -> None:
    sys.stdout.write(f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}, {os.environ['OF_A_TEST']}\n")
    sys.stdout.flush()
    if os.environ["RANK"] == "1":
        raise ValueError("the trouble of one rank")
    time.sleep(600)


@pytest.mark.engine
def test_where_one_rank_fails_the_others_are_ended(tmp_path: Path) -> None:
    codes, outputs = ranks.fork(fails_or_waits, directory=tmp_path, ranks=2, timeout_s=300, OF_A_TEST="told")
    assert codes == [-9, 1]
    assert [output.splitlines()[0] for output in outputs] == ["rank 0 of 2, told", "rank 1 of 2, told"]
    assert "ValueError: the trouble of one rank" in outputs[1]


@pytest.mark.engine
def test_who_is_late_is_ended(tmp_path: Path) -> None:
    codes, _ = ranks.fork(time.sleep, 600, directory=tmp_path, ranks=1, timeout_s=1)
    assert codes == [-9]
