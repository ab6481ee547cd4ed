"""Is there a block that nobody reads? Asked at the exit of a script without an engine."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

VARIABLE = "DS_TBA_BLOCK"
MOST_BYTES = 1 << 20  # of a file that may be a config
_HOOKED = "_ds_tba_hooked"  # the mark of ds_tba/engine.py on methods of an engine that has a block
_KEY = re.compile(r"""(?<![\w])activation_nvme_offload["']?\s*:""")
_OFF = re.compile(r"""["']?enabled["']?\s*:\s*false""")
_LAUNCHERS = ("/deepspeed/launcher/", "/torch/distributed/")  # which run no training themselves


def line(argv: Sequence[str], environ: Mapping[str, str]) -> str:
    """Return what to say at exit, empty where no block is in sight, or an engine has one."""
    script = argv[0] if argv else ""
    is_accelerate = Path(script).name.startswith("accelerate")
    is_training = script.endswith(".py") and not any(one in script for one in _LAUNCHERS)
    if not (is_accelerate or is_training) or _is_other_process(environ) or _has_engine():
        return ""
    # A script that failed has its own error to read; a line about a config below it would hide that.
    if hasattr(sys, "last_value") or {"-h", "--help"} & set(argv):
        return ""
    variable = environ.get(VARIABLE, "")
    if variable.strip() and not _OFF.search(variable):
        if is_accelerate:
            return ""
        return (
            f"ds_tba: {VARIABLE} is set, but this script built no DeepSpeed engine that trains, so no activation was "
            "offloaded: train with DeepSpeed (--deepspeed ds_config.json of the Trainer, or deepspeed.initialize), or "
            f"unset {VARIABLE}.\n"
        )
    for path in _configs(argv, environ, is_accelerate=is_accelerate):
        is_yaml = path.suffix in (".yaml", ".yml")
        if (is_accelerate and not is_yaml) or not _has_block(path):
            continue
        if is_yaml:
            return (
                f'ds_tba: "activation_nvme_offload" in {path} is read by nobody: Accelerate gives only its own keys to '
                "DeepSpeed. Put the block into a ds_config.json that deepspeed_config_file names, or set "
                f"{VARIABLE}.\n"
            )
        return (
            f'ds_tba: "activation_nvme_offload" in {path} was read by no DeepSpeed engine that trains, so no '
            "activation was offloaded: give the file to DeepSpeed (--deepspeed, or deepspeed.initialize).\n"
        )
    return ""


def _has_block(path: Path) -> bool:
    """Return whether a file has a key with the block's name that is not switched off, wherever it stands."""
    try:
        if not path.is_file() or path.stat().st_size > MOST_BYTES:
            return False
        text = path.read_text(errors="replace")
    except OSError:
        return False
    if _KEY.search(text) is None:
        return False
    try:
        found = json.loads(text)["activation_nvme_offload"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return True
    return not (isinstance(found, dict) and found.get("enabled") is False)


def _configs(argv: Sequence[str], environ: Mapping[str, str], *, is_accelerate: bool) -> Iterator[Path]:
    for argument in argv[1:]:
        path = Path(argument.rpartition("=")[2])
        if path.suffix in (".json", ".yaml", ".yml"):
            yield path
    if is_accelerate:
        cache = environ.get("HF_HOME") or os.path.join(environ.get("HOME", ""), ".cache", "huggingface")
        yield Path(cache, "accelerate", "default_config.yaml")


def _is_other_process(environ: Mapping[str, str]) -> bool:
    """Return whether this is a worker of a data loader, or a rank but the first."""
    multiprocessing = sys.modules.get("multiprocessing.process")
    is_worker = multiprocessing is not None and multiprocessing.parent_process() is not None
    return is_worker or environ.get("RANK", "0") not in ("", "0")


def _has_engine() -> bool:
    engine = getattr(sys.modules.get("deepspeed.runtime.engine"), "DeepSpeedEngine", None)
    return hasattr(getattr(engine, "forward", None), _HOOKED)
