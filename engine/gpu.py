"""Running a model on a CUDA device: steps are packed into one copy and run, eagerly or from a CUDA graph.

Knows layouts, buffers and graphs; what the kernels compute is in `engine.kernels`, what a layer is in `engine.model`.
"""
