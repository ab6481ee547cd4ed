from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_tba.config import BLOCK, UPDATE_BLOCK, near_misses, parse_block, refuse_misplaced, with_staging
from ds_tba.errors import ConfigError
from ds_tba.update.config import parse_update_block

GOOD = {"enabled": True, "nvme_path": "/local_nvme"}


def refusal(block: Any, **more: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_block({BLOCK: block, **more})
    return str(caught.value)


def test_defaults_are_those_of_the_design() -> None:
    parsed = parse_block({BLOCK: GOOD})
    assert parsed is not None
    assert parsed[0].model_dump() == {
        "enabled": True,
        "nvme_path": "/local_nvme",
        "placement": "adaptive",
        "min_tensor_bytes": 1048576,
        "max_step_overhead": 0.02,
        "activation_budget_bytes": None,
        "rematerialize": True,
        "recompute": False,
        "blocks": None,
        "host_budget_bytes": 0,
        "io": {
            "backend": None,
            "write_lanes": 2,
            "read_lanes": 2,
            "staging_bytes": None,
            "swap_file_bytes": None,
            "integrity": "sampled",
        },
        "ssd": {"rated_endurance_tbw": None, "min_life_days": None},
        "report": {"path": None, "trace_path": None, "every_steps": 0},
    }


GIB = 1 << 30


@pytest.mark.parametrize(
    ("io", "host_bytes", "is_host", "expected"),
    [
        ({}, 512 * GIB, False, GIB),
        ({}, 8 * GIB, False, GIB // 2),
        ({}, GIB, False, GIB // 4),
        ({}, 8 * GIB + 16000, False, GIB // 2),  # in whole units of I/O
        ({}, 512 * GIB, True, GIB // 4),
        ({"backend": "gds"}, 512 * GIB, False, GIB // 4),
        ({"placement": "nvme"}, 512 * GIB, False, GIB // 4),
        ({"staging_bytes": 12345678}, 512 * GIB, False, 12345678),
    ],
)
def test_staging_is_derived_from_host_memory_where_it_is_null(
    io: dict[str, Any], host_bytes: float, is_host: bool, expected: int
) -> None:
    placement = {key: io[key] for key in ("placement",) if key in io}
    settings = {key: value for key, value in io.items() if key != "placement"}
    parsed = parse_block({BLOCK: {**GOOD, **placement, "io": settings}})
    assert parsed is not None
    found = with_staging(parsed[0], host_bytes, is_host=is_host)
    assert found.io.staging_bytes == found.io.ring_bytes == expected
    assert found.model_copy(update={"io": parsed[0].io}) == parsed[0]


def test_absent_or_disabled_is_none() -> None:
    assert parse_block({"zero_optimization": {"stage": 3}}) is None
    assert parse_block({BLOCK: {"enabled": False}}) is None


def test_a_disabled_block_is_still_checked() -> None:
    assert "placment" in refusal({"enabled": False, "placment": "nvme"})


def test_aio_settings_are_inherited() -> None:
    parsed = parse_block({BLOCK: GOOD, "aio": {"block_size": 262144, "queue_depth": 32, "thread_count": 1}})
    assert parsed is not None
    assert (parsed[1].block_size, parsed[1].queue_depth, parsed[1].overlap_events) == (262144, 32, True)


@pytest.mark.parametrize(
    ("block", "words"),
    [
        ({**GOOD, "placment": "nvme"}, ["placment", "did you mean `placement`?"]),
        ({**GOOD, "placement": "nvm"}, ["placement", "'nvm'", '"adaptive"', "did you mean `nvme`?"]),
        ({**GOOD, "io": {"backend": "libaio"}}, ["io.backend", "'libaio'", "did you mean `aio`?"]),
        ({**GOOD, "io": {"stagng_bytes": 1}}, ["io.stagng_bytes", "did you mean `staging_bytes`?"]),
        ({**GOOD, "min_tensor_bytes": "64MB"}, ["min_tensor_bytes", "'64MB'", "67108864"]),
        ({**GOOD, "min_tensor_bytes": True}, ["min_tensor_bytes", "True", "number"]),
        ({**GOOD, "min_tensor_bytes": -1}, ["min_tensor_bytes", "-1", "greater than or equal to 0"]),
        ({**GOOD, "min_tensor_bytes": 1.5}, ["min_tensor_bytes", "1.5"]),
        ({**GOOD, "min_tensor_bytes": 1 << 40}, ["min_tensor_bytes", "io.staging_bytes", "268435456"]),
        ({**GOOD, "max_step_overhead": float("nan")}, ["max_step_overhead", "nan"]),
        ({**GOOD, "io": {"write_lanes": 0}}, ["io.write_lanes", "0", "greater than or equal to 1"]),
        ({**GOOD, "io": 3}, ["io", "3"]),
        ({**GOOD, "blocks": ["layers.0", "layers.1", "layers.0"]}, ["blocks", "layers.0 more than once"]),
        ({**GOOD, "placement": "auto"}, ["placement", "auto", "leave the key out"]),
        ({**GOOD, "io": {"backend": "auto"}}, ["io.backend", "auto"]),
        ({**GOOD, "enabled": "true"}, ["enabled", "'true'", "boolean"]),
        ({**GOOD, "placement": "host"}, ["host_budget_bytes is 0"]),
        ({"enabled": True}, ["nvme_path", "missing", "/local_nvme"]),
        ({**GOOD, "nvme_path": []}, ["nvme_path", "[]", "non-empty"]),
        ({**GOOD, "nvme_path": 3}, ["nvme_path", "3", "directory"]),
        ({**GOOD, "nvme_path": ["/a", None]}, ["nvme_path", "None"]),
        ({**GOOD, "nvme_path": "/a\0b"}, ["nvme_path", r"'/a\x00b'", "NUL", "take that character out"]),
        ({**GOOD, "nvme_path": ["/a", "/\ud800"]}, ["nvme_path", r"'/\ud800'", "surrogate"]),
        ({**GOOD, "report": {"path": "/a\0"}}, ["report.path", r"'/a\x00'", "NUL"]),
        ({**GOOD, "report": {"trace_path": "/\udc80"}}, ["report.trace_path", r"'/\udc80'", "surrogate"]),
        (None, [BLOCK, "None", "object"]),
        ("yes", [BLOCK, "'yes'", "object"]),
    ],
)
def test_a_bad_value_is_named_with_its_rule_and_the_repair(block: Any, words: list[str]) -> None:
    message = refusal(block)
    assert all(word in message for word in [BLOCK, *words]), message


def test_choices_are_listed_once() -> None:
    message = refusal({**GOOD, "io": {"backend": "zzz"}})
    assert message.count("kvikio") == 1, message


def test_every_bad_value_is_named_at_once() -> None:
    message = refusal({**GOOD, "placment": 1, "io": {"integrity": "some", "read_lanes": 0}})
    assert all(word in message for word in ("placment", "io.integrity", "io.read_lanes"))


def test_aio_block_size_must_be_aligned() -> None:
    message = refusal(GOOD, aio={"block_size": 5000})
    assert "5000" in message and "4096" in message and "8192" in message


def test_integral_floats_are_integers_as_in_other_deepspeed_blocks() -> None:
    parsed = parse_block({BLOCK: {**GOOD, "min_tensor_bytes": 2e6}})
    assert parsed is not None and parsed[0].min_tensor_bytes == 2_000_000


def test_near_misses_of_the_name_are_found_and_other_keys_are_not() -> None:
    keys = ["activation_nvme_ofload", "activation-nvme-offload", "nvme_activation_offload", "Activation_NVMe_Offload"]
    keys += ["nvme_offload", "activation_offload", "activations_nvme_offloading", "offload_nvme"]
    others = ["zero_optimization", "activation_checkpointing", "aio", "data_types", "nebula", "amp", BLOCK]
    others += ["offload_param", "offload_optimizer", "cpu_checkpointing", "partition_activations", "nvme_path"]
    assert near_misses(dict.fromkeys(keys + others)) == keys


def test_near_misses_are_found_inside_other_blocks_and_not_inside_of_ours() -> None:
    config = {
        "zero_optimization": {"offload_param": {"device": "nvme"}, "nvme_offload": {}},
        BLOCK: {"nvme_offload": 1},
    }
    assert near_misses(config) == ["zero_optimization.nvme_offload"]


@pytest.mark.parametrize("outer", ["zero_optimization", "activation_checkpointing", "aio"])
def test_the_block_in_a_wrong_place_is_refused_with_the_right_one(outer: str) -> None:
    with pytest.raises(ConfigError, match=f'inside "{outer}".*move the block to the top level.*beside "{outer}"'):
        refuse_misplaced({"bf16": {"enabled": True}, outer: {"stage": 3, BLOCK: GOOD}})
    refuse_misplaced({outer: {"stage": 3}, BLOCK: GOOD})


@pytest.mark.parametrize(
    ("keys", "hint"),
    [
        ({"enabled": "true"}, "drop the quotes: true"),
        ({"recompute": " False"}, "drop the quotes: false"),
        ({"max_step_overhead": "0.05"}, "drop the quotes: 0.05"),
        ({"io": {"write_lanes": "4"}}, "drop the quotes: 4"),
        ({"min_tensor_bytes": "1048576"}, "drop the quotes: 1048576"),
        ({"min_tensor_bytes": "1MB"}, "'1MB' would be 1048576"),
    ],
)
def test_values_in_quotes_are_refused_with_what_to_write(keys: dict[str, Any], hint: str) -> None:
    assert hint in refusal({**GOOD, **keys})


def test_a_swap_file_smaller_than_any_tensor_is_refused() -> None:
    message = refusal({**GOOD, "min_tensor_bytes": 4 << 20, "io": {"swap_file_bytes": 2 << 20}})
    assert "io.swap_file_bytes 2097152" in message and "min_tensor_bytes 4194304" in message


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-10, 1 << 40) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=4,
)
top_keys = st.sampled_from([*(parse_block({BLOCK: GOOD}) or ({},))[0].__class__.model_fields, "typo"])


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(top_keys, json_values, max_size=4) | json_values)
def test_whatever_the_block_is_it_is_taken_or_refused_with_its_name(block: Any) -> None:
    try:
        parse_block({BLOCK: block})
    except ConfigError as error:
        assert BLOCK in str(error)


@pytest.mark.parametrize(
    "path", sorted(Path(__file__).parents[1].glob("ds_configs/*.json")), ids=lambda path: path.name
)
def test_shipped_configs_are_valid(path: Path) -> None:
    config = json.loads(path.read_text())
    assert (parse_block(config) is not None) == (BLOCK in config)
    assert not near_misses(config) and not near_misses(config, UPDATE_BLOCK)
    assert (parse_update_block(config) is not None) == (UPDATE_BLOCK in config)
