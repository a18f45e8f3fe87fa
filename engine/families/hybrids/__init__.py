"""Families in which attention is beside layers of another kind: short convolutions and recurrences."""
