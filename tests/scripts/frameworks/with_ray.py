"""A training script of Ray Train on one node, two workers: ``with_ray.py DS_CONFIG RESULT``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def train(settings: dict[str, Any]) -> None:
    """Train on each worker, as Ray's guide for DeepSpeed has it."""
    import deepspeed
    import ray.train
    import torch
    from small import BATCH, STEPS, Net, data, write_outcome

    torch.manual_seed(0)
    model = Net()
    context = ray.train.get_context()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings["config"])
    losses = []
    samples = torch.utils.data.Subset(data(), range(context.get_world_rank(), 2 * STEPS * BATCH, 2))
    for batch in torch.utils.data.DataLoader(samples, batch_size=BATCH):
        loss = engine(*batch)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    write_outcome(f"{settings['result']}{context.get_world_rank()}", losses, model)
    engine.destroy()  # Ray ends its workers without Python's exit, at which the report would be completed


if __name__ == "__main__":
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    config, result = sys.argv[1:]
    settings = {"config": json.loads(Path(config).read_text()), "result": result}
    TorchTrainer(
        train, train_loop_config=settings, scaling_config=ScalingConfig(num_workers=2, use_gpu=False),
        run_config=RunConfig(storage_path=str(Path(result).parent / "ray")),
    ).fit()  # fmt: skip
