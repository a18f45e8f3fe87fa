"""LoRA fine-tuning of a decoder."""
