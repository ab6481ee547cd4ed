"""Tests of plans. A package, because other rooms have files of the same names."""
