"""``benchmarks/peers.py``: others' ways and ours over one model, tiny."""

from __future__ import annotations

import json
from pathlib import Path

import peers
import pytest
import torch
from torch.autograd.graph import save_on_cpu

pytestmark = pytest.mark.thorough

KIB_64 = 64 << 10


def test_peers_tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("curves.turns.STEPS_AT_REST", 1)
    (tmp_path / "nvme").mkdir()
    options = ["--tiny", "--rounds", "2", "--steps", "1", "--nvme_path", str(tmp_path / "nvme")]
    assert peers.main([*options, "--out", str(tmp_path / "out")]) == 0
    found = json.loads((tmp_path / "out" / "peers.json").read_text())
    rows = {row["name"]: row for row in found["rows"]}
    assert set(rows) > set(peers.PEERS)
    text = (tmp_path / "out" / "peers.md").read_text()
    assert all(f"| {name} |" in text for name in rows)
    ran = {name: row for name, row in rows.items() if "error" not in row}
    assert {"torch checkpoint", "torch save_on_cpu", "transformers offload", "TRL OffloadActivations"} < set(ran)
    assert all(row["exact"] for row in ran.values())
    plain = ran["plain"]
    assert plain["moved_bytes"] == 0 and plain["peak_bytes"] == ran["plain again"]["peak_bytes"]
    for name in ("torch save_on_cpu", "TRL OffloadActivations", "ds_tba, placement nvme"):
        assert ran[name]["moved_bytes"] > 0 and ran[name]["peak_bytes"] < plain["peak_bytes"], name
    for row in rows.values():
        assert "error" not in row or "No module named" in row["error"], row


def test_the_meter_tells_host_memory_apart() -> None:
    x = torch.randn(128, 128, requires_grad=True)
    with peers.Meter([x.untyped_storage()], is_cuda=False) as meter:
        with peers.cpu_as_device(), save_on_cpu(pin_memory=True):
            y = x.exp()  # saves its result, of 64 KiB
            y = y.sin().sum()
        y.backward()
    assert meter.host_peak_bytes == 2 * KIB_64  # no peer looks whether it has a tensor already
    assert meter.peak_bytes <= 4 * KIB_64 + 8
