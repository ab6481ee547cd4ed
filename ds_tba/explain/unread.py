"""Is there a block that nobody reads? Asked at the exit of a script without an engine that reads one."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

VARIABLE = "DS_TBA_BLOCK"
MOST_BYTES = 1 << 20  # of a file that may be a config
_BLOCK = re.compile(r'"activation_nvme_offload"\s*:\s*{([^{}]*)')
_OFF = re.compile(r'"enabled"\s*:\s*false')


def line(argv: Sequence[str], environ: Mapping[str, str]) -> str:
    """Return what to say at exit, empty where no block is in sight, the script failed, or an engine has one."""
    engine = getattr(sys.modules.get("deepspeed.runtime.engine"), "DeepSpeedEngine", None)
    processes = sys.modules.get("multiprocessing.process")
    is_worker = processes is not None and processes.parent_process() is not None  # of a data loader
    is_hooked = hasattr(getattr(engine, "forward", None), "_ds_tba_hooked")  # by ds_tba/engine.py
    script, is_first = argv[0] if argv else "", environ.get("RANK", "0") in ("", "0")
    # A launcher trains nothing itself, and a script that failed has an error to read.
    is_training = script.endswith(".py") and not any(one in script for one in ("/deepspeed/launcher/", "/torch/"))
    if (
        is_hooked
        or is_worker
        or not is_training
        or not is_first
        or hasattr(sys, "last_value")
        or {"-h", "--help"} & set(argv)
    ):
        return ""
    paths = [Path(one.rpartition("=")[2]) for one in argv[1:]]
    texts = {VARIABLE: environ.get(VARIABLE, "")} | {str(one): _text(one) for one in paths}
    for where, text in texts.items():
        found = _BLOCK.search(text) or (re.search("(.+)", text, re.DOTALL) if where == VARIABLE else None)
        if found is not None and _OFF.search(found[1]) is None:
            return (
                f"ds_tba: the block in {where} was read by no DeepSpeed engine that trains, so no activation was "
                "offloaded: give it to DeepSpeed (--deepspeed of the Trainer, or deepspeed.initialize).\n"
            )
    return ""


def _text(path: Path) -> str:
    try:
        is_config = path.suffix == ".json" and path.stat().st_size <= MOST_BYTES
        return path.read_text(errors="replace") if is_config else ""
    except OSError:
        return ""
