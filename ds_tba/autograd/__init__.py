"""What autograd holds in place of saved tensors, and how blocks run again."""
