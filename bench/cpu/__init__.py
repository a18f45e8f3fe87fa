"""Measures how fast a CPU runs a model of Qwen3-0.6B's shape, 1 to 128 at once, beside llama.cpp and `transformers`."""
