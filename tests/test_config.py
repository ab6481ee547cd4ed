from __future__ import annotations

import ast
import importlib.util
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from support import runs

from ds_tba.config import BLOCK, BLOCKS, UPDATE_BLOCK, parse_block, parse_keywords, refuse_misnamed, zero_paths
from ds_tba.errors import ConfigError
from ds_tba.storage.staging import with_staging
from ds_tba.update import parse_update_block

GOOD = {"enabled": True, "nvme_path": "/local_nvme"}


def refusal(block: Any, **more: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_block({BLOCK: block, **more})
    return str(caught.value)


def test_names_choose() -> None:
    parsed = parse_block({BLOCK: {**GOOD, "only": ["*.mlp"], "except": ["*.down"]}})
    assert parsed is not None and parsed[0].patterns == {"only": ["*.mlp"], "except": ["*.down"]}
    assert parse_keywords({**GOOD, "except_": ["a"]}, "call").patterns == {"except": ["a"]}


GIB = 1 << 30


@pytest.mark.parametrize(
    ("block", "host_gib", "is_host", "expected"),
    [
        ({}, 512, False, GIB),
        ({}, 8, False, GIB // 2),
        ({}, 1, False, GIB // 4),
        ({}, 15, False, GIB // 2),  # PyTorch pins powers of two
        ({}, 512, True, GIB // 8),  # of the memory that offloading is to free
        ({"io": {"backend": "gds"}}, 512, False, GIB // 4),
        ({"placement": "nvme"}, 512, False, GIB // 4),
        ({"io": {"staging_bytes": 12345678}}, 512, False, 12345678),
    ],
)
def test_staging_is_derived_from_host_memory_where_it_is_null(
    block: dict[str, Any], host_gib: int, is_host: bool, expected: int
) -> None:
    parsed = parse_block({BLOCK: {**GOOD, **block}})
    assert parsed is not None
    found = with_staging(parsed[0], host_gib * GIB, is_host=is_host)
    assert found.io.staging_bytes == found.io.ring_bytes == expected
    assert found.model_copy(update={"io": parsed[0].io}) == parsed[0]


WORSE = {"enabled": False, "placment": "nvme", "io": 3, "min_tensor_bytes": "auto", "max_step_overhead": 2, "": None}


def test_a_disabled_block_never_refuses() -> None:
    config = {BLOCK: WORSE, "aio": 3, "zero_optimization": {BLOCK: WORSE, UPDATE_BLOCK: WORSE}, "nvme_offload": WORSE}
    assert parse_block(config) is None
    assert parse_update_block({UPDATE_BLOCK: WORSE, "zero_optimization": 3}) is None
    refuse_misnamed(config)


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
        ({**GOOD, "min_tensor_bytes": "64MB"}, ["min_tensor_bytes", "'64MB'", "a JSON number, in the unit"]),
        ({**GOOD, "min_tensor_bytes": -1}, ["min_tensor_bytes", "-1", "greater than or equal to 0"]),
        # Not told as set: nobody has set it.
        ({**GOOD, "min_tensor_bytes": 1 << 40}, ["min_tensor_bytes", "above the 268435456 bytes of staging"]),
        ({**GOOD, "io": {"write_lanes": 0}}, ["io.write_lanes", "0", "greater than or equal to 1"]),
        ({**GOOD, "placement": "cpu"}, ["placement", "'cpu'", "did you mean `host`?"]),
        ({**GOOD, "placement": "auto"}, ["placement", "auto", "leave the key out"]),
        ({**GOOD, "enabled": "true"}, ["enabled", "'true'", "drop the quotes: true"]),
        ({**GOOD, "placement": "host"}, ["host_budget_bytes is 0"]),
        ({"enabled": True}, ["nvme_path", "missing", "/local_nvme", '"placement": "keep"']),
        ({**GOOD, "activation_budget_bytes": 8}, ["activation_budget_bytes", "is 8 bytes", "1 GiB is 1073741824"]),
        ({**GOOD, "nvme_path": []}, ["nvme_path", "[]", "non-empty"]),
        ({**GOOD, "nvme_path": ["/a", None]}, ["nvme_path", "None"]),
        ({**GOOD, "min_tensor_bytes": 4 << 20, "io": {"swap_file_bytes": 2 << 20}},
         ["io.swap_file_bytes 2097152", "min_tensor_bytes 4194304"]),
        ({**GOOD, "min_tensor_bytes": 1e30}, [f'"{BLOCK}.min_tensor_bytes" is 1e+30: ']),
        ({**GOOD, "max_step_overhead": 10**400}, [f'"{BLOCK}.max_step_overhead" is 1000']),
        ({**GOOD, "recompute": " False"}, ["drop the quotes: false"]),
        ({**GOOD, "min_tensor_bytes": "1048576"}, ["drop the quotes: 1048576"]),
        *(({**GOOD, "max_step_overhead": one}, [f"did you mean {one / 100:g}?"]) for one in (2, 5.0, 1, 2.5)),
        ({**GOOD, "except": []}, ['"activation_nvme_offload.except" is []: it must have at least 1 item']),
        ({**GOOD, "only": "*.mlp"}, [".only\" is '*.mlp': it must be a valid list"]),
        ({**GOOD, "except_": ["*.mlp"]}, ["did you mean `except`?"]),
        ({**GOOD, "report": {"path": "/a", "trace_path": "/a"}}, ["one path for two files"]),
        # Halves of surrogate pairs.
        *(({**GOOD, **half}, ["it must be a valid string"]) for half in (
            {"\ud800": 1}, {"placement": "\ud800"}, {"io": {"\ud800": 1}}, {"report": {"path": "/\udc80"}})),
        # Every bad value is named at once.
        ({**GOOD, "placment": 1, "io": {"integrity": "some", "read_lanes": 0}},
         ["placment", "io.integrity", "io.read_lanes"]),
        (None, [BLOCK, "None", "object"]),
        ("yes", [BLOCK, "'yes'", "object"]),
    ],
)  # fmt: skip
def test_a_bad_value_is_named_with_its_rule_and_the_repair(block: Any, words: list[str]) -> None:
    message = refusal(block)
    assert all(word in message for word in [BLOCK, *words]), message


NOT_OBJECTS: list[Any] = [3, 1.5, "x", True, None, [], [{}]]
NOT_NUMBERS: list[Any] = ["x", True, [], {}, math.nan, math.inf]
ODD: list[tuple[str, list[Any]]] = [
    *((key, NOT_OBJECTS) for key in ("io", "ssd", "report")),
    ("rematerialize", [3, "true", None, [], {"exclude": "gelu"}, {"exclude": [1, ""]}, {"exlude": []}]),
    ("blocks", [3, "x", {}, [3], [""], [None], True]),
    *((key, [*NOT_NUMBERS, None, -1, 2.5]) for key in ("min_tensor_bytes", "io.read_lanes")),
    ("host_budget_bytes", [*NOT_NUMBERS, -1, 2.5]),
    *((key, [*NOT_NUMBERS, -1]) for key in ("ssd.rated_endurance_tbw", "max_step_overhead", "io.staging_bytes")),
    *((key, [1, "true", None, [], {}]) for key in ("enabled", "recompute")),
    ("recompute", [[""], [1], "*"]),
    *((key, [3, True, [], {}, "zzz"]) for key in ("placement", "io.backend", "io.integrity", "io.compression")),
    *((key, [3, True, [], {}, ""]) for key in ("report.path", "report.trace_path", "nvme_path")),
]
FOREIGN = re.compile("instance of|pydantic|nput should|dictionary|Value error|validation|ReportConfig|literal")


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in ODD for value in values])
def test_no_word_of_pydantic_reaches_a_user(key: str, value: Any) -> None:
    outer, _, inner = key.rpartition(".")
    message = refusal({**GOOD, **({outer: {inner: value}} if outer else {key: value})})
    assert f'"{BLOCK}.{key}' in message and not FOREIGN.search(message), message
    assert "it must" in message or "is not a key" in message, message


@pytest.mark.parametrize(
    "block",
    [
        {"min_tensor_bytes": 2e6},  # as in other blocks of DeepSpeed
        *({"max_step_overhead": meant} for meant in (0, 0.5, 0.999, 100.0, 1000)),
        # Which stage nothing.
        {"placement": "keep", "min_tensor_bytes": 1 << 40},
        {"placement": "host", "nvme_path": None, "host_budget_bytes": 1, "min_tensor_bytes": 1 << 40},
    ],
)
def test_a_value_that_may_be_meant_is_taken(block: dict[str, Any]) -> None:
    parsed = parse_block({BLOCK: {**GOOD, **block}})
    assert parsed is not None and parsed[0].model_dump().items() >= block.items()


@pytest.mark.parametrize("key", ["on or off", "in detail", "", "{x}", 1])
def test_odd_keys_are_named_as_others_are(key: Any) -> None:
    for block, at in (({key: 1}, ""), ({"rematerialize": {key: 1}}, ".rematerialize"), ({"io": {key: 1}}, ".io")):
        if isinstance(key, str) or at:
            assert f'"{BLOCK}{at}.{key}"' in refusal({**GOOD, **block})


@pytest.mark.parametrize("zero", [True, False])
def test_the_old_form_of_zero_optimization_says_no_stage(zero: bool) -> None:
    with pytest.raises(ConfigError, match=r'"zero_optimization\.stage" is 0: .* needs 3'):
        parse_update_block({UPDATE_BLOCK: {}, "zero_optimization": zero})


def test_aio_blocks_that_are_not_aligned_or_overflow_in_deepspeeds_op_are_refused() -> None:
    """It reads and writes beyond its buffers then, and gradients were wrong."""
    for block_size, queue_depth in ((2 << 20, 1024), (1 << 20, 4096), (1 << 30, 3)):
        aio = {"block_size": block_size, "queue_depth": queue_depth}
        assert parse_block({BLOCK: GOOD, "aio": aio}) is not None
        message = refusal(GOOD, aio={**aio, "overlap_events": False})
        assert f"{block_size} times queue_depth {queue_depth} must be below" in message and "lower one" in message
    assert parse_block({BLOCK: GOOD, "aio": {"block_size": 16 << 20, "queue_depth": 127, "overlap_events": False}})
    assert '"aio.block_size" is 5000: it must be a multiple of 4096' in refusal(GOOD, aio={"block_size": 5000})


NEAR_MISSES = {
    BLOCK: [
        "activation_nvme_ofload", "activation-nvme-offload", "nvme_activation_offload", "Activation_NVMe_Offload",
        "nvme_offload", "activation_offload", "activations_nvme_offloading", "offload_nvme",
    ],
    UPDATE_BLOCK: [
        "interleaved_update", "interleaved-optimizer-update", "interleave_optimizer", "interleavd_optimizer_update",
        "optimizer_update_interleaved",
    ],
}  # fmt: skip
OTHERS = [
    "zero_optimization", "activation_checkpointing", "aio", "data_types", "nebula", "amp", "offload_param", "nvme_path",
    "offload_optimizer", "cpu_checkpointing", "partition_activations", "optimizer", "scheduler", "update_interval",
    "optimizer_update_freq", "interleaved", "activation", "nvme", "offload", "_activation_nvme_offload",
    "//activation_offload", "# nvme_offload", "activation_function", "pipeline_interleave", *BLOCKS,
]  # fmt: skip


@pytest.mark.parametrize("outer", ["", "zero_optimization", "activation_checkpointing"])
@pytest.mark.parametrize(("block", "name"), [(block, name) for block, names in NEAR_MISSES.items() for name in names])
def test_near_misses_of_a_block_are_refused_with_its_name(block: str, name: str, outer: str) -> None:
    for value in ({"enabled": True, "nvme_path": "/a"}, {}, True, "/a"):
        inner = {"stage": 3, name: value}
        with pytest.raises(ConfigError) as found:
            refuse_misnamed({"bf16": {"enabled": True}, **({outer: inner} if outer else inner)})
        where = f"{outer}.{name}" if outer else name
        assert f'a key "{where}"' in str(found.value) and f'did you mean "{block}"' in str(found.value)
        assert "remove the key" in str(found.value) and f'"_{name}"' in str(found.value)
    for off in ({"enabled": False, "typo": "auto"}, None, False):
        refuse_misnamed({outer: {name: off}} if outer else {name: off})


def test_other_keys_are_nobodys_business() -> None:
    refuse_misnamed({key: {"enabled": True} for key in OTHERS})
    refuse_misnamed({"zero_optimization": {key: 1 for key in OTHERS if key not in BLOCKS}, BLOCK: {"nvme_offload": 1}})
    refuse_misnamed({"my_settings": {"nvme_offload": {"path": "/a"}}})


def test_no_key_of_deepspeed_is_taken_for_ours() -> None:
    """Every name and every string of the modules that read its config."""
    root = Path(importlib.util.find_spec("deepspeed").origin).parent / "runtime"  # type: ignore[union-attr, arg-type]
    names: set[str] = set()
    for path in (*root.rglob("*config*.py"), *root.rglob("constants.py"), *root.rglob("*offload*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                names.add(node.target.id)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
                names.add(node.value)
    assert {"offload_optimizer", "activation_checkpointing", "cpu_checkpointing"} <= names and len(names) > 300
    refuse_misnamed({name: {"enabled": True} for name in names})
    refuse_misnamed({"zero_optimization": dict.fromkeys(names, 1), "activation_checkpointing": dict.fromkeys(names, 1)})


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("outer", ["zero_optimization", "activation_checkpointing", "aio"])
def test_a_block_in_a_wrong_place_is_refused_with_the_right_one(block: str, outer: str) -> None:
    with pytest.raises(ConfigError, match=f'inside "{outer}".*move the block to the top level.*beside "{outer}"'):
        refuse_misnamed({"bf16": {"enabled": True}, outer: {"stage": 3, block: GOOD}})
    refuse_misnamed({outer: {"stage": 3}, block: GOOD})


@pytest.mark.parametrize("path", sorted(runs.ROOT.glob("ds_configs/*.json")), ids=lambda path: path.name)
def test_shipped_configs_are_valid(path: Path) -> None:
    config = json.loads(path.read_text())
    assert (parse_block(config) is not None) == (BLOCK in config)
    refuse_misnamed(config)
    assert (parse_update_block(config) is not None) == (UPDATE_BLOCK in config)


def test_the_directories_of_zero_s_own_offload_are_those_on_nvme() -> None:
    nvme, cpu = {"device": "nvme", "nvme_path": "/a"}, {"device": "cpu", "nvme_path": "/b"}
    assert zero_paths({"zero_optimization": {"offload_param": nvme, "offload_optimizer": cpu}}) == ("/a",)
    assert zero_paths({"zero_optimization": {"offload_param": nvme, "offload_optimizer": nvme}}) == ("/a", "/a")
    for zero in ({"offload_param": None}, {"offload_param": "nvme"}, {"stage": 3}, True):
        assert zero_paths({"zero_optimization": zero}) == ()
    assert zero_paths({}) == ()


CIRCLE: dict[str, object] = {}
CIRCLE["itself"] = CIRCLE


@pytest.mark.parametrize(
    "value", [{(1, 2): 3}, CIRCLE, b"/tmp", {"/tmp"}, object()], ids=["key", "circle", "bytes", "set", "object"]
)
def test_what_no_json_file_could_have_is_refused(value: object) -> None:
    with pytest.raises(ConfigError, match=r"^Offloader\(nvme_path=\.\.\.\) is .*, which no JSON file could have"):
        parse_keywords({"nvme_path": value}, "Offloader")
