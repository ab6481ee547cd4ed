"""The optimizer update and the whole step: stock ZeRO-3 with its optimizer on the host, and interleaved, in turns.

    python benchmarks/update_time.py [--parameters 50e6] [--tokens 64] [--rounds 20] [--steps 5]
    python benchmarks/update_time.py --gpu [--parameters 3e9] [--tokens 2048]

The model is a stack of linear layers in bf16. "update" is the optimizer's ``step``, "step" is forward, backward and
update. In a round each variant takes some steps, in a new random order; reported are medians over the rounds of the
medians of each turn, and of their ratios to stock's turn of the same round, with quartiles and range. The losses of all
variants must be equal, step by step, bit for bit.

Without ``--gpu`` the engines of stock and of the block are in one process, and the CPU is the device, too: only
``share 0`` says something, and it must not be slower than stock by more than 2 %. With ``--gpu`` there is memory for
one engine only, so that stock and the block are processes that take turns; within a process the shares do, twice.
No GPU has run it yet: a round of 3e9 parameters is expected to take 5 to 10 minutes (``--rounds 1`` is one of all
processes, ``--shares`` takes fewer), and 5e9 to need 112 GB of host memory.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

from alternating import add_process_options, has_answered, has_gpu, in_a_process, rounds_of
from benchmarking import JSON, markdown_table, median, parser_of, ratios, write_json

BLOCK = "interleaved_optimizer_update"
ADAM = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
# Fraction by which share 0 may be slower than stock.
TOLERANCE = 0.02
GPU_SHARES = (0.0, 0.25, 0.5, 0.75, 1.0, None)
CPU_SHARES = (0.0, 0.5, None)
GPU_DEFAULTS = {"parameters": 3e9, "tokens": 2048, "rounds": 2, "steps": 2, "width": 8192, "chunk_mib": 64}
CPU_DEFAULTS = {"parameters": 50e6, "tokens": 64, "rounds": 20, "steps": 5, "width": 2048, "chunk_mib": 4}
STOCK, INTERLEAVED = "stock", "interleaved"
TOGETHER = "together"
TURNS_APART = 2


class Variant(NamedTuple):
    """One way to update: the engine, which a family shares, and the device's share; None lets both meet."""

    family: str
    share: float | None = None

    @property
    def name(self) -> str:
        """Name in tables and files."""
        share = "null" if self.share is None else f"share {self.share:g}"
        return STOCK if self.family == STOCK else share


def variants_of(options: argparse.Namespace) -> list[Variant]:
    """Return all variants, stock first."""
    shares = options.shares or (GPU_SHARES if options.gpu else CPU_SHARES)
    return [Variant(STOCK), *(Variant(INTERLEAVED, share) for share in shares)]


