"""Tests of the commands. A package, because other rooms have files of the same names."""
