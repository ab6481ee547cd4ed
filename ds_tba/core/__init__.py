"""The tensor cache: saved tensors, their records and their places."""
