"""Kernels in Triton, each with a twin in torch of the same signature, which it is held to.

A function picks the kernel for CUDA tensors and the twin for all others. Importing this needs no Triton.
"""
