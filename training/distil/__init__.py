"""Speculative decoding's two drafters, made from Pebble's own answers: Medusa heads, and the draft model."""
