"""The subject of an estimate: the model with its inputs, and how ``ds_config.json`` has it trained. No DeepSpeed here.

The model comes from a function of the user, or from an HF config.

[Note: The contract of the function] The function is called with the keyword arguments ``batch`` and ``sequence`` and
returns ``(model, inputs)``: inputs are a tuple or a dict of arguments of ``model``. The model returns the loss, an
object or a dict with ``loss``, or tensors of which the first is summed. The call is made on the meta device, where
tensors have shapes and no values (under ``torch_autocast`` on the CPU).
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ds_tba.config import BLOCK, AioConfig, OffloadConfig, parse_block
from ds_tba.errors import ConfigError, ModelError
from ds_tba.update.config import parse_update_block

Recipe = Callable[[int, int], "Subject"]

_CONTRACT = (
    "it is called with the keyword arguments batch and sequence, and must return (model, inputs), inputs being a tuple "
    "or a dict of arguments of the model"
)
# Architectures whose labels are tokens, and those whose labels are one class for each sequence.
_TOKEN_LABELS = ("ForCausalLM", "LMHeadModel", "ForMaskedLM", "ForConditionalGeneration", "ForPreTraining")
_SEQUENCE_LABELS = ("ForSequenceClassification",)


@dataclass(frozen=True, slots=True)
class Subject:
    """A model and the positional or keyword arguments of its forward."""

    model: nn.Module
    inputs: tuple[Any, ...] | dict[str, Any]

    def forward(self) -> Any:
        """Call the model."""
        if isinstance(self.inputs, dict):
            return self.model(**self.inputs)
        return self.model(*self.inputs)

    def to(self, device: str, dtype: torch.dtype | None) -> Subject:
        """The subject in training mode on a device; floating-point tensors are cast if a dtype is given."""
        inputs = _moved(self.inputs, torch.device(device), dtype)
        return Subject(self.model.to(device=device, dtype=dtype).train(), inputs)


def loss_of(output: Any) -> torch.Tensor:
    """The scalar that backward starts from; see [Note: The contract of the function].

    Raises:
        ModelError: the output has no tensor that needs a gradient.
    """
    found = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if found is None:
        found = output
        if isinstance(found, Mapping):
            found = list(found.values())
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
        text: ``FILE.py:function``, or the path of an HF ``config.json``.

    Raises:
        ModelError: ``text`` is neither, or there is no such file or function.
    """
    if text.endswith(".json"):
        return _from_hf_config(Path(text))
    file, colon, name = text.rpartition(":")
    if not colon or not file.endswith(".py"):
        raise ModelError(f"--model {text!r}: it must be FILE.py:function, or the path of an HF config.json.")
    return _from_function(_function(Path(file), name))


# ---- a function -----------------------------------------------------------------------------------------------------


def _function(path: Path, name: str) -> Callable[..., Any]:
    if not path.is_file():
        raise ModelError(f"--model {path}:{name}: there is no file {path}; give its path from here.")
    module = _imported(path)
    function = getattr(module, name, None)
    if not callable(function):
        functions = [one for one, value in vars(module).items() if inspect.isfunction(value)]
        raise ModelError(
            f"--model {path}:{name}: {path} has no function {name!r}; it has {', '.join(functions) or 'none'}."
        )
    try:
        inspect.signature(function).bind(batch=1, sequence=1)
    except TypeError as error:
        raise ModelError(
            f"--model {path}:{name}: {name}{inspect.signature(function)}: {error}; {_CONTRACT}."
        ) from error
    return function  # type: ignore[no-any-return]


