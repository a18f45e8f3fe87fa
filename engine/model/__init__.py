"""The decoder and what describes it: `spec` (what to compute), `layers` (weights, packed), `decoder` (the forward).

Import from the modules: family files need `spec` alone, and the decoder needs the families.
"""
