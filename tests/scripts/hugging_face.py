"""Trains tiny Hugging Face models, built from configs, one case after the other, each in an engine of its own.

A case is "model/checkpointing", such as "llama/reentrant". Prints every rank's losses of each case and, after them, a
fingerprint of its parameters; and where the config has our block, what the report says of the case.
"""

import argparse
import gc
import warnings

import deepspeed
import torch
import transformers
from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledFusedLogitsLoss, TiledMLP
from support.engine_runs import tell_training
from torch import nn
from torch.nn import functional
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


def tiled(layer):
    """DeepSpeed's function for long sequences, in the place of a layer's feed-forward part."""
    feed_forward = layer.mlp
    own, weights = type(feed_forward).forward, list(feed_forward.parameters())
    feed_forward.forward = lambda x: TiledMLP.apply(own, feed_forward, x, 4, weights)


class WithTiledLoss(nn.Module):
    """Runs the backward of the logits in forward."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids, labels):
        hidden = self.model.model(input_ids=input_ids).last_hidden_state[:, :-1].contiguous()
        head, labels = self.model.lm_head, labels[:, 1:].contiguous()
        loss = TiledFusedLogitsLoss.apply(self.loss, head, hidden, labels, None, 3, list(head.parameters()), "mean")
        return transformers.modeling_outputs.CausalLMOutput(loss=loss)

    @staticmethod
    def loss(head, x, y):
        return functional.cross_entropy(head(x).float(), y)


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
    elif checkpointing in ("tiled", "tiled_loss"):
        for layer in model.model.layers:
            tiled(layer)
    return (WithTiledLoss(model) if checkpointing == "tiled_loss" else model).train()


def train(case):
    model = build(case)
    engine, *_ = deepspeed.initialize(args=options, model=model, model_parameters=model.parameters())
    chance = torch.Generator().manual_seed(1 + engine.global_rank)
    torch.manual_seed(100 + engine.global_rank)

    def loss():
        words = torch.randint(1, WORDS, (options.rows, options.words), generator=chance)
        return engine(input_ids=words, labels=words).loss

    tell_training(engine, "case", case, options.steps, loss, lambda: None)


for case in options.cases:
    train(case)
    gc.collect()
deepspeed.comm.destroy_process_group()
