"""Train a Llama-like model on long sequences with the Hugging Face Trainer, with the inputs of its layers on NVMe.

    deepspeed examples/long_context.py --deepspeed_config ds_configs/long_context.json --nvme_path /local_nvme

Nothing here imports ds_tba: the block in the config is enough. The model has random weights and its tokens are bytes of
text files, so that nothing is downloaded. ``docs/guides/long_context.md`` explains the settings.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledFusedLogitsLoss
from torch.nn import functional
from torch.utils.data import Dataset
from train_gpt import (
    BLOCK,
    VOCABULARY,
    memory_owner,
    parameters_sha256,
    peak_memory_bytes,
    reset_peak_memory,
    standard_library_bytes,
)

try:
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments
    from transformers.modeling_outputs import CausalLMOutput
except ImportError as error:
    raise SystemExit(
        f"examples/long_context.py needs transformers and accelerate ({error}): pip install 'ds_tba[examples]'"
    ) from error

MIB = 1 << 20
HEAD_WIDTH = 64
SEED = 1234
IGNORED = -100  # label of a token that has no next one
LOSS_TOKENS = 1024  # in each part of the loss


# ---- the model and the data -----------------------------------------------------------------------------------------


def llama(width: int, layers: int, longest: int, **more: Any) -> LlamaForCausalLM:
    """Return a Llama with random weights, for bytes.

    Args:
        longest: tokens in the longest sequence.
        more: other values of its config.
    """
    shape = {
        "vocab_size": VOCABULARY,
        "hidden_size": width,
        "intermediate_size": width * 7 // 2,
        "num_hidden_layers": layers,
        "num_attention_heads": max(1, width // HEAD_WIDTH),
        "num_key_value_heads": max(1, width // HEAD_WIDTH // 4),
        "max_position_embeddings": longest,
        "use_cache": False,  # a cache of keys and values is for generation
        "attn_implementation": "sdpa",
        "bos_token_id": None,
        "eos_token_id": None,
    }
    return LlamaForCausalLM(LlamaConfig(**{**shape, **more}))


def tile_loss(model: LlamaForCausalLM, part_tokens: int = LOSS_TOKENS) -> None:
    """Have DeepSpeed compute the loss in parts of the sequence: the logits of all tokens never exist at once."""

    def forward(input_ids: torch.Tensor, labels: torch.Tensor, **more: Any) -> CausalLMOutput:
        hidden = model.model(input_ids=input_ids, attention_mask=more.get("attention_mask")).last_hidden_state
        labels = functional.pad(labels[:, 1:], (0, 1), value=IGNORED)
        tokens = more.get("num_items_in_batch")  # the Trainer's count, over all micro-batches of a step
        tokens = (labels != IGNORED).sum() if tokens is None else tokens

        def part_of_loss(head: torch.nn.Module, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            # TiledFusedLogitsLoss adds up the head's gradient here: a division after it would miss that gradient.
            return functional.cross_entropy(head(hidden).float(), labels, reduction="sum") / tokens

        shards, weights = max(1, labels.numel() // part_tokens), list(model.lm_head.parameters())
        loss = TiledFusedLogitsLoss.apply(part_of_loss, model.lm_head, hidden, labels, None, shards, weights, "sum")
        return CausalLMOutput(loss=loss)

    model.forward = forward


class LongTexts(Dataset):  # type: ignore[type-arg]
    """Sequences of bytes from random places of a text, the same in every run.

    Args:
        files: the text, in this order; without files, the sources of Python's standard library.
    """

    def __init__(self, files: list[Path], sequence: int, count: int) -> None:
        text = b"".join(path.read_bytes() for path in files)
        self._text = torch.frombuffer(bytearray(text), dtype=torch.uint8) if files else standard_library_bytes()
        if len(self._text) < sequence:
            raise SystemExit(f"--text has {len(self._text)} bytes, less than --sequence {sequence}: name more files")
        chance = random.Random(SEED)
        self._starts = [chance.randrange(len(self._text) - sequence + 1) for _ in range(count)]
        self._sequence = sequence

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        start = self._starts[index]
        tokens = self._text[start : start + self._sequence].long()
        return {"input_ids": tokens, "labels": tokens}


# ---- training -------------------------------------------------------------------------------------------------------


class Meter(TrainerCallback):  # type: ignore[misc]
    """Time and loss of every step, and the peak memory of all."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.times_s: list[float] = []
        self._began_s = 0.0

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        reset_peak_memory()

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._began_s = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.times_s.append(time.perf_counter() - self._began_s)

    def on_log(self, *_: Any, logs: dict[str, float], **__: Any) -> None:
        if "loss" in logs:
            self.losses.append(float(logs["loss"]))


