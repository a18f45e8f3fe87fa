"""Commands that make weights: `ponder quantize` and `ponder train-lora`."""
