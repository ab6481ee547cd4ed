"""The state that a module's forward can read and change, by name, to be compared before and after.

Knows modules, Python objects and random-number generators; does not know passes, nor what a difference means.

[Note: Read] Parameters and buffers; attributes of the module, of the modules inside and of their classes;
objects in them, in containers and among the arguments; and what their methods refer to by name: closures, defaults,
globals, classes, modules, a few calls deep. Of a tensor its identity, version and place are compared, and its bytes
where it is small or where asked; of a generator its state; of a ``ContextVar`` its value; of anything else its content
as far as Python shows it. Classes and functions of PyTorch, NumPy, DeepSpeed and the standard library are not looked
into; nor are objects of PyTorch and DeepSpeed. Objects of the standard library are, but for those without state.

[Note: No user code] Content is read through the built-in base class: methods of a user's class that tell its length,
items or attributes are not called. Where reading raises all the same, the state is unreadable.

[Note: Not read] Recomputing restores whether modules train, and PyTorch's default generators. Attributes that ZeRO
keeps at a module are none of its forward's. Hooks of the whole block do not run again.
"""

from __future__ import annotations

import enum
import sys
import threading
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any

import numpy
import torch
from torch import nn
from torch.nn.modules import module as module_hooks

from ds_tba.autograd.comparison import (
    Held,
    content_fingerprint,
    is_compiled,
    is_wrapper_of_compiled,
    settings,
    tensor_fingerprint,
)

State = Mapping[str, Any]
_Named = tuple[str, Any]
"""A value and the name to report when it has changed."""

# A state of more values than this is not compared: reading it would take longer than a block's forward.
MAX_VALUES = 20_000
# Calls that are followed from a method to what other functions refer to.
MAX_CALLS = 3
# Calls after which a class that is named is looked at for its values, and no more for its methods.
_MAX_CALLS_TO_METHODS = 2
# Modules in modules that are followed, as in ``package.module.name``.
MAX_MODULES = 3

_LIBRARIES = sys.stdlib_module_names | {"ds_tba", "deepspeed", "numpy", "torch", "triton"}

# Modules of the standard library whose objects hold no state of a forward.
_STATELESS = frozenset(
    {"_abc", "abc", "ast", "asyncio", "builtins", "concurrent", "contextvars", "_contextvars", "datetime", "decimal",
     "enum", "fractions", "importlib", "inspect", "_frozen_importlib", "_frozen_importlib_external", "ipaddress",
     "logging", "_operator", "operator", "pathlib", "re", "_sre", "_thread", "typing", "uuid", "warnings", "zoneinfo"}
)  # fmt: skip
# Modules of the standard library whose classes without ``__dict__`` hold no state, or are read in another way.
_WITHOUT_DICT = frozenset({"_collections", "_functools", "_weakref", "collections", "functools", "types", "weakref"})

_PLAIN = frozenset({type(None), bool, int, str, bytes, torch.dtype, torch.device, torch.memory_format, torch.layout})
_CONTAINERS = (list, tuple, set, frozenset, deque)
# Attributes of a tensor are read if they are of these classes, and not those of DeepSpeed, torch.compile and ours.
_VALUES = frozenset({*_PLAIN, *_CONTAINERS, float, complex, dict})
_OF_TENSORS_BY_FRAMEWORKS = ("ds_", "_ds_", "_z3_", "_dynamo_")
# Py_TPFLAGS_HEAPTYPE of CPython: set for every class that is made while Python runs.
_HEAP_TYPE = 1 << 9
_METHODS = (types.FunctionType, staticmethod, classmethod, property)
_WITHOUT_ATTRIBUTES = frozenset({*_CONTAINERS, dict, types.MappingProxyType, types.BuiltinFunctionType})
# Methods that do not run in a forward, unless it makes an object of the class.
_OF_MAKING = frozenset({"__init__", "__new__", "__post_init__"})
_NEVER_RUN = frozenset({"__init_subclass__", "__class_getitem__", "__repr__", "__str__", "__reduce__", "__reduce_ex__",
                        "__getstate__", "__setstate__", "__del__", "__deepcopy__", "__copy__"})  # fmt: skip

