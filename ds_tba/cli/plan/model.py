"""Which model is asked about: the config.json of a Hugging Face model, with inputs, and what changes it.

LoRA, weights in 4 or 8 bits and fused kernels save and hold here what the libraries' own do. Models are made on the
meta device, where tensors have shapes and no values. Blind spot: the images of a model that takes text as well, whose
number the text decides.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn

from ds_tba.errors import ModelError
from ds_tba.recompute.blocks import find_blocks

# Architectures whose labels are tokens. Of others the first output stands for the loss.
_TOKEN_LABELS = ("ForCausalLM", "LMHeadModel", "ForMaskedLM", "ForConditionalGeneration", "ForPreTraining")


@dataclass(frozen=True, slots=True)
class Subject:
    """A model, the arguments of its forward by name, and remarks for the reader.

    ``element_bytes`` is the size of an element of its linear layers where they are quantized, else None;
    ``hidden_size`` that of the config, 0 where it has none.
    """

    model: nn.Module
    inputs: dict[str, torch.Tensor]
    notes: tuple[str, ...] = ()
    element_bytes: float | None = None
    hidden_size: int = 0

    def forward(self) -> Any:
        """Call the model with its inputs."""
        return self.model(**self.inputs)

    def to(self, device: str, dtype: torch.dtype | None) -> Subject:
        """Return the subject in training mode on a device; its parameters and buffers are cast if a dtype is given."""
        inputs = {name: one.to(device) for name, one in self.inputs.items()}
        return replace(self, model=self.model.to(device=device, dtype=dtype).train(), inputs=inputs)


Recipe: TypeAlias = Callable[[int, int], Subject]  # of a batch and a length of the sequence


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
        aids: ``--fused-loss``, ``--liger`` and ``--tiled-mlp``.

    Raises:
        ModelError: ``text`` is none of these; when the subject is made, the model has no place for an adapter or an
            aid.
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
    named = config.architectures[:1] if isinstance(config.architectures, list) else []
    made = getattr(transformers, str(named[0]), None) if named else None
    if made is None:
        raise ModelError(
            f'MODEL {text!r}: its "architectures", which say what to build, are {config.architectures!r}: they must be '
            f'a list such as ["LlamaForCausalLM"], and transformers {transformers.__version__} must have the first.'
        )
    found = {"bits": bits, "bnb_4bit_use_double_quant": True} if bits else getattr(config, "quantization_config", None)
    element_bytes, notes = _quantized(found)
    wanted = getattr(made, "config_class", None) or type(config)
    if not isinstance(config, wanted):  # the text model of one for images and text
        parts = (getattr(config, name, None) for name in config.sub_configs)
        config = next((part for part in parts if isinstance(part, wanted)), config)
    config.use_cache = False  # as in Trainer

    def make(batch: int, sequence: int) -> Subject:
        model = made(config)
        found = _with_inputs(named[0], model, config, batch, sequence)
        layers = list(find_blocks(model, None).values())
        if lora_rank is not None:
            add_lora(model, layers, lora_rank, lora_targets)
        for aid, (change, what) in AIDS.items():
            if aid in aids and not change(model, layers):
                raise ModelError(f"{aid}: {type(model).__name__} has no {what}: leave {aid} out")
        hidden_size = getattr(config.get_text_config(), "hidden_size", 0) or 0
        return replace(found, notes=found.notes + notes, element_bytes=element_bytes, hidden_size=hidden_size)

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
    return bits / 8 + scale_bytes, (
        f"linear layers but the head are of {bits} bits, with their scales; each is of the dtype above in use",
    )


def _with_inputs(architecture: str, model: nn.Module, config: Any, batch: int, sequence: int) -> Subject:
    """Add tokens and labels, all zero: no size depends on their values."""
    taken = inspect.signature(model.forward).parameters
    if "input_ids" not in taken:
        raise ModelError(f"{architecture} takes no input_ids: inputs of other models than of text cannot be made up.")
    names = ["input_ids", *(["labels"] if "labels" in taken and architecture.endswith(_TOKEN_LABELS) else [])]
    inputs = {name: torch.zeros(batch, sequence, dtype=torch.int64) for name in names}
    notes, longest = [], getattr(config, "max_position_embeddings", None) or math.inf
    if sequence > longest:
        notes.append(f"the config ends at max_position_embeddings {longest}: training of {sequence} tokens may fail")
    if {"pixel_values", "input_features"} & set(taken):
        notes.append("images and sound are left out: their number is that of the text")
    return Subject(model, inputs, tuple(notes))


def add_lora(model: nn.Module, layers: Sequence[nn.Module], rank: int, targets: Collection[str] = ()) -> None:
    """Freeze a model and put adapters on linear layers in some layers: on all, as peft's ``all-linear``, or by name.

    They save what peft's save without dropout. Experts whose weights are one tensor have none: as in peft.
    """
    model.requires_grad_(False)

    def adapted(base: Any, whole: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> Any:
        return whole(x) + base.lora_up(base.lora_down(x)) * 2.0

    for name, one in [found for layer in layers for found in layer.named_modules()]:
        is_linear = type(one).__name__ in ("Linear", "NonDynamicallyQuantizableLinear", "Conv1D")
        if is_linear and (not targets or name.rpartition(".")[2] in targets):
            weight: Any = one.weight
            # Conv1D, GPT-2's linear layer, has its weight the other way.
            inputs, outputs = weight.shape if type(one).__name__ == "Conv1D" else reversed(weight.shape)
            one.forward = partial(adapted, one, one.forward)
            one.lora_down, one.lora_up = nn.Linear(inputs, rank, bias=False), nn.Linear(rank, outputs, bias=False)
    if not any(one.requires_grad for one in model.parameters()):
        named = f" named {' or '.join(targets)}" if targets else ""
        raise ModelError(
            f"--lora: no linear layer{named} was found in repeated layers of the model; leave --lora"
            f"{'-targets' if targets else ''} out"
        )


def quantized_linears(subject: Subject) -> list[torch.Tensor]:
    """Return the weights that are held in fewer bits: of all linear layers but the head.

    Raises:
        ModelError: they would be trained.
    """
    if subject.element_bytes is None:
        return []
    model: Any = subject.model
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    linears = [one for one in model.modules() if type(one) is nn.Linear and one is not head]
    found = [one.weight for one in linears if not one.weight.requires_grad]
    if not found:
        raise ModelError(
            'weights of a few bits (--bits, or the model\'s "quantization_config") cannot be trained: train adapters '
            '(--lora 16), or leave --bits or "quantization_config" out'
        )
    return found


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


def fuse_kernels(model: nn.Module, layers: Sequence[nn.Module]) -> bool:
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
    return bool(norms or units) and fuse_loss(model, layers)


def fuse_loss(model: Any, _layers: Sequence[nn.Module]) -> bool:
    """Have the loss of a Hugging Face model made from hidden states and the head's weight, some tokens at a time."""
    owners = [one for one in model.modules() if isinstance(getattr(one, "lm_head", None), nn.Linear)]
    if not owners or not hasattr(type(model), "loss_function"):
        return False
    head = owners[0].lm_head
    head.forward = lambda hidden: hidden  # its loss computes the logits

    def loss(logits: torch.Tensor, *_: Any, **__: Any) -> Any:
        return _FusedLoss.apply(logits, head.weight)  # type: ignore[no-untyped-call]

    model.loss_function = loss
    return True


def tile_mlps(_model: nn.Module, layers: Sequence[nn.Module]) -> bool:
    """Have the MLPs in some layers run in DeepSpeed's tiles, each as long as the hidden states are wide."""
    from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledMLP

    def in_tiles(whole: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> Any:
        return TiledMLP.apply(lambda _, part: whole(part), None, x, -(-x.shape[-2] // x.shape[-1]), [])

    found = [one for layer in layers for one in layer.modules() if type(one).__name__.endswith("MLP")]
    for one in found:
        one.forward = partial(in_tiles, one.forward)
    return bool(found)


# Each option changes a model and its layers by a function, in this order, and needs what the text names.
AIDS: dict[str, tuple[Callable[[nn.Module, Sequence[nn.Module]], bool], str]] = {
    "--liger": (fuse_kernels, "RMS norm or gated MLP, or no lm_head whose loss could be fused"),
    "--fused-loss": (fuse_loss, "lm_head whose loss could be fused"),
    "--tiled-mlp": (tile_mlps, "module whose class ends with MLP in repeated layers"),
}
