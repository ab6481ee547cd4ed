"""``ds_tba env``: what an issue should say of the machine and its packages, in Markdown."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Any

PACKAGES = (
    "ds_tba", "torch", "deepspeed", "transformers", "accelerate", "peft", "trl", "pydantic",
    "kvikio-cu12", "kvikio-cu13",
)  # fmt: skip
# Of the environment: what changes which code runs. Values of others may be secrets.
VARIABLES = ("CUDA_", "CUFILE_", "DS_ACCELERATOR", "KVIKIO_", "OMP_NUM_THREADS", "PYTORCH_", "TORCH_")


def add_parser(commands: Any) -> None:
    """Add the subcommand."""
    parser = commands.add_parser("env", help="print versions and devices, to paste into an issue")
    parser.add_argument("--json", action="store_true", help="print JSON instead of Markdown")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print it; always 0."""
    found = environment()
    if options.json:
        sys.stdout.write(json.dumps(found, indent=2) + "\n")
    else:
        sys.stdout.write("| | |\n|---|---|\n")
        sys.stdout.writelines(
            f"| {name} | {str(value).replace('|', chr(92) + '|')} |\n" for name, value in found.items()
        )
    return 0


def environment() -> dict[str, str]:
    """Name and value of each line."""
    import torch

    from ds_tba.storage.backends import aio

    found = {"Python": platform.python_version(), "system": f"{platform.system()} {platform.release()}"}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    found["CUDA of torch"] = torch.version.cuda or "none"
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    found["devices"] = ", ".join(names) or "none"
    pages, page_bytes = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    found["processors"], found["memory"] = str(os.cpu_count()), f"{pages * page_bytes / 2**30:.0f} GiB"
    found["DeepSpeed's aio op"] = "built" if aio.is_built() else "not built"
    found |= {name: value for name, value in sorted(os.environ.items()) if name.startswith(VARIABLES)}
    return found
