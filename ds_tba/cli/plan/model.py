"""Which model is asked about: the config.json of a Hugging Face model, with inputs, and what changes it.

LoRA, weights in 4 or 8 bits, a fused loss and tiled MLPs save and hold here what the libraries' own do; none is run.
Models are made on the meta device, where tensors have shapes and no values. Blind spot: the images of a model that
takes text as well, whose number the text decides.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from ds_tba.errors import ModelError

# Architectures whose labels are tokens, and those whose labels are one class for each sequence or image.
_TOKEN_LABELS = ("ForCausalLM", "LMHeadModel", "ForMaskedLM", "ForConditionalGeneration", "ForPreTraining")
_CLASS_LABELS = ("ForSequenceClassification", "ForImageClassification")


@dataclass(frozen=True, slots=True)
class Subject:
    """A model, the arguments of its forward by name, and remarks for the reader.

    ``element_bytes`` is the size of an element of its linear layers where they are quantized, else None.
    """

    model: nn.Module
    inputs: dict[str, Any]
    notes: tuple[str, ...] = ()
    element_bytes: float | None = None

    def forward(self) -> Any:
        """Call the model with its inputs."""
        return self.model(**self.inputs)

    def to(self, device: str, dtype: torch.dtype | None) -> Subject:
        """Return the subject in training mode on a device; floating-point tensors are cast if a dtype is given."""

        def moved(one: torch.Tensor) -> torch.Tensor:
            return one.to(device, dtype if one.is_floating_point() else None)

        inputs = tree_map_only(torch.Tensor, moved, self.inputs)
        return replace(self, model=self.model.to(device=device, dtype=dtype).train(), inputs=inputs)


class Recipe(Protocol):
    """Makes the subject for a batch and a sequence length."""

    def __call__(self, batch: int, sequence: int, /) -> Subject: ...


def loss_of(output: Any) -> torch.Tensor:
    """Return the scalar that backward starts from: the loss, or the sum of the first tensor.

    Raises:
        ModelError: the output has no tensor that needs a gradient.
    """
    found = output if isinstance(output, torch.Tensor) else getattr(output, "loss", None)
    if found is None:
        found = next(iter(output.values() if isinstance(output, Mapping) else output), None)
    if not isinstance(found, torch.Tensor) or not found.requires_grad:
        raise ModelError(f"the model returned {type(output).__name__} without a loss that needs a gradient.")
    return found.sum()


def recipe_of(text: str) -> Recipe:
    """Return what makes the subject for a batch and a sequence length.

    Args:
        text: the ``config.json``, folder or name of a Hugging Face model on this machine.

    Raises:
        ModelError: ``text`` is none of these.
    """
    try:
        import transformers
    except ImportError as error:
        raise ModelError(
            f"MODEL {text!r}: transformers makes the model from its config.json: pip install transformers."
        ) from error
    try:
        # No download: a name with a slip would otherwise wait for a network, or fetch gigabytes.
        config = transformers.AutoConfig.from_pretrained(text, local_files_only=True)
    except Exception as error:  # the classes of its configs may raise anything
        why = " ".join(str(error).split()) or type(error).__name__
        if not Path(text).exists():
            why = "there is no such file or folder, and no model of this name in Hugging Face's cache"
        raise ModelError(
            f"MODEL {text!r} cannot be read: it must be the config.json, folder or name of a Hugging Face model "
            f"that is on this machine: {why if len(why) <= 200 else f'{why[:200]}...'}"
        ) from error
    match config.architectures:
        case [str(architecture), *_]:
            pass
        case found:
            raise ModelError(
                f'MODEL {text!r}: its "architectures", which say what to build, are {found!r}: they must be a list '
                'such as ["LlamaForCausalLM"].'
            )
    made = getattr(transformers, architecture, None)
    if made is None:
        raise ModelError(
            f"MODEL {text!r}: transformers {transformers.__version__} has no {architecture!r}: install a version that "
            "has it."
        )
    quantization = getattr(config, "quantization_config", None)
    wanted = getattr(made, "config_class", None) or type(config)
    if not isinstance(config, wanted):  # the text model of one for images and text
        parts = (getattr(config, name, None) for name in config.sub_configs)
        config = next((part for part in parts if isinstance(part, wanted)), config)
    config.use_cache = False  # as in Trainer

    def make(batch: int, sequence: int) -> Subject:
        found = _with_inputs(architecture, made(config), config, batch, sequence)
        element_bytes, note = _quantized(quantization)
        return replace(found, notes=found.notes + note, element_bytes=element_bytes)

    return make


def _quantized(found: Any) -> tuple[float | None, tuple[str, ...]]:
    """Return the size of an element of a linear layer as a ``quantization_config`` has it, and a remark."""
    if found is None:
        return None, ()
    get = found.get if isinstance(found, Mapping) else partial(getattr, found)
    bits = 4 if get("load_in_4bit", None) else 8 if get("load_in_8bit", None) else get("bits", None)
    if bits not in (2, 3, 4, 8):
        method = get("quant_method", "unknown")
        return None, (
            f'the model\'s "quantization_config" ({method}) is not counted: its weights are of the dtype above',
        )
    # bitsandbytes has a scale for 64 elements, in FP32, or in 8 bits with one in FP32 for 256 scales.
    scale_bytes = 0.0 if bits == 8 else (1 + 4 / 256) / 64 if get("bnb_4bit_use_double_quant", None) else 4 / 64
    note = (
        f"linear layers but the head are of {bits} bits, with their scales; each is of the dtype above while it is used"
    )
    return bits / 8 + scale_bytes, (note,)


def _with_inputs(architecture: str, model: nn.Module, config: Any, batch: int, sequence: int) -> Subject:
    """Add tokens or images, and labels, all zero: no size depends on their values."""
    taken = inspect.signature(model.forward).parameters
    notes: tuple[str, ...] = ()
    if "input_ids" in taken:
        inputs = {"input_ids": torch.zeros(batch, sequence, dtype=torch.int64)}
        longest = getattr(config, "max_position_embeddings", None) or math.inf
        if sequence > longest:
            notes = (f"the config ends at max_position_embeddings {longest}: training of {sequence} tokens may fail",)
        if {"pixel_values", "input_features"} & set(taken):
            notes += ("images and sound are left out: their number is that of the text",)
    elif "pixel_values" in taken and hasattr(config, "image_size"):
        size = config.image_size
        height, width = (size, size) if isinstance(size, int) else size
        inputs = {"pixel_values": torch.zeros(batch, getattr(config, "num_channels", 3), height, width)}
        notes = (f"images of {height} x {width}; the sequence length is not used",)
    else:
        raise ModelError(
            f"{architecture} takes neither input_ids nor images of a size in its config: inputs cannot be made up."
        )
    if "labels" in taken and architecture.endswith(_TOKEN_LABELS):
        inputs["labels"] = torch.zeros(batch, sequence, dtype=torch.int64)
    elif "labels" in taken and architecture.endswith(_CLASS_LABELS):
        inputs["labels"] = torch.zeros(batch, dtype=torch.int64)
    return Subject(model, inputs, notes)


# ---- LoRA -----------------------------------------------------------------------------------------------------------


class _Adapted(nn.Module):
    """A frozen linear layer with an adapter, which saves what peft's saves without dropout."""

    def __init__(self, base: nn.Module, inputs: int, outputs: int, rank: int) -> None:
        super().__init__()
        self.base = base
        self.down, self.up = nn.Linear(inputs, rank, bias=False), nn.Linear(rank, outputs, bias=False)

    @property
    def weight(self) -> Any:
        """The frozen weight: a model may ask for its dtype."""
        return self.base.weight

    def forward(self, x: torch.Tensor) -> Any:
        return self.base(x) + self.up(self.down(x)) * 2.0


