"""Everything that only a GPU can tell, measured by one command in pieces: ``make gpu``."""
