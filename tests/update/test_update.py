from __future__ import annotations

from typing import Any

import pytest

from ds_tba.config import UPDATE_BLOCK
from ds_tba.errors import ConfigError
from ds_tba.update import UpdateConfig, parse_update_block

ZERO = {"stage": 3, "offload_optimizer": {"device": "cpu"}}


def test_absent_or_disabled_is_nothing() -> None:
    assert parse_update_block({}) is None and parse_update_block({UPDATE_BLOCK: {"enabled": False}}) is None
    assert parse_update_block({UPDATE_BLOCK: {}, "zero_optimization": ZERO}) == UpdateConfig()


@pytest.mark.parametrize(
    ("block", "zero", "words"),
    [
        ({"device_share": 1.5}, ZERO, ["device_share", "1.5", "less than or equal to 1"]),
        ({"device_share": "auto"}, ZERO, ["device_share", "auto"]),
        ({"device_share": True}, ZERO, ["device_share", "number"]),
        ({"chunk_bytes": 1}, ZERO, ["chunk_bytes", "65536"]),
        ({"device_buffer_bytes": 1 << 20}, ZERO, ["device_buffer_bytes", "335544320", "lower chunk_bytes"]),
        ({"device_shar": 1}, ZERO, ["device_shar", "did you mean `device_share`?"]),
        ({"report": {"every_steps": -1}}, ZERO, ["report.every_steps", "-1"]),
        ({"report": {"path": "/a\0"}}, ZERO, ["report.path", r"'/a\x00'", "pattern"]),
        ([], ZERO, ["is []: it must be an object"]),
        ({}, None, ["zero_optimization.stage", "is 0", "needs 3"]),
        ({}, ZERO | {"stage": 2}, ["zero_optimization.stage", "is 2"]),
        ({}, {"stage": 3}, ["offload_optimizer.device", "is null", 'needs "cpu"']),
        ({}, ZERO | {"offload_optimizer": "cpu"}, ["offload_optimizer.device", "is null", 'needs "cpu"']),
        ({}, ZERO | {"offload_optimizer": {"device": "nvme"}}, ["offload_optimizer.device", '"nvme"']),
    ],
)
def test_a_bad_value_is_named_with_the_rule_and_the_repair(block: Any, zero: Any, words: list[str]) -> None:
    """In the block, and of the stage and the offload that it needs beside it."""
    with pytest.raises(ConfigError) as found:
        parse_update_block({UPDATE_BLOCK: block, "zero_optimization": zero})
    assert all(word in str(found.value) for word in [UPDATE_BLOCK, *words]), found.value


def test_no_device_buffer_is_needed_where_all_is_on_the_host() -> None:
    assert UpdateConfig(device_share=0, device_buffer_bytes=0).device_share == 0
