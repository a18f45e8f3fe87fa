"""Tests of `engine.speculation`."""
