"""State of the process and contents of values, in forms that can be compared; and two runs of one forward, compared.

Knows PyTorch, Python and NumPy; does not know passes, nor which values refer to which.

[Note: Fingerprints] A fingerprint is small and holds no tensor; equal fingerprints mean equal contents, all but
certainly. Of a tensor it has identity and version, and the bytes only where they are asked for or are few and in host
memory: reading bytes of a device waits for the device.
"""

from __future__ import annotations

import array
import ctypes
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import numpy
import torch
import xxhash
from torch import nn
from torch.overrides import _get_current_function_mode_stack as function_modes
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from ds_tba.autograd.tensors import Stamp, has_plain_storage, is_parameter, lineage_of, stamp_of, uncompiled_hooks
from ds_tba.device.memory import digest_of

# ---- the process: random generators, PyTorch's settings and modes, what is compiled ----------------------------------


class Held:
    """An object known by its identity; held, because another could be made where it was."""

    __slots__ = ("_value",)

    def __init__(self, value: Any) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Held) and self._value is other._value

    def __hash__(self) -> int:
        return id(self._value)


def default_generators() -> list[torch.Generator]:
    """PyTorch's default generators: of the CPU, and of the current device if there is one."""
    found = [torch.default_generator]
    kind = torch.accelerator.current_accelerator() if hasattr(torch, "accelerator") else None
    device = None if kind is None else torch.get_device_module(kind)
    if device is not None and getattr(device, "is_initialized", lambda: False)():
        found += [device.default_generators[device.current_device()]]
    return found


def python_rng_states() -> tuple[Any, Any]:
    """The states of Python's and NumPy's global generators."""
    return random.getstate(), numpy.random.get_state()


def set_python_rng_states(states: tuple[Any, Any]) -> None:
    """Put the states back."""
    random.setstate(states[0])
    numpy.random.set_state(states[1])


def drawn_from(before: tuple[Any, Any], after: tuple[Any, Any]) -> str | None:
    """Which of the two generators has drawn numbers."""
    if before[0] != after[0]:
        return "Python's random"
    (_, keys, *place), (_, later_keys, *later_place) = before[1], after[1]
    return "numpy.random" if place != later_place or not numpy.array_equal(keys, later_keys) else None


_SETTINGS: tuple[Callable[[], Any], ...] = (
    torch.backends.cuda.flash_sdp_enabled,
    torch.backends.cuda.mem_efficient_sdp_enabled,
    torch.backends.cuda.math_sdp_enabled,
    torch.backends.cuda.cudnn_sdp_enabled,
    torch.are_deterministic_algorithms_enabled,
    torch.get_default_dtype,
    torch.get_float32_matmul_precision,
    torch._C._get_cudnn_enabled,
    torch._C._get_cudnn_benchmark,
    torch._C._get_cudnn_deterministic,
    torch._C._get_cudnn_allow_tf32,
    torch._C._get_mkldnn_enabled,
)


def settings() -> tuple[Any, ...]:
    """Which kernels PyTorch takes, and which modes change what functions of it do."""
    return *(_setting(one) for one in _SETTINGS), *(Held(one) for one in modes())


def modes() -> list[Any]:
    """``TorchFunctionMode`` and ``TorchDispatchMode`` that are on; not the default device, which a checkpoint keeps."""
    functions = [one for one in function_modes() if not isinstance(one, DeviceContext)]  # type: ignore[no-untyped-call]
    return [*functions, *_get_current_dispatch_mode_stack()]


def _setting(getter: Callable[[], Any]) -> Any:
    try:
        return getter()
    except RuntimeError:  # of what was set through its newer name
        return None


def is_compiled(module: nn.Module) -> bool:
    """Whether ``torch.compile`` compiles the module's forward."""
    return module._compiled_call_impl is not None or is_wrapper_of_compiled(module)


def is_wrapper_of_compiled(module: nn.Module) -> bool:
    """Whether it is an ``OptimizedModule``, whose own attributes are the compiler's."""
    return "dynamo_ctx" in vars(module) and "_orig_mod" in module._modules


# ---- values ---------------------------------------------------------------------------------------------------------

# Arrays that are larger are known by their identity: one may map a whole data set.
MAX_ARRAY_BYTES = 64 << 20
# Tensors in host memory that are no larger are compared by their bytes in every reading.
MAX_SMALL_BYTES = 64 << 10

_NUMBERS_AND_WORDS = (int, float, complex, str, bytes)
_BYTES = (bytearray, array.array, memoryview, ctypes._SimpleCData, ctypes.Structure, ctypes.Union, ctypes.Array)


