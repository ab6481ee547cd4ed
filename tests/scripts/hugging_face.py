"""Trains tiny Hugging Face models, built from configs, one case after the other, each in an engine of its own.

A case is "model/checkpointing", such as "llama/reentrant". Prints every rank's losses of each case and, after them, a
fingerprint of its parameters; and where the config has our block, what the report says of the case.
"""

import argparse
import gc
import hashlib
import json
import sys
import warnings

import deepspeed
import torch
import transformers
from torch.utils.checkpoint import checkpoint

parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
parser.add_argument("--local_rank", type=int, default=0)
parser.add_argument("--steps", type=int, default=14)
parser.add_argument("--rows", type=int, default=2)
parser.add_argument("--words", type=int, default=64)
parser.add_argument("--cases", nargs="+")
options = parser.parse_args()
deepspeed.init_distributed()
warnings.simplefilter("ignore", FutureWarning)

LAYERS, WORDS = 3, 64
WIDTHS = {
    "hidden_size": 32, "num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 64, "vocab_size": WORDS, "pad_token_id": 0,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 8}
T5 = {
    "d_model": 32, "d_ff": 64, "d_kv": 8, "num_heads": 4, "num_layers": LAYERS, "vocab_size": WORDS,
    "decoder_start_token_id": 0,
}  # fmt: skip
GPT2 = {"n_embd": 32, "n_layer": LAYERS, "n_head": 4, "vocab_size": WORDS}
MODELS = {
    "llama": (transformers.LlamaForCausalLM, transformers.LlamaConfig, WIDTHS),
    "qwen3_moe": (transformers.Qwen3MoeForCausalLM, transformers.Qwen3MoeConfig, {**WIDTHS, **EXPERTS}),
    "t5": (transformers.T5ForConditionalGeneration, transformers.T5Config, T5),
    "gpt2": (transformers.GPT2LMHeadModel, transformers.GPT2Config, GPT2),
}


def selective(layer):
    """Checkpoint a part of a layer's forward, inside it."""
    feed_forward = layer.mlp
    own = feed_forward.forward
    feed_forward.forward = lambda *args: checkpoint(own, *args, use_reentrant=False)


def build(case):
    name, checkpointing = case.split("/")
    torch.manual_seed(0)
    kind, config, settings = MODELS[name]
    model = kind(config(**settings))
    if checkpointing != "cached":
        model.config.use_cache = False
    if checkpointing in ("reentrant", "non_reentrant"):
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing == "reentrant"})
    elif checkpointing == "deepspeed":
        deepspeed.checkpointing.configure(None, deepspeed_config=options.deepspeed_config)
        model.gradient_checkpointing_enable()
        for module in model.modules():
            if hasattr(module, "gradient_checkpointing"):
                module._gradient_checkpointing_func = deepspeed.checkpointing.checkpoint
    elif checkpointing == "selective":
        for layer in model.model.layers:
            selective(layer)
    return model.train()


def fingerprint(engine):
    digest = hashlib.sha256(torch.get_rng_state().numpy().tobytes())
    for parameter in engine.module.parameters():
        with deepspeed.zero.GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")):
            digest.update(parameter.detach().float().cpu().numpy().tobytes())
    return digest.hexdigest()


def train(case):
    model = build(case)
    engine, *_ = deepspeed.initialize(args=options, model=model, model_parameters=model.parameters())
    rank = engine.global_rank
    chance = torch.Generator().manual_seed(1 + rank)
    torch.manual_seed(100 + rank)
    for _ in range(options.steps):
        words = torch.randint(1, WORDS, (options.rows, options.words), generator=chance)
        loss = engine(input_ids=words, labels=words).loss
        engine.backward(loss)
        engine.step()
        sys.stdout.write(f"LOSS {rank} {case} {loss.item().hex()}\n")
    sys.stdout.write(f"PARAMETERS {rank} {case} {fingerprint(engine)}\n")
    offloader = getattr(engine, "activation_offloader", None)
    if offloader is not None:
        report = offloader.report().to_dict()
        sys.stdout.write(f"REPORT {rank} {json.dumps({'case': case, **report})}\n")
    engine.destroy()
    del engine, model
    gc.collect()


for case in options.cases:
    train(case)
deepspeed.comm.destroy_process_group()