def add_lora(model: nn.Module, layers: Sequence[nn.Module], rank: int) -> None:
    """Freeze a model and put adapters on every linear layer in some layers, as peft's ``all-linear`` does.

    Experts whose weights are one tensor have none: peft leaves them out, too.
    """
    model.requires_grad_(False)
    for layer in layers:
        for parent in list(layer.modules()):
            for name, child in list(parent.named_children()):
                if type(child).__name__ in ("Linear", "NonDynamicallyQuantizableLinear", "Conv1D"):
                    weight: Any = child.weight
                    rows, columns = weight.shape  # Conv1D, GPT-2's linear layer, has its weight the other way
                    sizes = (rows, columns) if type(child).__name__ == "Conv1D" else (columns, rows)
                    setattr(parent, name, _Adapted(child, *sizes, rank))
    if not any(one.requires_grad for one in model.parameters()):
        raise ModelError("--lora: no linear layer was found in repeated layers of the model; leave --lora out")


# ---- weights in fewer bits ------------------------------------------------------------------------------------------


def quantized_linears(subject: Subject) -> list[torch.Tensor]:
    """Return the weights that are held in fewer bits: of all linear layers but the head.

    Raises:
        ModelError: they would be trained.
    """
    if subject.element_bytes is None:
        return []
    model: Any = subject.model
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    of_head = set() if head is None else set(head.modules())  # a fused loss has put another module around it
    linears = [one for one in model.modules() if type(one) is nn.Linear and one not in of_head]
    found = [one.weight for one in linears if _is_frozen(one)]
    if not found:
        raise ModelError(
            'the model\'s "quantization_config" has weights of a few bits, which cannot be trained: train adapters '
            '(--lora 16), or take "quantization_config" out of config.json'
        )
    return found


