"""The parts of ``benchmarks/soak.py``: the steps, the faults, the meters, one process."""
