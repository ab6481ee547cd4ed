"""A trace of one step for Chrome's or Perfetto's viewer, and how much of the copying ran beside kernels."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from gpu.budget import OUT_OF_TIME, Deadline
from gpu.device import Device
from gpu.measure import OUT_OF_MEMORY, Workload
from gpu.models import Shape
from gpu.plan import kernels
from gpu.variants import Variants

TRACED = ("ours adaptive, host", "ours host")
LARGEST_FILE_BYTES = 16 << 20
MIN_S = 5.0  # a part that has less left does not begin another trace
Spans = list[tuple[float, float]]


def measure(
    part: dict[str, Any], deadline: Deadline, shape: Shape, variants: Variants, device: Device, out: Path
) -> None:
    """Part 5."""
    part["shape"], part["traces"] = vars(shape), {}
    with kernels(device, part):
        try:
            workload = Workload.of(shape, device)
        except torch.OutOfMemoryError:
            part["traces"] = dict.fromkeys(TRACED, OUT_OF_MEMORY)
            return
        for variant in TRACED:
            if not deadline.has(MIN_S):
                part["traces"][variant] = OUT_OF_TIME
                continue
            way = variants.prepared(variant, shape, workload.model)
            variants.get_ready(variant, lambda way=way: workload.step(way))
            activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.is_cuda else [])]
            workload.model.reset()
            workload.step(way)
            device.synchronize()
            with profile(activities=activities) as profiler:
                workload.step(way)
                device.synchronize()
            path = out / f"trace_{variant.replace(',', '').replace(' ', '_')}.json.gz"
            profiler.export_chrome_trace(str(path))
            part["traces"][variant] = described(path, device)


def described(path: Path, device: Device) -> dict[str, Any] | str:
    """What a trace shows; a file that is too large to keep is taken away, and said so."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        events = json.load(file)["traceEvents"]
    found: dict[str, Any] = {"file": path.name, "bytes": path.stat().st_size, "events": len(events)}
    found["overlap"] = overlap(events) if device.is_cuda else "not measured: no CUDA"
    if found["bytes"] >= LARGEST_FILE_BYTES:
        path.unlink()
        found["file"] = f"not kept: {found['bytes']} bytes"
    return found


def overlap(events: list[dict[str, Any]]) -> dict[str, float]:
    """Seconds of kernels, of copies between host and device, and of copies while a kernel ran."""

    def spans(wanted: str, words: tuple[str, ...] = ("",)) -> Spans:
        return union(
            [
                (event["ts"], event["ts"] + event["dur"])
                for event in events
                if event.get("cat") == wanted and event.get("ph") == "X" and any(w in event["name"] for w in words)
            ]
        )

    kernel, copy = spans("kernel"), spans("gpu_memcpy", ("HtoD", "DtoH"))
    return {
        "kernel_s": length(kernel) / 1e6,
        "copy_s": length(copy) / 1e6,
        "copy_beside_kernel_s": (length(kernel) + length(copy) - length(union(kernel + copy))) / 1e6,
    }


def union(spans: Spans) -> Spans:
    """The same time as spans that do not touch."""
    merged: Spans = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def length(spans: Spans) -> float:
    return sum(end - start for start, end in spans)
