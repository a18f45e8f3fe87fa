"""Decoder layers in bfloat16 for processors with AMX tiles: C++ that is compiled when it is first needed.

`library` gives the compiled kernels, or says why there are none; torch then runs the model. What they compute stands in
the C++ files, how they are called in `layers`. Knows nothing of checkpoints or requests.
"""

from engine.kernels.amx.build import library, unavailable

__all__ = ["library", "unavailable"]
