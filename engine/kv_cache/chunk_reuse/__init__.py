"""Reuse of the K/V of retrieved chunks, whatever lies before them."""
