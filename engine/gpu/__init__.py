"""Running a model on a CUDA device: a step is packed into one copy, run eagerly or from a CUDA graph, and read back once.

Knows layouts, buffers and graphs; what the kernels compute is in `engine.kernels`, what a layer is in `engine.models`.
"""
