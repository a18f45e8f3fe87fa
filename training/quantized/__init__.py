"""Fine-tunes the bundled model for weights of 4 bits (quantisation-aware training)."""
