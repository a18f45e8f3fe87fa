"""Decoder layers in bfloat16, or on weights of 8 and 4 bits, for processors with AMX, AVX-512, AVX2 or NEON: C++,
brought by the wheel or compiled when it is first needed.

`library` gives the compiled kernels, or the reason why there are none; torch then runs the model. Their mathematics is
in the C++ files, their calls in `binding`. Knows nothing of checkpoints or requests.
"""

from engine.kernels.cpu.build import has_tiles, library, name, processor, unavailable

__all__ = ["has_tiles", "library", "name", "processor", "unavailable"]
