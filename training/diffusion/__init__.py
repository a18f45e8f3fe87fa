"""Trains a masked-diffusion model beside an autoregressive twin of the same shape, data and steps."""