def _imported(path: Path) -> Any:
    """The file as a module, imported with its directory on the path, as if run as a script."""
    spec = importlib.util.spec_from_file_location(f"ds_tba_estimate_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ModelError(f"--model {path}: it is not Python source; name a file that ends in .py.")
    module = importlib.util.module_from_spec(spec)
    directory = str(path.resolve().parent)
    sys.path.insert(0, directory)
    sys.modules[spec.name] = module  # dataclasses and pickle look their module up there
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # the user's file may raise anything
        raise ModelError(f"--model {path}: importing it failed: {type(error).__name__}: {error}") from error
    finally:
        sys.path.remove(directory)
    return module


def _from_function(function: Callable[..., Any]) -> Recipe:
    def make(batch: int, sequence: int) -> Subject:
        made = function(batch=batch, sequence=sequence)
        if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module)):
            raise ModelError(f"{function.__name__} returned {_described(made)}: {_CONTRACT}.")
        model, inputs = made
        if not isinstance(inputs, (tuple, list, dict)):
            raise ModelError(f"{function.__name__} returned inputs of class {type(inputs).__name__}: {_CONTRACT}.")
        return Subject(model, inputs if isinstance(inputs, dict) else tuple(inputs))

    return make


def _described(made: Any) -> str:
    if isinstance(made, tuple):
        return f"({', '.join(type(one).__name__ for one in made)})"
    return type(made).__name__


# ---- an HF config ---------------------------------------------------------------------------------------------------


def _from_hf_config(path: Path) -> Recipe:
    try:
        architectures = json.loads(path.read_text()).get("architectures")
    except (OSError, ValueError, AttributeError) as error:
        raise ModelError(f"--model {path}: it cannot be read as the config.json of an HF model: {error}") from error
    if not architectures:
        raise ModelError(
            f'--model {path}: it has no "architectures", which say what to build, for example '
            '"architectures": ["LlamaForCausalLM"]; add them.'
        )
    try:
        import transformers
    except ImportError as error:
        raise ModelError(
            f"--model {path}: an HF config needs transformers: pip install transformers, or name a function "
            "(FILE.py:function)."
        ) from error
    architecture = architectures[0]
    made = getattr(transformers, architecture, None)
    if made is None:
        raise ModelError(
            f"--model {path}: transformers {transformers.__version__} has no {architecture!r}: install a version that "
            "has it, or name a function (FILE.py:function)."
        )
    try:
        config = transformers.AutoConfig.from_pretrained(str(path))
    except (ValueError, KeyError, OSError) as error:
        raise ModelError(f"--model {path}: transformers does not take it as a config: {error}") from error
    config.use_cache = False  # as in Trainer: blocks that fill a cache in forward cannot be recomputed

    def make(batch: int, sequence: int) -> Subject:
        model = made(config)
        return Subject(model, _hf_inputs(architecture, model, batch, sequence))

    return make


def _hf_inputs(architecture: str, model: nn.Module, batch: int, sequence: int) -> dict[str, Any]:
    """Tokens and labels, all zero: no size depends on their values."""
    taken = inspect.signature(model.forward).parameters
    if "input_ids" not in taken:
        raise ModelError(
            f"{architecture} takes no input_ids, so its inputs cannot be made up: name a function "
            f"(FILE.py:function); {_CONTRACT}."
        )
    inputs: dict[str, Any] = {"input_ids": torch.zeros(batch, sequence, dtype=torch.int64)}
    if "labels" in taken and architecture.endswith(_TOKEN_LABELS):
        inputs["labels"] = torch.zeros(batch, sequence, dtype=torch.int64)
    elif "labels" in taken and architecture.endswith(_SEQUENCE_LABELS):
        inputs["labels"] = torch.zeros(batch, dtype=torch.int64)
    return inputs


def _moved(value: Any, device: torch.device, dtype: torch.dtype | None) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device, dtype if value.is_floating_point() else None)
    if isinstance(value, dict):
        return {key: _moved(one, device, dtype) for key, one in value.items()}
    if isinstance(value, (tuple, list)) and not hasattr(value, "_fields"):
        return type(value)(_moved(one, device, dtype) for one in value)
    return value


# ---- ds_config.json --------------------------------------------------------------------------------------------------


