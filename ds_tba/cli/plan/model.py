"""Which model is asked about: a Hugging Face config or a function of the user's, with inputs, and perhaps LoRA.

[Note: The contract of the function] The function is called with the keyword arguments ``batch`` and ``sequence`` and
returns ``(model, inputs)``: inputs are a tuple or a dict of arguments of ``model``. The model returns the loss, an
object or a dict with ``loss``, or tensors of which the first is summed. The call is made on the meta device, where
tensors have shapes and no values (under ``torch_autocast`` on the CPU). Blind spot: the images of a model that takes
text as well, whose number the text decides.
"""

from __future__ import annotations

import inspect
import math
import runpy
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from ds_tba.errors import ModelError

Recipe = Callable[[int, int], "Subject"]

_CONTRACT = (
    "it is called with the keyword arguments batch and sequence, and must return (model, inputs), inputs being a tuple "
    "or a dict of arguments of the model"
)
# Architectures whose labels are tokens, and those whose labels are one class for each sequence or image.
_TOKEN_LABELS = ("ForCausalLM", "LMHeadModel", "ForMaskedLM", "ForConditionalGeneration", "ForPreTraining")
_CLASS_LABELS = ("ForSequenceClassification", "ForImageClassification")


@dataclass(frozen=True, slots=True)
class Subject:
    """A model, the positional or keyword arguments of its forward, and remarks for the reader."""

    model: nn.Module
    inputs: tuple[Any, ...] | dict[str, Any]
    notes: tuple[str, ...] = ()

    def forward(self) -> Any:
        """Call the model."""
        return self.model(**self.inputs) if isinstance(self.inputs, dict) else self.model(*self.inputs)

    def to(self, device: str, dtype: torch.dtype | None) -> Subject:
        """The subject in training mode on a device; floating-point tensors are cast if a dtype is given."""

        def moved(one: torch.Tensor) -> torch.Tensor:
            return one.to(device, dtype if one.is_floating_point() else None)

        inputs = tree_map_only(torch.Tensor, moved, self.inputs)
        return Subject(self.model.to(device=device, dtype=dtype).train(), inputs, self.notes)


def loss_of(output: Any) -> torch.Tensor:
    """The scalar that backward starts from; see [Note: The contract of the function].

    Raises:
        ModelError: the output has no tensor that needs a gradient.
    """
    found = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if found is None:
        found = list(output.values()) if isinstance(output, Mapping) else output
        if isinstance(found, Sequence) and found:
            found = found[0]
    if not isinstance(found, torch.Tensor) or not found.requires_grad:
        raise ModelError(
            f"the model returned {type(output).__name__} without a loss: it must return a tensor that needs a "
            "gradient, an object with .loss, or a tuple or dict that begins with such a tensor."
        )
    return found if found.dim() == 0 else found.sum()


def recipe_of(text: str) -> Recipe:
    """The function that makes the subject for a batch and a sequence length.

    Args:
        text: ``FILE.py:function``, or the ``config.json``, folder or name of a Hugging Face model on this machine.

    Raises:
        ModelError: ``text`` is none of these.
    """
    file, _, name = (text if ":" in text else f"{text}:").rpartition(":")
    return _from_function(Path(file), name) if file.endswith(".py") else _from_hf_config(text)


# ---- a function -----------------------------------------------------------------------------------------------------


def _from_function(path: Path, name: str) -> Recipe:
    """The file is run with its directory on the path, as a script is."""
    at = f"MODEL {path}:{name}"
    if not path.is_file():
        raise ModelError(f"{at}: there is no file {path}; give its path from here.")
    directory = str(path.resolve().parent)
    sys.path.insert(0, directory)
    try:
        found = runpy.run_path(str(path), run_name=f"ds_tba_plan_{path.stem}")
    except (Exception, SystemExit) as error:  # the user's file may raise anything
        raise ModelError(f"{at}: running {path} failed: {type(error).__name__}: {error}") from error
    finally:
        sys.path.remove(directory)
    function = found.get(name)
    if not callable(function):
        functions = ", ".join(one for one, value in found.items() if inspect.isfunction(value))
        raise ModelError(f"{at}: {path} has no function {name!r}; it has {functions or 'none'}.")

    def make(batch: int, sequence: int) -> Subject:
        made = function(batch=batch, sequence=sequence)
        match made:
            case (nn.Module() as model, (dict() | tuple() | list()) as inputs):
                return Subject(model, inputs if isinstance(inputs, dict) else tuple(inputs))
        classes = [type(one).__name__ for one in (made if isinstance(made, tuple) else [made])]
        raise ModelError(f"{name} returned {', '.join(classes)}: {_CONTRACT}.")

    return make


# ---- a Hugging Face config ------------------------------------------------------------------------------------------


def _from_hf_config(text: str) -> Recipe:
    try:
        import transformers
    except ImportError as error:
        raise ModelError(
            f"MODEL {text!r}: a Hugging Face model needs transformers: pip install transformers, or name a function "
            "(FILE.py:function)."
        ) from error
    try:
        config = transformers.AutoConfig.from_pretrained(text, local_files_only=True)
    except Exception as error:  # the classes of its configs may raise anything
        why = " ".join(str(error).split()) or type(error).__name__
        if not Path(text).exists():
            why = "there is no such file or folder, and no model of this name in Hugging Face's cache"
        raise ModelError(
            f"MODEL {text!r} cannot be read: it must be FILE.py:function, or the config.json, folder or name of a "
            f"Hugging Face model that is on this machine: {why if len(why) <= 200 else f'{why[:200]}...'}"
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
            "has it, or name a function (FILE.py:function)."
        )
    config.use_cache = False  # as in Trainer

    def make(batch: int, sequence: int) -> Subject:
        model = made(config)
        return _with_inputs(architecture, model, config, batch, sequence)

    return make


def _with_inputs(architecture: str, model: nn.Module, config: Any, batch: int, sequence: int) -> Subject:
    """Tokens or images, and labels, all zero: no size depends on their values."""
    taken = inspect.signature(model.forward).parameters
    notes: tuple[str, ...] = ()
    if "input_ids" in taken:
        inputs = {"input_ids": torch.zeros(batch, sequence, dtype=torch.int64)}
        longest = getattr(config, "max_position_embeddings", None) or math.inf
        if sequence > longest:
            notes = (f"the config ends at max_position_embeddings {longest}: training of {sequence} tokens may fail",)
        if {"pixel_values", "input_features"} & set(taken):
            notes += ("images and sound are left out: name a function (FILE.py:function) that makes them",)
    elif "pixel_values" in taken and hasattr(config, "image_size"):
        size = config.image_size
        height, width = (size, size) if isinstance(size, int) else size
        inputs = {"pixel_values": torch.zeros(batch, getattr(config, "num_channels", 3), height, width)}
        notes = (f"images of {height} x {width}; the sequence length is not used",)
    else:
        raise ModelError(
            f"{architecture} takes neither input_ids nor images of a size in its config, so its inputs cannot be made "
            f"up: name a function (FILE.py:function); {_CONTRACT}."
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
        """For models that look at it, for its dtype say."""
        return self.base.weight

    def forward(self, x: torch.Tensor) -> Any:
        return self.base(x) + self.up(self.down(x)) * 2.0


def add_lora(model: nn.Module, layers: Sequence[nn.Module], rank: int) -> None:
    """Freeze a model and put adapters on every linear layer in some layers, as peft's ``all-linear`` does."""
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
