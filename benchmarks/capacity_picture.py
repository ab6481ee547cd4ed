"""Draw memory against tokens from a results file of ``capacity.py``; needs matplotlib.

python benchmarks/capacity_picture.py benchmarks/results/smollm2_135m_cpu2_202611.json docs/capacity.svg
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

MIB = 1 << 20
LABELS = {
    "keep": "as it is",
    "checkpoint": "checkpointing",
    "checkpoint_nvme": "checkpointing + ds_tba",
    "nvme": "ds_tba",
}


def draw(results: Path, picture: Path) -> None:
    """Draw one line for each way to train, and the limit; memory is what a step adds to a process between steps."""
    from matplotlib.figure import Figure

    found = json.loads(results.read_text(encoding="utf-8"))
    options, first = found["options"], found["rounds"][0]
    rest_mib = options["limit_mib"] - options["headroom_mib"]
    figure = Figure(figsize=(7, 3.6), layout="constrained")
    axes = figure.add_subplot()
    for name, label in LABELS.items():
        measured = {one["sequence"]: one["peak_bytes"] for one in (first[name]["timed"], *first[name]["lengths"])}
        points = sorted((tokens, nbytes / MIB - rest_mib) for tokens, nbytes in measured.items())
        axes.plot(*zip(*points, strict=True), marker="o", markersize=3, label=label, linewidth=2)
    axes.axhline(options["headroom_mib"], color="black", linestyle="--", linewidth=1, label="limit")
    axes.set(xlabel="tokens in the sequence", ylabel="MiB that a step adds", ylim=(0, 3 * options["headroom_mib"]))
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(picture, metadata={"Date": None})


if __name__ == "__main__":
    draw(Path(sys.argv[1]), Path(sys.argv[2]))
