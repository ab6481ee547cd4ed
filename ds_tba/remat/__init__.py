"""Rematerialization: outputs of cheap ops that are recomputed from other saved tensors instead of being saved."""
