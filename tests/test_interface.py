"""Names that users hold on to change only on purpose, and the pages and the schema made of them are in step."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from support import interface

import ds_tba

HINT = "a change for users: say it in CHANGELOG.md, then make freeze"


def test_keys_options_fields_and_names_are_frozen() -> None:
    assert json.loads(interface.FROZEN.read_text()) == json.loads(interface.frozen_text()), HINT


@pytest.mark.parametrize(
    ("path", "text"),
    [
        (interface.KEYS, interface.page_of_keys),
        (interface.COMMANDS, interface.page_of_commands),
        (interface.FIELDS, interface.page_of_fields),
        (interface.PYTHON, interface.page_of_python),
        (interface.SCHEMA, interface.schema_of_config),
    ],
    ids=["keys", "commands", "fields", "python", "schema"],
)
def test_the_reference_is_that_of_the_code(path: Path, text: Callable[[], str]) -> None:
    assert path.read_text() == text(), "make reference writes it anew"


def test_each_name_that_python_imports_is_on_its_page() -> None:
    page = interface.PYTHON.read_text()
    assert [name for name in ds_tba.__all__ if f"`ds_tba.{name}`" not in page and f"`{name}`" not in page] == []


def test_each_key_is_described() -> None:
    assert "**not described**" not in interface.KEYS.read_text()
