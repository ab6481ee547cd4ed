"""The example of long sequences: the same training whatever is done with its activations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support import runs

EXAMPLE = runs.ROOT / "examples" / "long_context.py"
SMALL = ("--sequence", "4096", "--width", "128", "--layers", "2", "--steps", "1", "--staging_mib", "16")
pytestmark = pytest.mark.engine


def long_context(directory: Path, *arguments: str) -> tuple[dict[str, Any], str]:
    config, found = runs.ROOT / "ds_configs" / "long_context.json", directory / "result.json"
    where = ("--nvme_path", str(directory), "--output_dir", str(directory), "--backend", "posix")
    told = ("--deepspeed_config", str(config), *where, "--result", str(found), *SMALL, *arguments)
    result = runs.run(None, directory, *told, script=EXAMPLE, timeout_s=600)
    assert result.returncode == 0, result.output
    return json.loads(found.read_text()), result.output


def test_checkpoints_go_to_nvme(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    plain, output = long_context(tmp_path, "--without_block", "--no-checkpointing")
    assert plain["report"] is None and "no checkpointing" in output and len(plain["losses"]) == 1
    checkpointed, output = long_context(tmp_path)
    assert all(checkpointed[one] == plain[one] for one in ("losses", "parameters_sha256"))
    # the inputs of the second layer, at least, in bf16
    assert checkpointed["report"]["fallbacks"] == 0 and checkpointed["report"]["offloaded_bytes"] >= 4096 * 128 * 2
    assert "activations: at most" in output


@pytest.mark.parametrize("counted", [None, 5000], ids=["by itself", "by the Trainer"])
def test_the_loss_in_chunks_is_the_models_own(counted: int | None) -> None:
    pytest.importorskip("transformers")
    from long_context import LOSS_TOKENS, llama, tile_loss

    torch.manual_seed(0)
    tokens = torch.randint(256, (1, 2 * LOSS_TOKENS + 300))
    more = {} if counted is None else {"num_items_in_batch": torch.tensor(counted)}
    found = []
    for tiled in (False, True):
        torch.manual_seed(0)
        model = llama(64, 1, tokens.shape[1])
        if tiled:
            tile_loss(model)
        loss = model(input_ids=tokens, labels=tokens, **more).loss
        loss.backward()
        found.append([loss.detach(), *(parameter.grad for parameter in model.parameters())])
    for own, in_chunks in zip(*found, strict=True):
        torch.testing.assert_close(in_chunks, own, rtol=1e-4, atol=1e-6)


def test_transformers_is_missing(tmp_path: Path) -> None:
    without = f"import runpy, sys; sys.modules['transformers'] = None; runpy.run_path({str(EXAMPLE)!r}, run_name='x')"
    done = runs.python("-c", f"import sys; sys.path.insert(0, {str(EXAMPLE.parent)!r}); {without}")
    assert done.returncode == 1
    assert "needs transformers and accelerate" in done.stderr and "pip install 'ds_tba[examples]'" in done.stderr
    assert "Traceback" not in done.stderr
