"""Compares shapes of a small decoder by training each on the same data, seed by seed."""
