"""Random trainings under interleaved updates, against unmodified DeepSpeed: every bit that a step leaves.

    python tests/update/fuzz_update.py --draws 200 [--first 0]

Drawn are sizes, dtypes, parameter groups, clipping, accumulation, where parameters are, sub-groups, chunks, the
device's share, and whether its streams run late. Prints the seeds that fail.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

for name in ("", "update", "compatibility"):
    sys.path.insert(0, str(Path(__file__).parents[1] / name))

import forked  # noqa: E402 - found by the line above, where this runs as a script
import update_programs as programs  # noqa: E402

DRAWS_OF_A_PROCESS = 10


def draw(seed: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """A DeepSpeed config, and what :func:`update_programs.compare` takes of a variant."""
    chance = random.Random(seed)
    zero: dict[str, Any] = {
        "sub_group_size": chance.choice([100, 3_000, 30_000, 10**9]),
        "stage3_param_persistence_threshold": chance.choice([0, 200, 10**6]),
        "contiguous_gradients": chance.random() < 0.7,
        "overlap_comm": chance.random() < 0.5,
    }
    if chance.random() < 0.25:
        zero["offload_param"] = {"device": "cpu"}
    adam = {
        "lr": 10 ** chance.uniform(-4, -1),
        "weight_decay": chance.choice([0.0, 0.1]),
        "eps": chance.choice([1e-8, 1e-4]),
    }
    adam["betas"] = chance.choice([[0.9, 0.999], [0.0, 0.95], [0.8, 0.9]])
    adam["adam_w_mode"] = chance.random() < 0.7
    config = programs.ds_config(
        zero_optimization=zero,
        optimizer={"type": "Adam", "params": adam},
        gradient_accumulation_steps=chance.choice([1, 1, 2, 3]),
        gradient_clipping=chance.choice([0.0, 0.01, 1.0]),
        bf16={"enabled": chance.random() < 0.7},
    )
    chunk_bytes = chance.choice([1 << 16, 3 << 15, 1 << 18])
    block = {
        "chunk_bytes": chunk_bytes,
        "device_buffer_bytes": chunk_bytes * 5 * chance.choice([1, 2, 4]),
        "device_share": chance.choice([0, 1, None, chance.random()]),
    }
    variant = {
        "groups": chance.choice(["one", "decay", "betas"]),
        "width": chance.choice([1, 30, 128, 193, 300]),
        "count": chance.randint(2, 4),
    }
    return config, {**variant, "block": block, "late": chance.random() < 0.4}


def compare(config: None, *, seeds: list[int]) -> dict[str, Any]:
    """The seeds whose steps differ from stock's; a program."""
    failed: dict[str, str] = {}
    elements = [0, 0]
    for seed in seeds:
        ds_config, ours = draw(seed)
        stock = {name: value for name, value in ours.items() if name not in ("block", "late")}
        try:
            expected, found = programs.compare(ds_config, variants=[stock, ours])["variants"]
            differing = [
                (number, name)
                for number, (one, other) in enumerate(zip(expected["steps"], found["steps"], strict=True))
                for name in one
                if one[name] != other[name]
            ]
            if differing:
                failed[str(seed)] = f"{differing[:3]} of {ours}"
            elements[0] += found["report"]["elements"]
            elements[1] += found["report"]["device_elements"]
        except Exception as error:  # noqa: BLE001 - any is a finding
            failed[str(seed)] = f"{type(error).__name__}: {error}"
    return {"failed": failed, "elements": elements}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=100)
    parser.add_argument("--first", type=int, default=0)
    options = parser.parse_args()
    failed: dict[str, str] = {}
    last = options.first + options.draws
    for first in range(options.first, last, DRAWS_OF_A_PROCESS):
        seeds = list(range(first, min(first + DRAWS_OF_A_PROCESS, last)))
        with tempfile.TemporaryDirectory() as directory:
            (result,) = forked.run(compare, None, Path(directory) / "run", seeds=seeds)
        failed |= result["failed"]
        print(f"{seeds[-1] + 1 - options.first} draws, {len(failed)} failed, elements {result['elements']}", flush=True)
        for seed, words in result["failed"].items():
            print(f"  seed {seed}: {words}", flush=True)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
