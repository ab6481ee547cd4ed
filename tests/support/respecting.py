"""A double of PyTorch 2.14's API for selective checkpoints under saved-tensor hooks, for older versions.

The argument ``respect_saved_tensors_hooks`` as pytorch #190581 merged it, with the functions behind ``checkpoint`` that
know of it. Where it is None, 2.14 warns.
"""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils import checkpoint as checkpointing
from torch.utils._pytree import tree_map

IS_REAL = hasattr(checkpointing, "_checkpoint_without_reentrant_generator_impl")
ORDER = ("preserve_rng_state", "context_fn", "determinism_check", "debug", "early_stop")


def hooks_in_scope() -> Any:
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    while hooks is not None and getattr(hooks[0], "_checkpoint_internal", False):
        hooks = hooks[0]._user_hooks
    return hooks


def internal(kind: Any) -> Any:
    """A class of a checkpoint's own hooks, which remember whose are around them."""

    class Internal(kind):  # type: ignore[misc]
        def __enter__(self) -> Any:
            self.pack_hook._user_hooks = hooks_in_scope()
            self.pack_hook._checkpoint_internal = True
            return super().__enter__()

        def __exit__(self, *error: Any) -> Any:
            del self.pack_hook._user_hooks
            return super().__exit__(*error)

    return Internal


class Chosen(NamedTuple):
    """A ``context_fn``, with what the call says to ``respect_saved_tensors_hooks``."""

    context_fn: Any
    respects: bool

    def __call__(self) -> Any:
        return self.context_fn()


def packed(value: Any, hooks: Any) -> Any:
    """Return the entry of a selective checkpoint that hooks have."""
    held = hooks[0](value)
    return SimpleNamespace(get_val=lambda _allow_mutation: hooks[1](held))


def respecting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have this PyTorch respect hooks as 2.14 does; nothing to do where it does by itself."""
    if IS_REAL:
        return
    caching, generate = checkpointing._CachingTorchDispatchMode, checkpointing._checkpoint_without_reentrant_generator
    dispatch, plain_checkpoint = caching.__torch_dispatch__, checkpointing.checkpoint

    def dispatch_and_pack(mode: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        index = mode.func_counter[func]
        out = dispatch(mode, func, types, args, kwargs)
        entry, hooks = mode.storage[func].get(index, checkpointing._RECOMPUTE), hooks_in_scope()
        if entry is checkpointing._RECOMPUTE or hooks is None:
            return out
        respects = getattr(mode, "respect_saved_tensors_hooks", None)
        if respects is None:
            warnings.warn("Tensors that SAC saves currently bypass these hooks", FutureWarning, stacklevel=2)
        if respects:
            is_tensor = lambda one: isinstance(one.val, torch.Tensor)  # noqa: E731
            mode.storage[func][index] = tree_map(lambda one: packed(one.val, hooks) if is_tensor(one) else one, entry)
        return out

    def impl(fn: Any, args: Any, kwargs: Any, *, context_fn: Any, respect_saved_tensors_hooks: Any, **more: Any) -> Any:
        def contexts() -> Any:
            forward, recomputation = context_fn()
            forward.respect_saved_tensors_hooks = respect_saved_tensors_hooks
            return forward, recomputation

        if context_fn is not checkpointing.noop_context_fn:
            more["context_fn"] = contexts
        return generate(fn, *(more.get(name, checkpointing.noop_context_fn) for name in ORDER), *args, **kwargs)

    def behind_checkpoint(fn: Any, *args: Any, **kwargs: Any) -> Any:
        options = dict(zip(ORDER, args[: len(ORDER)], strict=True))
        respects = options["context_fn"].respects if isinstance(options["context_fn"], Chosen) else None
        return checkpointing._checkpoint_without_reentrant_generator_impl(  # type: ignore[attr-defined]
            fn, args[len(ORDER) :], kwargs, **options, respect_saved_tensors_hooks=respects
        )

    def checkpoint(*args: Any, respect_saved_tensors_hooks: Any = None, **kwargs: Any) -> Any:
        if respect_saved_tensors_hooks is not None:  # to the function behind, which 2.13 does not hand it to
            kwargs["context_fn"] = Chosen(kwargs["context_fn"], respect_saved_tensors_hooks)
        return plain_checkpoint(*args, **kwargs)

    put = monkeypatch.setattr
    put(checkpointing, "checkpoint", checkpoint)
    put(caching, "__torch_dispatch__", dispatch_and_pack)
    put(checkpointing, "_checkpoint_hook", internal(checkpointing._checkpoint_hook))
    put(checkpointing, "_recomputation_hook", internal(checkpointing._recomputation_hook))
    put(checkpointing, "_current_user_saved_tensors_hooks", hooks_in_scope, raising=False)
    put(checkpointing, "_checkpoint_without_reentrant_generator_impl", impl, raising=False)
    put(checkpointing, "_checkpoint_without_reentrant_generator", behind_checkpoint)
