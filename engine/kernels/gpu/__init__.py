"""The kernels themselves, in Triton: imported on first use, since a machine without CUDA needs no Triton.

Every file gives its kernels and `variants()`, the ways they are compiled, which `engine.kernels.ahead` compiles with no
GPU at hand. Under `TRITON_INTERPRET=1` they run on CPU tensors, slowly; that is how they are tested where there is no
GPU. Knows nothing of twins or of who calls.
"""

import os

# Triton asks that whether products and sums are fused be said: they are, as in every compiler for this device.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