class Trainee:
    """An engine and its fixed batch."""

    def __init__(self, family: str, options: argparse.Namespace) -> None:
        import deepspeed
        import torch

        self._options = options
        self.losses: list[float] = []
        self._device, self._synchronize = torch.device("cuda" if options.gpu else "cpu"), torch.cuda.synchronize
        torch.manual_seed(1)
        depth = max(1, round(options.parameters / options.width**2))
        with self._device:
            model = _stack(options.width, depth)
            self._batch = torch.randn(options.tokens, options.width, dtype=torch.bfloat16)
        self._engine, *_ = deepspeed.initialize(
            model=model, model_parameters=model.parameters(), config=config_of(family, options)
        )
        self.parameters = depth * options.width**2
        self._update_s = 0.0
        self._updater = getattr(self._engine, BLOCK, None)
        if (self._updater is None) != (family == STOCK):
            raise SystemExit(f'{family}: "{BLOCK}" is {"not " if self._updater is None else ""}at work')
        update = self._engine.optimizer.step

        def timed(*args: Any, **kwargs: Any) -> Any:
            began_s = self._now_s()
            try:
                return update(*args, **kwargs)
            finally:
                self._update_s = self._now_s() - began_s

        self._engine.optimizer.step = timed

    def _now_s(self) -> float:
        """Return the time when everything that was queued is done."""
        if self._device.type == "cuda":
            self._synchronize()
        return time.perf_counter()

    def use(self, share: float | None) -> None:
        """Set the device's share from now on. Only a benchmark changes it while training."""
        if self._updater is None:
            return
        if "not exact" in self._updater.report().fallbacks:
            raise SystemExit("the device does not give the bits of this processor's CPUAdam: there is nothing to share")
        updater = self._updater._updater
        updater.config = updater.config.model_copy(update={"device_share": share})

    def step(self) -> dict[str, Any]:
        """Take one step and return its times."""
        began_s = self._now_s()
        loss = self._engine(self._batch).float().square().mean()
        self._engine.backward(loss)
        self._engine.step()
        step_s = self._now_s() - began_s
        self.losses.append(loss.item())
        share = 0.0 if self._updater is None else self._updater.report().last_device_share
        return {"update_s": self._update_s, "step_s": step_s, "device_share": share}

    def turn(self, share: float | None) -> dict[str, float]:
        """Return the medians of a few steps, after one that does not count."""
        self.use(share)
        self.step()
        steps = [self.step() for _ in range(self._options.steps)]
        return {key: statistics.median(one[key] for one in steps) for key in steps[0]}

    def close(self) -> dict[str, Any] | None:
        """Destroy the engine and return the report of its updates."""
        report = None if self._updater is None else self._updater.report().to_dict()
        self._engine.destroy()
        return report


