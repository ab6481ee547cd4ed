"""Layers of Llama-3-8B with random weights, and the ways to train them: ours, checkpointing, and other offloaders."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from curves.models import Workload
from torch import nn

from ds_tba.autograd.tensors import mark_owned

GIB = 1 << 30
BYTE_VALUES = 256  # the vocabulary: what is measured are layers
LEARNABLE_BYTES = 2 + 2  # of a parameter in bf16 and its gradient


@dataclass(frozen=True)
class Shape:
    """Of a layer, and how many there are."""

    hidden: int = 4096
    inner: int = 14336
    heads: int = 32
    key_heads: int = 8
    layers: int = 32

    @property
    def layer_parameters(self) -> int:
        keys = self.hidden // self.heads * self.key_heads
        return self.hidden * (2 * self.hidden + 2 * keys + 3 * self.inner)

    @property
    def token_bytes(self) -> int:
        """About what one layer saves of one token: ten tensors of the width, six of the MLP's, in bf16."""
        return 2 * (10 * self.hidden + 6 * self.inner)

    def layers_for(self, tokens: int, memory_bytes: int) -> int:
        """As many layers as one GPU holds with everything kept for so many tokens, a tenth of it to spare; not
        more than the model has."""
        of_one = LEARNABLE_BYTES * self.layer_parameters + tokens * self.token_bytes
        return min(self.layers, max(1, int(0.9 * memory_bytes / of_one)))


class Loss(nn.Module):
    """Token numbers in, mean cross entropy out."""

    def __init__(self, llama: Any) -> None:
        super().__init__()
        self.llama = llama

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.llama(input_ids=tokens, labels=tokens).loss
        return loss


def workload(shape: Shape, tokens: int, device: torch.device) -> Workload:
    """The model in bf16, with gradients of zero, and one sequence."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=BYTE_VALUES,
        hidden_size=shape.hidden,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.key_heads,
        max_position_embeddings=tokens,
        use_cache=False,
        attn_implementation="sdpa",
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(1)
    with device:
        model = Loss(LlamaForCausalLM(config).bfloat16()).train()
    for module in model.modules():
        mark_owned(module)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    batch = torch.randint(BYTE_VALUES, (1, tokens), generator=torch.Generator().manual_seed(2)).to(device)
    return Workload(model, (batch,), list(model.parameters()))  # type: ignore[arg-type]


# ---- ways to train ---------------------------------------------------------------------------------------------------

Around = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Room:
    """What ours may use, in bytes.

    Attributes:
        kept: what is saved with everything kept.
        host, swap: of pinned memory and of the drive, for the variant that puts everything there.
        small_host, small_swap: for each of those that plan.
    """

    kept: int
    host: int
    swap: int
    small_host: int
    small_swap: int


@dataclass(frozen=True)
class Way:
    """One way to train.

    Attributes:
        around: makes, from the model, what forward runs in; raises where it does not exist here.
        block: keys of our block, or None.
        plans: it has a plan after some steps.
        pins_all: it moves all that is saved to pinned host memory of torch's.
    """

    name: str
    title: str
    around: Callable[[nn.Module], Around] = lambda _: nullcontext
    block: Callable[[Room], dict[str, Any]] | None = None
    plans: bool = False
    pins_all: bool = False


def layers_of(model: nn.Module) -> list[Any]:
    return list(model.llama.model.layers)  # type: ignore[union-attr, arg-type]


def checkpointing(function: Callable[..., Any] | None = None) -> Callable[[nn.Module], Around]:
    """Every layer, by torch's function or another."""

    def make(model: nn.Module) -> Around:
        from torch.utils.checkpoint import checkpoint

        chosen = function or (lambda layer, *args: checkpoint(layer, *args, use_reentrant=False))

        @contextmanager
        def checkpointed() -> Iterator[None]:
            for layer in layers_of(model):
                layer.gradient_checkpointing, layer._gradient_checkpointing_func = True, chosen
            try:
                yield
            finally:
                for layer in layers_of(model):
                    layer.gradient_checkpointing = False

        return checkpointed

    return make


