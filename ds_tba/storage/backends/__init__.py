"""How bytes reach a file: the contract and one backend per file."""
