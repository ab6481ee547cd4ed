"""Trainings that run out of memory, and the same once more as the message advises: one line of JSON for each.

    python tests/scripts/memory_runs.py [--culprits mlp,logits] [--seeds 1,2] [--fraction 0.65] [--show]

Each training runs without a limit first. Then the limit is a fraction of the peak of its tensors: it must die of it.
Then the first advice of the message is taken as it is written, keys and calls, and the training runs again under the
same limit. Where it dies again, the first advice of that message is taken, too, up to ``MOST_ADVICE`` in all.
"""

from __future__ import annotations

import argparse
import copy
import ctypes
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FRACTION = 0.65  # of what a run takes
MOST_ADVICE = 3
ADVICE = re.compile(r"^ +\d+\. (.*)$", re.MULTILINE)
SHIM_SOURCE = Path(__file__).parents[1] / "support/memory_limit.cpp"


def main() -> None:
    if "memory_limit" not in os.environ.get("LD_PRELOAD", ""):
        with tempfile.TemporaryDirectory() as directory:
            shim = Path(directory) / "memory_limit.so"
            subprocess.run(["g++", "-O2", "-shared", "-fPIC", "-o", str(shim), str(SHIM_SOURCE), "-ldl"], check=True)
            own = {"LD_PRELOAD": str(shim), "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
            sys.exit(subprocess.run([sys.executable, *sys.argv], env={**os.environ, **own}).returncode)
    # Before the forks, also what an engine imports only when it is built.
    import torch._dynamo  # noqa: F401
    from support.culprits import CULPRITS

    parser = argparse.ArgumentParser()
    parser.add_argument("--culprits", default=",".join(CULPRITS))
    parser.add_argument("--seeds", default="1")
    parser.add_argument("--fraction", type=float, default=FRACTION, help="the limit, of the peak without one")
    parser.add_argument("--show", action="store_true", help="the messages, too")
    options = parser.parse_args()
    for seed in map(int, options.seeds.split(",")):
        for name in options.culprits.split(","):
            with tempfile.TemporaryDirectory() as directory:
                found = investigated(name, seed, options.fraction, Path(directory))
            if options.show:
                print("\n".join([*found["messages"], found["output"]]), file=sys.stderr)
            print(json.dumps(found), flush=True)


def investigated(name: str, seed: int, fraction: float, directory: Path) -> dict[str, Any]:
    """The result of one training; see the docstring of this file."""
    from support.culprits import CULPRITS

    program = CULPRITS[name](random.Random(seed))
    config = {
        "train_micro_batch_size_per_gpu": program.batch,
        "optimizer": program.optimizer,
        "zero_optimization": {"stage": 0},
        "zero_allow_untested_optimizer": True,
        "activation_nvme_offload": {
            "enabled": True,
            "nvme_path": str(directory),
            "placement": program.placement,
            "min_tensor_bytes": 16384,
            "io": {"backend": "posix", "staging_bytes": 32 << 20},
        },
    }
    changes: frozenset[str] = frozenset()
    free = run(name, seed, config, changes, None, directory)
    limit_bytes = int(fraction * free["peak_bytes"])
    result = run(name, seed, config, changes, limit_bytes, directory)
    has_died = result["has_died"]
    messages, taken = result["messages"], []
    while result["has_died"] and result["messages"] and len(taken) < MOST_ADVICE:
        advice = ADVICE.findall(result["messages"][-1])
        if not advice:
            break
        taken.append(advice[0])
        config, changes = advised(advice[0], config, changes, program.changes, directory)
        result = run(name, seed, config, changes, limit_bytes, directory)
        messages = messages + result["messages"]
    first = messages[0] if messages else ""
    verdict = first.partition("\n\n")[0]
    return {
        "culprit": name,
        "seed": seed,
        "ran_without_limit": not free["has_died"],
        "peak_bytes": free["peak_bytes"],
        "limit_bytes": limit_bytes,
        "has_died": has_died,
        "verdict": verdict,
        "is_named": bool(verdict) and all(word in verdict for word in program.named),
        "taken": taken,
        "lives": not result["has_died"],
        "messages": messages,
        "output": free["output"] + result["output"] if free["has_died"] or result["has_died"] else "",
    }


def advised(
    advice: str, config: dict[str, Any], changes: frozenset[str], offered: Mapping[str, str], directory: Path
) -> tuple[dict[str, Any], frozenset[str]]:
    """The config and the program, changed as a piece of advice says."""
    for found in re.finditer(r'\{".*\}', advice):
        config = merged(config, json.loads(found[0].replace("/local_nvme", str(directory))))
    return config, changes | {change for change, words in offered.items() if words in advice}


def merged(config: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    result = copy.deepcopy(dict(config))
    for key, value in more.items():
        result[key] = merged(result.get(key) or {}, value) if isinstance(value, Mapping) else value
    return result


def run(
    name: str, seed: int, config: dict[str, Any], changes: frozenset[str], limit_bytes: int | None, directory: Path
) -> dict[str, Any]:
    """Train in a child: whether it died of memory, what the log said, and the peak of tensors."""
    output, answer = directory / "output.txt", directory / "answer.json"
    answer.unlink(missing_ok=True)
    child = os.fork()
    if child == 0:
        with output.open("w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        status = 1
        try:
            answer.write_text(json.dumps(train(name, seed, config, changes, limit_bytes)))
            status = 0
        except Exception:  # noqa: BLE001 - told in the output
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    os.waitpid(child, 0)
    text = output.read_text(errors="replace")
    if not answer.exists():
        return {"has_died": True, "messages": [], "peak_bytes": 0, "output": text}
    return {**json.loads(answer.read_text()), "output": text}


def train(
    name: str, seed: int, config: dict[str, Any], changes: frozenset[str], limit_bytes: int | None
) -> dict[str, Any]:
    import logging

    import deepspeed
    import torch
    from support.culprits import CULPRITS
    from support.ranks import free_port

    from ds_tba.device.memory import is_out_of_memory

    own = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    os.environ.update(own, MASTER_PORT=str(free_port()))
    messages: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "memory ran out" in record.getMessage():
                messages.append(record.getMessage())

    logging.getLogger("ds_tba").addHandler(Keep())
    logging.getLogger("ds_tba").addHandler(logging.StreamHandler())
    logging.getLogger("ds_tba").setLevel(logging.INFO)
    libc = ctypes.CDLL(None)
    libc.limit_tensors.argtypes, libc.peak_of_tensors.restype = [ctypes.c_size_t], ctypes.c_size_t
    torch.manual_seed(seed)
    program = CULPRITS[name](random.Random(seed))
    has_died, kept = False, []
    try:
        model = program.make(changes)
        engine, *_ = deepspeed.initialize(model=model, model_parameters=trained(model), config=config)
        del model
        libc.peak_of_tensors()  # of measuring drives
        if limit_bytes is not None:
            libc.limit_tensors(limit_bytes)
        for _ in range(program.steps * engine.gradient_accumulation_steps()):
            outputs = engine(program.inputs(engine.train_micro_batch_size_per_gpu()))
            loss, *others = outputs if isinstance(outputs, tuple) else (outputs,)
            kept += [one.detach() if "detach" in changes else one for one in others]
            del outputs, others
            engine.backward(loss)
            engine.step()
        engine.destroy()
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        traceback.print_exc()
        has_died = True
    return {"has_died": has_died, "messages": messages, "peak_bytes": libc.peak_of_tensors()}


def trained(model: Any) -> list[Any]:
    return [one for one in model.parameters() if one.requires_grad]


if __name__ == "__main__":
    main()
