"""Tests of the stores. A package, because other rooms have files of the same names."""
