"""Where bytes live: the contract, spans, the swap file, integrity, and the NVMe store."""
