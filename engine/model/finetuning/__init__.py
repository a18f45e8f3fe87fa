"""LoRA fine-tuning of a decoder, from chats to an adapter."""
