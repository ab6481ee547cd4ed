"""One micro-step of a model without its memory: on the meta device, through the cache and the recorder of a real run.

The same code as in a run decides eligibility, views, deduplication and blocks. Nothing is taken as rematerialized: a
run has lower peaks where it is.

[Note: The roofline] An operation takes as long as its FLOPs at the rate that matrix products reach, or as its inputs
and outputs at the rate of device memory, or as its launch, whichever is longest. Blind spots: kernels fused into one,
and communication between ranks.

[Note: Which kernels] What is saved depends on the kernel. A CUDA device has fused kernels for attention (which save the
inputs, the output and a log-sum-exp per row, not the probabilities) and dropout (a mask of one byte per element). Plain
products stand for attention that no fused kernel takes: of grouped heads in FP32. Blind spot: the fused kernel of
``torch.nn.RMSNorm``, which models of transformers do not use.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.library import _scoped_library
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from ds_tba.cli.plan.model import Recipe, Subject, loss_of
from ds_tba.cli.plan.training import LAUNCH_S, Device, DryRun, Training, brief
from ds_tba.config import OffloadConfig
from ds_tba.core.cache import TensorCache
from ds_tba.core.tensors import mark_all_owned, mark_inputs
from ds_tba.errors import ConfigError, DsTbaError, ModelError
from ds_tba.plan.recorder import Recorder, Scene
from ds_tba.plan.trace import Resources, StorageTrace
from ds_tba.recompute import Blocks, find_blocks
from ds_tba.remat.where import ChosenModules, RunningModule
from ds_tba.stats import Gauge
from ds_tba.storage.base import Always
from ds_tba.storage.staging import slots_bytes_of


def dry_run(
    recipe: Recipe,
    batch: int,
    sequence: int,
    training: Training,
    device: Device,
    rates: tuple[float, float] = (0.0, 0.0),
) -> DryRun:
    """Run one micro-step; ``rates`` are those of the drives, for the trace.

    Raises:
        ConfigError: the config names what the model lacks.
        ModelError: the model does not run, or needs values, which the meta device does not have.
    """
    offload = training.offload
    # No stores: everything is kept and recorded, and the settings are replayed from that.
    cache = TensorCache([], "meta", offload.min_tensor_bytes)
    clock = OpClock(device.flops, device.memory_bytes_per_s, LAUNCH_S, cache.stats.saved)
    try:
        with torch.device("meta"):
            subject = recipe(batch, sequence)
        subject.model.to(dtype=training.dtype)
        with cuda_kernels():
            recorder, largest_bytes = _micro_step(subject, offload, cache, clock)
    except DsTbaError:
        raise
    except Exception as error:  # the model may raise anything
        what = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        raise ModelError(
            f"the model failed at {clock.last_operation or 'its making'}: {what}. It runs on shapes alone here: its "
            "forward may not read the values of tensors"
        ) from error
    no_blocks = 'no repeated layers that may run again were found: name the layers in "blocks"'
    copy, parameters = device.copy_bytes_per_s, list(subject.model.parameters())
    owned = [list(module.parameters(recurse=False)) for module in subject.model.modules()]
    trained = [one for one in parameters if one.requires_grad]
    micro_steps = training.number("gradient_accumulation_steps", 1)
    trace = recorder.trace(Resources(*rates, copy, copy, slots_bytes_of(offload)), micro_steps=micro_steps)
    whole_bytes = [one.nbytes for one in subject.quantized]  # of each while it is used
    saved_by_bits = sum(whole_bytes) - int(sum(one.numel() for one in subject.quantized) * subject.element_bytes)
    return DryRun(
        trace=trace,
        temporary=clock.temporary(max(whole_bytes, default=0)),
        parameters=sum(one.numel() for one in parameters),
        parameter_bytes=sum(one.nbytes for one in parameters) - saved_by_bits,
        trained=sum(one.numel() for one in trained),
        trained_bytes=sum(one.nbytes for one in trained),
        largest_bytes=largest_bytes,
        largest_module=max(sum(one.numel() for one in each) for each in owned),
        notes=subject.notes if trace.blocks else (*subject.notes, no_blocks),
    )


def _micro_step(subject: Subject, offload: OffloadConfig, cache: TensorCache, clock: OpClock) -> tuple[Recorder, int]:
    """Run one forward and one backward; return the bytes of forward's largest storage, too."""
    model = subject.model
    running = RunningModule()
    running.watch(model)
    chosen = ChosenModules(running, offload.patterns)
    for problem in chosen.watch(model).values():
        raise ConfigError(f"{problem}.")
    cache.gate.excluded_by = chosen.reason
    found = find_blocks(model, offload.blocks)
    blocks = {path: block for path, block in found.items() if not chosen.excludes_part_of(block)}
    recorder = Recorder(Scene(cache.eligibility_of, clock, running))
    mark_all_owned(model)
    mark_inputs(subject.inputs)
    # Without them a gradient would count as temporary here, and again among what the device holds.
    for one in model.parameters():  # gradients exist, as in all micro-steps but the first
        one.grad = torch.zeros_like(one) if one.requires_grad else None
        clock.ignore(each.untyped_storage() for each in (one, one.grad) if each is not None)
    with clock:
        with (
            cache.saving(Always((), wait=False), recorder.around),
            Blocks(blocks, cache).forward(recorder.passing),
        ):
            output = model(**subject.inputs)
        loss, largest_bytes = loss_of(output), clock.largest_bytes
        del output
        loss.backward()  # type: ignore[no-untyped-call]
        recorder.end()
    cache.settle()
    return recorder, largest_bytes


