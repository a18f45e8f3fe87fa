"""Layers whose memory of a sequence is a state of fixed size."""
