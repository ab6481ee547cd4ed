"""The longest sequence within a memory limit, and memory and seconds per token: keep, checkpointing, tiles, and ours.

    python benchmarks/capacity.py [--nvme_path DIR] [--headroom_mib 112] [--rounds 3] [--json FILE]
    python benchmarks/capacity.py --model smollm2_135m --headroom_mib 512 --loss_tokens 128 --timed_sequence 2048 \\
        --timed_steps 2 --rounds 1 --longest_s 300 --shortest_sequence 1024 --longest_sequence 32768 \\
        --min_tensor_kib 1024 --variants checkpoint checkpoint_nvme nvme

A Llama with random weights (16 layers) under DeepSpeed, one sequence per step. Some variants have what people add for
long sequences: DeepSpeed's ``TiledFusedLogitsLoss`` and its ``TiledMLP``. A loss in tiles rounds in another way, so
such a variant is compared with the same tiles without anything of ours. Each variant runs in processes of its own.
Memory is measured, not limited: the peak of a step is the process's peak of resident bytes, staging included, and a
sequence fits if that is within the limit. (RLIMIT_AS would count reserved addresses, of which PyTorch has many.) The
limit is what the process without anything of this holds between two steps, plus a headroom. Sequences are doubled until
one does not fit; then the longest is sought in between. No sequence is tried that would take longer than
``--longest_s``. On a GPU ``make gpu`` measures the layers of Llama-3-8B instead.

With ``--model`` the shape is that of a published model (``benchmarks/models``), with random weights, a frozen base,
LoRA of ``--lora_rank`` on all linear layers, and the loss as DeepSpeed's tiled one in every variant.

Time is taken at one length that all variants can train, in rounds; from the second on the variants take turns in
random order. Seconds on the clock, and of the process's processor time, on which a busy machine has less influence.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

from account import live_at_peak
from alternating import add_process_options, has_answered, has_gpu, in_a_process, rounds_of
from benchmarking import JSON, MIB, Found, markdown_table, median, parser_of, ranged, ratios, write_json
from step_time import EXAMPLES, resident_bytes

MODELS = Path(__file__).parent / "models"
MMAP_THRESHOLD_BYTES = str(64 << 10)  # narrow tensors, too, are given back to the system when they are freed
INTERPOLATIONS = 3
TILE_TOKENS = 256  # or a few more in each part of a tiled MLP
BLOCK_OF_TOKENS = 64  # sequences are multiples of it
STAYS = "stays after a step (staging, the allocator's)"
SHOWN = 0.01  # of the peak


@dataclass(frozen=True)
class Variant:
    """One way to train: checkpointed or not, keys of our block, if DeepSpeed tiles it, one of ``peers.PEERS``."""

    title: str
    is_checkpointed: bool = False
    block: dict[str, Any] | None = None
    is_tiled: bool = False
    peer: str = ""

    @property
    def compared_with(self) -> str:
        """The variant without ours that has the same arithmetic, hence the same losses."""
        return "tiled" if self.is_tiled else "keep"


NVME, TILES = {"placement": "nvme"}, "DeepSpeed's tiled loss and MLP"
VARIANTS = {
    "keep": Variant("keep (nothing)"),
    "checkpoint": Variant("torch checkpointing of every layer", True),
    "nvme": Variant('**ours**, `"placement": "nvme"`', block=NVME),
    "checkpoint_nvme": Variant("torch checkpointing + **ours**", True, block=NVME),
    "tiled": Variant(TILES, is_tiled=True),
    "checkpoint_tiled": Variant(f"torch checkpointing, {TILES}", True, is_tiled=True),
    "nvme_tiled": Variant(f"{TILES} + **ours**", block=NVME, is_tiled=True),
    "checkpoint_nvme_tiled": Variant(f"torch checkpointing, {TILES} + **ours**", True, block=NVME, is_tiled=True),
}
OWN = list(VARIANTS)
VARIANTS |= {
    "transformers_offload": Variant("transformers' `offload`", peer="transformers offload"),
    "deepspeed_offload": Variant("DeepSpeed's hidden states", peer="DeepSpeed CheckpointHiddenStatesOffload"),
    "axolotl_disk": Variant("axolotl's `disk`", peer="axolotl disk"),
}


class Enough(Exception):  # noqa: N818 - it is no error
    """The step has had its peak."""


class Training:
    """A model, an engine and random bytes, for one variant."""

    def __init__(self, options: argparse.Namespace) -> None:
        import deepspeed
        import torch

        model, base = models(options)
        from train_gpt import peak_memory_bytes, reset_peak_memory

        self._peak_bytes, self._reset_peak = peak_memory_bytes, reset_peak_memory
        config = ds_config(options)
        trained = [one for one in model.parameters() if one.requires_grad]
        self._engine, *_ = deepspeed.initialize(model=model, model_parameters=trained, config=config)
        self._random = torch.Generator().manual_seed(1)
        self._rows, self._vocabulary, self._torch = options.rows, base.config.vocab_size, torch
        self._layers = base.model.layers
        self._peer = contextlib.ExitStack()
        if peer := VARIANTS[options.variant].peer:
            self._peer.enter_context(around_as(peer, base, options.nvme_path))

    def step(self, sequence: int) -> dict[str, float]:
        """Take one step, and return loss, peak memory and time; the peak is infinite where memory ran out."""
        tokens = self._torch.randint(self._vocabulary, (self._rows, sequence), generator=self._random).to(
            self._engine.device
        )
        self._reset_peak()
        began_s, began_cpu_s = time.perf_counter(), time.process_time()
        try:
            loss = self._engine(input_ids=tokens, labels=tokens).loss
            self._engine.backward(loss)
            self._engine.step()
            last = loss.item()
        except Enough:
            last = loss.item()
        except self._torch.OutOfMemoryError:
            return {"loss": math.nan, "peak_bytes": math.inf, "step_s": 0.0, "cpu_s": 0.0}
        times = {"step_s": time.perf_counter() - began_s, "cpu_s": time.process_time() - began_cpu_s}
        return {"loss": last, "peak_bytes": float(self._peak_bytes()), **times}

    def end_backward_after(self, count: int) -> None:
        """End later steps when backward has run the last ``count`` layers.

        The peak is over by then, but for the gradients of parameters, which a whole step adds where its other memory
        does not become less from layer to layer.
        """

        def end(_: Any) -> None:
            raise Enough

        def follow(_: Any, __: Any, output: Any) -> None:
            output.register_hook(end)

        self._layers[-1 - count].register_forward_hook(follow)

    def steps(self, sequence: int, count: int) -> dict[str, Any]:
        """Take steps, and return their highest peak and median time; the first of a new length takes longest."""
        found = [self.step(sequence) for _ in range(count)]
        times = {key: statistics.median(one[key] for one in found[count // 2 :]) for key in ("step_s", "cpu_s")}
        peak_bytes = max(one["peak_bytes"] for one in found)
        return {"sequence": sequence, "peak_bytes": peak_bytes, **times, "losses": [one["loss"] for one in found]}

    @property
    def threads(self) -> int:
        return int(self._torch.get_num_threads())

    def report(self) -> dict[str, Any] | None:
        """Return the report of our offloader, if there is one."""
        offloader = getattr(self._engine, "activation_offloader", None)
        return None if offloader is None else offloader.report().to_dict()


def models(options: argparse.Namespace) -> tuple[Any, Any]:
    """Return the model of a variant, and the model of transformers' within it."""
    import torch

    sys.path.insert(0, str(EXAMPLES))
    from long_context import llama, tile_loss

    variant = VARIANTS[options.variant]
    torch.manual_seed(1)
    if options.model:
        base = published(options.model)
        model = with_lora(base, options.lora_rank)
    else:
        base = model = llama(options.width, options.layers, options.longest_sequence)
    if variant.is_tiled:
        tile_mlps(base)
    if variant.is_tiled or options.model:
        tile_loss(base, options.loss_tokens)
    if variant.is_checkpointed:
        checkpoint_layers(model)
    return model, base


