"""The recompute-offload-keep curve: contenders that take turns, a meter of memory, verdicts, and slower drives."""
