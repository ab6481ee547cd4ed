"""What happened: counters, bandwidth, the report."""
