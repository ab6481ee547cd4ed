"""Races of contenders over one model: turns, a meter of memory, points, verdicts, and slower drives."""
