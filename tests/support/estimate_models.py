"""Small models of every kind, each as a function of the contract of ``ds_tba estimate``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

WIDTH, HEADS, DEPTH, WORDS = 64, 4, 3, 256


def tokens(batch: int, sequence: int) -> torch.Tensor:
    return torch.zeros(batch, sequence, dtype=torch.int64)


class BertLayer(nn.Module):
    """Post-norm, with dropout everywhere and a mask of padding."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.norm1, self.norm2, self.dropout = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), nn.Dropout(0.1)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        batch, sequence, _ = x.shape
        q, k, v = self.qkv(x).view(batch, sequence, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=0.1)
        x = self.norm1(x + self.dropout(self.out(y.transpose(1, 2).reshape(batch, sequence, -1))))
        return self.norm2(x + self.dropout(self.down(functional.gelu(self.up(x)))))


class Bert(nn.Module):
    def __init__(self, sequence: int) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(WORDS, WIDTH), nn.Embedding(sequence, WIDTH)
        self.norm, self.dropout = nn.LayerNorm(WIDTH), nn.Dropout(0.1)
        self.layers = nn.ModuleList(BertLayer() for _ in range(DEPTH))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, words: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = self.dropout(self.norm(self.words(words) + self.positions.weight))
        for layer in self.layers:
            x = layer(x, mask)
        return functional.cross_entropy(self.head(x).flatten(0, 1).float(), words.flatten())


class RmsNorm(nn.Module):
    """T5's norm: in FP32, of plain operations."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        factor = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)
        return self.weight * (x * factor).to(x.dtype)


class T5Attention(nn.Module):
    """With a learned bias for each distance, or across to the encoder."""

    def __init__(self, *, biased: bool) -> None:
        super().__init__()
        self.q, self.kv, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.bias = nn.Embedding(32, HEADS) if biased else None

    def forward(self, x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        batch, rows, _ = x.shape
        columns = memory.shape[1]
        q = self.q(x).view(batch, rows, HEADS, -1).transpose(1, 2)
        k, v = self.kv(memory).view(batch, columns, 2, HEADS, -1).permute(2, 0, 3, 1, 4)
        bias = None
        if self.bias is not None:
            distance = torch.arange(rows, device=x.device)[:, None] - torch.arange(columns, device=x.device)
            bias = self.bias(distance.clamp(0, 31)).permute(2, 0, 1).unsqueeze(0)
        y = functional.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        return self.out(y.transpose(1, 2).reshape(batch, rows, -1))


class T5Layer(nn.Module):
    def __init__(self, *, crosses: bool) -> None:
        super().__init__()
        self.norm1, self.attention = RmsNorm(), T5Attention(biased=True)
        self.norm2, self.across = (RmsNorm(), T5Attention(biased=False)) if crosses else (None, None)
        self.norm3 = RmsNorm()
        self.gate, self.up, self.down = (nn.Linear(WIDTH, 2 * WIDTH) for _ in range(3))
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, memory: torch.Tensor | None = None) -> torch.Tensor:
        y = self.norm1(x)
        x = x + self.attention(y, y)
        if self.across is not None and self.norm2 is not None:
            x = x + self.across(self.norm2(x), memory)
        y = self.norm3(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


class T5(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.encoder = nn.ModuleList(T5Layer(crosses=False) for _ in range(DEPTH))
        self.decoder = nn.ModuleList(T5Layer(crosses=True) for _ in range(DEPTH))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> dict[str, torch.Tensor]:
        memory = self.words(source)
        for layer in self.encoder:
            memory = layer(memory)
        x = self.words(target)
        for layer in self.decoder:
            x = layer(x, memory)
        return {"loss": functional.cross_entropy(self.head(x).flatten(0, 1), target.flatten())}


def gpt(batch: int, sequence: int) -> Any:
    pytest.importorskip("rich")  # which the example shows its progress with
    from train_gpt import GPT

    inputs = tokens(batch, sequence)
    return GPT(WIDTH, DEPTH, sequence), (inputs, inputs)


def bert(batch: int, sequence: int) -> Any:
    mask = torch.ones(batch, 1, 1, sequence, dtype=torch.bool)
    return Bert(sequence), {"words": tokens(batch, sequence), "mask": mask}


def t5(batch: int, sequence: int) -> Any:
    return T5(), (tokens(batch, sequence), tokens(batch, sequence // 2))


def encoder(batch: int, sequence: int) -> Any:
    """Takes floats, and returns no loss."""
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, dropout=0.1, batch_first=True)
    return nn.TransformerEncoder(layer, DEPTH), (torch.zeros(batch, sequence, WIDTH),)


def llama(batch: int, sequence: int) -> Any:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=WORDS, hidden_size=WIDTH, intermediate_size=2 * WIDTH, num_hidden_layers=DEPTH,
        num_attention_heads=HEADS, num_key_value_heads=2, use_cache=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config), {
        "input_ids": tokens(batch, sequence),
        "labels": tokens(batch, sequence),
    }


def gpt2(batch: int, sequence: int) -> Any:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=WORDS, n_embd=WIDTH, n_layer=DEPTH, n_head=HEADS, n_positions=sequence, use_cache=False,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config), {
        "input_ids": tokens(batch, sequence),
        "labels": tokens(batch, sequence),
    }


ALL = {"gpt": gpt, "bert": bert, "t5": t5, "encoder": encoder, "llama": llama, "gpt2": gpt2}
