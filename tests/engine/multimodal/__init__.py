"""Tests of images in the engine."""
