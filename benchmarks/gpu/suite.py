"""One file of ``tests/gpu`` under pytest, and how its tests ended; also of a run that is ended before its end."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

from gpu.results import ROOT, write_whole  # noqa: E402

# As `pytest -v` says at the end of each test.
VERDICT = re.compile(r"^(\S+::.*?) (PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)\b(?: \((.*?)\))?")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("tests", type=Path)
    parser.add_argument("--result", type=Path, required=True)
    parser.add_argument("--scratch", type=Path, required=True)
    options = parser.parse_args(argv)
    command = [sys.executable, "-m", "pytest", "-v", "-rN", "--tb=short", "-m", "gpu", "-p", "no:cacheprovider"]
    command += ["-o", "console_output_style=classic", f"--basetemp={options.scratch / 'pytest'}", str(options.tests)]
    counts: Counter[str] = Counter()
    failed: list[str] = []
    reasons: Counter[str] = Counter()
    wide = {**os.environ, "COLUMNS": "1000"}  # else the reason is cut off
    with subprocess.Popen(
        command, cwd=ROOT, env=wide, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        for line in process.stdout or ():
            print(line, end="", flush=True)
            if verdict := VERDICT.match(line):
                name, how, why = verdict.groups()
                counts[how.lower()] += 1
                if how in ("FAILED", "ERROR"):
                    failed.append(name)
                if how == "SKIPPED":
                    reasons[why or "?"] += 1
                found = {"counts": dict(counts), "failed": failed, "skipped": dict(reasons)}
                write_whole(options.result, json.dumps(found))
    return min(process.returncode, 2)


if __name__ == "__main__":
    raise SystemExit(main())
