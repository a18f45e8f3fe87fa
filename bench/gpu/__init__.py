"""Measures how fast a GPU runs models of published shapes beside what it could do: `python -m bench.gpu`, or `make
gpu`.

Weights are random, so no checkpoint is needed. Every figure stands beside a floor or a peer of the same run.
"""
