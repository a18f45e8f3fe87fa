"""Measures the cost of serving beside the model: everything measured here runs on a model that takes no time."""
