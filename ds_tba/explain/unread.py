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
    # A launcher, a driver of Ray's workers and a command of ours train nothing, and a script that failed has an error.
    script = argv[0] if argv else ""
    others = ("/deepspeed/launcher/", "/torch/", "/ds_tba/__main__.py")
    is_training = script.endswith(".py") and not any(one in script for one in others) and "ray" not in sys.modules
    is_silent = is_hooked or is_worker or hasattr(sys, "last_value") or environ.get("RANK", "0") not in ("", "0")
    if is_silent or not is_training or {"-h", "--help"} & set(argv):
        return ""
    files = [Path(one.rpartition("=")[2]) for one in argv[1:] if one.endswith(".json")]
    small = [one for one in files if one.is_file() and one.stat().st_size <= MOST_BYTES]
    texts = {str(one): one.read_text(errors="replace") for one in small}
    blocks = {where: found[1] for where, text in texts.items() if (found := _BLOCK.search(text))}
    blocks |= {VARIABLE: environ[VARIABLE]} if environ.get(VARIABLE) else {}
    for where, block in blocks.items():
        if not _OFF.search(block):
            return (
                f"ds_tba: the block in {where} was read by no DeepSpeed engine that trains, so no activation was "
                "offloaded: give it to DeepSpeed (--deepspeed of the Trainer, or deepspeed.initialize).\n"
            )
    return ""
