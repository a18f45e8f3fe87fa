"""Connections between engines, and to K/V stores: their proof, the transfer engines behind them, and their choice."""
