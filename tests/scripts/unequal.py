"""``train.py`` on ranks with drives as slow as ``DRIVES_BYTES_PER_S`` says, one each."""

import os
import runpy
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from curves.throttled import opened
from support.modelled_drive import ModelledDrive

with opened(ModelledDrive(float(os.environ["DRIVES_BYTES_PER_S"].split(",")[int(os.environ["RANK"])]))):
    runpy.run_path(str(Path(__file__).with_name("train.py")), run_name="__main__")
