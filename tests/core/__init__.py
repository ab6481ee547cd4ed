"""Tests of the core. A package, because other rooms have files of the same names."""
