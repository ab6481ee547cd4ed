"""Numbers as people write them, and results as they are printed."""

from __future__ import annotations

import json
from argparse import ArgumentTypeError, Namespace
from typing import Any

import pytest

from ds_tba.cli.format import show, size


def test_sizes_are_as_people_write_them() -> None:
    assert [size(text) for text in ("1", "32k", "24GB", "24 GiB", "0.5M", "1T")] == [
        1, 32 << 10, 24 << 30, 24 << 30, 1 << 19, 1 << 40
    ]  # fmt: skip
    with pytest.raises(ArgumentTypeError, match="must be a whole number"):
        size("9" * 400)


def test_json_is_alone_on_the_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    def make(_: Namespace) -> tuple[int, list[str], Any]:
        print("of a model's own")
        return 3, ["a line"], {"a": 1}

    assert show("plan", make, Namespace(json=True)) == 3
    told = capsys.readouterr()
    assert json.loads(told.out) == {"a": 1} and told.err == "of a model's own\n"
    assert show("plan", make, Namespace(json=False)) == 3
    assert capsys.readouterr().out == "of a model's own\na line\n"