def train(options: argparse.Namespace, ds_config: dict[str, Any]) -> dict[str, Any]:
    """Train a whole run; return losses, parameters, peak memory, time, and the offloader's report."""
    torch.manual_seed(SEED)
    batch = ds_config["train_micro_batch_size_per_gpu"]
    micro_steps = ds_config.get("gradient_accumulation_steps", 1)
    on_cpu = get_accelerator().is_synchronized_device()
    arguments = TrainingArguments(
        output_dir=options.output_dir,
        deepspeed=ds_config,
        **checkpointing(options.checkpointing),
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=micro_steps,
        max_steps=options.steps,
        learning_rate=ds_config["optimizer"]["params"]["lr"],
        lr_scheduler_type="constant",
        max_grad_norm=ds_config.get("gradient_clipping", 0.0),
        bf16=ds_config.get("bf16", {}).get("enabled", False),
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=on_cpu,
        dataloader_pin_memory=not on_cpu,
        seed=SEED,
    )
    sequences = options.steps * batch * micro_steps * arguments.world_size
    data = LongTexts(options.text, options.sequence, sequences)
    model = llama(options.width, options.layers, options.sequence)
    if options.tiled_loss:
        tile_loss(model)
    meter = Meter()
    trainer = Trainer(model=model, args=arguments, train_dataset=data, callbacks=[meter])
    trainer.train()
    peak_bytes = peak_memory_bytes()
    engine = trainer.model_wrapped
    offloader = getattr(engine, "activation_offloader", None)
    return {
        "losses": meter.losses,
        "step_s": sorted(meter.times_s)[len(meter.times_s) // 2],
        "tokens": options.sequence * batch,
        "peak_memory_bytes": peak_bytes,
        "parameters_sha256": parameters_sha256(engine),
        "report": None if offloader is None else offloader.report().to_dict(),
    }


def checkpointing(wanted: bool) -> dict[str, Any]:
    """Return the Trainer's arguments for checkpointing of every layer, whose names changed in transformers 5."""
    names = {field.name for field in fields(TrainingArguments)}
    name = "activation_checkpointing" if "activation_checkpointing" in names else "gradient_checkpointing"
    return {name: True, f"{name}_kwargs": {"use_reentrant": False}} if wanted else {}


# ---- the command ----------------------------------------------------------------------------------------------------


def read_config(options: argparse.Namespace) -> dict[str, Any]:
    """Return the JSON, with the options of the command line put in."""
    ds_config: dict[str, Any] = json.loads(Path(options.deepspeed_config).read_text())
    if options.without_block:
        ds_config.pop(BLOCK, None)
    if BLOCK not in ds_config:
        return ds_config
    block = ds_config[BLOCK]
    if options.nvme_path:
        block["nvme_path"] = options.nvme_path
    if options.backend:
        block.setdefault("io", {})["backend"] = options.backend
    if options.staging_mib:
        block.setdefault("io", {})["staging_bytes"] = options.staging_mib * MIB
    if options.recompute:
        block |= {"placement": "adaptive", "recompute": True}
    if options.budget_mib:
        block |= {"placement": "adaptive", "activation_budget_bytes": options.budget_mib * MIB}
    return ds_config


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--deepspeed_config", required=True, help="the ds_config.json")
    parser.add_argument("--sequence", type=int, default=8192, help="tokens (bytes) per sequence")
    parser.add_argument("--steps", type=int, default=8, help="optimizer steps")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--text", type=Path, nargs="*", default=[], help="text files (default: Python's own sources)")
    parser.add_argument(
        "--checkpointing",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="gradient checkpointing of every layer, by the Trainer",
    )
    parser.add_argument(
        "--tiled_loss",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="DeepSpeed's TiledFusedLogitsLoss instead of the model's own loss on all logits",
    )
    parser.add_argument(
        "--recompute",
        action="store_true",
        help="the block's recomputing instead: which layers run again is planned (with --budget_mib)",
    )
    parser.add_argument("--budget_mib", type=int, help="adaptive, with this activation_budget_bytes")
    parser.add_argument("--nvme_path", help="use this directory instead of the config's")
    parser.add_argument("--backend", help="use this io.backend instead of the config's")
    parser.add_argument("--staging_mib", type=int, help="use this io.staging_bytes instead of the config's")
    parser.add_argument("--without_block", action="store_true", help="as if the config had no block")
    parser.add_argument("--output_dir", default=".cache/long_context", help="the Trainer's; nothing is saved there")
    parser.add_argument("--result", type=Path, help="write losses, peak memory, time and report to this JSON file")
    parser.add_argument("--local_rank", type=int, default=0, help="set by the launcher")
    options = parser.parse_args(argv)
    if options.recompute:
        options.checkpointing = False
    return options


def main(argv: list[str] | None = None) -> int:
    """Train; return 0 if every loss is finite."""
    options = parse(sys.argv[1:] if argv is None else argv)
    run = train(options, read_config(options))
    if torch.distributed.get_rank() == 0:
        print(summary(options, run))
        if options.result:
            options.result.write_text(json.dumps(run))
    torch.distributed.destroy_process_group()
    return 0 if all(loss == loss and abs(loss) != float("inf") for loss in run["losses"]) else 1


def summary(options: argparse.Namespace, run: dict[str, Any]) -> str:
    """Return a few lines for the end of the log."""
    how = "the Trainer's checkpointing" if options.checkpointing else "no checkpointing"
    lines = [
        f"{options.layers} layers of width {options.width}, {run['tokens']:,} tokens per step and rank, "
        f"{'the block may recompute' if options.recompute else how}",
        f"loss {run['losses'][0]:.4f} -> {run['losses'][-1]:.4f}; median step {run['step_s']:.2f} s; "
        f"peak memory of the {memory_owner()} {run['peak_memory_bytes'] / MIB:,.0f} MiB",
    ]
    report = run["report"]
    if report is not None:
        lines.append(
            f"activations: at most {report['peak_saved_bytes'] / MIB:,.0f} MiB in memory instead of "
            f"{report['peak_saved_bytes_without'] / MIB:,.0f} MiB; {report['written_bytes'] / MIB:,.0f} MiB written"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
