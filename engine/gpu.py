"""Running a model on a CUDA device: steps are packed into one copy and run, eagerly or from a CUDA graph.

Knows layouts, buffers and graphs; the kernels are in `engine.kernels`, the layers in `engine.model`.
"""
