"""Short marks of what values hold, to be compared before and after: of tensors, arrays, generators and plain values.

Knows single values; does not know what refers to them.
"""

from __future__ import annotations

import array
import ctypes
import random
from itertools import count
from typing import Any

import numpy
import torch
import xxhash
from torch import nn

from ds_tba.autograd.recompute.process_state import Held, default_generators
from ds_tba.autograd.tensors import lineage_of, stamp_of
from ds_tba.device.memory import digest_of

# Arrays that are larger are known by their identity: one may map a whole data set.
MAX_ARRAY_BYTES = 64 << 20
# Tensors in host memory that are no larger are compared by their bytes in every reading.
MAX_SMALL_BYTES = 64 << 10

_NUMBERS_AND_WORDS = (int, float, complex, str, bytes)
_BYTES = (bytearray, array.array, memoryview, ctypes._SimpleCData, ctypes.Structure, ctypes.Union, ctypes.Array)


def content_mark(value: Any) -> Any | None:
    """Of what holds bytes or random numbers; None for anything else."""
    if isinstance(value, torch.Generator):
        return "default" if value in default_generators() else digest(value.get_state().numpy())
    if isinstance(value, random.Random):
        return hash(value.getstate())
    if isinstance(value, numpy.random.Generator):
        return repr(value.bit_generator.state)
    if isinstance(value, numpy.random.RandomState):
        return repr(value.get_state(legacy=False))
    if isinstance(value, numpy.ndarray):
        return array_mark(value)
    if isinstance(value, numpy.generic):
        return type(value).__name__, value.tobytes()
    if isinstance(value, numpy.random.BitGenerator):
        return repr(value.state)
    if isinstance(value, _BYTES):
        return digest(memoryview(value).tobytes())
    for kind in _NUMBERS_AND_WORDS:
        if isinstance(value, kind):
            return type(value).__qualname__, kind.__repr__(value)
    if isinstance(value, count):
        return repr(value)
    return None


def array_mark(value: numpy.ndarray[Any, Any]) -> Any:
    if value.nbytes > MAX_ARRAY_BYTES or isinstance(value, numpy.memmap):
        return Held(value)
    return value.shape, str(value.dtype), digest(numpy.ascontiguousarray(value).tobytes())


def digest(data: Any) -> int:
    return xxhash.xxh3_64_intdigest(data)


def tensor_mark(tensor: torch.Tensor, *, with_bytes: bool) -> tuple[Any, ...]:
    """A parameter is itself, wherever ZeRO-3 puts its memory."""
    version = version_of(tensor)
    if isinstance(tensor, nn.Parameter):
        return lineage_of(tensor), version
    if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or tensor.is_inference():
        return lineage_of(tensor), version, tensor.shape
    where = stamp_of(tensor.untyped_storage()), tensor.storage_offset(), tensor.stride()
    mark = (lineage_of(tensor), version, tensor.shape, tensor.dtype, where)
    is_small = tensor.device.type == "cpu" and tensor.nbytes <= MAX_SMALL_BYTES  # on a device one would wait for it
    return (*mark, bytes_mark(tensor)) if with_bytes or is_small else mark


def bytes_mark(tensor: torch.Tensor) -> tuple[int, ...]:
    """Differs, all but certainly, for tensors whose bytes differ. Waits for the device."""
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
    """The hooks that were registered on a tensor."""
    hooks = (*(tensor._backward_hooks or {}).values(), *(tensor._post_accumulate_grad_hooks or {}).values())
    return tuple(map(id, hooks))


def gradient_mark(tensor: torch.Tensor) -> tuple[int, int] | None:
    """Which gradient a leaf has, and at which version."""
    gradient = tensor.grad if tensor.is_leaf else None
    return None if gradient is None else (id(gradient), version_of(gradient))
