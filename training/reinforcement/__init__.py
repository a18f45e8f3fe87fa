"""Reinforcement learning with verifiable rewards: Pebble's own answers, judged as the evaluation judges them."""
