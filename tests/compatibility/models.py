"""Models that people train, tiny, from configs, and a random batch for each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

WORDS, LENGTH, LAYERS, WIDTH = 128, 32, 3, 64
WIDTHS: dict[str, Any] = {
    "hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": 4, "intermediate_size": 2 * WIDTH,
    "vocab_size": WORDS,
}  # fmt: skip


@dataclass(frozen=True)
class Model:
    """How to build a model, and a batch of so many samples from a random generator."""

    build: Callable[[], nn.Module]
    batch: Callable[[int, torch.Generator], dict[str, Tensor]]


def from_config(model: str, config: str, **settings: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import transformers

        built: nn.Module = getattr(transformers, model)(getattr(transformers, config)(**settings))
        return built.train()

    return build


def words(batch: int, chance: torch.Generator) -> dict[str, Tensor]:
    text = torch.randint(0, WORDS, (batch, LENGTH), generator=chance)
    return {"input_ids": text, "labels": text}


MODELS = {
    "llama": Model(from_config("LlamaForCausalLM", "LlamaConfig", **WIDTHS, num_key_value_heads=2), words),
}
