"""Other libraries that offload or recompute activations beside ds_tba: exactness, bytes, peak and time of one model.

    python benchmarks/peers.py --nvme_path DIR --out DIR [--device cpu|cuda] [--minutes 20] [--tiny]

A Llama of Hugging Face, made from numbers, trains under each peer in turn, in a new random order each round, and under
ds_tba. Each peer is used as its users use it, with its own defaults. A peer that is not installed, or does not run
here, is a row with its own error. Into ``--out`` go ``peers.json`` and ``peers.md``; the exit status is 0 if ds_tba is
exact.

[Note: a CPU in the place of the device] Most peers move from a GPU to the host and do nothing, or fail, where there is
none. So without a GPU their copies and streams are led to the CPU: what is copied "to the host" and back is copied in
memory, and streams are PyTorch's for CPUs, which do nothing. This tells whether they are exact, how much they move and
what stays; their copies cannot overlap with the work, so that their times are from above.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import platform
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest import mock

import torch
from benchmarking import MIB, first_line, markdown_table, provenance, race_parser, write_json, write_whole
from curves.device import Device, hold_freed_memory
from curves.models import Workload
from curves.points import point
from curves.turns import AGAIN, PLAIN, Contender, PeakMeter, Race, Runner, StepTaken, parameters_of
from gpu.results import version
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

ENOUGH = 100.0  # an overhead that no plan reaches: the budget decides
DROPOUT = 0.1
AXOLOTL_DISK = "axolotl disk"
TRL = "trl.models.activation_offloading:get_act_offloading_ctx_manager"
VERSIONS = ("torch", "transformers", "deepspeed", "trl", "torchtune", "axolotl", "torch_remat")


class Peered(nn.Module):
    """A model of transformers' whose layers a peer can checkpoint."""

    def __init__(self, llama: Any) -> None:
        super().__init__()
        self.llama = llama

    @contextmanager
    def checkpointed(self, by: Callable[..., Any]) -> Iterator[None]:
        """Run each layer as ``by(layer, *arguments)``, as gradient checkpointing of transformers does."""
        self.llama._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=by)
        try:
            yield
        finally:
            self.llama._set_gradient_checkpointing(enable=False)


