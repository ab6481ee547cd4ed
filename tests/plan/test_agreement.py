"""What ranks agree on: real processes, and one alone."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from support import runs

PROGRAM = """
import json, os, sys
import torch.distributed as dist
from ds_tba.plan.agreement import Ranks
rank, meeting = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method="file://" + meeting, rank=rank, world_size=3)
ranks = Ranks()
found = [
    ranks.rank,
    ranks.all_reduce_max([1, 4, 2][rank]),
    ranks.all_reduce_max([3, 0, 0][rank]),
    ranks.all_gather({"rank": rank, "of": "x" * (1000 * rank)}),
    ranks.broadcast([rank, None], 2),
    ranks.broadcast("from 0" if rank == 0 else "from another", 0),
]
part = Ranks.of_stage([[1], [0, 2]])
found += [part.rank, part.size, part.where, part.all_reduce_max(rank), part.all_gather(rank)]
found += [part.broadcast(rank, part.size - 1)]
print(json.dumps(found), flush=True)
dist.barrier()
os._exit(0)  # gloo's own threads may abort at interpreter exit, also without us
"""


def test_all_ranks_have_the_highest_value_every_value_and_the_leaders_value(tmp_path: Path) -> None:
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(rank), str(tmp_path / "meeting")],
            env=runs.environment(),
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(3)
    ]
    try:
        outputs = [rank.communicate(timeout=120)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    everyone = [{"rank": rank, "of": "x" * (1000 * rank)} for rank in range(3)]
    for rank, output in enumerate(outputs):
        part = [0, 1, " of stage 0", 1, [1], 1] if rank == 1 else [rank // 2, 2, " of stage 1", 2, [0, 2], 2]
        assert json.loads(output) == [rank, 4, 3, everyone, [2, None], "from 0", *part]
