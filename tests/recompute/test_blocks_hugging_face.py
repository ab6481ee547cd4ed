"""Blocks of Hugging Face models, built tiny from configs: which are found, and that recomputing them is exact."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ds_tba.core.cache import TensorCache
from ds_tba.errors import RecomputationError
from ds_tba.recompute import Blocks, find_blocks

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("one_thread")

LAYERS, WORDS = 3, 64
WIDTHS: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": LAYERS, "num_attention_heads": 4, "intermediate_size": 64,
    "vocab_size": WORDS,
}  # fmt: skip
T5 = {"d_model": 32, "d_ff": 64, "d_kv": 8, "num_heads": 4, "num_layers": LAYERS, "vocab_size": WORDS}
MODELS: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "T5ForConditionalGeneration": ("T5Config", {**T5, "decoder_start_token_id": 0}, ["encoder.block", "decoder.block"]),
    "GPT2LMHeadModel": ("GPT2Config", {"n_embd": 32, "n_layer": LAYERS, "n_head": 4, "vocab_size": WORDS},
                        ["transformer.h"]),
    "MixtralForCausalLM": ("MixtralConfig", {**WIDTHS, "num_key_value_heads": 2, "num_local_experts": 4},
                          ["model.layers"]),
}  # fmt: skip
# From transformers 5 on a ContextVar collects router logits: a second run would add a layer's a second time.
MORE = {"MixtralForCausalLM": {"output_router_logits": True}}


def build(name: str) -> nn.Module:
    torch.manual_seed(1)
    config, settings, _ = MODELS[name]
    model: nn.Module = getattr(transformers, name)(getattr(transformers, config)(**settings))
    return model.train()


def train(model: nn.Module, seed: int, **more: Any) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    model.zero_grad()
    words = torch.randint(0, WORDS, (2, 12))
    loss = model(input_ids=words, labels=words, **more).loss
    loss.backward()
    return {"loss": loss.detach(), **{name: one.grad for name, one in model.named_parameters() if one.grad is not None}}


class Memory:
    saved = 0

    def count_again(self, tensor: Tensor) -> None:
        self.saved += 1

    def end_recomputations(self) -> None: ...


def check(name: str, **more: Any) -> None:
    """Three steps with every layer recomputed are equal to those without us."""
    model = build(name)
    twin, memory = copy.deepcopy(model), Memory()
    found = find_blocks(model, None)
    assert [*found] == [f"{stack}.{index}" for stack in MODELS[name][2] for index in range(LAYERS)]
    blocks = Blocks(found, memory, found)
    for seed in range(3):
        with TensorCache([], "cpu", 1).saving(), blocks.forward():
            ours = train(model, seed, **more)
        blocks.end_backward()
        theirs = train(twin, seed, **more)
        assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)
    assert memory.saved


@pytest.mark.parametrize("name", MODELS)
def test_every_layer_is_found_and_recomputed_to_the_bit(name: str) -> None:
    check(name, use_cache=False, **MORE.get(name, {}))


@pytest.mark.parametrize("name", MODELS)
def test_layers_that_fill_a_cache_of_keys_are_exact_or_raise_with_the_repair(name: str) -> None:
    """It is on by default, in training too; a second run of a layer adds its keys a second time."""
    try:
        check(name)
    except RecomputationError as error:
        assert "use_cache=False" in str(error)
