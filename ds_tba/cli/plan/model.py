"""Which model is asked about: the config.json of a Hugging Face model, with inputs, and what changes it.

LoRA, weights in 4 or 8 bits and fused kernels save and hold here what the libraries' own do. Models are made on the
meta device, where tensors have shapes and no values. Blind spot: the images of a model that takes text as well, whose
number the text decides.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from ds_tba.errors import ModelError

# Bytes of each element of a quantized weight, by its bits. bitsandbytes adds an FP32 scale for 64 elements of 4 bits.
_ELEMENT_BYTES = {4: 0.5 + 4 / 64, 8: 1.0}


@dataclass(frozen=True, slots=True)
class Subject:
    """A model, the arguments of its forward by name, and remarks for the reader.

    ``quantized`` are its weights of a few bits, which take ``element_bytes`` for each element.
    """

    model: nn.Module
    inputs: dict[str, torch.Tensor]
    notes: tuple[str, ...] = ()
    quantized: tuple[torch.Tensor, ...] = ()
    element_bytes: float = 0.0


Recipe: TypeAlias = Callable[[int, int], Subject]  # of a batch and a length of the sequence


def loss_of(output: Any) -> torch.Tensor:
    """Return the scalar that backward starts from: the sum of the first tensor with a gradient, which is the loss."""
    tensors = (one for one in tree_leaves(output) if isinstance(one, torch.Tensor))
    return next(one for one in tensors if one.requires_grad).sum()


def recipe_of(
    text: str,
    *,
    bits: int | None = None,
    lora_rank: int | None = None,
    lora_targets: Collection[str] = (),
    aids: Collection[str] = (),
) -> Recipe:
    """Return what makes the subject for a batch and a sequence length.

    Args:
        text: the ``config.json``, folder or name of a Hugging Face model on this machine.
        bits: of the weights of linear layers, whatever the config says.
        lora_rank, lora_targets: of adapters, which are trained instead of the model, and the names of their layers.
        aids: of :data:`AIDS`.

    Raises:
        ModelError: ``text`` is none of these; when the subject is made, the model has no place for an adapter or an
            aid.
    """
    try:
        import transformers

        # No download: a name with a slip would otherwise wait for a network, or fetch gigabytes.
        config = transformers.AutoConfig.from_pretrained(text, local_files_only=True)
        made = getattr(transformers, config.architectures[0])
        if not isinstance(config, made.config_class):  # the text model of one for images and text
            config = config.get_text_config()
    except Exception as error:  # the classes of its configs may raise anything
        why = " ".join(repr(error).split())[:300]
        raise ModelError(
            f"MODEL {text!r} cannot be read: it must be the config.json, folder or name of a Hugging Face model on "
            f'this machine, with "architectures" that transformers (pip install transformers) has: {why}'
        ) from error
    quantization = getattr(config, "quantization_config", None) or {}
    bits = bits or (4 if quantization.get("load_in_4bit") else 8 if quantization.get("load_in_8bit") else None)
    bits = bits or quantization.get("bits")
    element_bytes, remarks = _ELEMENT_BYTES.get(bits or 0, 0.0), []
    if element_bytes:
        remarks = [f"linear layers but the head are of {bits} bits, with scales; each is of the dtype above in use"]
    elif quantization:
        method = quantization.get("quant_method", "unknown")
        remarks = [f'the model\'s "quantization_config" ({method}) is not counted: its weights are of the dtype above']
    config.use_cache = False  # as in Trainer

    def make(batch: int, sequence: int) -> Subject:
        model = made(config)
        inputs, notes = _inputs_of(model, config, batch, sequence)
        if lora_rank is not None:
            add_lora(model, lora_rank, lora_targets)
        for aid, (change, what) in AIDS.items():
            if aid in aids and not change(model):
                option = f"--{aid.replace('_', '-')}"
                raise ModelError(f"{option}: {type(model).__name__} has no {what}: leave {option} out")
        frozen = tuple(one.weight for _, one in _linears(model) if not one.weight.requires_grad)
        if element_bytes and not frozen:
            raise ModelError(
                'weights of a few bits (--bits, or the model\'s "quantization_config") cannot be trained: train '
                'adapters (--lora 16), or leave --bits or "quantization_config" out'
            )
        quantized = frozen if element_bytes else ()
        return Subject(model, inputs, (*notes, *remarks), quantized, element_bytes)

    return make


def _inputs_of(model: Any, config: Any, batch: int, sequence: int) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Return tokens and labels, all zero, because no size depends on their values; and remarks."""
    taken = inspect.signature(model.forward).parameters
    if "input_ids" not in taken:
        raise ModelError(f"{type(model).__name__} takes no input_ids: only those of text can be made up.")
    # With a head labels are tokens. Of other models the first output stands for the loss.
    names = ["input_ids", *(["labels"] if "labels" in taken and model.get_output_embeddings() is not None else [])]
    notes, longest = [], getattr(config, "max_position_embeddings", None) or math.inf
    if sequence > longest:
        notes.append(f"the config ends at max_position_embeddings {longest}: training of {sequence} tokens may fail")
    if {"pixel_values", "input_features"} & set(taken):
        notes.append("images and sound are left out: their number is that of the text")
    return {name: torch.zeros(batch, sequence, dtype=torch.int64) for name in names}, notes


