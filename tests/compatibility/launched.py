"""A training script for ``accelerate launch``: what it trains and compares goes to a file.

    accelerate launch --config_file config.yaml launched.py RESULT {loop, trainer} [BLOCK]

BLOCK, in JSON, is for DeepSpeed settings that have no file in which it could stand.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from programs_hf import accelerated_loop, trainer

if __name__ == "__main__":
    path, way, *block = sys.argv[1:]
    result = trainer(None) if way == "trainer" else accelerated_loop(json.loads(block[0]) if block else None)
    Path(f"{path}{os.environ['RANK']}.json").write_text(json.dumps(result))
