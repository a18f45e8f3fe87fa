"""The engine's sequences as programs elsewhere hold them: lent for a time, counted for each user."""
