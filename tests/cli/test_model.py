"""LoRA, weights of a few bits, a fused loss and tiled MLPs change the model that is planned for."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_tba.cli.plan.dry_run import dry_run
from ds_tba.cli.plan.model import AIDS, recipe_of
from ds_tba.cli.plan.training import Device, DryRun, Training, account_of
from ds_tba.config import OffloadConfig
from ds_tba.errors import ModelError

pytest.importorskip("transformers")
WIDTH, WORDS, LAYERS, MIDDLE = 64, 4096, 2, 256
TEXT = {
    "hidden_size": WIDTH, "intermediate_size": MIDDLE, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
    "num_key_value_heads": 4, "head_dim": 16, "vocab_size": WORDS,
}  # fmt: skip
LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **TEXT}
SEQUENCE = 2048
DEVICE = Device("made up", None, 1e12, 1e11, 1e10)


def planned(
    directory: Path,
    config: dict[str, Any],
    lora: int | None = None,
    aids: Collection[str] = (),
    length: int = SEQUENCE,
    targets: Collection[str] = (),
    **changes: int,
) -> DryRun:
    (directory / "config.json").write_text(json.dumps(config))
    training = Training({}, OffloadConfig(enabled=False, min_tensor_bytes=4096), torch.bfloat16)
    recipe = recipe_of(str(directory), lora_rank=lora, lora_targets=targets, aids=aids, **changes)
    return dry_run(recipe, 1, length, training, DEVICE)


def test_a_fused_loss_holds_a_chunk_of_logits_and_saves_gradients(tmp_path: Path) -> None:
    plain, fused = planned(tmp_path, LLAMA), planned(tmp_path, LLAMA, aids=("fused_loss",))
    logits = SEQUENCE * WORDS
    assert plain.temporary_bytes > 4 * logits and plain.saved_bytes > fused.saved_bytes + 3.9 * logits
    # A chunk of logits, the gradient of the head by it, and hidden states; Liger: as many logits as hidden states.
    assert fused.temporary_bytes < 2 * (SEQUENCE * WIDTH + 2 * WORDS * WIDTH) + 8 * SEQUENCE * MIDDLE
    assert fused.parameters == plain.parameters == fused.trained
    assert fused.trace.end_s == pytest.approx(plain.trace.end_s, rel=0.25)  # as many products
    lora = planned(tmp_path, LLAMA, 4, ("fused_loss",))
    assert lora.trained < plain.trained and lora.saved_bytes < fused.saved_bytes  # no gradient of the head


def test_adapters_are_on_the_layers_that_are_named(tmp_path: Path) -> None:
    named = planned(tmp_path, LLAMA, 4, targets=("q_proj", "v_proj"))
    assert named.trained == LAYERS * 2 * 4 * 2 * WIDTH < planned(tmp_path, LLAMA, 4).trained
    with pytest.raises(ModelError, match=r"named 'qproj' or '' was found .*leave --lora or its targets out"):
        planned(tmp_path, LLAMA, 4, targets=("qproj", ""))


@pytest.mark.parametrize("aid", list(AIDS))
def test_a_model_without_a_place_for_an_aid_is_refused(tmp_path: Path, aid: str) -> None:
    bert = {"model_type": "bert", "architectures": ["BertModel"], **TEXT}
    option = f"--{aid.replace('_', '-')}"
    with pytest.raises(ModelError, match=f"{option}: BertModel has no .*: leave {option} out"):
        planned(tmp_path, bert, aids=(aid,), length=128)


def test_tiled_mlps_hold_one_tile(tmp_path: Path) -> None:
    plain, tiled = (planned(tmp_path, LLAMA, aids=("fused_loss", *more)) for more in ((), ("tiled_mlp",)))
    # Gate, its activation, up and their product are saved no more in any layer.
    assert plain.saved_bytes - tiled.saved_bytes == pytest.approx(LAYERS * 4 * 2 * SEQUENCE * MIDDLE, rel=0.05)
    assert tiled.temporary_bytes <= plain.temporary_bytes and tiled.trace.end_s > plain.trace.end_s


@pytest.mark.parametrize(
    ("quantization", "bits", "element_bytes"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, 4, 0.5 + 4 / 64),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, 8, 1.0),
        ({"quant_method": "gptq", "bits": 4}, 4, 0.5 + 4 / 64),
    ],
)
def test_weights_of_a_few_bits_count_as_such(
    tmp_path: Path, quantization: dict[str, Any], bits: int, element_bytes: float
) -> None:
    plain, given = (planned(tmp_path, LLAMA, 4, length=128, **more) for more in ({}, {"bits": bits}))
    config = {**LLAMA, "quantization_config": quantization}
    found, fused = (planned(tmp_path, config, 4, aids, 128) for aids in ((), ("fused_loss",)))
    assert given.parameter_bytes == found.parameter_bytes == fused.parameter_bytes  # the head is left as it is
    linears = LAYERS * (4 * WIDTH * WIDTH + 3 * WIDTH * MIDDLE)
    assert plain.parameter_bytes - found.parameter_bytes == pytest.approx(linears * (2 - element_bytes), abs=2)
    assert found.temporary_bytes == plain.temporary_bytes + 2 * WIDTH * MIDDLE  # one of them as it is used
    training = Training({}, OffloadConfig(enabled=False), torch.bfloat16)
    gradient_bytes = account_of(training, found, DEVICE).held.always["gradients"]
    assert gradient_bytes == 2 * found.trained  # adapters are not quantized
    with pytest.raises(ModelError, match=r"--bits, .*--lora 16"):
        planned(tmp_path, LLAMA, length=128, bits=bits)


def test_a_quantization_that_is_not_counted_is_said(tmp_path: Path) -> None:
    found = planned(tmp_path, {**LLAMA, "quantization_config": {"quant_method": "fp8"}}, length=128)
    assert any('"quantization_config" (fp8) is not counted' in note for note in found.notes)


def test_the_largest_module_is_that_of_all_experts(tmp_path: Path) -> None:
    mixtral = {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"], **TEXT, "num_local_experts": 8}
    for lora in (None, 4):
        assert planned(tmp_path, mixtral, lora, length=128).largest_module == 8 * 3 * WIDTH * MIDDLE
    assert planned(tmp_path, LLAMA, length=128).largest_module == WORDS * WIDTH