def _linears(model: Any) -> list[tuple[str, Any]]:
    """Return the linear layers but the head, with their names: those of peft's ``all-linear`` and of bitsandbytes."""
    head = model.get_output_embeddings()
    return [(name, one) for name, one in model.named_modules() if isinstance(one, nn.Linear) and one is not head]


def add_lora(model: nn.Module, rank: int, targets: Collection[str] = ()) -> None:
    """Freeze a model and put adapters on its linear layers: on all but the head, or by name.

    They save what peft's save without dropout. Experts whose weights are one tensor have none: as in peft.
    """
    model.requires_grad_(False)

    def adapted(base: Any, whole: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> Any:
        return whole(x) + base.lora_up(base.lora_down(x)) * 2.0

    found = [one for name, one in _linears(model) if not targets or name.rpartition(".")[2] in targets]
    for one in found:
        one.forward = partial(adapted, one, one.forward)
        one.lora_down = nn.Linear(one.in_features, rank, bias=False)
        one.lora_up = nn.Linear(rank, one.out_features, bias=False)
    if not found:
        named = f" named {' or '.join(map(repr, targets))}" if targets else ""
        raise ModelError(f"--lora: no linear layer{named} was found in the model; leave --lora or its targets out")


class _FusedLoss(torch.autograd.Function):
    """The loss of some tokens at a time, with all gradients made in forward, as Liger's fused linear cross entropy.

    TRL's chunked loss and DeepSpeed's TiledFusedLogitsLoss differ in the tokens of a chunk.
    """

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        rows = hidden.reshape(-1, hidden.shape[-1])
        chunks = -(-weight.shape[0] // weight.shape[1])
        tokens = 1 << (-(-len(rows) // chunks) - 1).bit_length()
        of_rows = torch.empty_like(rows)
        of_weight = torch.zeros_like(weight) if weight.requires_grad else None
        for part, of_part in zip(torch.split(rows, tokens), torch.split(of_rows, tokens), strict=True):
            logits = part @ weight.t()
            logits.mul_(1.0)  # in place they become their gradient
            of_part.copy_(logits @ weight)
            if of_weight is not None:
                of_weight += logits.t() @ part
            del logits
        ctx.save_for_backward(of_rows.view_as(hidden), of_weight)
        return hidden.new_zeros(())

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return tuple(None if one is None else one.mul_(grad) for one in ctx.saved_tensors)


class _GatedUnit(torch.autograd.Function):
    """SwiGLU in one kernel, as Liger's: it saves its two inputs alone, and writes gradients over what there is."""

    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        return gate * up

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
        _, up = ctx.saved_tensors
        return grad.mul_(1.0), up.detach()  # itself would be copied


def fuse_kernels(model: nn.Module) -> bool:
    """Have RMS norms and gated MLPs run in one kernel each, and the loss in chunks, as Liger's do.

    Rotary embeddings save nothing, fused or not.
    """

    def norm(own: Any, x: torch.Tensor) -> torch.Tensor:  # saves its input, and no copy in FP32
        return nn.functional.layer_norm(x, own.weight.shape, own.weight)

    def gated(mlp: Any, x: torch.Tensor) -> Any:
        return mlp.down_proj(_GatedUnit.apply(mlp.gate_proj(x), mlp.up_proj(x)))  # type: ignore[no-untyped-call]

    norms = [one for one in model.modules() if type(one).__name__.endswith("RMSNorm")]
    units = [one for one in model.modules() if hasattr(one, "gate_proj") and hasattr(one, "up_proj")]
    for one in [*norms, *units]:
        one.forward = partial(norm if one in norms else gated, one)
    return bool(norms or units) and fuse_loss(model)


def fuse_loss(model: Any) -> bool:
    """Have the loss of a Hugging Face model made from hidden states and the head's weight, some tokens at a time."""
    if not isinstance(getattr(model, "lm_head", None), nn.Linear) or not hasattr(type(model), "loss_function"):
        return False
    head = model.lm_head
    head.forward = lambda hidden: hidden  # its loss computes the logits

    def loss(logits: torch.Tensor, *_: Any, **__: Any) -> Any:
        return _FusedLoss.apply(logits, head.weight)  # type: ignore[no-untyped-call]

    model.loss_function = loss
    return True


def tile_mlps(model: nn.Module) -> bool:
    """Have MLPs run in DeepSpeed's tiles, each as long as the hidden states are wide."""
    from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledMLP

    def in_tiles(whole: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> Any:
        return TiledMLP.apply(lambda _, part: whole(part), None, x, -(-x.shape[-2] // x.shape[-1]), [])

    found = [one for one in model.modules() if type(one).__name__.endswith("MLP")]
    for one in found:
        one.forward = partial(in_tiles, one.forward)
    return bool(found)


# By option: a function that changes a model, in this order, and what that needs.
AIDS: dict[str, tuple[Callable[[nn.Module], bool], str]] = {
    "liger": (fuse_kernels, "RMS norm or gated MLP, or no lm_head whose loss could be fused"),
    "fused_loss": (fuse_loss, "lm_head whose loss could be fused"),
    "tiled_mlp": (tile_mlps, "module whose class ends with MLP"),
}
