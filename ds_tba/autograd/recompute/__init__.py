"""Running a block's forward again in backward, once it was proven that it may."""
