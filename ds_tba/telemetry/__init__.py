"""Counters, bandwidth, the drives' health, the report."""
