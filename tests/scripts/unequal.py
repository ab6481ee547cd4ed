"""``train.py``, or what ``SCRIPT`` names, on ranks with drives as slow as ``DRIVES_BYTES_PER_S`` says, one each."""

import os
import runpy
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from support.modelled_drive import ModelledDrive

import ds_tba.storage.tiers
from ds_tba.storage.backends.select import Selection

rate = float(os.environ["DRIVES_BYTES_PER_S"].split(",")[int(os.environ["RANK"])])
backend = ModelledDrive(rate)
ds_tba.storage.tiers.select_backend = lambda *_, **__: Selection(backend, "the test's")
runpy.run_path(str(Path(__file__).with_name(os.environ.get("SCRIPT", "train.py"))), run_name="__main__")
