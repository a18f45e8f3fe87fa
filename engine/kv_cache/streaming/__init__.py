"""Sequences without an end: attention sinks and a window."""
