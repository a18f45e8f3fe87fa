"""Measures how fast a GPU runs models of published shapes beside its limits: `python -m bench.gpu`, or `make gpu`.

Weights are random, so no checkpoint is needed. Every figure stands beside a floor or a peer of the same run.
"""
