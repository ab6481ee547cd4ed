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
import json
import platform
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1])]

import torch  # noqa: E402
from curves.allocator import hold_freed_memory  # noqa: E402
from curves.device import Device  # noqa: E402
from curves.models import Workload  # noqa: E402
from curves.points import point  # noqa: E402
from curves.turns import (  # noqa: E402
    AGAIN,
    PLAIN,
    Contender,
    Race,
    Runner,
    StepTaken,
    add_race_options,
    parameters_of,
)
from gpu.results import version  # noqa: E402
from torch import nn  # noqa: E402
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from ds_tba.cli.plan.dry_run import PeakMeter  # noqa: E402

MIB = 1 << 20
ENOUGH = 100.0  # an overhead that no plan reaches: the budget decides
DROPOUT = 0.1
LONGEST_ERROR = 160
AXOLOTL_DISK = "axolotl disk"
VERSIONS = ("torch", "transformers", "deepspeed", "trl", "torchtune", "axolotl", "torch_remat")


class Llama(nn.Module):
    """Token numbers and targets in, the loss out."""

    def __init__(self, *, tiny: bool, is_cuda: bool) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        width, layers, head, vocabulary = (64, 2, 32, 256) if tiny else (256, 6, 64, 2048)
        if is_cuda and not tiny:
            width, layers, head, vocabulary = 4096, 8, 128, 32000
        config = LlamaConfig(
            hidden_size=width, intermediate_size=3 * width, num_hidden_layers=layers, vocab_size=vocabulary,
            num_attention_heads=width // head, num_key_value_heads=width // head, use_cache=False,
        )  # fmt: skip
        torch.manual_seed(1)
        self.llama = LlamaForCausalLM(config).train()

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.llama(input_ids=inputs, labels=targets).loss
        return loss

    @contextmanager
    def checkpointed(self, by: Callable[..., Any]) -> Iterator[None]:
        """Run each layer as ``by(layer, *arguments)``, as gradient checkpointing of transformers does."""
        self.llama._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=by)
        try:
            yield
        finally:
            self.llama._set_gradient_checkpointing(enable=False)

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


# ---- the peers, each as its documentation says ----------------------------------------------------------------------


def _checkpointing(model: Llama, is_cuda: bool) -> AbstractContextManager[Any]:
    return model.checkpointed(partial(checkpoint, use_reentrant=False))


def _save_on_cpu(model: Llama, is_cuda: bool) -> AbstractContextManager[Any]:
    return save_on_cpu(pin_memory=True)


@contextmanager
def _transformers(model: Llama, is_cuda: bool) -> Iterator[None]:
    model.llama.activation_checkpointing_enable(offload=True)
    try:
        yield
    finally:
        model.llama.activation_checkpointing_disable()
        model.llama.disable_input_require_grads()


def _trl(model: Llama, is_cuda: bool) -> AbstractContextManager[Any]:
    from trl.models.activation_offloading import get_act_offloading_ctx_manager

    return get_act_offloading_ctx_manager(model.llama, use_streams=is_cuda, use_pin_memory=is_cuda)


def _torchtune(model: Llama, is_cuda: bool) -> AbstractContextManager[Any]:
    from torchtune.training import OffloadActivations

    return OffloadActivations(use_streams=is_cuda, use_pin_memory=is_cuda)


@contextmanager
def _deepspeed(model: Llama, is_cuda: bool) -> Iterator[None]:
    from deepspeed.accelerator import get_accelerator
    from deepspeed.runtime.activation_checkpointing.offload_activations import CheckpointHiddenStatesOffload

    accelerator = type(get_accelerator())
    device = nullcontext() if is_cuda else mock.patch.object(accelerator, "is_synchronized_device", lambda _: False)
    context = CheckpointHiddenStatesOffload(use_streams=is_cuda, use_pin_memory=is_cuda)
    with device, _checkpointing(model, is_cuda), context:
        yield


@contextmanager
def _axolotl(model: Llama, is_cuda: bool) -> Iterator[None]:
    from axolotl.monkeypatch.checkpoint_activation_offload import get_checkpoint_hidden_states_offloading_ctx_manager

    context = get_checkpoint_hidden_states_offloading_ctx_manager(use_streams=is_cuda, use_pin_memory=is_cuda)
    with _checkpointing(model, is_cuda), context:
        yield


@contextmanager
def _axolotl_disk(model: Llama, is_cuda: bool) -> Iterator[None]:
    from axolotl.monkeypatch.gradient_checkpointing import offload_disk

    if offload_disk.Disco._manager is None:
        offload_disk.Disco._manager = offload_disk.DiskOffloadManager(prefetch_size=1, prefetch_to_gpu=is_cuda)
    # Not by its wrapper for transformers, which asks the layer for a ``__self__`` that is no longer there.
    with model.checkpointed(offload_disk.Disco.apply):
        yield


@contextmanager
def _torch_remat(model: Llama, is_cuda: bool) -> Iterator[None]:
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
PEERS: dict[str, Callable[[Llama, bool], AbstractContextManager[Any]]] = {
    "torch checkpoint": _checkpointing,
    "torch save_on_cpu": _save_on_cpu,
    "transformers offload": _transformers,
    "DeepSpeed CheckpointHiddenStatesOffload": _deepspeed,
    "TRL OffloadActivations": _trl,
    "torchtune OffloadActivations": _torchtune,
    "axolotl hidden_states": _axolotl,
    AXOLOTL_DISK: _axolotl_disk,
    "torch_remat, attention saved": _torch_remat,
}