def _stack(width: int, depth: int) -> Any:
    import torch

    class Residual(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + super().forward(x)

    return torch.nn.Sequential(*(Residual(width, width, bias=False, dtype=torch.bfloat16) for _ in range(depth)))


def config_of(family: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return the DeepSpeed config of a family."""
    config: dict[str, Any] = {"train_micro_batch_size_per_gpu": options.tokens, "bf16": {"enabled": True}}
    config |= {"optimizer": {"type": "AdamW", "params": ADAM}, "gradient_clipping": options.clip}
    offload = {"device": "cpu", "pin_memory": options.gpu}
    config["zero_optimization"] = {"stage": 3, "offload_optimizer": offload, "sub_group_size": int(options.sub_group)}
    if family != STOCK:
        # Slots for three chunks: one on its way up, one computed, one on its way down.
        chunk_bytes = options.chunk_mib << 20
        config[BLOCK] = {"chunk_bytes": chunk_bytes, "device_buffer_bytes": 15 * chunk_bytes}
    return config


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run the turns of one process, which has one family or all."""
    variants = [one for one in variants_of(options) if options.variant in (one.family, TOGETHER)]
    trainees = {family: Trainee(family, options) for family in dict.fromkeys(one.family for one in variants)}
    for one in variants:  # moments are made, memory is pinned, every share has run
        trainees[one.family].use(one.share)
        trainees[one.family].step()
    most = TURNS_APART if options.apart else options.rounds
    rounds = list(rounds_of(variants, lambda one: trainees[one.family].turn(one.share), most))
    return {
        "parameters": next(iter(trainees.values())).parameters,
        "rounds": [{one.name: found for one, found in turns.items()} for turns in rounds],
        "losses": {family: trainee.losses for family, trainee in trainees.items()},
        "reports": {family: trainee.close() for family, trainee in trainees.items()},
    }


def run(options: argparse.Namespace, argv: Sequence[str]) -> dict[str, Any]:
    """Run all rounds."""

    def turn(family: str) -> dict[str, Any]:
        return in_a_process(__file__, family, argv, CUBLAS_WORKSPACE_CONFIG=":4096:8")

    if not options.apart:
        return turn(TOGETHER)
    families = list(dict.fromkeys(one.family for one in variants_of(options)))
    found: dict[str, Any] = {"rounds": [], "losses": {}, "reports": {}}
    with contextlib.suppress(KeyboardInterrupt):
        for number, turns in enumerate(rounds_of(families, turn, options.rounds)):
            # Each process has rounds of its own, which stand beside those of the others.
            for own in zip(*(one["rounds"] for one in turns.values()), strict=True):
                found["rounds"].append({name: times for one in own for name, times in one.items()})
            found["parameters"] = turns[STOCK]["parameters"]
            for key in ("losses", "reports"):
                found[key] |= {f"{family} {number}": one[key][family] for family, one in turns.items()}
    return found


def spread(values: Sequence[float]) -> str:
    """Return median, quartiles and range of sorted values."""
    low, high = values[len(values) // 4], values[-1 - len(values) // 4]
    return f"{statistics.median(values):.3f} ({low:.2f}-{high:.2f}) [{values[0]:.2f}-{values[-1]:.2f}]"


def table(found: dict[str, Any], names: Sequence[str]) -> Iterator[str]:
    """Yield the Markdown table."""
    rounds = found["rounds"]
    yield f"{found['parameters'] / 1e6:,.0f} M parameters, {found['tokens']:,} tokens per step, {len(rounds)} rounds"
    yield ""
    share, *times = map(itemgetter, ("device_share", "update_s", "step_s"))
    rows = []
    for name in names:
        figures = ((f"{median(rounds, name, one):.4f}", spread(ratios(rounds, name, one, STOCK))) for one in times)
        rows.append((name, f"{median(rounds, name, share):.2f}", *itertools.chain(*figures)))
    columns = ("variant", "on the device", "update s", "update / stock (quartiles) [range]", "step s", "step / stock")
    yield from markdown_table(columns, rows)


def are_equal(losses: dict[str, list[float]]) -> bool:
    """Return whether losses are equal step by step, as far as both went."""
    first = max(losses.values(), key=len)
    return all(one == first[: len(one)] for one in losses.values())


def verdicts(found: dict[str, Any]) -> Iterator[str]:
    """Yield what was asked for with what was found."""
    rounds = found["rounds"]
    host = Variant(INTERLEAVED, 0.0).name
    yield f"losses equal step by step: {'yes' if are_equal(found['losses']) else 'NO'}"
    if host in rounds[0]:
        slower = statistics.median(ratios(rounds, host, itemgetter("update_s"), STOCK)) - 1
        held = "held" if slower <= TOLERANCE else "NOT HELD"
        yield f"update of {host} against stock: {slower:+.1%}, {TOLERANCE:.0%} more is allowed: {held}"


def share_or_null(text: str) -> float | None:
    """Return a device's share as the command line has it."""
    if text == "null":
        return None
    value = float(text)
    if not 0 <= value <= 1:
        raise ValueError
    return value


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = parser_of(
        __doc__,
        apart=(False, "as --gpu has it, each family in a process of its own"),
        gpu=(False, "on a GPU"),
        parameters=(float, "default: 50e6; with --gpu 3e9"),
        tokens=(int, "of a step, default: 64; with --gpu 2048"),
        rounds=(int, "default: 20; with --gpu 2 of each process"),
        steps=(int, "of a turn, default: 5; with --gpu 2; one more does not count"),
        width=(int, "default: 2048; with --gpu 8192"),
        clip=(0.0, "gradient_clipping"),
        sub_group=(1e9, "sub_group_size"),
        chunk_mib=(int, "chunk_bytes, default: 4; with --gpu 64"),
        json=JSON,
    )
    parser.add_argument("--shares", type=share_or_null, nargs="+", help="device_share, numbers or null")
    add_process_options(parser, (TOGETHER, STOCK, INTERLEAVED))
    on_gpu = parser.parse_args(argv).gpu
    parser.set_defaults(**(GPU_DEFAULTS if on_gpu else CPU_DEFAULTS), apart=on_gpu)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    options = parse(argv)
    if has_answered(options, measure):
        return 0
    if options.gpu and not has_gpu():
        print("--gpu: PyTorch finds no CUDA device here; nothing was measured", file=sys.stderr)
        return 2
    found = {"options": vars(options), "tokens": options.tokens, **run(options, argv)}
    lines = table(found, [one.name for one in variants_of(options)])
    print("\n".join([*lines, "", *(f"- {line}" for line in verdicts(found))]))
    write_json(options.json, found)
    return 0 if are_equal(found["losses"]) else 1


if __name__ == "__main__":
    raise SystemExit(main())
