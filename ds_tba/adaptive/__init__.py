"""Measures, has plans made, and watches that they keep their promises."""