def ds_config(options: argparse.Namespace) -> dict[str, Any]:
    """Return the DeepSpeed config of this variant."""
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {"lr": 1e-3}}}
    block = VARIANTS[options.variant].block
    if block is None:
        return config
    io = {"backend": options.backend, "staging_bytes": options.staging_mib * MIB}
    common = {"min_tensor_bytes": options.min_tensor_kib * 1024, "nvme_path": options.nvme_path, "io": io}
    return {**config, "activation_nvme_offload": {"enabled": True, **common, **block, **json.loads(options.block)}}


def published(name: str) -> Any:
    """Return a model of a published shape, with random weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = shape_of(name)
    config = AutoConfig.for_model(shape.pop("model_type"), **shape)
    return AutoModelForCausalLM.from_config(config)


def shape_of(name: str) -> dict[str, Any]:
    """Return the numbers of a published shape."""
    shape: dict[str, Any] = json.loads((MODELS / f"{name}.json").read_text())
    return shape


def with_lora(model: Any, rank: int) -> Any:
    """Freeze a model, put LoRA into all its linear layers, and return it wrapped."""
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=rank, target_modules="all-linear"))


def checkpoint_layers(model: Any) -> None:
    """Turn on gradient checkpointing, which has another name since transformers 5."""
    kwargs = {"use_reentrant": False}
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=kwargs)
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs)


@contextlib.contextmanager
def around_as(peer: str, model: Any, nvme_path: str) -> Iterator[None]:
    """Train a model as a peer does, with the CPU in the place of the device where there is no other."""
    from peers import PEERS, Peered, cpu_as_device

    model.enable_input_require_grads()  # axolotl's function has no gradient where its input has none
    tempfile.tempdir = nvme_path
    with contextlib.nullcontext() if has_gpu() else cpu_as_device(), PEERS[peer](Peered(model), has_gpu()):
        yield


def tile_mlps(model: Any) -> None:
    """Have DeepSpeed's ``TiledMLP`` compute each layer's MLP in parts of the sequence."""
    from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledMLP

    def in_tiles(mlp: Any, x: Any) -> Any:
        tiles = max(1, x.shape[1] // TILE_TOKENS)
        return TiledMLP.apply(type(mlp).forward, mlp, x, tiles, list(mlp.parameters()))

    for layer in model.model.layers:
        layer.mlp.forward = partial(in_tiles, layer.mlp)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure in one process: time at one length, and with ``--sweep`` peak memory at growing lengths."""
    if options.trainer:
        return measure_with_trainer(options)
    training = Training(options)
    training.step(4 * BLOCK_OF_TOKENS)
    rest_bytes = resident_bytes()
    if options.limit_mib is None:
        options.limit_mib = rest_bytes // MIB + options.headroom_mib
    if options.backward_layers:
        training.end_backward_after(options.backward_layers)
    timed = training.steps(options.timed_sequence, options.timed_steps)
    found: dict[str, Any] = {"timed": timed, "lengths": [], "limit_mib": options.limit_mib}
    if options.account:
        found["account"] = account(training, options, timed["peak_bytes"], rest_bytes)
    if options.sweep:
        found["lengths"] = list(sweep(training, options))
        found["threads"], found["report"] = training.threads, training.report()
    return found


