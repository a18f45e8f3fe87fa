"""Benchmarks: they print their figures, keep them as JSON with the hardware's name, and plot them."""
