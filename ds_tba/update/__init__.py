"""The optimizer update, on host and device at once; knows nothing of activations."""
