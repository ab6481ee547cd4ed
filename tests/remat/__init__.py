"""Tests of rematerialization. A package, because other rooms have files of the same names."""
