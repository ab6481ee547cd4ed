"""The parts of ``benchmarks/soak.py``: the model with the hazards, the steps, the faults, the meters, one process."""