class Llama(Peered):
    """Token numbers and targets in, the loss out."""

    def __init__(self, *, tiny: bool, is_cuda: bool) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        width, layers, head, vocabulary = (64, 2, 32, 256) if tiny else (256, 6, 64, 2048)
        if is_cuda and not tiny:
            width, layers, head, vocabulary = 4096, 8, 128, 32000
        sizes = {"hidden_size": width, "intermediate_size": 3 * width, "num_hidden_layers": layers}
        heads = {"num_attention_heads": width // head, "num_key_value_heads": width // head}
        config = LlamaConfig(**sizes, **heads, vocab_size=vocabulary, use_cache=False)
        torch.manual_seed(1)
        super().__init__(LlamaForCausalLM(config).train())

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.llama(input_ids=inputs, labels=targets).loss
        return loss

    def drop_out(self, share: float) -> None:
        for layer in self.llama.model.layers:
            layer.self_attn.attention_dropout = share


def workload_of(options: argparse.Namespace, device: Device) -> Workload:
    with device.torch:
        model = Llama(tiny=options.tiny, is_cuda=device.is_cuda)
        if device.is_cuda:
            model.bfloat16()
        size = (2, 32) if options.tiny else (4, 4096) if device.is_cuda else (2, 256)
        text = torch.randint(0, model.llama.config.vocab_size, size)
    return Workload.prepared(model, text, text)


def _checkpointing(model: Peered, is_cuda: bool) -> AbstractContextManager[Any]:
    return model.checkpointed(partial(checkpoint, use_reentrant=False))


@contextmanager
def _transformers(model: Peered, is_cuda: bool) -> Iterator[None]:
    model.llama.activation_checkpointing_enable(offload=True)
    try:
        yield
    finally:
        model.llama.activation_checkpointing_disable()
        model.llama.disable_input_require_grads()


def _made(by: str, is_cuda: bool, *models: nn.Module) -> AbstractContextManager[Any]:
    """Return the context that a library makes for a step; its maker is named as ``module:name``."""
    module, _, name = by.partition(":")
    make = getattr(importlib.import_module(module), name)
    made: AbstractContextManager[Any] = make(*models, use_streams=is_cuda, use_pin_memory=is_cuda)
    return made


@contextmanager
def _deepspeed(model: Peered, is_cuda: bool) -> Iterator[None]:
    from deepspeed.accelerator import get_accelerator

    accelerator, module = type(get_accelerator()), "deepspeed.runtime.activation_checkpointing.offload_activations"
    device = nullcontext() if is_cuda else mock.patch.object(accelerator, "is_synchronized_device", lambda _: False)
    with device, _checkpointing(model, is_cuda), _made(f"{module}:CheckpointHiddenStatesOffload", is_cuda):
        yield


@contextmanager
def _axolotl(model: Peered, is_cuda: bool) -> Iterator[None]:
    module = "axolotl.monkeypatch.checkpoint_activation_offload"
    context = _made(f"{module}:get_checkpoint_hidden_states_offloading_ctx_manager", is_cuda)
    with _checkpointing(model, is_cuda), context:
        yield


@contextmanager
def _axolotl_disk(model: Peered, is_cuda: bool) -> Iterator[None]:
    from axolotl.monkeypatch.gradient_checkpointing import offload_disk

    if offload_disk.Disco._manager is None:
        offload_disk.Disco._manager = offload_disk.DiskOffloadManager(prefetch_size=1, prefetch_to_gpu=is_cuda)
    # Not by its wrapper for transformers, which asks the layer for a ``__self__`` that is no longer there.
    with model.checkpointed(offload_disk.Disco.apply):
        yield


@contextmanager
def _torch_remat(model: Peered, is_cuda: bool) -> Iterator[None]:
    import torch_remat

    def keeping(attend: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        out, weights = torch_remat.region(attend, "attention", recompute=False)(*args, **kwargs)
        torch_remat.recompute_needs_tensor(out)
        return out, weights

    def by(layer: Callable[..., Any], *args: Any) -> Any:
        return torch_remat.checkpoint(region_name="layer")(layer)(*args)

    with ExitStack() as stack:
        for layer in model.llama.model.layers:
            own = layer.self_attn.forward
            stack.enter_context(mock.patch.object(layer.self_attn, "forward", partial(keeping, own)))
        stack.enter_context(model.checkpointed(by))
        yield


# The context of a training step, made from the model and whether there is a GPU.
PEERS: dict[str, Callable[[Peered, bool], AbstractContextManager[Any]]] = {
    "torch checkpoint": _checkpointing,
    "torch save_on_cpu": lambda *_: save_on_cpu(pin_memory=True),
    "transformers offload": _transformers,
    "DeepSpeed CheckpointHiddenStatesOffload": _deepspeed,
    "TRL OffloadActivations": lambda model, is_cuda: _made(TRL, is_cuda, model.llama),
    "torchtune OffloadActivations": lambda _, is_cuda: _made("torchtune.training:OffloadActivations", is_cuda),
    "axolotl hidden_states": _axolotl,
    AXOLOTL_DISK: _axolotl_disk,
    "torch_remat, attention saved": _torch_remat,
}


def contender(name: str, model: Peered, is_cuda: bool) -> Contender:
    """Return a peer as a contender."""
    kept: list[saved_tensors_hooks] = []

    @contextmanager
    def around() -> Iterator[None]:
        with nullcontext() if is_cuda else cpu_as_device():
            context = kept[0] if kept else PEERS[name](model, is_cuda)
            if isinstance(context, saved_tensors_hooks):  # entered again in each step, as trainers do
                kept[:] = [context]
            with context:
                yield

    return Contender(name, around=around)


@contextmanager
def cpu_as_device() -> Iterator[None]:
    """Lead copies and streams of a device to the CPU; see [Note: a CPU in the place of the device]."""
    own = torch.Tensor.to

    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if args and isinstance(args[0], (str, torch.device)):
            return own(self, "cpu", *args[1:], **{**kwargs, "copy": True})
        return own(self, *args, **kwargs)

    stream, cpu = torch.cpu.current_stream(), torch.device("cpu")
    with ExitStack() as stack:
        for target, name, stand_in in (
            (torch.Tensor, "to", to),
            (torch.accelerator, "current_accelerator", lambda *_: cpu),
            (torch.cpu, "is_available", lambda: False),  # there is no pinned memory
            (torch.cuda, "default_stream", lambda *_: stream),
            (torch.cuda, "stream", torch.cpu.stream),
        ):
            stack.enter_context(mock.patch.object(target, name, stand_in))
        yield


class Meter(PeakMeter):
    """Tells host memory apart: on a GPU by its device; on a CPU it is what a pack hook makes."""

    def __init__(self, ignored: Sequence[torch.UntypedStorage], is_cuda: bool) -> None:
        super().__init__(ignored)
        self.host_peak_bytes = 0
        self._is_cuda, self._packing = is_cuda, False
        self._host: dict[int, int] = {}

    def __enter__(self) -> Any:
        def enter(hooks: Any) -> None:
            pack = partial(self._pack, hooks.pack_hook)
            torch._C._autograd._push_saved_tensors_default_hooks(pack, hooks.unpack_hook)

        self._patch = nullcontext() if self._is_cuda else mock.patch.object(saved_tensors_hooks, "__enter__", enter)
        self._patch.__enter__()
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        self._patch.__exit__(*raised)

    def _pack(self, hook: Callable[[torch.Tensor], Any], tensor: torch.Tensor) -> Any:
        before, self._packing = self._packing, True
        try:
            return hook(tensor)
        finally:
            self._packing = before

    def _see(self, storage: torch.UntypedStorage) -> None:
        key = id(storage)
        is_host = storage.device.type == "cpu" if self._is_cuda else self._packing
        if key in self._seen or not is_host:
            return super()._see(storage)

        def forget(_: Any) -> None:
            del self._host[key]
            self._freed.append((key, 0))

        self._seen[key] = weakref.ref(storage, forget)
        self._host[key] = storage.nbytes()
        self.host_peak_bytes = max(self.host_peak_bytes, sum(self._host.values()))
        return None


def moved_bytes(runner: Runner, host_bytes: int) -> int:
    """Return the bytes that leave memory in one step; ``host_bytes`` are those of copies in host memory."""
    offloader = runner.offloader
    if offloader is not None:
        runner.settle()
        before = offloader.report().offloaded_bytes
        runner.step()
        return offloader.report().offloaded_bytes - before
    if runner.contender.name != AXOLOTL_DISK:
        return host_bytes
    from axolotl.monkeypatch.gradient_checkpointing import offload_disk

    saved: list[int] = []
    own = offload_disk.DiskOffloadManager.save_tensor

    def save(manager: Any, tensor: torch.Tensor) -> Any:
        saved.append(tensor.nbytes)
        return own(manager, tensor)

    with mock.patch.object(offload_disk.DiskOffloadManager, "save_tensor", save):
        runner.step()
    return sum(saved)


# ds_tba with its defaults, and at the ends of what it can do.
OURS = (
    Contender("ds_tba, defaults", "adaptive"),
    Contender("ds_tba, no drive", "adaptive", {"placement": "keep"}),
    Contender("ds_tba, placement nvme", "adaptive", {"placement": "nvme"}),
)


def budgeted(part: int, plain_bytes: int) -> Contender:
    limits = {"activation_budget_bytes": plain_bytes // part, "recompute": True, "max_step_overhead": ENOUGH}
    return Contender(f"ds_tba, recompute, saved bytes within 1/{part} of plain's peak", "adaptive", limits)


def block(options: argparse.Namespace) -> dict[str, Any]:
    staging_bytes = 4 << 20 if options.tiny else None if options.device == "cuda" else 64 << 20
    io = {"backend": "posix", "staging_bytes": staging_bytes, "swap_file_bytes": None}
    return {"nvme_path": str(options.nvme_path), "min_tensor_bytes": 4096 if options.tiny else 256 << 10, "io": io}


def measure(options: argparse.Namespace, ends_s: float) -> dict[str, Any]:
    """Measure all that run here, in turns, and name the errors of those that do not."""
    device = Device(options.device)
    workload = workload_of(options, device)
    model: Any = workload.model
    meter = partial(Meter, is_cuda=device.is_cuda)
    errors: dict[str, str] = {}
    with Race(workload, device, block(options)) as race:
        race.enter([PLAIN, AGAIN])
        for name in PEERS:
            try:
                race.enter([contender(name, model, device.is_cuda)])
            except Exception as error:  # noqa: BLE001 - whatever it is, it is this peer's row
                errors[name] = first_line(error)
            if name in errors:
                race.drop(name)
        race.enter(OURS)
        plain_bytes = race.runners[PLAIN.name].metered(meter).peak_bytes
        race.enter([budgeted(part, plain_bytes) for part in (2, 4)])
        rounds = race.run(options.rounds, options.steps, ends_s)
        rows = [_row(runner, rounds, runner.metered(meter)) for runner in race.runners.values()]
        start = parameters_of(workload)
        for key, share in (("exact", 0.0), ("exact_with_dropout", DROPOUT)):
            model.drop_out(share)
            digests = {name: runner.proof(start) for name, runner in race.runners.items()}
            for row in rows:
                row[key] = digests[row["name"]] == digests[PLAIN.name]
    rows += [{"name": name, "error": error} for name, error in errors.items()]
    return {"rows": rows, "rounds": len(rounds), "shape": str(tuple(workload.batch[0].shape))}


def _row(runner: Runner, rounds: list[dict[str, list[StepTaken]]], meter: Meter) -> dict[str, Any]:
    found = point(runner.contender, rounds, meter.peak_bytes)
    row = {"name": found.name, "step_s": found.step_s.median, "to_plain": vars(found.to_plain)}
    return {**row, "peak_bytes": found.peak_bytes, "moved_bytes": moved_bytes(runner, meter.host_peak_bytes)}


def markdown(found: dict[str, Any]) -> str:
    """Return the table, for docs."""
    versions = ", ".join(f"{name} {one}" for name, one in found["versions"].items())
    rows = []
    for row in found["rows"]:
        if "error" in row:
            rows.append((row["name"], f"`{row['error']}`", "", "", "", ""))
            continue
        is_exact = ("yes" if row[key] else "NO" for key in ("exact", "exact_with_dropout"))
        nbytes = (f"{row[key] / MIB:.1f}" for key in ("peak_bytes", "moved_bytes"))
        rows.append((row["name"], *is_exact, *nbytes, "{median:.2f} [{low:.2f}-{high:.2f}]".format(**row["to_plain"])))
    columns = ("", "exact", "with dropout", "peak MiB", "moved MiB a step", "step / plain")
    first = f"`{found['command']}`, {found['date']}, {found['device']}, Python {found['python']}, {versions}; "
    first += f"{found['rounds']} rounds, tokens {found['shape']}."
    return "\n".join([first, "", *markdown_table(columns, rows), ""])


def main(argv: list[str] | None = None) -> int:
    options = race_parser(__doc__, tiny=(False, "a tiny model: shows that it works")).parse_args(argv)
    options.out.mkdir(parents=True, exist_ok=True)
    with mock.patch.object(tempfile, "tempdir", str(options.nvme_path)), contextlib.redirect_stdout(sys.stderr):
        found = measure(options, time.monotonic() + options.minutes * 60)
    here = {"device": Device(options.device).name, "python": platform.python_version()}
    versions = {"versions": {name: version(name) for name in VERSIONS}}
    found = {**provenance(__file__, argv), **here, **versions, **found}
    write_json(options.out / "peers.json", found)
    write_whole(options.out / "peers.md", markdown(found))
    print(markdown(found))
    own = [row for row in found["rows"] if row["name"].startswith("ds_tba")]
    return 0 if all(row["exact"] and row["exact_with_dropout"] for row in own) else 1


if __name__ == "__main__":
    hold_freed_memory()
    raise SystemExit(main())