def content_fingerprint(value: Any) -> Any | None:
    """Of a value that holds bytes, random numbers or a plain value; None for anything else."""
    if isinstance(value, torch.Generator):
        return "default" if value in default_generators() else _digest(value.get_state().numpy())
    if isinstance(value, random.Random):
        return hash(value.getstate())
    if isinstance(value, numpy.random.Generator):
        return repr(value.bit_generator.state)
    if isinstance(value, numpy.random.RandomState):
        return repr(value.get_state(legacy=False))
    if isinstance(value, numpy.ndarray):
        return _array_fingerprint(value)
    if isinstance(value, numpy.generic):
        return type(value).__name__, value.tobytes()
    if isinstance(value, numpy.random.BitGenerator):
        return repr(value.state)
    if isinstance(value, _BYTES):
        return _digest(memoryview(value).tobytes())
    for kind in _NUMBERS_AND_WORDS:
        if isinstance(value, kind):
            return type(value).__qualname__, kind.__repr__(value)
    if isinstance(value, count):
        return repr(value)
    return None


def _array_fingerprint(value: numpy.ndarray[Any, Any]) -> Any:
    if value.nbytes > MAX_ARRAY_BYTES or isinstance(value, numpy.memmap):
        return Held(value)
    return value.shape, str(value.dtype), _digest(numpy.ascontiguousarray(value).tobytes())


def _digest(data: Any) -> int:
    return xxhash.xxh3_64_intdigest(data)


def tensor_fingerprint(tensor: torch.Tensor, *, with_bytes: bool) -> tuple[Any, ...]:
    """Of a tensor; a parameter is known by its identity, wherever ZeRO-3 puts its memory."""
    version = version_of(tensor)
    if isinstance(tensor, nn.Parameter):
        return lineage_of(tensor), version
    if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or tensor.is_inference():
        return lineage_of(tensor), version, tensor.shape
    where = stamp_of(tensor.untyped_storage()), tensor.storage_offset(), tensor.stride()
    form = (lineage_of(tensor), version, tensor.shape, tensor.dtype, where)
    is_small = tensor.device.type == "cpu" and tensor.nbytes <= MAX_SMALL_BYTES  # on a device this would wait for it
    return (*form, _bytes_fingerprint(tensor)) if with_bytes or is_small else form


def _bytes_fingerprint(tensor: torch.Tensor) -> tuple[int, ...]:
    """Waits for the device."""
    if tensor.device.type == "meta" or tensor.is_quantized or not tensor.numel():
        return ()
    data = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    if data.device.type == "cpu":
        return (digest_of(data),)
    weights = torch.arange(1, 2 * data.numel(), 2, device=data.device)
    values = data.to(torch.int64)
    return int(values.sum()), int((values * weights).sum())


def version_of(tensor: torch.Tensor) -> int:
    """The version counter; -1 for an inference tensor, which has none."""
    return -1 if tensor.is_inference() else tensor._version


def hooks_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """Identities of the hooks that were registered on a tensor."""
    hooks = (*(tensor._backward_hooks or {}).values(), *(tensor._post_accumulate_grad_hooks or {}).values())
    return tuple(map(id, hooks))


def gradient_identity(tensor: torch.Tensor) -> tuple[int, int] | None:
    """Which gradient a leaf has, and at which version."""
    gradient = tensor.grad if tensor.is_leaf else None
    return None if gradient is None else (id(gradient), version_of(gradient))


# ---- two runs of a forward ------------------------------------------------------------------------------------------


class LeavesTraceError(Exception):
    """Running a forward again would change, or has changed, what others see; caught where it is verified."""


class RandomGuard(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Stops a forward before it draws numbers that would not be drawn again; see ``proof.py``.

    Afterwards the default generators are as before.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._generators = default_generators()
        self._first = self._last = self._states()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(not torch.equal(one, last) for one, last in zip(self._states(), self._last, strict=True)):
            raise LeavesTraceError("its forward sets the state of PyTorch's default random-number generator")
        for value in (*args, *kwargs.values()):
            if isinstance(value, torch.Generator) and value not in self._generators:
                raise LeavesTraceError("its forward draws from a torch.Generator of its own")
        result = func(*args, **kwargs)
        self._last = self._states()
        return result

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        for generator, state in zip(self._generators, self._first, strict=True):
            generator.set_state(state)

    def _states(self) -> list[torch.Tensor]:
        return [one.get_state() for one in self._generators]


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def difference(saved: torch.Tensor, again: torch.Tensor) -> str | None:
    """In what a tensor that was made again differs from the one that was saved, in words; None if in no bit."""
    if type(saved) is not torch.Tensor or type(again) is not torch.Tensor:
        if saved is again:
            return None
        return f"a tensor of class {type(saved).__name__}, which cannot be compared"
    if saved.layout is not torch.strided or again.layout is not torch.strided or saved.is_quantized:
        return "a tensor that is not dense, which cannot be compared"
    if _form(saved) != _form(again):
        return f"a tensor of another form: {_form(again)} instead of {_form(saved)}"
    with torch.no_grad():
        return None if torch.equal(integers_of(saved), integers_of(again)) else "other bytes"


def _form(tensor: torch.Tensor) -> tuple[Any, ...]:
    where = (tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), tensor.dtype, tensor.device)
    return (*where, "conjugated") if tensor.is_conj() else (*where, "negated") if tensor.is_neg() else where


