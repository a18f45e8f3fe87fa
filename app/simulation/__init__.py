"""Simulation of a fleet of engines on a virtual clock: the real scheduler, block pool, policies and admission."""
