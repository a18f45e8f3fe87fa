"""Speculative decoding: drafts, their proposers, and the choice of how much of each is verified."""
