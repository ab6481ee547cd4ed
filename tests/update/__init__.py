"""Tests of the optimizer update. A package, because other rooms have files of the same names."""