# Of a module's own attributes, those that every module has; what is in _parameters, _buffers and _modules is looked at.
_OF_EVERY_MODULE = frozenset(vars(nn.Module())) | {"_compiled_call_impl"}
# Attributes that DeepSpeed keeps at modules while forward and backward run.
_OF_FRAMEWORKS = frozenset({"applied_pre_backward_ref_cnt", "pre_bwd_fn", "post_bwd_fn", "all_parameters",
                            "_external_params", "_original_parameters", "to_empty"})  # fmt: skip


class StateReader:
    """Reads the state of one module again and again.

    Args:
        forward: the module's, as it is without us.

    Attributes:
        is_compiled: whether something compiled by ``torch.compile`` was found.
    """

    def __init__(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        self._module = module
        self._forward = forward
        self._names: dict[types.CodeType, tuple[str, ...]] = {}
        self.is_compiled = False

    def parameters(self) -> list[torch.Tensor]:
        """Of the module."""
        return list(self._module.parameters())

    def read(self, arguments: Sequence[Any] = (), *, with_bytes: bool = False) -> State:
        """The state now.

        Args:
            arguments: objects among the arguments that are neither tensors nor containers of them.
            with_bytes: read the bytes of tensors, too, which takes as long as a pass over them.

        Raises:
            UnreadableError: nobody could tell whether it changes.
        """
        walk = _Walk(self._names, with_bytes=with_bytes)
        walk.add([("", self._module), ("forward", self._forward)], 0)
        walk.add(((f"{_ARGUMENT}{type(argument).__name__}", argument) for argument in arguments), 0)
        before, after = module_hooks._global_forward_pre_hooks, module_hooks._global_forward_hooks
        walk.add([("hooks before every module", _not_ours(before)), ("hooks after every module", _not_ours(after))], 0)
        walk.run()
        walk.found[_SETTINGS_NAME] = settings()
        self.is_compiled = self.is_compiled or walk.is_compiled
        return walk.found

    def changed_since(self, before: State, arguments: Sequence[Any] = (), *, with_bytes: bool = False) -> str | None:
        """Name a value that is not as it was; None if every value is."""
        try:
            return changed_name(before, self.read(arguments, with_bytes=with_bytes))
        except UnreadableError as error:
            return str(error)


class UnreadableError(Exception):
    """A state that cannot be compared, and why; never leaves the package."""


def changed_name(before: State, after: State) -> str | None:
    """One value in which two states differ, in words that go after "changes"."""
    if before == after:
        return None
    name = next((name for name in (*before, *after) if before.get(name, _NONE) != after.get(name, _NONE)), "state")
    if not name.startswith(_ARGUMENT):
        return name if name == _SETTINGS_NAME else f"its {name!r}"
    argument = name.partition(".")[0]
    # Each layer has its own place in a cache: one reason for all of them.
    return f"its {argument}{CACHE}" if "cache" in argument.lower() else f"its {name}"


_NONE = object()
_ARGUMENT = "argument of class "
CACHE = ", a cache"  # after the name of an argument that keeps keys and values for generating
_SETTINGS_NAME = "a global setting of PyTorch"


class _Walk:
    """One reading of a state: breadth first, every value under the name by which it was first reached.

    Attributes:
        found: the content of each value, or its identity, by name.
        is_compiled: whether something compiled by ``torch.compile`` was found.
    """

    def __init__(self, names: dict[types.CodeType, tuple[str, ...]], *, with_bytes: bool) -> None:
        self._names = names
        self._with_bytes = with_bytes
        self._to_do: deque[tuple[str, Any, int]] = deque()
        self._seen: dict[int, str] = {}
        self._held: list[Any] = []  # every object seen, lest another one gets its id
        self.found: dict[str, Any] = {}
        self.is_compiled = False

    def add(self, values: Iterable[_Named], calls: int) -> None:
        """Values to be read, so many calls away from the forward."""
        self._to_do.extend((name, value, calls) for name, value in values)

    def run(self) -> None:
        """Read the values that were added, and what they refer to.

        Raises:
            UnreadableError: nobody could tell whether they change.
        """
        while self._to_do:
            name, value, calls = self._to_do.popleft()
            while name in self.found:
                name += "'"
            try:
                self._one(name, value, calls)
            except UnreadableError:
                raise
            except Exception as error:  # objects of the user's may raise anything when they are looked at
                raise UnreadableError(f"{name!r}, which cannot be read ({type(error).__name__})") from error
            if len(self.found) > MAX_VALUES:
                raise UnreadableError(f"more than {MAX_VALUES} values, too many to compare")

    def _one(self, name: str, value: Any, calls: int) -> None:
        if type(value) in _PLAIN:
            self.found[name] = type(value), value
        elif type(value) in (float, complex):
            self.found[name] = repr(value)  # tells zeros by their signs, and not-a-number is itself
        elif isinstance(value, torch.Tensor):
            self.found[name] = tensor_fingerprint(value, with_bytes=self._with_bytes)
            self.add(_attributes_of_tensor(name, value), calls)
        elif id(value) in self._seen:
            self.found[name] = ("as", self._seen[id(value)])
        else:
            self._seen[id(value)] = name
            self._held.append(value)
            self._read(name, value, calls)

    def _read(self, name: str, value: Any, calls: int) -> None:
        if isinstance(value, type):
            self._class(name, value, calls)
        elif isinstance(value, nn.Module):
            self._module(name, value, calls)
        elif isinstance(value, (dict, types.MappingProxyType)):
            self._dict(name, value, calls)
        elif isinstance(value, _CONTAINERS):
            self._sequence(name, value, calls)
        elif isinstance(value, types.FunctionType):
            self._function(name, value, calls)
        elif (parts := _parts(value)) is not None:
            self.add(((name, part) for part in parts), calls)
        elif isinstance(value, ContextVar):
            self.add([(f"{name} (a ContextVar)", value.get(None))], calls)
        elif isinstance(value, (enum.Enum, types.ModuleType)):
            self.found[name] = Held(value)
        elif type(value) is threading.local:
            self.found[name] = Held(value)
            self.add(_attributes(name, value), calls)
        elif isinstance(value, weakref.ref):
            self.add([(f"{name} (a weak reference)", value())], calls)
        elif isinstance(value, numpy.ndarray) and value.dtype.hasobject:
            self._sequence(name, numpy.ndarray.tolist(value.reshape(-1)), calls)
        elif (fingerprint := content_fingerprint(value)) is not None:
            self.found[name] = fingerprint
            if not _is_of_library(type(value)):
                self.add(_attributes(name, value), calls)
        elif _is_of_library(type(value)):
            self._library_object(name, value, calls)
        else:
            self.found[name] = type(value).__qualname__
            self.add(_attributes(name, value), calls)
            self._class_of(name, value, calls + 1)

    def _library_object(self, name: str, value: Any, calls: int) -> None:
        """Content where there may be state, or else identity."""
        self.found[name] = Held(value)
        if isinstance(value, Iterator):
            raise UnreadableError(f"{name!r}, an iterator whose place cannot be compared")
        owner = getattr(value, "__self__", None)
        if owner is not None and not isinstance(owner, (type, types.ModuleType)):
            self.add([(f"{name} (a method)", owner)], calls)  # a method that is not written in Python
        root = _root_of(type(value))
        if root not in sys.stdlib_module_names or root in _STATELESS:
            return
        if not hasattr(value, "__dict__") and root not in _WITHOUT_DICT and not _has_members(type(value)):
            raise UnreadableError(f"{name!r}, of the class {root}.{type(value).__name__}, which shows no content")
        self.add(_attributes(name, value), calls)

    def _module(self, name: str, module: nn.Module, calls: int) -> None:
        self.is_compiled = self.is_compiled or is_compiled(module)
        self.add(_tensors_and_children(name, module), calls)
        if not is_wrapper_of_compiled(module):
            self.add(_own_attributes(name, module), calls)
            self._class_of(name, module, calls)

    def _class_of(self, name: str, value: Any, calls: int) -> None:
        for one in type(value).__mro__:
            if id(one) not in self._seen and not _is_of_library(one):
                self._seen[id(one)] = name
                self.add(_namespace(one, calls), calls)

    def _class(self, name: str, value: type, calls: int) -> None:
        """One that is referred to by name: a forward may read and set its attributes, and make objects of it."""
        self.found[name] = Held(value)
        if isinstance(value, enum.EnumMeta):
            return
        for one in value.__mro__:
            if (one is value or id(one) not in self._seen) and not _is_of_library(one):
                self._seen[id(one)] = name
                self.add(_namespace(one, calls + 1, is_making=True), calls + 1)

    def _dict(self, name: str, value: Any, calls: int) -> None:
        items = list(_items(value))
        words = [key if type(key) in (str, int) else f"key {number}" for number, (key, _) in enumerate(items)]
        self.found[name] = tuple(words)
        for word, (key, inside) in zip(words, items, strict=True):
            self.add([(f"{name}[{word}]", inside)], calls)
            if type(key) not in (str, int):
                self.add([(f"{name}, {word}", key)], calls)
        self.add(_attributes(name, value), calls)

    def _sequence(self, name: str, value: Iterable[Any], calls: int) -> None:
        inside = _values(value)
        self.found[name] = len(inside)
        self.add(((f"{name}[{number}]", one) for number, one in enumerate(inside)), calls)
        self.add(_attributes(name, value), calls)

    def _function(self, name: str, function: types.FunctionType, calls: int) -> None:
        original = getattr(function, "_torchdynamo_orig_callable", None)
        if original is not None:
            self.is_compiled = True
            self.add([(name, original)], calls)
            return
        self.found[name] = Held(function)
        if _is_of_library(function) or calls > MAX_CALLS:
            return
        names = self._names.get(function.__code__)
        if names is None:
            names = self._names[function.__code__] = tuple(dict.fromkeys(_names_in(function.__code__)))
        self.add(_bound_in(function), calls + 1)
        self.add(_globals_of(function, names), calls + 1)


# ---- what values refer to, each with its name -----------------------------------------------------------------------


def _tensors_and_children(name: str, module: nn.Module) -> Iterator[_Named]:
    for members in (module._parameters, module._buffers, module._modules):
        for key, member in members.items():
            yield _dotted(name, key), member


def _own_attributes(name: str, module: nn.Module) -> Iterator[_Named]:
    if name:  # hooks of the whole block run once, outside of its forward
        for key in ("_forward_pre_hooks", "_forward_hooks"):
            yield _dotted(name, key), getattr(module, key)
    for key, value in vars(module).items():
        if key == "forward" and (not name or _is_of_library(type(value))):
            continue  # the block's own is read by itself; ours is none of its state
        if key not in _OF_EVERY_MODULE and key not in _OF_FRAMEWORKS and not key.startswith("ds_"):
            yield _dotted(name, key), value


def _namespace(one: type, calls: int, *, is_making: bool = False) -> Iterator[_Named]:
    """Attributes and methods of a class; with ``is_making``, the forward may make objects of that class."""
    for key, inside in list(vars(one).items()):
        is_special = key.startswith("__") and key.endswith("__")
        if is_special and not (isinstance(inside, types.FunctionType) and key not in _NEVER_RUN):
            continue
        if is_making and calls > _MAX_CALLS_TO_METHODS and isinstance(inside, _METHODS):
            continue
        if is_making or key not in _OF_MAKING:
            yield f"{one.__name__}.{key}", inside


def _parts(value: Any) -> tuple[Any, ...] | None:
    """Of something that stands for functions; None for anything else."""
    if isinstance(value, types.MethodType):
        return value.__func__, value.__self__
    if isinstance(value, partial):
        return value.func, value.args, value.keywords
    if isinstance(value, property):
        return value.fget, value.fset, value.fdel
    return (value.__func__,) if isinstance(value, (staticmethod, classmethod)) else None


def _bound_in(function: types.FunctionType) -> Iterator[_Named]:
    """Closure, defaults and attributes of a function."""
    for key, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        if cell != types.CellType():  # an empty one has no content to ask for
            yield _dotted(function.__name__, key), cell.cell_contents
    for key, value in (function.__kwdefaults__ or {}).items():
        yield _dotted(function.__name__, key), value
    for number, value in enumerate(function.__defaults__ or ()):
        yield f"{function.__name__}, default {number}", value
    for key, value in vars(function).items():
        yield _dotted(function.__name__, key), value


def _globals_of(function: types.FunctionType, names: Sequence[str]) -> Iterator[_Named]:
    """The globals, and members of imported modules, that a function refers to by the ``names`` in its code."""
    inside = function.__globals__
    place, package = str(inside.get("__name__", "")), str(inside.get("__package__", ""))
    if place.partition(".")[0] in _LIBRARIES:  # a wrapper that goes by the name of what it wraps
        return
    for key in names:
        value = inside.get(key, _NONE)
        if value is _NONE:  # imported inside the function
            value = sys.modules.get(key) or sys.modules.get(f"{package}.{key}", _NONE)
        if isinstance(value, types.ModuleType):
            yield from _members_of(value, names, MAX_MODULES)
        elif _is_worth_reading(value):
            yield _dotted(place, key), value


def _members_of(module: types.ModuleType, names: Sequence[str], depth: int) -> Iterator[_Named]:
    if module.__name__.partition(".")[0] in _LIBRARIES:
        return
    for key in names:
        value = vars(module).get(key, _NONE)
        if isinstance(value, types.ModuleType):
            if depth > 1:
                yield from _members_of(value, names, depth - 1)
        elif _is_worth_reading(value):
            yield _dotted(module.__name__, key), value


def _attributes_of_tensor(name: str, tensor: torch.Tensor) -> Iterator[_Named]:
    """Values only: frameworks put their methods on parameters, too."""
    for key, inside in vars(tensor).items():
        if type(inside) in _VALUES and not key.startswith(_OF_TENSORS_BY_FRAMEWORKS):
            yield _dotted(name, key), inside


def _attributes(name: str, value: Any) -> Iterator[_Named]:
    if type(value) in _WITHOUT_ATTRIBUTES:
        return
    inside = getattr(value, "__dict__", None)
    if isinstance(inside, dict):
        for key, attribute in list(dict.items(inside)):
            yield _dotted(name, key), attribute
    for key, member in _members(type(value)):
        try:
            attribute = member.__get__(value)
        except AttributeError:  # a slot that is empty
            continue
        yield _dotted(name, key), attribute


def _not_ours(hooks: Mapping[int, Any]) -> list[Any]:
    """Without those that record a micro-step, which come and go, and change nothing."""
    return [hook for hook in hooks.values() if not str(getattr(hook, "__module__", "")).startswith("ds_tba.")]


def _dotted(name: str, key: str) -> str:
    return f"{name}.{key}" if name else key


def _root_of(one: Any) -> str:
    return str(getattr(one, "__module__", None) or "builtins").partition(".")[0]


def _is_of_library(one: Any) -> bool:
    return _root_of(one) in _LIBRARIES


def _is_worth_reading(value: Any) -> bool:
    """Whether something found under a global name may hold state: it is there, and no library's class."""
    return value is not _NONE and not (isinstance(value, type) and _is_of_library(value))


def _names_in(code: types.CodeType) -> Iterator[str]:
    """The names in a function and in the functions that are written inside it."""
    yield from code.co_names
    for one in code.co_consts:
        if isinstance(one, types.CodeType):
            yield from _names_in(one)


def _items(value: Any) -> Iterable[tuple[Any, Any]]:
    """Of a dict, in its order; an ``OrderedDict`` keeps one that the dict below it does not know."""
    if isinstance(value, OrderedDict):
        return OrderedDict.items(value)
    return dict.items(value) if isinstance(value, dict) else value.items()


def _values(value: Any) -> list[Any]:
    kind: Any = next(one for one in _CONTAINERS if isinstance(value, one))
    return list(kind.__iter__(value))


def _members(kind: type) -> Iterator[tuple[str, Any]]:
    """Slots, by the names under which the class has them."""
    for one in kind.__mro__:
        if not one.__flags__ & _HEAP_TYPE:  # written in C, and without slots
            continue
        for key, member in vars(one).items():
            if type(member) is types.MemberDescriptorType:
                yield key, member


def _has_members(kind: type) -> bool:
    return next(_members(kind), None) is not None
