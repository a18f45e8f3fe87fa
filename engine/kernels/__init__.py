"""The kernels of a step, one operation a file, each with a twin in torch of the same signature.

A function here picks the kernel for CUDA tensors and the twin for all others; the twin is the reference, slow and
obvious. The Triton kernels are in `gpu`, those in C++ for a CPU in `cpu`. Importing this needs neither.
"""
