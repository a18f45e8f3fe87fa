"""The kernels themselves, in Triton: imported on first use, since a machine without CUDA needs no Triton.

Every file gives its kernels and `variants()`, the ways they are compiled, which `engine.kernels.ahead` compiles with no
GPU at hand. Under `TRITON_INTERPRET=1` they run on CPU tensors, slowly; that is how they are tested where there is no
GPU. Knows nothing of the torch references or of callers.
"""

import os

# Triton wants the fusing of products and sums set explicitly: they are fused, as in every compiler for this device.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
