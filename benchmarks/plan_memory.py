"""Memory per token as ``ds_tba plan`` has it, and as training takes it: five architectures, with the drive and without.

    python benchmarks/plan_memory.py [--models GPT-2 ...] [--lengths 2048 4096] [--nvme_path DIR] [--json FILE]

Models are those of transformers, made from configs, in FP32: four layers of width 128. Each has a process of its own,
in which the settings follow each other. Memory is that of ``capacity.py``: the process's peak of resident bytes in a
step, staging included; here less what it holds right before that step. The table has slopes between two lengths. Both
must have tensors larger than a quarter of staging: smaller ones are loaded in place, so that half of staging may be
their memory, and a slope from such a length to a longer one counts that half as if it grew with the sequence. A first
step of the longest length is not measured: the libraries touch memory of their own in it, once.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from alternating import add_process_options, has_answered, in_a_process
from benchmarking import JSON, MIB, markdown_table, parser_of, write_json
from capacity import MMAP_THRESHOLD_BYTES, checkpoint_layers
from step_time import EXAMPLES, resident_bytes

WIDTH, HEADS, VOCABULARY, LONGEST = 128, 4, 256, 1 << 14
SPECIAL = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 0}
USUAL = {
    **SPECIAL, "hidden_size": WIDTH, "intermediate_size": WIDTH * 7 // 2, "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS, "head_dim": WIDTH // HEADS, "max_position_embeddings": LONGEST,
    "pad_token_id": 0,
}  # fmt: skip
# Keys have as many heads as queries: the plan is of a GPU, which has no fused attention in FP32 for grouped ones.
# GPT-2's attention has no dropout here: with it the CPU has no kernel that does without a square of scores.
GPT2 = {**SPECIAL, "n_embd": WIDTH, "n_head": HEADS, "n_positions": LONGEST, "attn_pdrop": 0.0}
MODELS: dict[str, dict[str, Any]] = {
    "GPT-2": {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], **GPT2},
    "Llama": {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **USUAL},
    "Qwen3": {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], **USUAL},
    "Mistral": {"model_type": "mistral", "architectures": ["MistralForCausalLM"], **USUAL, "sliding_window": None},
    "Phi-3": {"model_type": "phi3", "architectures": ["Phi3ForCausalLM"], **USUAL},
}
# Settings by their names in the plan: checkpointing of each layer, and everything to the drive.
SETTINGS = {
    "as it is": (False, False), "+ checkpointing": (True, False),
    "offload all": (False, True), "+ checkpointing and NVMe": (True, True),
}  # fmt: skip
RATES = 1e9, 1e9  # of a drive, for times that nobody reads here


def config_in(directory: Path, options: argparse.Namespace) -> str:
    """Write the model's ``config.json`` and return its folder."""
    layers = "n_layer" if options.variant == "GPT-2" else "num_hidden_layers"
    (directory / "config.json").write_text(json.dumps({**MODELS[options.variant], layers: options.layers}))
    return str(directory)


def planned(folder: str, options: argparse.Namespace) -> dict[str, list[int]]:
    """Return bytes beside what is held always, by setting, for each length; the plan's margin is not in them."""
    import torch

    from ds_tba.cli.plan.dry_run import dry_run
    from ds_tba.cli.plan.model import recipe_of
    from ds_tba.cli.plan.rows import FRAGMENTATION, Setup, fixed_rows
    from ds_tba.cli.plan.training import Device, Training
    from ds_tba.config import OffloadConfig

    io = {"staging_bytes": options.staging_mib * MIB}
    block = {"enabled": False, "min_tensor_bytes": options.min_tensor_kib * 1024, "rematerialize": False, "io": io}
    training = Training({}, OffloadConfig.model_validate(block), torch.float32)
    device, recipe = Device("as a CPU", None, 1e11, 1e10, 5e9), recipe_of(folder)
    found: dict[str, list[int]] = {name: [] for name in SETTINGS}
    for sequence in options.lengths:
        run = dry_run(recipe, 1, sequence, training, device, RATES)
        setup = Setup(run, training, device, 600.0)
        for row in (one for one in fixed_rows(setup) if one.name in SETTINGS):
            staging_bytes = io["staging_bytes"] if row.cost.written_bytes else 0
            moving_bytes = (row.need_bytes - setup.account.held.nbytes) / (1 + FRAGMENTATION)
            found[row.name].append(staging_bytes + int(moving_bytes))
    return found


