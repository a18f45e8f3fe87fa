"""Texts that training makes up or words anew."""
