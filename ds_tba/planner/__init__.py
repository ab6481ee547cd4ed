"""Where each saved storage should live: from a trace of lifetimes and rates to a plan. Pure: no I/O, no clock."""