def save_on_cpu(_: nn.Module) -> Around:
    return lambda: torch.autograd.graph.save_on_cpu(pin_memory=torch.cuda.is_available())


def hf_offload(model: nn.Module) -> Around:
    """Hugging Face's checkpointing with the inputs on the host, as it sets the layers up."""
    llama: Any = model.llama
    if not hasattr(llama, "activation_checkpointing_enable"):
        raise ValueError("this version of transformers has no activation_checkpointing_enable(offload=True)")
    llama.activation_checkpointing_enable(offload=True)
    function = layers_of(model)[0]._gradient_checkpointing_func
    llama.gradient_checkpointing_disable()
    return checkpointing(function)(model)


def trl_offload(_: nn.Module) -> Around:
    from trl.models.activation_offloading import OffloadActivations

    offload = OffloadActivations()
    return lambda: offload


def deepspeed_cpu_checkpointing(model: nn.Module) -> Around:
    import deepspeed

    if not torch.distributed.is_initialized():
        deepspeed.init_distributed()
    deepspeed.checkpointing.configure(None, partition_activations=False, checkpoint_in_cpu=True)
    return checkpointing(deepspeed.checkpointing.checkpoint)(model)


def deepspeed_offload(model: nn.Module) -> Around:
    """DeepSpeed's hooks for checkpoints' inputs; it moves those that it sees being made."""
    from deepspeed.runtime.activation_checkpointing.offload_activations import CheckpointHiddenStatesOffload

    around, offload = checkpointing()(model), CheckpointHiddenStatesOffload()

    @contextmanager
    def offloaded() -> Iterator[None]:
        with offload, around():
            yield
            if not offload.stats.marked_tensors:
                raise RuntimeError("DeepSpeed's offload_activations marks no input of this version's checkpoints")

    return offloaded


def _nvme(room: Room) -> dict[str, Any]:
    return {"placement": "nvme", "io": {"swap_file_bytes": room.swap}}


def _host(room: Room) -> dict[str, Any]:
    return {"placement": "host", "host_budget_bytes": room.host}


def _planned(room: Room, **more: Any) -> dict[str, Any]:
    return {"host_budget_bytes": room.small_host, "io": {"swap_file_bytes": room.small_swap}, **more}


def _within(share: float, **more: Any) -> Callable[[Room], dict[str, Any]]:
    # An overhead that no plan reaches: the budget decides.
    return lambda room: _planned(room, activation_budget_bytes=int(share * room.kept), max_step_overhead=100.0, **more)


WAYS = (
    Way("keep", "keep (nothing)"),
    Way("checkpointing", "torch checkpointing of every layer", checkpointing()),
    Way(
        "checkpointing + nvme",
        "torch checkpointing + **ours**, nvme",
        checkpointing(),
        lambda room: {"placement": "nvme", "io": {"swap_file_bytes": room.small_swap}},
    ),
    Way("rematerialize", "**ours**, rematerialization alone", block=lambda _: {"placement": "keep"}),
    Way("host", "**ours**, host", block=_host),
    Way("adaptive 2 %", "**ours**, adaptive, 2 %", block=_planned, plans=True),
    Way("adaptive 0.5", "**ours**, adaptive in half of what keep saves", block=_within(0.5), plans=True),
    Way("adaptive 0.25", "**ours**, adaptive in a quarter", block=_within(0.25), plans=True),
    Way("save_on_cpu", "`torch.autograd.graph.save_on_cpu`", save_on_cpu, pins_all=True),
    Way("hf offload", "Hugging Face's checkpointing, `offload=True`", hf_offload),
    Way("trl offload", "TRL's activation offloading", trl_offload, pins_all=True),
    Way("deepspeed cpu_checkpointing", "DeepSpeed's `cpu_checkpointing`", deepspeed_cpu_checkpointing),
    Way("deepspeed offload_activations", "checkpointing + DeepSpeed's `offload_activations`", deepspeed_offload),
    Way("nvme", "**ours**, nvme (everything)", block=_nvme),
    Way(
        "adaptive 0.25, recompute",
        '**ours**, adaptive in a quarter, `"recompute": true`',
        block=_within(0.25, recompute=True),
        plans=True,
    ),
)
