"""Gemma, of all generations."""