def _is_frozen(layer: nn.Module) -> bool:
    return not any(one.requires_grad for one in layer.parameters())


# ---- a fused loss, and tiled MLPs -----------------------------------------------------------------------------------


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


class _Head(nn.Module):
    """A projection to logits that its loss computes: hidden states pass."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base

    @property
    def weight(self) -> Any:
        """The weight of the projection: a model may ask for it."""
        return self.base.weight

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden


def fuse_loss(model: Any) -> None:
    """Have the loss of a Hugging Face model made from hidden states and the head's weight, some tokens at a time.

    Raises:
        ModelError: the model has no such head.
    """
    owners = [one for one in model.modules() if isinstance(getattr(one, "lm_head", None), nn.Linear)]
    if not owners or not hasattr(type(model), "loss_function"):
        raise ModelError(
            f"--fused-loss: {type(model).__name__} has no lm_head whose loss could be fused: leave --fused-loss out, "
            "and fuse the loss in the model itself"
        )
    head = owners[0].lm_head = _Head(owners[0].lm_head)

    def loss(logits: torch.Tensor, *_: Any, **__: Any) -> Any:
        return _FusedLoss.apply(logits, head.weight)  # type: ignore[no-untyped-call]

    model.loss_function = loss


class _Tiled(torch.autograd.Function):
    """A module run on pieces of a sequence, again in backward, as by DeepSpeed's TiledMLP."""

    @staticmethod
    def forward(ctx: Any, run: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.run = run
        ctx.save_for_backward(x)
        return torch.cat([run(part) for part in x.chunk(_tiles(x), -2)], -2)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, torch.Tensor]:
        (x,) = ctx.saved_tensors
        tiles, found = _tiles(x), torch.zeros_like(x)
        for part, of_part, of_output in zip(*(one.chunk(tiles, -2) for one in (x, found, grad)), strict=True):
            leaf = part.detach().requires_grad_()
            with torch.enable_grad():
                output = ctx.run(leaf)
            torch.autograd.backward(output, of_output)
            of_part.copy_(leaf.grad)
        return None, found


def _tiles(x: torch.Tensor) -> int:
    """Return as many as the guide of TiledMLP has: a tile is as long as the hidden states are wide."""
    return -(-x.shape[-2] // x.shape[-1])


def tile_mlps(layers: Sequence[nn.Module]) -> None:
    """Have the MLPs in some layers run in tiles.

    Raises:
        ModelError: there is none.
    """
    found = [one for layer in layers for one in layer.modules() if type(one).__name__.endswith("MLP")]
    for one in found:
        one.forward = partial(_Tiled.apply, one.forward)
    if not found:
        raise ModelError("--tiled-mlp: no module whose class ends with MLP was found in repeated layers; leave it out")
