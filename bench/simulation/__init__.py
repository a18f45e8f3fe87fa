"""Measures an engine's steps for the simulator, and holds it to the engine on minutes that it was not fitted to."""
