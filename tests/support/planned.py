"""Small models for ``ds_tba plan``, as their config.json has them."""

from __future__ import annotations

from typing import Any

WIDTH, LAYERS, WORDS = 256, 4, 512
LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": WORDS, "hidden_size": WIDTH,
    "intermediate_size": 2 * WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 4,
}  # fmt: skip
GROUPED = {"num_key_value_heads": 2, "head_dim": 16}
ENDS = {"bos_token_id": 0, "eos_token_id": 0}
# By name: the type, the architecture, and what only it has.
KINDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "Llama": ("llama", "LlamaForCausalLM", GROUPED),
    "Qwen3": ("qwen3", "Qwen3ForCausalLM", GROUPED),
    "Mixtral": ("mixtral", "MixtralForCausalLM", {**GROUPED, "num_local_experts": 4}),
    "Gemma 2": ("gemma2", "Gemma2ForCausalLM", {**GROUPED, "sliding_window": 64}),
    "Phi-3": ("phi3", "Phi3ForCausalLM", {**GROUPED, **ENDS, "pad_token_id": 0}),
    "BERT": ("bert", "BertForMaskedLM", {}),
}


def small(name: str, layers: int, words: int, positions: int, dropout: float = 0.1) -> dict[str, Any]:
    """A model with layers of width 64; GPT-2 and BERT have dropout."""
    if name == "GPT-2":
        widths = {"n_embd": 64, "n_layer": layers, "n_head": 4, "n_positions": positions, "vocab_size": words, **ENDS}
        dropouts = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
        return {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], **widths, **dropouts}
    kind, architecture, own = KINDS[name]
    widths = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": layers, "num_attention_heads": 4}
    dropouts = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), dropout)
    whole = {"model_type": kind, "architectures": [architecture], **widths, **own, **dropouts}
    return {**whole, "vocab_size": words, "max_position_embeddings": positions}
