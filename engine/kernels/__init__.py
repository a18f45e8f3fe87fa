"""The kernels of a step, one operation a file, each with a torch reference of the same signature.

A function here picks the kernel for CUDA tensors and the torch reference, slow and obvious, for all others. The Triton
kernels are in `gpu`, those in C++ for a CPU in `cpu`. Importing this needs neither.
"""
