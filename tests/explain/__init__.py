"""Tests of what a run says of itself. A package, because other rooms have files of the same names."""