class OpClock(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The time that the operations inside would take on the device, and the storages that they read or make.

    Bytes count as an allocator counts them; see [Note: The roofline] for the time. On the meta device it answers
    ``any()`` with false and all other questions for a truth with true, so that masks do not stop a model.
    """

    observes_only = True  # for ``is_under_a_mode``: activations go where they go without it

    def __init__(
        self, flops_per_s: float, memory_bytes_per_s: float, launch_s: float = 0.0, saved: Gauge | None = None
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # Seconds of all operations so far, and the name of the last one, which may have failed.
        self.now_s, self.last_operation = 0.0, ""
        self.now_bytes = self.largest_bytes = 0  # of all storages now, and of the largest so far
        self._freed: deque[tuple[int, int]] = deque()  # left by finalizers, which run in any thread
        self._seen: dict[int, object] = {}
        # Each operation that takes time adds its seconds, the time of its end, and the bytes then beside saved tensors.
        self._samples: list[tuple[float, float, int]] = []
        self._flops_per_s, self._memory_bytes_per_s, self._launch_s = flops_per_s, memory_bytes_per_s, launch_s
        # Level of the saved tensors, which are not temporary: inputs, buffers, logits and gradients are left.
        self._saved = Gauge() if saved is None else saved

    def ignore(self, storages: Iterable[torch.UntypedStorage]) -> None:
        """Count these storages not; they are held, or another storage would get their place and not count either."""
        self._seen |= {id(one): one for one in storages}

    def temporary(self, more_bytes: int) -> tuple[StorageTrace, ...]:
        """Return the tensors beside saved ones by time, and ``more_bytes`` all the time.

        What is there as an operation ends is there while it runs. One ends before the next one begins.
        """
        return tuple(
            brief(end_s - 0.999 * took_s, end_s - 0.001 * took_s, nbytes + more_bytes)
            for took_s, end_s, nbytes in self._samples
        )

    def mark(self) -> float:
        return self.now_s

    def elapsed_s(self, earlier: float, later: float) -> float:
        return later - earlier

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self.last_operation, name, kwargs = str(func), func._schema.name, kwargs or {}
        if name == "aten::_local_scalar_dense" and args[0].is_meta and args[0].dtype is torch.bool:
            return not hasattr(args[0], _OF_ANY)
        result = func(*args, **kwargs)
        while self._freed:
            key, nbytes = self._freed.popleft()
            del self._seen[key]
            self.now_bytes -= nbytes
        tensors = {id(one): one for one in tree_leaves((args, kwargs, result)) if isinstance(one, torch.Tensor)}
        for one in tensors.values():
            self._see(one.untyped_storage())
        if name == "aten::any":
            setattr(result, _OF_ANY, True)
        aliases = [one.alias_info for one in func._schema.returns]
        is_view = any(alias is not None and not alias.is_write for alias in aliases)
        if not (is_view or name.startswith(("aten::empty", "aten::new_empty"))):
            moved_s = sum(one.numel() * one.element_size() for one in tensors.values()) / self._memory_bytes_per_s
            took_s = max(_flops(func, args, kwargs, result) / self._flops_per_s, moved_s, self._launch_s)
            self.now_s += took_s
            self._samples.append((took_s, self.now_s, self.now_bytes - self._saved.now))
        return result

    def _see(self, storage: torch.UntypedStorage) -> None:
        key, nbytes = id(storage), storage.nbytes()
        if key not in self._seen:
            self._seen[key] = weakref.ref(storage, partial(self._free, key, nbytes))
            self.now_bytes += nbytes
            self.largest_bytes = max(self.largest_bytes, nbytes)

    def _free(self, key: int, nbytes: int, _: weakref.ref[torch.UntypedStorage]) -> None:
        self._freed.append((key, nbytes))


def _flops(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> float:
    """Return the FLOPs of matrix products and attention; fused attention with a causal mask computes half of them."""
    name, arguments = func._schema.name, [one.name for one in func._schema.arguments]
    if name == "aten::_grouped_mm":  # each row of the first tensor is multiplied with one matrix of the second
        return 2.0 * float(args[0].numel()) * float(args[1].shape[-1])
    if func.overloadpacket not in flop_registry:
        return 0.0
    flops = float(flop_registry[func.overloadpacket](*args, **kwargs, out_val=result))
    at = arguments.index("is_causal") if "is_causal" in arguments else len(args)
    return flops / 2 if (args[at] if at < len(args) else kwargs.get("is_causal", False)) else flops


_OF_ANY = "_ds_tba_of_any"
_aten = torch.ops.aten


@contextmanager
def cuda_kernels() -> Iterator[None]:
    """Have operations inside save what CUDA's kernels would save; see [Note: Which kernels].

    Changes PyTorch's dispatch table for tensors of the meta device that need a gradient, in all threads.
    """
    # Taken back at the end: the table is the process's, and every later tensor on this device would run these kernels.
    with _scoped_library("aten", "IMPL") as library:
        library.impl("scaled_dot_product_attention", _attend, "AutogradMeta")
        library.impl("dropout", _dropout, "AutogradMeta")
        yield


def _attend(query: Any, key: Any, value: Any, mask: Any = None, *more: Any, **options: Any) -> Any:
    """Run ``scaled_dot_product_attention``; ``more`` are its dropout and whether it is causal."""
    if mask is not None and mask.dtype is torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype)  # the kernels save the bias that a mask becomes
    if query.itemsize != 2 and query.shape[1] != key.shape[1]:
        return _aten._scaled_dot_product_attention_math(query, key, value, mask, *more, **options)[0]
    options.pop("enable_gqa", None)
    if mask is None:
        return _aten._scaled_dot_product_cudnn_attention(query, key, value, None, True, *more, **options)[0]
    mask = mask.expand(*query.shape[:3], key.shape[-2])
    return _aten._scaled_dot_product_efficient_attention(query, key, value, mask, True, *more, **options)[0]


def _dropout(tensor: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    if not train or p == 0.0 or not tensor.numel():
        return tensor
    return torch.native_dropout(tensor, p, True)[0]
