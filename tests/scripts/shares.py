"""Makes an engine with the block and writes what its rank may take of the machine to ``DIRECTORY/RANK.json``.

python tests/scripts/shares.py DIRECTORY
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import deepspeed
from torch import nn

from ds_tba.device.accelerator import available_bytes

directory = Path(sys.argv[1])
config = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
    "activation_nvme_offload": {
        "enabled": True,
        "nvme_path": str(directory),
        "host_budget_bytes": None,
        "placement": "nvme",
        "io": {"backend": "posix", "staging_bytes": 1 << 20},
        "ssd": {"rated_endurance_tbw": 600},
    },
}
before_bytes = available_bytes()
model = nn.Linear(4, 4)
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
tiers = engine.activation_offloader._tiers
deepspeed.comm.barrier()
statvfs = os.statvfs(directory)
found = {
    "swap": tiers.paths[0].file.limit_bytes / (statvfs.f_bavail * statvfs.f_frsize),
    "host_bytes": tiers.host.limit_bytes,
    "available_bytes": before_bytes,
    "endurance_tbw": tiers.left_tbw(),
}
(directory / f"{os.environ['RANK']}.json").write_text(json.dumps(found))
deepspeed.comm.barrier()
engine.destroy()
deepspeed.comm.destroy_process_group()
