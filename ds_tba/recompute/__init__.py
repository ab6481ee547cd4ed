"""Blocks whose forward runs again in backward."""
