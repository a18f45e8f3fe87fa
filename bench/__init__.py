"""Benchmarks that print what they measured, keep it as JSON with the hardware's name, and draw it."""
