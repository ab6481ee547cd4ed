"""The pieces of ``make gpu``, which measures what only a GPU can tell."""