_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_AUTOCAST = {"bfloat16": torch.bfloat16, "float16": torch.float16}
# Bytes per parameter: Adam's two moments, and the FP32 copy of a 16-bit parameter.
_MOMENTS_BYTES, _MASTER_BYTES = 8, 4


@dataclass(frozen=True, slots=True)
class Zero:
    """ZeRO's stage, and whether it keeps parameters and optimizer states off the device."""

    stage: int
    offloads_parameters: bool
    offloads_optimizer: bool


@dataclass(frozen=True, slots=True)
class Training:
    """How the model will be trained.

    Attributes:
        offload: the block, or its defaults where there is none.
        dtype: of parameters; None where they stay as the model has them.
        autocast: the dtype of ``torch_autocast``, if it is on.
        micro_batch: of one rank, if the config has a number.
        micro_steps: of one step.
        optimizer: its type; empty where the config names none.
        notes: assumptions, for the reader.
    """

    offload: OffloadConfig
    aio: AioConfig
    dtype: torch.dtype | None
    autocast: torch.dtype | None
    micro_batch: int | None
    micro_steps: int
    zero: Zero
    optimizer: str
    notes: tuple[str, ...]

    @property
    def state_bytes(self) -> int | None:
        """Bytes of optimizer states per parameter; None where the optimizer is not known."""
        if "adam" not in self.optimizer.lower():
            return None
        return _MOMENTS_BYTES + (_MASTER_BYTES if self.dtype is not None else 0)

    def states(self, parameters: int) -> str:
        """The optimizer's states in words; empty where the optimizer is not known."""
        if self.state_bytes is None:
            return ""
        what = f"{self.optimizer}'s states {parameters * self.state_bytes / 2**30:.2f} GiB"
        divided = {1: "the states", 2: "gradients and states", 3: "parameters, gradients and states"}
        if self.zero.stage in divided:
            what += f"; ZeRO stage {self.zero.stage} divides {divided[self.zero.stage]} by the number of ranks"
        return what


def read_training(path: Path) -> Training:
    """Read how a ``ds_config.json`` has the model trained.

    Raises:
        ConfigError: the file cannot be read, or its block is wrong.
    """
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"--config {path} cannot be read as ds_config.json: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"--config {path} holds {type(found).__name__}: ds_config.json is an object.")
    notes: list[str] = []
    parsed = parse_block(found)
    if parsed is None:
        notes.append(f'{path} has no enabled "{BLOCK}" block: the defaults of the block are used')
        parsed = OffloadConfig(enabled=False), AioConfig()
    parse_update_block(found)  # refuses here what training would refuse
    zero = _section(found, "zero_optimization")
    return Training(
        *parsed,
        _dtype(found, notes),
        _autocast(found),
        _number(found, "train_micro_batch_size_per_gpu"),
        _number(found, "gradient_accumulation_steps") or 1,
        Zero(
            _number(zero, "stage") or 0,
            _section(zero, "offload_param").get("device", "none") != "none",
            _section(zero, "offload_optimizer").get("device", "none") != "none",
        ),
        str(_section(found, "optimizer").get("type", "")),
        tuple(notes),
    )


def _section(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = config.get(key)
    return value if isinstance(value, dict) else {}


def _number(config: Mapping[str, Any], key: str) -> int | None:
    value = config.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _dtype(config: Mapping[str, Any], notes: list[str]) -> torch.dtype | None:
    for name, dtype in _DTYPES.items():
        enabled = _section(config, name).get("enabled", False)
        if enabled is True:
            return dtype
        if enabled == "auto":
            notes.append(f'"{name}.enabled" is "auto", which the trainer decides: taken as off here (set --dtype)')
    return None


def _autocast(config: Mapping[str, Any]) -> torch.dtype | None:
    section = _section(config, "torch_autocast")
    if section.get("enabled") is not True:
        return None
    return _AUTOCAST.get(str(section.get("dtype", "bfloat16")), torch.bfloat16)
