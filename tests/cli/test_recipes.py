"""The recipes of the guide of long context: their configs are valid, and their script does what it says."""

from __future__ import annotations

import json
import re
import runpy

import pytest
import torch
from support import runs

from ds_tba.config import parse_block

GUIDE = (runs.ROOT / "docs" / "guides" / "long_context.md").read_text().partition("## The example")[0]


def test_the_configs_are_valid() -> None:
    configs = [json.loads(text) for text in re.findall(r"```json\n(\{.*?\n\})\n```", GUIDE, re.DOTALL)]
    assert len(configs) == 2 and all(parse_block(one) is not None for one in configs)


def test_the_script_puts_the_mlp_in_tiles_and_runs_trl_s(monkeypatch: pytest.MonkeyPatch) -> None:
    modeling = pytest.importorskip("transformers.models.llama.modeling_llama")
    sequence_parallel = pytest.importorskip("deepspeed.runtime.sequence_parallel.ulysses_sp")
    (script,) = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)
    ran: list[tuple[str, str]] = []
    monkeypatch.setattr(runpy, "run_module", lambda name, run_name: ran.append((name, run_name)))
    monkeypatch.setattr(modeling.LlamaMLP, "forward", modeling.LlamaMLP.forward)  # put back at the end
    tiles: list[int] = []
    real = sequence_parallel.TiledMLP.apply
    torch.manual_seed(0)
    mlp = modeling.LlamaMLP(modeling.LlamaConfig(hidden_size=16, intermediate_size=32, num_attention_heads=2))

    def gradients() -> list[torch.Tensor]:
        x = torch.linspace(-1, 1, 40 * 16).view(1, 40, 16).requires_grad_()
        mlp.zero_grad()
        output = mlp(x)
        output.square().sum().backward()
        return [output, x.grad, *(one.grad for one in mlp.parameters())]

    whole = [one.detach().clone() for one in gradients()]
    monkeypatch.setattr(sequence_parallel.TiledMLP, "apply", lambda *given: tiles.append(given[3]) or real(*given))
    exec(compile(script, "sft_in_tiles.py", "exec"), {})
    for one, other in zip(whole, gradients(), strict=True):
        torch.testing.assert_close(one, other)
    assert tiles == [3] and ran == [("trl.scripts.sft", "__main__")]  # 40 tokens in tiles of 16 at most