def measure_with_trainer(options: argparse.Namespace) -> dict[str, Any]:
    """Measure one step that the Hugging Face Trainer takes, after a short one."""
    model, base = models(options)
    import torch
    from train_gpt import peak_memory_bytes, reset_peak_memory
    from transformers import Trainer, TrainerCallback, TrainingArguments

    random = torch.Generator().manual_seed(1)
    lengths = (4 * BLOCK_OF_TOKENS, options.timed_sequence)
    tokens = [torch.randint(base.config.vocab_size, (length,), generator=random) for length in lengths]

    class InTurn(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
        def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
            return iter([{"input_ids": one, "labels": one} for one in tokens])

    class Meter(TrainerCallback):  # type: ignore[misc]
        rest_bytes = 0

        def on_step_end(self, *_: Any, **__: Any) -> None:
            if not self.rest_bytes:
                self.rest_bytes = resident_bytes()
                reset_peak_memory()

    meter = Meter()
    arguments = TrainingArguments(
        deepspeed={**ds_config(options), "zero_optimization": {"stage": 0}},
        per_device_train_batch_size=1, max_steps=len(lengths), learning_rate=1e-3,
        lr_scheduler_type="constant", max_grad_norm=0.0, logging_steps=1, save_strategy="no", report_to="none",
        disable_tqdm=True, use_cpu=not has_gpu(), output_dir=options.nvme_path,
    )  # fmt: skip
    trainer = Trainer(model=model, args=arguments, train_dataset=InTurn(), callbacks=[meter])
    trainer.train()
    losses = [one["loss"] for one in trainer.state.log_history if "loss" in one][1:]
    timed = {"sequence": lengths[-1], "peak_bytes": peak_memory_bytes(), "losses": losses, "step_s": math.nan}
    return {"timed": timed, "lengths": [], "limit_mib": meter.rest_bytes // MIB}


def account(training: Training, options: argparse.Namespace, peak_bytes: float, rest_bytes: int) -> dict[str, Any]:
    """Account for what a step has in memory at its peak, beyond what the process holds anyway."""
    pieces = {STAYS: {"nbytes": resident_bytes() - rest_bytes, "count": 1}}
    for (module, operator, nbytes), count in live_at_peak(partial(training.step, options.timed_sequence)).items():
        piece = pieces.setdefault(f"{module}, {operator}", {"nbytes": 0, "count": 0})
        piece["nbytes"] += nbytes * count
        piece["count"] += count
    return {"peak_bytes": peak_bytes - rest_bytes, "pieces": pieces}


def account_table(found: dict[str, Any], tokens: int) -> list[str]:
    """Return the Markdown table of an account, and what its sum is of the peak that was measured."""
    peak_bytes, pieces = found["peak_bytes"], found["pieces"]
    total_bytes = sum(one["nbytes"] for one in pieces.values())
    large = {label: one for label, one in pieces.items() if one["nbytes"] >= SHOWN * peak_bytes}
    rest = {key: sum(one[key] for label, one in pieces.items() if label not in large) for key in ("nbytes", "count")}
    lines = [*sorted(large.items(), key=lambda one: -one[1]["nbytes"]), ("smaller ones", rest)]
    lines += [("sum", {"nbytes": total_bytes, "count": ""})]
    lines += [(f"peak, {total_bytes / peak_bytes:.3f} of it in the sum", {"nbytes": peak_bytes, "count": ""})]
    rows = (
        (label, one["count"], f"{one['nbytes'] / MIB:.1f}", f"{one['nbytes'] / tokens / 4:,.0f}")
        for label, one in lines
    )
    return markdown_table(("who made it", "pieces", "MiB", "floats per token"), rows)


def sweep(training: Training, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Try sequences of growing length until one does not fit, then some between it and the last that fits."""
    limit_bytes, peaks = options.limit_mib * MIB, {0: 0.0}
    sequence, tries = options.shortest_sequence, 1 + INTERPOLATIONS
    while tries:
        found = training.steps(sequence, 1)
        yield found
        peaks[sequence] = found["peak_bytes"]
        fits = max(length for length, peak in peaks.items() if peak <= limit_bytes)
        fails = min((length for length, peak in peaks.items() if peak > limit_bytes), default=0)
        if fails:
            tries -= 1
            if not fits or fails - fits <= max(BLOCK_OF_TOKENS, fits // 16):
                return
            sequence = between(peaks, fits, fails, limit_bytes)
        else:  # attention is quadratic: the next may take four times as long
            sequence *= 2
            if 4 * found["cpu_s"] > options.longest_s or sequence > options.longest_sequence:
                return


def between(peaks: dict[int, float], fits: int, fails: int, limit_bytes: int) -> int:
    """Return a length between one that fits and one that does not: the straight line crosses the limit there."""
    share = (limit_bytes - peaks[fits]) / (peaks[fails] - peaks[fits]) if peaks[fails] < math.inf else 0.5
    guess = (fits + int(share * (fails - fits))) // BLOCK_OF_TOKENS * BLOCK_OF_TOKENS
    return min(max(guess, fits + BLOCK_OF_TOKENS), fails - BLOCK_OF_TOKENS)


def line(lengths: list[dict[str, Any]]) -> tuple[float, float]:
    """Return slope and intercept of peak memory over length; nan for fewer than two lengths.

    The line goes through the longest length and the longest of at most half of it. At shorter ones something else may
    be the peak, staging or the optimizer's step, and a line through them would be too flat.
    """
    points = sorted((one["sequence"], one["peak_bytes"]) for one in lengths if one["peak_bytes"] != math.inf)
    halves = [point for point in points if 2 * point[0] <= points[-1][0]]
    if not halves:
        return math.nan, math.nan
    return tuple(statistics.linear_regression(*zip(halves[-1], points[-1], strict=True)))


def longest(lengths: list[dict[str, Any]], limit_bytes: int) -> str:
    """Return the longest sequence that fits, and, if none did not, the length at which the line of peaks does not."""
    fits = max((one["sequence"] for one in lengths if one["peak_bytes"] <= limit_bytes), default=0)
    if any(one["peak_bytes"] > limit_bytes for one in lengths):
        return f"{fits:,}"
    slope, intercept = line(lengths)
    if not slope > 0:
        return f"more than {fits:,}"
    return f"more than {fits:,}; by the slope {max(fits, round((limit_bytes - intercept) / slope, -2)):,.0f}"


def table(rounds: list[dict[str, Found]], options: argparse.Namespace) -> list[str]:
    """Return the Markdown table."""
    first, times = rounds[0], [{name: one["timed"] for name, one in each.items()} for each in rounds]
    kept, _ = line(first["keep"]["lengths"])
    rows = []
    for name in (name for name in VARIANTS if name in first):
        lengths = first[name]["lengths"]
        per_token, _ = line(lengths)
        per_token_s = median(times, name, itemgetter("step_s")) / options.timed_sequence
        rows.append((
            VARIANTS[name].title, longest(lengths, options.limit_mib * MIB), f"{per_token / 1024:.1f}",
            f"{per_token / kept:.3f}", f"{per_token_s * 1000:.2f}",
            *(ranged(ratios(times, name, itemgetter(key)), 2) for key in ("step_s", "cpu_s")),
        ))  # fmt: skip
    columns = ("variant", f"longest sequence in {options.limit_mib} MiB", "KiB of memory per token", "to keep",
               "ms per token", "time / keep", "processor time / keep")  # fmt: skip
    return markdown_table(columns, rows)


def parse(argv: list[str]) -> argparse.Namespace:
    parser = parser_of(
        __doc__,
        headroom_mib=(112, "beyond what a process holds anyway"),
        limit_mib=(int, "memory limit instead of that"),
        rounds=3, width=128, layers=16, rows=(1, "sequences in a micro-batch"),
        model=("", "a shape of benchmarks/models, with LoRA, instead of width and layers"),
        lora_rank=16, loss_tokens=(1024, "in each part of a tiled loss"), timed_steps=4, timed_sequence=1024,
        shortest_sequence=512, longest_sequence=8192,
        longest_s=(60.0, "try no length that takes longer"),
        staging_mib=(32, "io.staging_bytes of ours"),
        # Per token, a tensor of width 128 has a 32nd of the bytes of one of width 4096.
        min_tensor_kib=(32, "min_tensor_bytes of ours"),
        backend=("posix", "io.backend of ours"), block=("{}", "JSON with more keys of ours"),
        nvme_path=".", json=JSON, sweep=(False, argparse.SUPPRESS),
        backward_layers=(0, "end a step when backward has run so many: its peak is over, but for gradients"),
        account=(False, "only say which bytes are there at the peak of a step of timed_sequence"),
        trainer=(False, "only measure the peak of a step of timed_sequence under the Hugging Face Trainer"),
    )  # fmt: skip
    parser.add_argument("--variants", nargs="+", default=OWN, choices=VARIANTS)
    add_process_options(parser, list(VARIANTS))
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    options = parse(argv)
    if has_answered(options, measure):
        return 0

    def turn(name: str, *more: str) -> dict[str, Any]:
        found = in_a_process(__file__, name, [*argv, *more], MALLOC_MMAP_THRESHOLD_=MMAP_THRESHOLD_BYTES)
        peaks = (f"{one['sequence']}: {one['peak_bytes'] / MIB:.0f} MiB" for one in found["lengths"])
        print(f"{name}: {found['timed']['step_s']:.2f} s", *peaks, flush=True)
        return found

    first: dict[str, Found] = {}
    rounds = [first]
    if options.account or options.trainer:
        for name in options.variants:
            first[name] = turn(name)
            print(f"at rest {first[name]['limit_mib']} MiB, at the peak {first[name]['timed']['peak_bytes'] / MIB:.0f}")
            if options.account:
                print("\n".join(account_table(first[name]["account"], options.timed_sequence)), flush=True)
        write_json(options.json, {"options": vars(options), "rounds": rounds})
        return 0
    for name in with_compared(options.variants):  # keep is the first: its process says what the limit is
        more = [] if options.limit_mib is None else ["--limit_mib", str(options.limit_mib)]
        first[name] = turn(name, "--sweep", *more)
        options.limit_mib = first[name]["limit_mib"]
        write_json(options.json, {"options": vars(options), "rounds": rounds})
    with contextlib.suppress(KeyboardInterrupt):
        for later in rounds_of(list(first), turn, options.rounds - 1):
            rounds.append(later)
            write_json(options.json, {"options": vars(options), "rounds": rounds})
    print("\n".join(table(rounds, options)))
    losses = [{name: found["timed"]["losses"] for name, found in one.items()} for one in rounds]
    equal = all(one[name] == one[VARIANTS[name].compared_with] for one in losses for name in one)
    print(f"losses equal those of the same arithmetic without ours, in all rounds: {'yes' if equal else 'NO'}")
    return 0 if equal else 1


def with_compared(names: Sequence[str]) -> list[str]:
    """Return the variants to run: keep first, and before each variant the one that its losses are compared with."""
    return list(dict.fromkeys(["keep", *(one for name in names for one in (VARIANTS[name].compared_with, name))]))


if __name__ == "__main__":
    raise SystemExit(main())