def contender(name: str, model: Llama, is_cuda: bool) -> Contender:
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


# ---- at work --------------------------------------------------------------------------------------------------------


class Meter(PeakMeter):
    """Tells host memory apart: on a GPU by its device; on a CPU it is what a pack hook makes.

    Attributes:
        host_peak_bytes: the most that was there at once.
    """

    def __init__(self, ignored: Sequence[torch.UntypedStorage], is_cuda: bool) -> None:
        super().__init__(ignored)
        self.host_peak_bytes = 0
        self._is_cuda, self._packing = is_cuda, False
        self._host: dict[int, int] = {}

    def __enter__(self) -> Any:
        def enter(hooks: Any) -> None:
            torch._C._autograd._push_saved_tensors_default_hooks(
                partial(self._pack, hooks.pack_hook), hooks.unpack_hook
            )

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


def ours() -> list[Contender]:
    """Return ds_tba with its defaults, and at the ends of what it can do."""
    return [
        Contender("ds_tba, defaults", "adaptive"),
        Contender("ds_tba, no drive", "adaptive", {"placement": "keep"}),
        Contender("ds_tba, placement nvme", "adaptive", {"placement": "nvme"}),
    ]


def budgeted(plain_bytes: int) -> list[Contender]:
    limits = {"recompute": True, "max_step_overhead": ENOUGH}
    return [
        Contender(
            f"ds_tba, recompute, saved bytes within {name} of plain's peak",
            "adaptive",
            {"activation_budget_bytes": plain_bytes // part, **limits},
        )
        for name, part in (("1/2", 2), ("1/4", 4))
    ]


def block(options: argparse.Namespace) -> dict[str, Any]:
    staging_bytes = 4 << 20 if options.tiny else None if options.device == "cuda" else 64 << 20
    least = 4096 if options.tiny else 256 << 10
    io = {"backend": "posix", "staging_bytes": staging_bytes, "swap_file_bytes": None}
    return {"nvme_path": str(options.nvme_path), "min_tensor_bytes": least, "io": io}


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
                errors[name] = f"{type(error).__name__}: {error}".partition("\n")[0][:LONGEST_ERROR]
            if name in errors:
                race.drop(name)
        race.enter(ours())
        race.enter(budgeted(race.runners[PLAIN.name].metered(meter).peak_bytes))
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
    return {
        "name": runner.contender.name,
        "step_s": found.step_s.median,
        "to_plain": vars(found.to_plain),
        "peak_bytes": found.peak_bytes,
        "moved_bytes": moved_bytes(runner, meter.host_peak_bytes),
    }


# ---- the table ------------------------------------------------------------------------------------------------------


def markdown(found: dict[str, Any]) -> str:
    """Return the table, for docs."""
    lines = [
        f"`{found['command']}`, {found['date']}, {found['device']}, Python {found['python']}, "
        + ", ".join(f"{name} {one}" for name, one in found["versions"].items())
        + f"; {found['rounds']} rounds, tokens {found['shape']}.",
        "",
        "| | exact | with dropout | peak MiB | moved MiB a step | step / plain |",
        "|---|---|---|---|---|:---|",
    ]
    for row in found["rows"]:
        if "error" in row:
            lines.append(f"| {row['name']} | `{row['error']}` | | | | |")
            continue
        exact, dropped = ("yes" if row[key] else "NO" for key in ("exact", "exact_with_dropout"))
        ratio = row["to_plain"]
        lines.append(
            f"| {row['name']} | {exact} | {dropped} | {row['peak_bytes'] / MIB:.1f} | {row['moved_bytes'] / MIB:.1f} | "
            f"{ratio['median']:.2f} [{ratio['low']:.2f}-{ratio['high']:.2f}] |"
        )
    return "\n".join([*lines, ""])


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add_race_options(parser)
    parser.add_argument("--tiny", action="store_true", help="a tiny model: shows that it works")
    options = parser.parse_args(argv)
    options.out.mkdir(parents=True, exist_ok=True)
    with mock.patch.object(tempfile, "tempdir", str(options.nvme_path)), contextlib.redirect_stdout(sys.stderr):
        found = measure(options, time.monotonic() + options.minutes * 60)
    found = {
        "command": " ".join(["python benchmarks/peers.py", *(sys.argv[1:] if argv is None else argv)]),
        "date": datetime.now(timezone.utc).date().isoformat(),
        "device": Device(options.device).name,
        "python": platform.python_version(),
        "versions": {name: version(name) for name in VERSIONS},
        **found,
    }
    (options.out / "peers.json").write_text(json.dumps(found, indent=1), encoding="utf-8")
    (options.out / "peers.md").write_text(markdown(found), encoding="utf-8")
    print(markdown(found))
    own = [row for row in found["rows"] if row["name"].startswith("ds_tba")]
    return 0 if all(row["exact"] and row["exact_with_dropout"] for row in own) else 1


if __name__ == "__main__":
    hold_freed_memory()
    raise SystemExit(main())
