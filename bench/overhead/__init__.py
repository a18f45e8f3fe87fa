"""Measures what serving costs beside the model: everything measured here runs on a model that takes no time."""
