"""Decoder layers in bfloat16 for processors with AVX512-BF16 or, better, AMX: C++, compiled when it is first needed.

`library` gives the compiled kernels, or the reason why there are none; torch then runs the model. Their mathematics is
in the C++ files, their calls in `binding`. Knows nothing of checkpoints or requests.
"""

from engine.kernels.cpu.build import has_tiles, library, name, processor, unavailable

__all__ = ["has_tiles", "library", "name", "processor", "unavailable"]
