"""Adapters of the bundled model: the data that they learn, and what they changed."""
