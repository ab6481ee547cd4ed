"""How people train with Hugging Face's libraries: Transformers' Trainer, Accelerate, PEFT and TRL.

As in ``programs_deepspeed.py``: each function is a training script, and returns what is compared. As a program this is
a script for ``accelerate launch``, and what it compares goes to a file:

    accelerate launch --config_file config.yaml programs_hf.py RESULT {loop, trainer} [BLOCK]

BLOCK, in JSON, is for DeepSpeed settings that have no file in which it could stand.
"""

from __future__ import annotations

import copy
import itertools
import json
import os
import random
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from models import LENGTH, MODELS, WORDS
from programs_deepspeed import outcome
from torch import nn

BLOCK = "activation_nvme_offload"
Build = Callable[[], nn.Module]


# ---- data -----------------------------------------------------------------------------------------------------------


def samples(*, varying_lengths: bool = False) -> list[dict[str, Any]]:
    """A data set: as many samples as a run may ask for."""
    batch, chance = MODELS["Llama"].batch(64, torch.Generator().manual_seed(1)), random.Random(1)
    lengths = [chance.randint(4, LENGTH) if varying_lengths else LENGTH for _ in range(64)]
    return [{key: value[at, :length] for key, value in batch.items()} for at, length in enumerate(lengths)]


def padded(batch: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """A batch as long as its longest text."""
    texts = nn.utils.rnn.pad_sequence([one["input_ids"] for one in batch], batch_first=True, padding_value=0)
    labels = nn.utils.rnn.pad_sequence([one["labels"] for one in batch], batch_first=True, padding_value=-100)
    return {"input_ids": texts, "labels": labels, "attention_mask": (labels != -100).long()}


def sentences(count: int) -> list[str]:
    """Texts of many lengths."""
    chance = random.Random(2)
    return [" ".join(f"w{chance.randrange(3, WORDS)}" for _ in range(chance.randint(4, LENGTH))) for _ in range(count)]


def tokenizer() -> Any:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<pad>": 0, "<s>": 1, "</s>": 2, **{f"w{index}": index for index in range(3, WORDS)}}
    words = Tokenizer(WordLevel(vocabulary, unk_token="<pad>"))
    words.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


# ---- Trainer --------------------------------------------------------------------------------------------------------


def settings(config: dict[str, Any] | None, steps: int, **more: Any) -> dict[str, Any]:
    """Arguments of a trainer; where there is no config, the launcher names its file."""
    return {
        "output_dir": "trained", "deepspeed": copy.deepcopy(config), "max_steps": steps, "report_to": "none",
        "save_strategy": "no", "disable_tqdm": True, "per_device_train_batch_size": 2, "learning_rate": 1e-3,
        "logging_steps": 1000, "bf16": False, "use_cpu": not torch.cuda.is_available(), **more,
    }  # fmt: skip


def train(trainer: Any, **options: Any) -> list[float]:
    """Train; return one loss for each micro-step, of which no digit is rounded off, as it is in the trainer's log."""
    losses, step = [], trainer.training_step

    def training_step(*args: Any, **kwargs: Any) -> torch.Tensor:
        loss: torch.Tensor = step(*args, **kwargs)
        losses.append(loss.item())
        return loss

    trainer.training_step = training_step
    trainer.train(**options)
    return losses + [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]


def build(*, lora: bool = False) -> nn.Module:
    torch.manual_seed(0)
    built = MODELS["Llama"].build()
    if not lora:
        return built
    from peft import LoraConfig, get_peft_model

    # As the documentation has it for gradient checkpointing: the first layer's input then asks for a gradient.
    built.enable_input_require_grads()
    return get_peft_model(built, LoraConfig(r=4, lora_dropout=0.1, target_modules="all-linear", task_type="CAUSAL_LM"))


def trainer(
    config: dict[str, Any] | None,
    steps: int = 8,
    *,
    lora: bool = False,
    varying_lengths: bool = False,
    generates: bool = False,
    **more: Any,
) -> dict[str, Any]:
    """Transformers' ``Trainer``.

    Args:
        generates: text after each second step.
        more: of ``TrainingArguments``.
    """  # fmt: skip
    from transformers import Trainer, TrainerCallback, TrainingArguments

    tokens: list[int] = []

    class Generating(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            if generates and state.global_step % 2 == 0:
                model.eval()
                text = model.generate(data[0]["input_ids"][None, :4], max_new_tokens=4, do_sample=False)
                tokens.extend(text.flatten().tolist())
                model.train()

    arguments = TrainingArguments(**settings(config, steps, **more))
    data = samples(varying_lengths=varying_lengths)
    trains = Trainer(
        build(lora=lora), arguments, train_dataset=data, eval_dataset=data[:4], callbacks=[Generating()],
        data_collator=padded if varying_lengths else None,
    )  # fmt: skip
    losses = train(trains)
    return outcome(trains.model_wrapped, losses + [float(token) for token in tokens])


def resumed_trainer(config: dict[str, Any], steps: int = 10, **more: Any) -> dict[str, Any]:
    """A run that is saved half-way, and another that goes on from there."""
    from transformers import Trainer, TrainingArguments

    half = settings(config, steps, save_strategy="steps", save_steps=steps // 2, **more)
    losses: list[float] = []
    for checkpoint in (None, f"trained/checkpoint-{steps // 2}"):
        trains = Trainer(build(), TrainingArguments(**half), train_dataset=samples())
        losses += train(trains, resume_from_checkpoint=checkpoint)
    assert len(losses) == steps + steps // 2
    return outcome(trains.model_wrapped, losses)


# ---- TRL ------------------------------------------------------------------------------------------------------------


def of_trl(kind: str, given: dict[str, Any], data: dict[str, list[str]], *builds: Build) -> dict[str, Any]:
    """Train with TRL's trainer of this kind."""
    import trl
    from datasets import Dataset

    arguments = getattr(trl, f"{kind}Config")(**given)
    models, texts = [build() for build in builds], Dataset.from_dict(data)
    trains = getattr(trl, f"{kind}Trainer")(*models, args=arguments, train_dataset=texts, processing_class=tokenizer())
    losses = train(trains)
    return outcome(trains.model_wrapped, losses)


def sft(config: dict[str, Any], steps: int = 8, **more: Any) -> dict[str, Any]:
    """TRL's ``SFTTrainer`` on texts of many lengths."""
    return of_trl("SFT", settings(config, steps, max_length=LENGTH, **more), {"text": sentences(64)}, build)


def dpo(config: dict[str, Any], steps: int = 8, *, lora: bool = False, **more: Any) -> dict[str, Any]:
    """TRL's ``DPOTrainer``: the policy, and a reference that is not trained (with LoRA the same without adapters)."""
    texts = sentences(96)
    data = {"prompt": texts[:32], "chosen": texts[32:64], "rejected": texts[64:]}
    builds = [partial(build, lora=lora), *([] if lora else [build])]
    return of_trl("DPO", settings(config, steps, max_length=2 * LENGTH, **more), data, *builds)


# ---- Accelerate -----------------------------------------------------------------------------------------------------


def accelerated(config: dict[str, Any], steps: int = 8, *, in_json: bool = True) -> dict[str, Any]:
    """A loop of one's own with Accelerate's plugin.

    Args:
        in_json: whether the plugin gets the DeepSpeed config, or settings of its own.
    """
    from accelerate.utils import DeepSpeedPlugin

    if in_json:
        plugin = DeepSpeedPlugin(hf_ds_config=copy.deepcopy(config))
    else:
        plugin = DeepSpeedPlugin(zero_stage=config["zero_optimization"]["stage"], gradient_clipping=1.0)
    return accelerated_loop(None if in_json else config.get(BLOCK), plugin, steps)


def accelerated_loop(block: dict[str, Any] | None, plugin: Any = None, steps: int = 8) -> dict[str, Any]:
    """A loop whose plugin is given, or made from what ``accelerate launch`` was told.

    Args:
        block: set where there is no JSON to hold it, before ``prepare``.
    """
    from accelerate import Accelerator
    from accelerate.utils import InitProcessGroupKwargs

    # Without a GPU Accelerate sees one rank only, unless a backend is named.
    backend = None if torch.cuda.is_available() else "gloo"
    accelerator = Accelerator(deepspeed_plugin=plugin, kwargs_handlers=[InitProcessGroupKwargs(backend=backend)])
    if block is not None:
        accelerator.state.deepspeed_plugin.deepspeed_config[BLOCK] = block
    built = build()
    optimizer = torch.optim.AdamW(built.parameters(), lr=1e-3)
    loader = torch.utils.data.DataLoader(samples(), batch_size=2, shuffle=True)
    engine, optimizer, loader = accelerator.prepare(built, optimizer, loader)
    losses: list[float] = []
    for batch in itertools.islice(loader, steps):
        loss = engine(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return outcome(engine, losses)


AUTO: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto", "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
}  # fmt: skip


def config_of(stage: int) -> dict[str, Any]:
    """Return a config as Hugging Face's documentation writes it: the arguments fill in what is "auto"."""
    return {**AUTO, "zero_optimization": {"stage": stage}}


def checkpointing(reentrant: bool, **more: Any) -> dict[str, Any]:
    return {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": reentrant, **more}}


FINE: dict[str, Any] = {"label_smoothing_factor": 0.1, "neftune_noise_alpha": 5.0, "max_grad_norm": 0.1}


if __name__ == "__main__":
    path, way, *block = sys.argv[1:]
    result = trainer(None) if way == "trainer" else accelerated_loop(json.loads(block[0]) if block else None)
    Path(f"{path}{os.environ['RANK']}.json").write_text(json.dumps(result))