def trained(folder: str, options: argparse.Namespace) -> dict[str, list[int]]:
    """Return bytes that a step takes beyond what the process holds before it, by setting, for each length."""
    import torch

    import ds_tba
    from ds_tba.cli.plan.model import recipe_of

    sys.path.insert(0, str(EXAMPLES))
    from train_gpt import peak_memory_bytes, reset_peak_memory

    recipe = recipe_of(folder)
    io = {"backend": "posix", "staging_bytes": options.staging_mib * MIB}
    block = {"placement": "nvme", "nvme_path": options.nvme_path, "rematerialize": False, "io": io}
    block["min_tensor_bytes"] = options.min_tensor_kib * 1024

    def step(model: Any, offloader: ds_tba.Offloader | None, sequence: int) -> int:
        """Return the peak of one step, less what there was before it."""
        tokens = torch.randint(VOCABULARY, (1, sequence))
        rest_bytes = resident_bytes()
        reset_peak_memory()
        with nullcontext() if offloader is None else offloader.saving():
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        if offloader is not None:
            offloader.step()
        return int(peak_memory_bytes()) - rest_bytes

    found: dict[str, list[int]] = {}
    for name, (is_checkpointed, is_offloaded) in SETTINGS.items():
        torch.manual_seed(1)
        model: Any = recipe(1, 1).model.float()
        if is_checkpointed:
            checkpoint_layers(model)
        for one in model.parameters():
            one.grad = torch.zeros_like(one)
        with ds_tba.Offloader(model, **block) if is_offloaded else nullcontext() as offloader:
            step(model, offloader, max(options.lengths))
            found[name] = [step(model, offloader, sequence) for sequence in options.lengths]
    return found


def measure(options: argparse.Namespace) -> dict[str, dict[str, list[int]]]:
    """Plan and train one model."""
    with tempfile.TemporaryDirectory() as directory:
        folder = config_in(Path(directory), options)
        return {"plan": planned(folder, options), "run": trained(folder, options)}


def slope(lengths: list[int], nbytes: list[int]) -> float:
    """Return KiB per token, between the first length and the last."""
    return (nbytes[-1] - nbytes[0]) / (lengths[-1] - lengths[0]) / 1024


def table(found: dict[str, dict[str, dict[str, list[int]]]], lengths: list[int]) -> list[str]:
    """Return the Markdown table."""
    rows = []
    for model, each in found.items():
        for name in SETTINGS:
            plan, run = (slope(lengths, each[kind][name]) for kind in ("plan", "run"))
            rows.append((model, name.removeprefix("+ "), *(f"{one:.2f}" for one in (plan, run, plan / run))))
    return markdown_table(("model", "setting", "plan, KiB a token", "run, KiB a token", "plan / run"), rows)


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    more = {"staging_mib": (2, "io.staging_bytes"), "min_tensor_kib": (4, "min_tensor_bytes"), "json": JSON}
    parser = parser_of(__doc__, layers=4, nvme_path=".", **more)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--lengths", nargs="+", type=int, default=[2048, 4096])
    add_process_options(parser, list(MODELS))
    options = parser.parse_args(argv)
    if has_answered(options, measure):
        return 0
    found = {}
    for model in options.models:
        found[model] = in_a_process(__file__, model, argv, MALLOC_MMAP_THRESHOLD_=MMAP_THRESHOLD_BYTES)
        print(f"{model}: {found[model]}", flush=True)
    write_json(options.json, {"lengths": options.lengths, "bytes": found})
    print("\n".join(table(found, options.lengths)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
