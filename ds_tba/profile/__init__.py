"""What the machine can move, measured: the rates that plans are made from."""
