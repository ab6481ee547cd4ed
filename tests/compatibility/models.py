"""Models that people train, tiny, from configs, and a random batch for each."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from support.runs import ROOT
from torch import Tensor, nn
from torch.nn import functional

WORDS, LENGTH, LAYERS, WIDTH = 128, 32, 3, 64
FRAMES, MELS = 64, 16  # of a sound
PIXELS = 16  # of the side of a picture
WIDTHS: dict[str, Any] = {
    "hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": 4, "intermediate_size": 2 * WIDTH,
    "vocab_size": WORDS,
}  # fmt: skip
DECODER: dict[str, Any] = {**WIDTHS, "num_key_value_heads": 2, "pad_token_id": 0}
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2}


Draw = Callable[[int, torch.Generator], Any]


def integers(high: int, *shape: int) -> Draw:
    """Return a function that draws integers below ``high``, of this shape for each sample."""
    return lambda samples, chance: torch.randint(0, high, (samples, *shape), generator=chance)


def normal(*shape: int) -> Draw:
    return lambda samples, chance: torch.randn(samples, *shape, generator=chance)


def masks(samples: int, chance: torch.Generator) -> Tensor:
    """Draw the attention masks of texts of several lengths."""
    lengths = torch.randint(LENGTH // 2, LENGTH, (samples, 1), generator=chance)
    return (torch.arange(LENGTH) < lengths).long()


TEXT, PICTURE, NOISE = integers(WORDS, LENGTH), normal(3, PIXELS, PIXELS), normal(4, PIXELS, PIXELS)
OF_TEXT: dict[str, Draw] = {"input_ids": TEXT, "labels": TEXT}
OF_CLASS: dict[str, Draw] = {"labels": integers(2)}
NOISY: dict[str, Draw] = {"sample": NOISE, "noise": NOISE, "timestep": integers(1000)}


@dataclass(frozen=True)
class Model:
    """How to build a model, and how to draw each of its inputs."""

    build: Callable[[], nn.Module]
    inputs: dict[str, Draw]

    def batch(self, samples: int, chance: torch.Generator) -> dict[str, Any]:
        return {name: draw(samples, chance) for name, draw in self.inputs.items()}


def hf(name: str, inputs: dict[str, Draw], **settings: Any) -> Model:
    """A model of Transformers."""

    def build() -> nn.Module:
        import transformers

        of = getattr(transformers, name)
        return of(of.config_class(**settings))

    return Model(build, inputs)


class Denoiser(nn.Module):
    """A model of Diffusers with its loss: what noise was added?"""

    def __init__(self, name: str, **settings: Any) -> None:
        import diffusers

        super().__init__()
        self.network = getattr(diffusers, name)(sample_size=PIXELS, dropout=0.1, **settings)

    def forward(self, sample: Tensor, noise: Tensor, **conditions: Tensor) -> SimpleNamespace:
        found = self.network(sample + noise, **conditions).sample
        return SimpleNamespace(loss=functional.mse_loss(found[:, : noise.shape[1]], noise))


def clip() -> nn.Module:
    text = {**WIDTHS, "max_position_embeddings": LENGTH, "attention_dropout": 0.1}
    vision = {**WIDTHS, "image_size": PIXELS, "patch_size": 4}
    built = hf("CLIPModel", {}, projection_dim=WIDTH, text_config=text, vision_config=vision).build()
    # DeepSpeed 0.19.8 cannot broadcast a parameter without dimensions.
    built.logit_scale = nn.Parameter(built.logit_scale.detach().reshape(1))
    return built


def our_gpt() -> nn.Module:
    sys.path.insert(0, str(ROOT / "examples"))
    from train_gpt import GPT

    return GPT(WIDTH, LAYERS, LENGTH)


MODELS = {
    "GPT-2": hf("GPT2LMHeadModel", OF_TEXT, vocab_size=WORDS, n_embd=WIDTH, n_layer=LAYERS, n_head=4,
        n_positions=LENGTH),
    "Llama": hf("LlamaForCausalLM", OF_TEXT, **DECODER, attention_dropout=0.1),
    "Llama with tied embeddings": hf("LlamaForCausalLM", OF_TEXT, **DECODER, tie_word_embeddings=True),
    "BERT": hf("BertForSequenceClassification", {"input_ids": TEXT, "attention_mask": masks, **OF_CLASS}, **WIDTHS),
    "T5": hf("T5ForConditionalGeneration", OF_TEXT, vocab_size=WORDS, d_model=WIDTH, d_kv=16, d_ff=2 * WIDTH,
        num_layers=LAYERS, num_heads=4, decoder_start_token_id=0),
    "ViT": hf("ViTForImageClassification", {"pixel_values": PICTURE, **OF_CLASS}, image_size=PIXELS, patch_size=4,
        hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1, **WIDTHS),
    "Mixtral": hf("MixtralForCausalLM", OF_TEXT, **DECODER, **EXPERTS, num_local_experts=4, output_router_logits=True),
    "Qwen2-MoE": hf("Qwen2MoeForCausalLM", OF_TEXT, **DECODER, **EXPERTS, num_experts=4, moe_intermediate_size=WIDTH,
        shared_expert_intermediate_size=WIDTH),
    "Qwen3-MoE": hf("Qwen3MoeForCausalLM", OF_TEXT, **DECODER, **EXPERTS, num_experts=4, head_dim=16,
        moe_intermediate_size=WIDTH),
    "Mamba-2": hf("Mamba2ForCausalLM", OF_TEXT, vocab_size=WORDS, hidden_size=WIDTH, num_hidden_layers=LAYERS,
        num_heads=8, head_dim=16, state_size=16, n_groups=2, chunk_size=16),
    "DeepSeek-V3 (MLA)": hf("DeepseekV3ForCausalLM", OF_TEXT, **WIDTHS, num_key_value_heads=4, q_lora_rank=32,
        kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=16, v_head_dim=16, n_routed_experts=4,
        num_experts_per_tok=2, n_group=2, topk_group=1, first_k_dense_replace=1, moe_intermediate_size=WIDTH),
    "Whisper": hf("WhisperForConditionalGeneration", {"input_features": normal(MELS, FRAMES), "labels": TEXT},
        vocab_size=WORDS, num_mel_bins=MELS, d_model=WIDTH, encoder_layers=LAYERS, decoder_layers=LAYERS,
        encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=2 * WIDTH, decoder_ffn_dim=2 * WIDTH,
        dropout=0.1, max_source_positions=FRAMES // 2, max_target_positions=LENGTH, pad_token_id=0, bos_token_id=1,
        eos_token_id=2, decoder_start_token_id=1),
    "CLIP": Model(clip, {"pixel_values": PICTURE, "input_ids": TEXT, "return_loss": lambda *_: True}),
    "Diffusion U-Net": Model(partial(Denoiser, "UNet2DConditionModel", block_out_channels=(32, 64), layers_per_block=1,
        cross_attention_dim=WIDTH, norm_num_groups=8, attention_head_dim=8,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "CrossAttnUpBlock2D")),
        {**NOISY, "encoder_hidden_states": normal(8, WIDTH)}),
    "Diffusion transformer (DiT)": Model(partial(Denoiser, "DiTTransformer2DModel", num_attention_heads=4,
        attention_head_dim=16, in_channels=4, out_channels=8, num_layers=LAYERS, num_embeds_ada_norm=1000),
        {**NOISY, "class_labels": integers(1000)}),
    "GPT of examples/train_gpt.py": Model(our_gpt, {"inputs": TEXT, "targets": TEXT}),
}  # fmt: skip
