"""Measures masked-diffusion decoding beside the autoregressive twin of the same shape, data and steps."""
