"""Saved tensors: their records and their places; and blocks whose forward runs again in backward."""
