"""A program of ``update_programs.py`` as the only rank, on the accelerator that ``DS_ACCELERATOR`` names.

python tests/gpu/gpu_updates.py PROGRAM FILE    # FILE has the config and the arguments, and gets what was found
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import update_programs


def main(program: str, file: str) -> int:
    torch.use_deterministic_algorithms(True)
    asked = json.loads(Path(file).read_text())
    found = getattr(update_programs, program)(asked["config"], **asked["arguments"])
    Path(file).write_text(json.dumps(found))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
