"""Training scripts that have another's activation offload switched on; see ``programs_deepspeed.py``."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from deepspeed.runtime.activation_checkpointing import offload_activations
from models import MODELS, Model
from programs_deepspeed import NETS, Block, Net, ended, started, texts, train_on, trained
from programs_hf import checkpointing, dpo, sft, trainer
from torch import Tensor, nn


def with_transformers_offload(config: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Transformers' ``offload`` of what checkpoints save; without a GPU there is no memory to pin, and it fails."""
    from transformers import modeling_utils

    if not torch.cuda.is_available():
        modeling_utils.save_on_cpu = lambda **_: torch.autograd.graph.save_on_cpu()
    return trainer(config, **checkpointing(False, offload=True, **more))


def with_trl_offload(config: dict[str, Any], way: str = "sft", **more: Any) -> dict[str, Any]:
    """TRL's ``activation_offloading``, as on a GPU: without one it does not start, and streams are no streams."""
    from trl.models import get_act_offloading_ctx_manager
    from trl.trainer import dpo_trainer, sft_trainer

    if not torch.cuda.is_available():
        offload = partial(get_act_offloading_ctx_manager, use_streams=False, use_pin_memory=False)
        for module in (sft_trainer, dpo_trainer):
            module.get_act_offloading_ctx_manager = offload
        if torch.accelerator.current_accelerator() is None:
            torch.accelerator.current_accelerator = lambda **_: torch.device("cpu")
    return {"sft": sft, "dpo": dpo}[way](config, activation_offloading=True, gradient_checkpointing=False, **more)


def checkpointed_llama() -> nn.Module:
    model = MODELS["Llama"].build()
    model.activation_checkpointing_enable({"use_reentrant": False})
    return model


def with_deepspeed_offload(config: dict[str, Any]) -> dict[str, Any]:
    """DeepSpeed's offload of the inputs of Transformers' checkpoints, opened around a micro-step, as it asks for.

    It acts on a CPU, too, where by itself it would leave all as it is.
    """
    kind = offload_activations.CheckpointHiddenStatesOffload
    kind._should_skip = lambda _self, tensor: isinstance(tensor, nn.Parameter)
    NETS["checkpointed Llama"] = Model(checkpointed_llama, MODELS["Llama"].inputs)
    offload = kind(use_pin_memory=False, use_streams=False)
    return trained(config, model="checkpointed Llama", has_cache=False, around=offload)


# ``torch_remat`` leaves random numbers to its caller.
RANDOM_STATE = SimpleNamespace(snapshot=torch.get_rng_state, restore=torch.set_rng_state)


class RematBlock(Block):
    """Attention's saved tensors are kept, all else is made again."""

    def attended(self, x: Tensor) -> Tensor:
        import torch_remat as remat

        attended = remat.region(super().attended, "attention", recompute=False)(x)
        remat.recompute_needs_tensor(attended)
        return attended


def with_torch_remat(config: dict[str, Any], steps: int = 6) -> dict[str, Any]:
    """Every block under a checkpoint of ``torch_remat``."""
    import torch_remat as remat

    def call(block: nn.Module, x: Tensor) -> Tensor:
        return remat.checkpoint(region_name="block", recompute_state_hooks=(RANDOM_STATE,))(block)(x)

    engine = started(config, partial(Net, RematBlock, call))
    return ended(engine, train_on(engine, texts(engine.global_rank), steps))
