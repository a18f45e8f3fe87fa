"""Readers of quantised checkpoints; see README.md. Import from the modules."""
