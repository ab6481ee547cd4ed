"""The config.json of a small model, for ``ds_tba plan``."""

WIDTH, LAYERS, WORDS = 256, 4, 512
LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": WORDS, "hidden_size": WIDTH,
    "intermediate_size": 2 * WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 4,
}  # fmt: skip