def integers_of(tensor: torch.Tensor) -> torch.Tensor:
    """The same bits as numbers that are equal only to themselves."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.view(_INTEGERS[tensor.element_size()])


# Values in a result that are compared; one of more is none.
MAX_OUTPUTS = 10_000
_PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device})

Outputs = tuple[Any, ...]
"""The result of a forward: forms and digests of its tensors, and its plain values."""


def outputs_of(result: Any) -> Outputs | None:
    """The fingerprint of a result; None if it cannot be compared. Waits for the device.

    Tuples, lists, dicts and objects with attributes are looked into.
    """
    with torch.no_grad():
        try:
            return tuple(_outputs(result))
        except Exception:  # noqa: BLE001 - objects of the user's may raise anything when they are looked at
            return None


def _outputs(result: Any) -> Iterator[Any]:
    to_do: list[Any] = [result]
    seen: dict[int, Any] = {}
    count = 0
    while to_do:
        value = to_do.pop()
        count += 1
        if count > MAX_OUTPUTS:
            raise ValueError("a result of too many values")
        yield type(value)
        if isinstance(value, torch.Tensor):
            yield _tensor_output(value)
        elif type(value) in _PLAIN:
            yield repr(value)
        elif id(value) not in seen:
            seen[id(value)] = value
            to_do += _inside(value)


def _inside(value: Any) -> list[Any]:
    """The values in an object; none for a module, whose values are state."""
    inside: list[Any] = []
    if isinstance(value, (torch.nn.Module, type)):
        return inside
    if isinstance(value, list):
        inside += list.__iter__(value)
    elif isinstance(value, tuple):
        inside += tuple.__iter__(value)
    elif isinstance(value, dict):
        for pair in dict.items(value):
            inside += pair
    return [*inside, *dict.values(getattr(value, "__dict__", {}))]


def _tensor_output(tensor: torch.Tensor) -> tuple[Any, ...]:
    if isinstance(tensor, torch.nn.Parameter):
        return ("a parameter", id(tensor))
    if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or tensor.is_quantized:
        raise ValueError("a tensor that cannot be compared")
    data = integers_of(tensor).contiguous().cpu() if tensor.device.type != "meta" else torch.empty(0)
    form = (tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)
    return *form, digest_of(data.reshape(-1).view(torch.uint8))


class Run:
    """One run of a verified forward, as far as two runs are compared by it.

    Attributes:
        parameters: by id, in the order in which the run saved tensors; None for each tensor that is no parameter.
        sizes: in bytes, of the storages behind the others.
    """

    def __init__(self) -> None:
        self.parameters: list[int | None] = []
        self.sizes: dict[Stamp, int] = {}
        self.outputs: Outputs | None = None

    @property
    def held_bytes(self) -> int:
        """What another run like it holds, with the one tensor that it is compared with."""
        return sum(self.sizes.values()) + max(self.sizes.values(), default=0)

    def add(self, tensor: torch.Tensor) -> bool:
        """The run saves a tensor; whether that is a parameter."""
        is_own = isinstance(tensor, nn.Parameter)
        self.parameters.append(id(tensor) if is_own else None)
        if not is_parameter(tensor) and has_plain_storage(tensor):  # nor a view of one
            self.sizes[stamp_of(tensor.untyped_storage())] = tensor.untyped_storage().nbytes()
        return is_own


@contextmanager
def nothing_saved() -> Iterator[None]:
    """Drop at once the tensors that autograd saves inside."""
    with uncompiled_hooks(lambda _: None, _no_backward):
        yield


def _no_backward(_: Any) -> torch.Tensor:
    raise LeavesTraceError("its forward runs a backward of its own")
