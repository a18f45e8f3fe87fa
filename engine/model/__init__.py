"""The decoder and its parts: `model_spec` (the architecture), `layers` (weights, packed), `decoder` (the forward).

Import from the modules: family files need `model_spec` alone, and the decoder needs the families.
"""
