"""Two runs of one forward, compared: whether they would draw the same random numbers, and whether they saved the same.

Knows tensors and generators; does not know passes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ds_tba.autograd.recompute.process_state import default_generators
from ds_tba.device.memory import digest_of


class LeavesTraceError(Exception):
    """Running a forward again would change, or has changed, what others see; caught where it is tried."""


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


# ---- two tensors ----------------------------------------------------------------------------------------------------

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
        return None if torch.equal(_integers(saved), _integers(again)) else "other bytes"


def _form(tensor: torch.Tensor) -> tuple[Any, ...]:
    where = (tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), tensor.dtype, tensor.device)
    return (*where, "conjugated") if tensor.is_conj() else (*where, "negated") if tensor.is_neg() else where


def _integers(tensor: torch.Tensor) -> torch.Tensor:
    """The same bits as numbers that are equal only to themselves."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.view(_INTEGERS[tensor.element_size()])


# ---- what two forwards return ---------------------------------------------------------------------------------------

# Values in a result that are compared; one of more is none.
MAX_OUTPUTS = 10_000
_PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device})

Outputs = tuple[Any, ...]
"""What a forward returned: forms and digests of its tensors, and its plain values."""


def outputs_of(result: Any) -> Outputs | None:
    """What is known of a result when its tensors are gone; None if it cannot be compared. Waits for the device.

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
    """What an object holds, but for modules: what they hold is state."""
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
    data = _integers(tensor).contiguous().cpu() if tensor.device.type != "meta" else torch.empty(0)
    form = (tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)
    return *form, digest_of(data.reshape(-1).view(torch.uint8))
